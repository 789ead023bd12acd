"""Dynamic rendezvous on a real etcd 3.4 with its v2 API."""

from __future__ import annotations

import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import etcd
import pytest

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from elasticjob_rendezvous.dynamic import DynamicRendezvousHandler
from elasticjob_rendezvous.dynamic.etcd_backend import (
    EtcdRendezvousBackend,
    create_backend,
    create_rdzv_handler,
)
from tests.integration.etcd_server import EtcdServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    made = EtcdServer(tmp_path, "3.4", arguments=["--enable-v2"])
    try:
        yield made.start()
    finally:
        made.close()


def parameters(server: EtcdServer, **settings: Any) -> RendezvousParameters:
    endpoint = f"127.0.0.1:{server.port}"
    settings = {"last_call_timeout": 1, "keep_alive_interval": 1, **settings}
    return RendezvousParameters("etcd-v2", endpoint, "run", 1, 4, "127.0.0.1", **settings)


def test_keys_values_tokens_and_ttl_match_torch(server: EtcdServer) -> None:
    from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend as torchs

    client = etcd.Client("127.0.0.1", server.port)
    backend, store = create_backend(parameters(server))
    other = torchs.EtcdRendezvousBackend(client, "run", "/torch/elastic/rendezvous")
    assert backend.name == other.name == "etcd-v2"
    assert backend.get_state() is None
    ours = backend.set_state(b"ours")
    assert ours is not None
    assert other.get_state() == ours[:2]
    stored = client.read("/torch/elastic/rendezvous/run")
    assert stored.value == b64encode(b"ours").decode()
    assert stored.modifiedIndex == ours[1]
    assert 7190 < stored.ttl <= 7200
    theirs = other.set_state(b"theirs", ours[1])
    assert backend.set_state(b"late", ours[1]) == (*theirs[:2], False)
    assert backend.set_state(b"no token") == (*theirs[:2], False)
    assert backend.set_state(b"odd token", "odd") == (*theirs[:2], False)
    again = backend.set_state(b"again", theirs[1])
    assert again is not None
    assert again[2]
    store.set("key", "value")
    key = b64encode(b"key").decode()
    assert client.read(f"/torch/elastic/store/{key}").value == b64encode(b"value").decode()


@pytest.mark.parametrize("run_id", ["exp#1", "exp?1", "a%41", "..", ".", "a/../b", "./a", "a/.."])
def test_run_id_with_key_of_another_run_is_refused(server: EtcdServer, run_id: str) -> None:
    params = parameters(server)
    params.run_id = run_id
    with pytest.raises(ValueError, match=r"run id must not contain .*; choose another run id"):
        create_rdzv_handler(params)


@pytest.mark.parametrize("run_id", ["exp/", "a//b", "my run", "a.b", "..a", "tab\tx", "ä+&;=:@"])
def test_run_id_with_key_of_its_own_is_allowed(server: EtcdServer, run_id: str) -> None:
    params = parameters(server)
    params.run_id = run_id
    backend, _ = create_backend(params)
    written = backend.set_state(b"state")
    assert written is not None
    assert written[2]
    assert backend.get_state() == written[:2]


def test_deleted_state_is_not_overwritten_with_old_token(server: EtcdServer) -> None:
    backend, _ = create_backend(parameters(server))
    ours = backend.set_state(b"ours")
    assert ours is not None
    etcd.Client("127.0.0.1", server.port).delete("/torch/elastic/rendezvous/run")
    assert backend.set_state(b"more", ours[1]) is None


def test_keys_of_run_with_expired_state_are_not_used(server: EtcdServer) -> None:
    """The state expires two hours after the last heartbeat; the keys of rounds stay."""
    with ThreadPoolExecutor(2) as pool:

        def rounds(count: int) -> list[RendezvousInfo]:
            """Return two members' views of the last round of a run."""
            made = [create_rdzv_handler(parameters(server)) for _ in range(2)]
            for handler in made:
                handler._settings = handler._actor.settings = replace(
                    handler.settings, min_nodes=2, max_nodes=2
                )
            for _ in range(count):
                infos = list(pool.map(lambda handler: handler.next_rendezvous(), made))
            for handler in made:
                handler.leave()
            return infos

        first = rounds(3)
        first[0].store.set("key", b"old")
        etcd.Client("127.0.0.1", server.port).delete("/torch/elastic/rendezvous/run")
        second = rounds(1)
        assert {info.round for info in first} == {2}
        assert {info.round for info in second} == {3}
        assert not second[0].store.check(["key"])
        assert second[0].bootstrap_store_info == second[1].bootstrap_store_info


