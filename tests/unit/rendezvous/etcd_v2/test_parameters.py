"""Handler parameters: endpoints, the URL form, and wrong settings."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousParameters
from elasticjob_rendezvous.etcd_v2 import create_rdzv_handler, parameters_from_url
from elasticjob_rendezvous.etcd_v2.client import parse_endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [("localhost", 2379)]),
        (" ", [("localhost", 2379)]),
        ("etcd", [("etcd", 2379)]),
        ("etcd-0.etcd:4001", [("etcd-0.etcd", 4001)]),
        ("[::1]:4001", [("::1", 4001)]),
        ("[fe80::2]", [("fe80::2", 2379)]),
        ("::1:4001", [("::1", 4001)]),
        ("fe80::2:4001", [("fe80::2", 4001)]),
        ("::1", [("::1", 2379)]),
        ("fe80::", [("fe80::", 2379)]),
        ("a:1, b:2", [("a", 1), ("b", 2)]),
    ],
)
def test_endpoints(text: str | None, expected: list[tuple[str, int]]) -> None:
    assert parse_endpoints(text) == expected


@pytest.mark.parametrize("text", ["a:b", "a:70000", ":1", "a b:1", "http://a:1", "a:"])
def test_malformed_endpoints_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="rendezvous endpoint"):
        parse_endpoints(text)


def test_url_form() -> None:
    parameters = parameters_from_url(
        "etcd://etcd:2379/job-7?min_workers=1&max_workers=3&timeout=60&last_call_timeout=5"
        "&etcd_prefix=/mine&protocol=https&cacert=/ca&cert=/c&key=/k&local_addr=10.0.0.1"
    )
    assert (parameters.backend, parameters.endpoint, parameters.run_id) == (
        "etcd",
        "etcd:2379",
        "job-7",
    )
    assert (parameters.min_nodes, parameters.max_nodes) == (1, 3)
    assert parameters.local_addr == "10.0.0.1"
    assert parameters.get_as_int("timeout") == 60
    assert parameters.config == {
        "timeout": "60",
        "last_call_timeout": "5",
        "etcd_prefix": "/mine",
        "protocol": "https",
        "cacert": "/ca",
        "cert": "/c",
        "key": "/k",
    }


def test_max_workers_defaults_to_min_workers() -> None:
    assert parameters_from_url("etcd://localhost/1234?min_workers=2").max_nodes == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://a:1/r?min_workers=1", "must start with etcd://"),
        ("etcd://a:1?min_workers=1", "must name the run"),
        ("etcd://a:1/r", "min_workers"),
        ("etcd://a:1/r?min_workers=one", "min_workers"),
        ("etcd://a:1/r?min_workers=1&max_workers=", "max_workers"),
        ("etcd://a:1/r?min_workers=0", "min_nodes must be at least 1"),
        ("etcd://a:1/r?min_workers=2&max_workers=1", "max_nodes must be at least"),
    ],
)
def test_malformed_urls_name_the_fault(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parameters_from_url(url)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"protocol": "ftp"}, "protocol must be http or https"),
        ({"timeout": "soon"}, "'timeout' must be a number"),
        ({"timeout": -1}, "'timeout' must not be negative"),
        ({"last_call_timeout": -1}, "'last_call_timeout' must not be negative"),
        ({"read_timeout": 0}, "'read_timeout' must be at least 1"),
        ({"close_on_shutdown": "perhaps"}, "'close_on_shutdown' must be true or false"),
    ],
)
def test_malformed_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        create_rdzv_handler(RendezvousParameters("etcd", "localhost:1", "r", 1, 1, **settings))


def test_unreachable_endpoint_is_a_connection_error() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(RendezvousConnectionError, match="no etcd with the v2 API at"):
            create_rdzv_handler(RendezvousParameters("etcd", endpoint, "r", 1, 1))
