"""Public API with the names of torch's elastic modules."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from elasticjob_rendezvous import api
from elasticjob_rendezvous.api import RendezvousParameters, RendezvousStoreInfo
from elasticjob_rendezvous.dynamic import master_address
from elasticjob_rendezvous.etcd import handler
from tests.unit.agent.memory_rendezvous import MemoryStore


def test_rank_0_publishes_its_address() -> None:
    store = MemoryStore()
    info = RendezvousStoreInfo.build(0, store, "10.0.0.1")
    assert info.master_addr == "10.0.0.1"
    assert 0 < info.master_port < 65536
    assert RendezvousStoreInfo.build(1, store, "10.0.0.2") == info
    assert RendezvousStoreInfo.build(0, store, "h", 29500) == RendezvousStoreInfo("h", 29500)
    assert store.get("MASTER_ADDR") == b"h"
    assert store.get("MASTER_PORT") == b"29500"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the host has no IPv6")
@pytest.mark.parametrize("held", [master_address.HeldPort, handler.HeldPort])
def test_port_of_rank_0_is_reserved_in_both_address_families(held: type[Any]) -> None:
    """On a host whose only address is IPv6, another process would get a port of IPv4."""
    holder = held()
    number = holder.number if held is master_address.HeldPort else holder.hold()
    release = holder.close if held is master_address.HeldPort else holder.release
    try:
        for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            with socket.socket(family) as other:
                if family == socket.AF_INET6:
                    other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind((any_address, number))
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind((any_address, number))
                other.listen()
    finally:
        release()


def test_port_is_reserved_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(family: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError("no address of this family")
        return bind(family)

    bind = api._bound
    monkeypatch.setattr(api, "_bound", bound)
    with api.reserved_port() as held:
        assert held.family is socket.AF_INET
        assert held.getsockname()[1] > 0


def parameters(**config: Any) -> RendezvousParameters:
    return RendezvousParameters("etcd", "localhost:2379", "run-1", 1, 4, **config)


def test_parameters_keep_given_values() -> None:
    given = parameters(local_addr="10.0.0.1", timeout="30", cacert="/ca.pem")
    assert (given.backend, given.endpoint, given.run_id) == ("etcd", "localhost:2379", "run-1")
    assert (given.min_nodes, given.max_nodes, given.local_addr) == (1, 4, "10.0.0.1")
    assert given.get("cacert") == "/ca.pem"
    assert given.get("cert") is None
    assert given.get("cert", "none") == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": ""}, "must be named"),
        ({"min_nodes": 0}, "at least 1, not 0"),
        ({"min_nodes": -1}, "at least 1, not -1"),
        ({"min_nodes": 3, "max_nodes": 2}, r"at least min_nodes \(3\), not 2"),
    ],
)
def test_contradictory_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    plain = {"backend": "etcd", "endpoint": "", "run_id": "r", "min_nodes": 1, "max_nodes": 1}
    assert RendezvousParameters(**plain).max_nodes == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        RendezvousParameters(**{**plain, **change})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True), (False, False), (1, True), (0, False), ("1", True), ("t", True),
        ("True", True), ("YES", True), ("y", True), ("0", False), ("f", False),
        ("False", False), ("no", False), ("N", False),
    ],
)  # fmt: skip
def test_boolean_values(value: object, expected: bool) -> None:
    assert parameters(flag=value).get_as_bool("flag") is expected


@pytest.mark.parametrize("value", ["", "on", "2", 2, "truee", " true"])
def test_invalid_boolean_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="'flag' must be true or false"):
        parameters(flag=value).get_as_bool("flag")


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3), (3.0, 3), ("3", 3), (" -7 ", -7), ("+2", 2)]
)
def test_integer_values(value: object, expected: int) -> None:
    assert parameters(count=value).get_as_int("count") == expected


@pytest.mark.parametrize("value", ["", "3.0", 3.5, float("inf"), "1e3", "0x10", "three", "1_000"])
def test_invalid_integer_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="'count' must be a whole number"):
        parameters(count=value).get_as_int("count")


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3.0), (0.5, 0.5), ("0.5", 0.5), ("1e3", 1000.0), ("7", 7.0)]
)
def test_float_values(value: object, expected: float) -> None:
    assert parameters(seconds=value).get_as_float("seconds") == expected


@pytest.mark.parametrize("value", ["", "ten", "1,5", "5s"])
def test_invalid_float_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="'seconds' must be a number") as caught:
        parameters(seconds=value).get_as_float("seconds")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("read", ["get_as_bool", "get_as_int", "get_as_float"])
def test_missing_parameter_has_its_default(read: str) -> None:
    assert getattr(parameters(), read)("missing") is None
    assert getattr(parameters(missing=None), read)("missing") is None
    assert getattr(parameters(), read)("missing", 1) == 1


@pytest.mark.parametrize(
    "error", ["Closed", "Timeout", "Connection", "State", "GracefulExit"]
)  # fmt: skip
def test_every_error_is_a_rendezvous_error(error: str) -> None:
    kind = getattr(api, f"Rendezvous{error}Error")
    assert issubclass(kind, api.RendezvousError)
    assert not issubclass(kind, OSError)


def test_store_info_uses_torch_key_names() -> None:
    info = RendezvousStoreInfo("10.0.0.1", 29500)
    assert (info.MASTER_ADDR_KEY, info.MASTER_PORT_KEY) == ("MASTER_ADDR", "MASTER_PORT")
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 29500)