def test_write_with_lost_answer_counts(server: EtcdServer) -> None:
    """A client that sends again is refused because of its own first write."""

    class Twice:
        def __init__(self, client: Any) -> None:
            self.read = client.read
            self._write = client.write

        def write(self, *arguments: Any, **options: Any) -> Any:
            self._write(*arguments, **options)
            return self._write(*arguments, **options)

    backend = EtcdRendezvousBackend(Twice(etcd.Client("127.0.0.1", server.port)), "run", "/x", 60)
    written = backend.set_state(b"state")
    assert written is not None
    assert written[2]


def test_non_base64_value_and_unreachable_etcd_are_errors(server: EtcdServer) -> None:
    backend, _ = create_backend(parameters(server, read_timeout=1))
    etcd.Client("127.0.0.1", server.port).write("/torch/elastic/rendezvous/run", "not base64!")
    with pytest.raises(RendezvousStateError):
        backend.get_state()
    server.kill()
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    with pytest.raises(RendezvousConnectionError):
        backend.set_state(b"state")
    with pytest.raises(RendezvousConnectionError, match="no etcd with the v2 API at"):
        create_backend(parameters(server, read_timeout=1))


@pytest.mark.parametrize(
    ("settings", "named"), [({"read_timeout": 0}, "read_timeout"), ({"protocol": "ftp"}, "http")]
)
def test_invalid_setting_is_reported(server: EtcdServer, settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        create_backend(parameters(server, **settings))
    with pytest.raises(ValueError, match="run id"):
        EtcdRendezvousBackend(None, "")


def test_etcd_restart_during_join_and_run_is_survived(server: EtcdServer) -> None:
    one = create_rdzv_handler(parameters(server, read_timeout=2, last_call_timeout=3))
    joined: list[Any] = []
    joining = threading.Thread(target=lambda: joined.append(one.next_rendezvous()))
    joining.start()
    server.restart()
    joining.join(60)
    assert [(info.rank, info.world_size) for info in joined] == [(0, 1)]
    server.restart()
    info = one.next_rendezvous()
    assert (info.rank, info.round) == (0, 1)
    assert one.shutdown()


@pytest.mark.parametrize("ids", [("exp", "exp/x"), ("exp/x", "exp"), ("exp/x/y", "exp")])
def test_key_below_that_of_another_run_is_refused_at_once(
    server: EtcdServer, ids: tuple[str, str]
) -> None:
    """A retry would last up to the timeout of the join, and end without the reason."""

    def made(run_id: str) -> DynamicRendezvousHandler:
        params = parameters(server)
        params.run_id = run_id
        return create_rdzv_handler(params)

    first, second = map(made, ids)
    try:
        first.next_rendezvous()
        with pytest.raises(RendezvousStateError) as refused:
            second.next_rendezvous()
        with pytest.raises(RendezvousStateError):
            second._backend.set_state(b"state")
    finally:
        second.shutdown()
        first.shutdown()
    folder = "/torch/elastic/rendezvous"
    message = str(refused.value)
    assert f"at {folder}/{ids[1]}: another run has its state at {folder}/{ids[0]}," in message
    assert "choose another run id on all nodes" in message


def test_folder_that_expired_runs_have_left_is_refused_with_a_remedy(server: EtcdServer) -> None:
    client = etcd.Client("127.0.0.1", server.port)
    first, second = (EtcdRendezvousBackend(client, run_id, "/left") for run_id in ("exp/x", "exp"))
    assert first.set_state(b"state")
    client.delete("/left/exp/x")
    with pytest.raises(RendezvousStateError, match=r"empty folder .*etcdctl rm .*/left/exp"):
        second.get_state()
