"""Dashboard in a cluster: tokens of viewers, and connections without encryption."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from http import HTTPStatus
from pathlib import Path

import pytest

from elasticjob_cli.dashboard.in_cluster import ApiServer, is_loopback, token_of, token_opener
from elasticjob_cli.dashboard.server import Denied, Request
from elasticjob_cli.dashboard.sources import Unavailable
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


def test_program_loads_only_packages_of_the_operators_image() -> None:
    script = (
        "import sys, elasticjob_cli.dashboard.in_cluster\n"
        "print(*(name for name, found in sys.modules.items() "
        "if 'site-packages' in str(getattr(found, '__file__', ''))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    lock = (ROOT / "requirements" / "operator.txt").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.M))
    assert loaded
    assert {name.replace("_", "-") for name in loaded} <= locked
