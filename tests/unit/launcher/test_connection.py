"""Connections of the launcher: messages of a peer that has closed the connection."""

from __future__ import annotations

import socket
from typing import Any

from elasticjob_launcher.loop import Loop
from elasticjob_launcher.sockets import Connection
from elasticjob_launcher.wire import encode

RELEASE = {"type": "release", "exit_code": 0, "message": ""}


def test_last_message_of_a_peer_that_reads_no_more_is_received() -> None:
    loop = Loop()
    here, peer = socket.socketpair()
    connection = Connection(loop, here, 1024)
    received: list[dict[str, Any]] = []
    connection.on_message = received.append
    ends: list[bool] = []

    def ended() -> None:
        ends.append(True)
        loop.stop()

    connection.on_closed = ended
    peer.sendall(encode(RELEASE))
    peer.close()
    connection.send({"type": "beat"})  # EPIPE
    connection.send({"type": "beat"})
    assert not connection.closed, "the release is unread"
    loop.call_later(5.0, loop.stop)
    loop.run()
    assert received == [RELEASE]
    assert (connection.closed, ends) == (True, [True])
