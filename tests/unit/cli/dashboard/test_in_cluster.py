"""Dashboard in a cluster: tokens of viewers, and connections without encryption."""

from __future__ import annotations

import base64
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import pytest

from elasticjob_cli.dashboard.in_cluster import (
    MAX_ANSWER,
    ApiServer,
    is_loopback,
    token_of,
    token_opener,
)
from elasticjob_cli.dashboard.server import Denied, Request
from elasticjob_cli.dashboard.sources import TooLarge, Unavailable
from tests.integration.certificates import make_certificates
from tests.paths import ROOT


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc.DEF-_9", "abc.DEF-_9"),
        ("bearer  abc ", "abc"),
        (basic("anyone:abc.d"), "abc.d"),
        (basic(":abc"), "abc"),
        (basic("abc"), None),
        (basic("a:b c"), None),
        (basic("a:b\r\nX-Remote-User: admin"), None),
        ("Basic ***", None),
        ("Basic /w==", None),
        ("Basic \xfc", None),
        ("Bearer", None),
        ("Bearer a b", None),
        ("Digest abc", None),
        ("", None),
    ],
)
def test_token_is_a_bearer_token_or_the_password(header: str, token: str | None) -> None:
    assert token_of({"authorization": header}) == token


@pytest.mark.parametrize(
    ("peer", "own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("fe80::1%eth0", False),
    ],
)
def test_unencrypted_connections_of_others_are_refused_before_a_token_is_asked_for(
    tmp_path: Path, peer: str, own: bool
) -> None:
    assert is_loopback(peer) == own
    api = ApiServer("https://127.0.0.1:1", make_certificates(tmp_path).ca_file)
    for encrypted in (True, False):
        with pytest.raises(Denied) as found:
            token_opener(api, encrypted)(Request("/", {}, peer))
        asked = encrypted or own
        wanted = HTTPStatus.UNAUTHORIZED if asked else HTTPStatus.FORBIDDEN
        assert found.value.status is wanted


def test_unreachable_api_server_is_an_error_of_the_gateway(tmp_path: Path) -> None:
    api = ApiServer("https://127.0.0.1:1", make_certificates(tmp_path).ca_file)
    with pytest.raises(Unavailable, match="cannot be reached") as found:
        api.fetch("token", "/")
    assert found.value.status is HTTPStatus.BAD_GATEWAY


@contextmanager
def answering(folder: Path, *chunks: bytes, pause: float = 0) -> Iterator[ApiServer]:
    """Run an API server that sends these chunks with pauses to one client."""
    made = make_certificates(folder)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.server.cert_file, made.server.key_file)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            link, _ = server.accept()
            with suppress(OSError), tls.wrap_socket(link, server_side=True) as wrapped:
                wrapped.recv(1 << 16)
                wrapped.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for chunk in chunks:
                    time.sleep(pause)
                    wrapped.sendall(chunk)

        thread = threading.Thread(target=serve)
        thread.start()
        yield ApiServer(f"https://127.0.0.1:{server.getsockname()[1]}", made.ca_file)
        thread.join()


def test_answers_within_the_limit_are_whole_and_larger_ones_are_refused(tmp_path: Path) -> None:
    half = b"x" * (MAX_ANSWER // 2)
    with answering(tmp_path / "whole", half, half) as api:
        assert api.fetch("token", "/") == half + half
    with answering(tmp_path / "larger", half, half, b"x") as api, pytest.raises(TooLarge):
        api.fetch("token", "/")


def test_slow_answer_ends_at_the_deadline(tmp_path: Path) -> None:
    chunks = [b"x"] * 100
    with answering(tmp_path, *chunks, pause=0.1) as api:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match=r"cannot be reached: .*timed out"):
            api.fetch("token", "/", seconds=0.5)
        assert time.monotonic() < begun + 9


PROGRAM = """
import importlib.metadata, sys

class Image:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        own = top.startswith(("elasticjob_", "_sysconfigdata"))
        if own or top in sys.stdlib_module_names:
            return None
        owners = distributions.get(top, ())
        if any(one.lower().replace("_", "-") in locked for one in owners):
            return None
        raise ModuleNotFoundError(f"the image has no {top}", name=name)

distributions = importlib.metadata.packages_distributions()
locked = set(sys.argv[2].split())
sys.meta_path.insert(0, Image())
from elasticjob_cli.dashboard import in_cluster
in_cluster.ClusterServer.serve_forever = lambda self: in_cluster.show_error("an error")
in_cluster.main(["--port=0", "--api-server=https://127.0.0.1:1", f"--ca-file={sys.argv[1]}"])
import typer
"""


def test_program_runs_with_the_packages_of_the_operators_image_alone(tmp_path: Path) -> None:
    lock = (ROOT / "requirements" / "operator.txt").read_text()
    locked = re.findall(r"^([a-z0-9-]+)==", lock, re.M)
    assert locked
    ca_file = str(make_certificates(tmp_path).ca_file)
    words = [sys.executable, "-c", PROGRAM, ca_file, " ".join(locked)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.startswith("serving port "), done.stderr
    assert done.stdout.endswith(", loopback only\n")
    assert done.stderr.startswith("an error\n")
    assert done.stderr.endswith("the image has no typer\n")  # so the test refuses others
