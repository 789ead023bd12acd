"""Reasons of refusals by etcd's v2 API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from threading import Thread

import etcd
import pytest

from elasticjob_rendezvous.etcd_v2.probe import EtcdV2Probe
from elasticjob_rendezvous.protocol.store_trouble import StoreFailure, StoreState


class RefusingServer(TCPServer):
    """Server that answers each write with this error of etcd's v2 API."""

    code = 0
    message = ""
    cause = ""


class _Handler(BaseHTTPRequestHandler):
    server: RefusingServer

    def do_PUT(self) -> None:
        error = {"errorCode": self.server.code, "message": self.server.message}
        body = json.dumps({**error, "cause": self.server.cause, "index": 7}).encode()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Etcd-Cluster-Id", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[RefusingServer]:
    with RefusingServer(("127.0.0.1", 0), _Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("code", "message", "cause", "expected"),
    [
        (110, "The request requires user authentication", "Insufficient credentials",
         StoreFailure.PERMISSION_DENIED),
        (301, "During Leader Election", "", StoreFailure.NO_LEADER),
        (300, "Raft Internal Error", "etcdserver: no leader", StoreFailure.NO_LEADER),
        (300, "Raft Internal Error", "etcdserver: request timed out", StoreFailure.OTHER),
    ],
)  # fmt: skip
def test_refusal_has_the_reason_of_its_error_code(
    server: RefusingServer, code: int, message: str, cause: str, expected: StoreFailure
) -> None:
    server.code, server.message, server.cause = code, message, cause
    ask = EtcdV2Probe(
        lambda: etcd.Client("127.0.0.1", server.server_address[1], read_timeout=30), "/torchelastic"
    )
    failure = ask(30.0)
    assert failure is not None
    assert (failure.state, failure.reason) == (StoreState.REFUSING, expected)
    assert message in failure.text
