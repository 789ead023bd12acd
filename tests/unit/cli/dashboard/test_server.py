"""Admission to the HTTP server of the dashboard, and its pages."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import pytest

from elasticjob_cli.commands.dashboard import local_opener
from elasticjob_cli.dashboard import server as module
from elasticjob_cli.dashboard.server import (
    HEADERS,
    LOOPBACK_NAMES,
    MAX_OF_PEER,
    Server,
    host_name,
)
from elasticjob_cli.dashboard.sources import Details, Jobs, Logs, Unavailable
from elasticjob_cli.log_lines import LogOptions

TOKEN = "secret-token"


class Shelf:
    """Source with one job; `asked` has the calls."""

    title = "a test"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses: Unavailable | None = None
        self.fails = False

    def jobs(self, namespace: str | None) -> Jobs:
        self.asked.append(namespace)
        if self.refuses and namespace is None:
            raise self.refuses
        if self.fails:
            raise RuntimeError("a defect")
        return Jobs([{"metadata": {"name": "demo", "namespace": "team"}, "status": {}}])

    def details(self, namespace: str, name: str) -> Details:
        self.asked.append((namespace, name))
        if name != "demo":
            raise Unavailable(HTTPStatus.NOT_FOUND, f"no <{name}>")
        return Details({"metadata": {"name": name, "namespace": namespace}}, [], ["Waiting."])

    def logs(self, namespace: str, name: str, options: LogOptions, document: Any = None) -> Logs:
        self.asked.append(options)
        if self.refuses:
            raise self.refuses
        return Logs(["demo-0"], [])


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[Server]:
    with Server(("127.0.0.1", 0), local_opener(shelf, TOKEN), LOOPBACK_NAMES) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", host: str = "", root: str = f"/{TOKEN}/"
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of an answer."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        link.request(method, root + path, headers={"Host": host or f"127.0.0.1:{server.port}"})
        answer = link.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        link.close()


@pytest.mark.parametrize("root", ["/", "/secret/", f"/{TOKEN}", f"/{TOKEN}x/", "/ü/"])
def test_address_without_the_token_is_refused(server: Server, shelf: Shelf, root: str) -> None:
    status, headers, body = ask(server, "", root=quote(root))
    assert (status, shelf.asked) == (404, [])
    assert TOKEN not in body
    assert HEADERS.items() <= headers.items()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "x"])
def test_host_of_a_rebound_name_is_refused(server: Server, shelf: Shelf, host: str) -> None:
    assert ask(server, "", host=host)[0] == 421
    assert shelf.asked == []


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:99", "LOCALHOST"])
def test_loopback_names_are_admitted_with_any_port(server: Server, host: str) -> None:
    assert ask(server, "", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_than_get_are_refused(server: Server, shelf: Shelf, method: str) -> None:
    status, headers, _ = ask(server, "", method=method)
    assert (status, headers["Allow"], shelf.asked) == (405, "GET, HEAD", [])
    assert HEADERS.items() <= headers.items()


def test_every_answer_forbids_inline_code_frames_copies_and_other_origins(server: Server) -> None:
    for path in ("", "style.css", "page.js", "icon.svg", "jobs/team/demo/", "nothing"):
        _, headers, _ = ask(server, path)
        assert HEADERS.items() <= headers.items()
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert "Set-Cookie" not in headers


def test_pages_have_their_addresses(server: Server, shelf: Shelf) -> None:
    assert 'href="jobs/team/demo/"' in ask(server, "")[2]
    assert 'href="../../style.css"' in ask(server, "namespaces/team/")[2]
    assert "Waiting." in ask(server, "jobs/team/demo/")[2]
    assert ask(server, "jobs/team/demo/logs/?pod=demo-0&rank=3&tail=9")[0] == 200
    assert shelf.asked[-1] == LogOptions(pod="demo-0", rank=3, tail=9)
    assert ask(server, "", method="HEAD")[2] == ""


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("jobs/team/demo", "demo/"),
        ("jobs/team/demo/logs", "logs/"),
        ("?namespace=team", "namespaces/team/"),
    ],
)
def test_page_is_moved_to_its_folder(server: Server, path: str, target: str) -> None:
    status, headers, _ = ask(server, path)
    assert (status, headers["Location"]) == (303, target)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("jobs/team/absent/", 404),
        ("jobs/..%2f..%2fetc/passwd/", 404),
        ("jobs/team/-n/", 404),
        ("namespaces/%3Cb%3E/", 404),
        ("jobs/team/demo/logs/?pod=-f", 404),
        ("jobs/team/demo/logs/?tail=x", 400),
        ("jobs/team/demo/logs/?rank=99999999999999999999", 400),
        ("style.css/", 404),
        ("?namespace=%0d%0aX:%20y", 404),
    ],
)
def test_other_addresses_have_no_page(server: Server, path: str, status: int) -> None:
    found, headers, body = ask(server, path)
    assert found == status
    assert "X" not in headers
    assert "<absent>" not in body


def test_viewer_without_permission_gets_the_choice_of_a_namespace_and_the_reason(
    server: Server, shelf: Shelf
) -> None:
    shelf.refuses = Unavailable(HTTPStatus.FORBIDDEN, "ann may not list <jobs>")
    status, _, body = ask(server, "")
    assert (status, 'name="namespace"' in body) == (200, True)
    assert "ann may not list &lt;jobs&gt;" in body
    assert "ann may not list &lt;jobs&gt;" in ask(server, "jobs/team/demo/")[2]
    assert ask(server, "jobs/team/demo/logs/")[0] == 403


def test_defect_is_reported_and_the_next_request_is_answered(
    server: Server, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf.fails = True
    status, _, body = ask(server, "")
    assert (status, "a defect" in body) == (500, False)
    assert "RuntimeError: a defect" in capsys.readouterr().err
    shelf.fails = False
    assert ask(server, "")[0] == 200


def test_requests_beyond_the_maximum_wait_and_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLACE_SECONDS", 0.05)
    for _ in range(server.max_requests):
        server.places.acquire()
    assert ask(server, "")[0] == 503
    monkeypatch.setattr(module, "PLACE_SECONDS", 60)
    release = threading.Timer(0.1, server.places.release)
    release.start()
    assert ask(server, "")[0] == 200
    release.join()


def eventually_answered(server: Server) -> None:
    due = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert ask(server, "")[0] == 200
            return
        assert time.monotonic() < due, "the closed connections were not released"


def test_connections_of_a_peer_beyond_the_maximum_are_closed_and_others_are_answered(
    server: Server,
) -> None:
    place = ("127.0.0.1", server.port)
    idle = [socket.create_connection(place) for _ in range(MAX_OF_PEER)]
    with socket.create_connection(place, timeout=60) as late:
        assert late.recv(1) == b""
    with socket.create_connection(place, 60, ("127.0.0.2", 0)) as other:
        other.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert other.recv(12) == b"HTTP/1.0 404"
    for link in idle:
        link.close()
    eventually_answered(server)


def test_connections_of_all_peers_have_a_maximum(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    place = ("127.0.0.1", server.port)
    with (
        socket.create_connection(place, 60, ("127.0.0.2", 0)),
        socket.create_connection(place, 60, ("127.0.0.3", 0)),
        socket.create_connection(place, 60) as late,
    ):
        assert late.recv(1) == b""


def test_connection_without_a_thread_is_released(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "MAX_OF_PEER", 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
            assert link.recv(1) == b""
    eventually_answered(server)


def test_slow_sender_is_cut_off_at_the_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < begun + 60:
                link.sendall(b"x")
                time.sleep(0.1)  # each byte would begin a timeout of the socket anew
        assert time.monotonic() < begun + 50


def test_slow_reader_is_cut_off_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.5)
    ended = threading.Event()
    sender, reader = socket.socketpair()

    def read() -> None:
        while not ended.wait(0.1):
            reader.recv(64 << 10)  # each would begin a timeout of the socket anew

    slow = threading.Thread(target=read)
    slow.start()
    with sender, reader:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            module.Timed(sender).write(b"x" * (16 << 20))
        took = time.monotonic() - begun
        ended.set()
        slow.join()
    assert 0.4 < took < 50


def test_request_beyond_the_maximum_size_is_closed(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        text = f"GET /{TOKEN}/ HTTP/1.0\r\nHost: localhost\r\n".encode()
        text += b"".join(b"X%d: %s\r\n" % (at, b"x" * 10_000) for at in range(9))
        with contextlib.suppress(ConnectionError):
            link.sendall(text + b"\r\n")
            assert link.recv(1) == b""


def test_broken_requests_end_no_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (b"\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x00", b""):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
            link.sendall(text)
            link.shutdown(socket.SHUT_WR)
            link.recv(100)
    assert ask(server, "")[0] == 200
    assert capsys.readouterr().err == ""


def test_host_name_drops_the_port_alone() -> None:
    assert [host_name(text) for text in ("A:80", "[::1]:8", "::1", "a:b")] == [
        "a", "[::1]", ":", "a:b",
    ]  # fmt: skip
