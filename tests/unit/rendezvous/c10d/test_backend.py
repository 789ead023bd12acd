"""C10d backend on a store that behaves as torch's, without torch; and its parameters."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys

import pytest

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from elasticjob_rendezvous.c10d import C10dRendezvousBackend, create_backend
from elasticjob_rendezvous.dynamic.endpoint import is_this_machine, parse_endpoint

KEY = "torch.rendezvous.run"


class Store:
    """TCPStore's compare-and-set, including its echo for an absent key."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None

    def get(self, key: str) -> bytes:
        if self.error:
            raise self.error
        return self.values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.error:
            raise self.error
        if key not in self.values and expected:
            return expected.encode()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values[key]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def backend(store: Store) -> C10dRendezvousBackend:
    return C10dRendezvousBackend(store, "run")


def test_begins_with_key_and_sentinel_of_torch(store: Store) -> None:
    backend = C10dRendezvousBackend(store, "run")
    assert store.values == {KEY: b"Y2FuaW1hZGFt"}
    assert backend.name == "c10d"
    assert backend.get_state() is None


def test_existing_state_is_kept(store: Store) -> None:
    store.values[KEY] = base64.b64encode(b"state")
    assert C10dRendezvousBackend(store, "run").get_state() == (b"state", store.values[KEY])


def test_empty_run_id_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(store, "")


def test_set_without_a_token_creates_only(backend: C10dRendezvousBackend) -> None:
    assert backend.set_state(b"one") == (b"one", b"b25l", True)
    assert backend.set_state(b"two") == (b"one", b"b25l", False)


def test_set_with_the_current_token_replaces(backend: C10dRendezvousBackend) -> None:
    assert backend.set_state(b"one") is not None
    assert backend.set_state(b"two", b"b25l") == (b"two", b"dHdv", True)
    assert backend.set_state(b"three", b"b25l") == (b"two", b"dHdv", False)
    assert backend.get_state() == (b"two", b"dHdv")


def test_set_with_a_foreign_token_changes_nothing(backend: C10dRendezvousBackend) -> None:
    assert backend.set_state(b"one", 7) is None
    backend.set_state(b"one")
    assert backend.set_state(b"two", 7) == (b"one", b"b25l", False)


def test_vanished_state_is_not_assumed_to_exist(
    store: Store, backend: C10dRendezvousBackend
) -> None:
    backend.set_state(b"one")
    store.values.clear()
    assert backend.set_state(b"two", b"b25l") is None
    assert backend.set_state(b"two") == (b"two", b"dHdv", True)


def test_set_of_the_current_value_succeeds(backend: C10dRendezvousBackend) -> None:
    backend.set_state(b"one")
    assert backend.set_state(b"one", b"b25l") == (b"one", b"b25l", True)


@pytest.mark.parametrize("value", [b"non-base64", b"abc", b"\xff"])
def test_state_that_is_not_base64_is_corrupt(
    store: Store, backend: C10dRendezvousBackend, value: bytes
) -> None:
    store.values[KEY] = value
    with pytest.raises(RendezvousStateError, match="corrupt"):
        backend.get_state()


@pytest.mark.parametrize("error", [RuntimeError("gone"), ValueError("gone"), TimeoutError("gone")])
def test_failing_store_is_a_connection_error(
    store: Store, backend: C10dRendezvousBackend, error: Exception
) -> None:
    store.error = error
    for call in (backend.get_state, lambda: backend.set_state(b"x"), lambda: again(store)):
        with pytest.raises(RendezvousConnectionError, match=r"torch\.rendezvous\.run.*gone"):
            call()


def again(store: Store) -> object:
    return C10dRendezvousBackend(store, "run")


# -- parameters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "parsed"),
    [
        (None, ("localhost", 29400)),
        ("", ("localhost", 29400)),
        ("  ", ("localhost", 29400)),
        ("node-1", ("node-1", 29400)),
        (" node-1.svc:123 ", ("node-1.svc", 123)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("host:65535", ("host", 65535)),
        ("[::1]", ("::1", 29400)),
        ("[2001:db8::2]:123", ("2001:db8::2", 123)),
        ("::1", ("::1", 29400)),
        ("::1:123", ("::1", 123)),
        ("2001:db8::5:29400", ("2001:db8::5", 29400)),
        ("2001:db8:0:0:0:0:0:1", ("2001:db8:0:0:0:0:0:1", 29400)),
    ],
)
def test_endpoints(endpoint: str | None, parsed: tuple[str, int]) -> None:
    assert parse_endpoint(endpoint, 29400) == parsed


@pytest.mark.parametrize("endpoint", ["host:", "host:x", "host:65536", "host:-1", "[::1]:x"])
def test_invalid_port_is_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match="port of the rendezvous endpoint"):
        parse_endpoint(endpoint, 29400)


@pytest.mark.parametrize("endpoint", ["~", "a b", ":123", "[]:123", "[]", "ho$t:123", "a/b"])
def test_invalid_host_is_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match="host of the rendezvous endpoint"):
        parse_endpoint(endpoint, 29400)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_names_of_this_machine(host: str) -> None:
    assert is_this_machine(host)


def test_own_host_name_is_this_machine() -> None:
    assert is_this_machine(socket.gethostname())


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid", "2001:db8::1"])
def test_names_of_other_machines(host: str) -> None:
    assert not is_this_machine(host)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"store_type": "redis"}, "store_type"),
        ({"read_timeout": 0}, "read_timeout"),
        ({"read_timeout": "-1"}, "read_timeout"),
        ({"read_timeout": "soon"}, "read_timeout"),
        ({"is_host": "maybe"}, "is_host"),
        ({"endpoint": "host:x"}, "endpoint"),
    ],
)
def test_invalid_setting_is_named(settings: dict, named: str) -> None:
    chosen = {"endpoint": "localhost:0", **settings}
    with pytest.raises(ValueError, match=named):
        create_backend(RendezvousParameters("c10d", run_id="r", min_nodes=1, max_nodes=1, **chosen))


def test_import_does_not_load_torch() -> None:
    code = (
        "import sys, elasticjob_rendezvous.c10d, elasticjob_rendezvous.dynamic; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
