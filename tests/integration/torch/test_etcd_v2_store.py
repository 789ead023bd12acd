"""`EtcdStore` alone and as torch's `Store`, beside torch's own on the same keys."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore as TorchsOwn

from elasticjob_rendezvous.etcd_v2 import EtcdStore, create_client
from elasticjob_rendezvous.torch_store import TorchEtcdStore
from tests.integration.etcd_server import EtcdServer
from tests.integration.etcd_v2_rig import SECONDS, Run, StartRun

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def run(v2_etcd: EtcdServer, start_v2_run: StartRun) -> Run:
    """Return a run on each of the shared servers."""
    return start_v2_run(v2_etcd)


@pytest.fixture
def ours(run: Run) -> EtcdStore:
    return EtcdStore(create_client(run.parameters(1, 1)), run.path("/kv"), timedelta(seconds=30))


@pytest.fixture(params=["alone", "in torch", "behind torch's prefix"])
def store(request: pytest.FixtureRequest, ours: EtcdStore) -> Iterator[Any]:
    wrapped = TorchEtcdStore(ours)  # torch's prefix does not keep the Python half of it alive
    match request.param:
        case "alone":
            yield ours
        case "in torch":
            yield wrapped
        case _:
            yield torch.distributed.PrefixStore("p", wrapped)


def test_store_supports_all_operations(store: Any) -> None:
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert (store.add("n", 2), store.add("n", -3)) == (2, -1)
    assert store.get("n") == b"-1"
    store.multi_set(["x", "y"], ["1", "2"])
    assert store.multi_get(["y", "x"]) == [b"2", b"1"]
    assert store.check(["x", "y"])
    assert not store.check(["x", "z"])
    assert not store.check(["z"])
    store.wait(["x", "y", "n"])
    store.append("a", "2")
    store.append("new", "0")
    assert store.multi_get(["a", "new"]) == [b"12", b"0"]
    assert store.compare_set("a", "other", "3") == b"12"
    assert store.compare_set("a", "12", "3") == b"3"
    assert store.compare_set("absent", "some", "4") == b"some"
    assert not store.check(["absent"])
    assert store.compare_set("absent", "", "4") == b"4"
    assert store.num_keys() == 6
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.num_keys() == 5
    assert store.clone().get("x") == b"1"


def test_missing_key_raises_lookup_error_after_timeout(store: Any) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    for call in (
        lambda: store.get("a"),
        lambda: store.multi_get(["a", "b"]),
        lambda: store.wait(["a"]),
        lambda: store.wait(["a", "b"], SHORT),
    ):
        began = time.monotonic()
        with pytest.raises(LookupError, match="in the store within"):
            call()
        assert 0.25 < time.monotonic() - began < SECONDS


def test_wait_ends_when_keys_appear(ours: EtcdStore) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ours.multi_get(["a", "b", "a"])))
    thread.start()
    other = ours.clone()
    other.set("b", b"2")
    other.set("unrelated", "")
    other.set("a", b"1")
    thread.join(SECONDS)
    assert found == [[b"1", b"2", b"1"]]


def test_concurrent_additions_are_exact(ours: EtcdStore) -> None:
    sums: list[int] = []

    def work() -> None:
        store = ours.clone()
        sums.extend(store.add("n", 1) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(sums) == list(range(1, 31))


def test_empty_requests_succeed(ours: EtcdStore) -> None:
    assert ours.num_keys() == 0
    assert ours.check([])
    assert ours.multi_get([]) == []
    ours.wait([])


def test_empty_values_and_keys_encoded_with_slash_are_supported(ours: EtcdStore) -> None:
    key = "a???"
    assert "/" in b64encode(key.encode()).decode()
    ours.multi_set([key, "empty"], ["v", ""])
    assert ours.multi_get([key, "empty"]) == [b"v", b""]
    assert ours.compare_set("empty", "", "x") == b"x"
    assert ours.num_keys() == 2


@pytest.mark.parametrize("value", [1, None, ["a"]])
def test_non_text_values_are_refused(ours: EtcdStore, value: Any) -> None:
    with pytest.raises(ValueError, match="must be str or bytes"):
        ours.set("a", value)
    with pytest.raises(ValueError, match="must be str or bytes"):
        ours.get(value)


def test_torch_store_shares_the_same_keys(ours: EtcdStore, run: Run) -> None:
    torchs = TorchsOwn(run.client, run.path("/kv"), timedelta(seconds=30))
    ours.set("a", b"\0\xff")
    assert torchs.get("a") == b"\0\xff"
    torchs.set("b", "text")
    assert ours.get("b") == b"text"
    assert [ours.add("n", 1), torchs.add("n", 1), ours.add("n", 1)] == [1, 2, 3]
    torchs.wait(["a", "b", "n"])
    assert torchs.check(["a"])
    assert sorted(
        child.key.rpartition("/")[2] for child in run.client.get(run.path("/kv")).children
    ) == sorted(b64encode(key).decode() for key in (b"a", b"b", b"n"))


@pytest.fixture(params=["torch", "ours"])
def either(request: pytest.FixtureRequest, ours: EtcdStore) -> Any:
    """Return torch's own class, or ours in its place."""
    if request.param == "torch":
        return TorchsOwn(ours.client, ours.prefix, timedelta(seconds=30))
    return TorchEtcdStore(ours)


def test_parameters_have_torch_names(either: Any, ours: EtcdStore) -> None:
    assert either.add(key="n", num=2) == 2
    assert either.add("n", num=-3) == -1
    either.set(key="k", value="v")
    assert either.get(key="k") == b"v"
    assert either.check(keys=["k", "n"])
    either.wait(keys=["k"], override_timeout=SHORT)
    either.wait(["k", "n"], SHORT)
    began = time.monotonic()
    with pytest.raises(LookupError):
        either.wait(keys=["absent"], override_timeout=SHORT)
    assert SHORT.total_seconds() <= time.monotonic() - began < 20
    assert (either.client, either.prefix) == (ours.client, ours.prefix)
