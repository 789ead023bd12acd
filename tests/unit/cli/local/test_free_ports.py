"""Ports of local jobs on hosts whose loopback interface has no IPv4 address."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.etcd import free_ports


def test_sockets_that_cannot_be_opened_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []

    class Limited(socket.socket):
        def __init__(self) -> None:
            if len(opened) == 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__()
            opened.append(self)

    monkeypatch.setattr(socket, "socket", Limited)
    with pytest.raises(CommandError, match=r"3 ports cannot be bound on .*: Too many open files"):
        free_ports(3)
    assert [each.fileno() for each in opened] == [-1, -1]


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
