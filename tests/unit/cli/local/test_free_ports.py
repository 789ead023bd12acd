"""Ports of local jobs on hosts whose loopback interface has no IPv4 address."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.etcd import free_ports


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EADDRNOTAVAIL, "; add the address with `ip address add 127.0.0.1/8 dev lo`"),
        (errno.EADDRINUSE, ""),
    ],
)
def test_port_that_cannot_be_bound_is_an_error_with_the_address(
    monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(CommandError) as caught:
        free_ports(1)
    reason = os.strerror(number)
    assert str(caught.value) == f"a port cannot be bound on 127.0.0.1: {reason}{message}"
