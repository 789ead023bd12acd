"""C10d rendezvous of jobs, without torch: one agent hosts the store, and may be lost."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as torch_distributed
from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    create_backend as torchs_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as torchs_handler

from elasticjob_agent.polling.backends import job_handler
from elasticjob_agent.polling.reconnecting_handler import ReconnectingHandler
from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import AgentSettings, Backend, EtcdAccess
from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousInfo
from elasticjob_rendezvous.c10d import native
from elasticjob_rendezvous.dynamic.stores import PrefixedStore, round_prefix
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.tcpstore import server
from tests.integration.local_rig import until

SECONDS = 90


class Job:
    """Handlers of one job's agents."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            self.port = held.getsockname()[1]
        self.pool = ThreadPoolExecutor(16)
        self.made: list[ReconnectingHandler] = []

    def settings(self, hosts: bool = False, most: int = 3, least: int = 1) -> AgentSettings:
        bounds = RendezvousParams(
            least, most, last_call_seconds=2, keep_alive_seconds=10, settle_seconds=0
        )
        return AgentSettings(
            prefix="/elasticjob/default/uid/1/",
            run_id="digits",
            member="uid-1",
            name="node-1",
            address="127.0.0.1",
            etcd=EtcdAccess((f"127.0.0.1:{self.port}",)),
            job_key=b"k",
            bounds=bounds,
            bind_address="127.0.0.1",
            backend=Backend.C10D,
            rendezvous_id="uid-1",
            hosts_store=hosts,
        )

    def agent(self, hosts: bool = False, most: int = 3, least: int = 1) -> ReconnectingHandler:
        made = job_handler(self.settings(hosts, most, least))
        assert made is not None
        self.made.append(made)
        return made

    def join(self, *agents: Any) -> list[Future[RendezvousInfo]]:
        return [self.pool.submit(agent.next_rendezvous) for agent in agents]

    def joined(self, *agents: Any) -> list[RendezvousInfo]:
        return [future.result(SECONDS) for future in self.join(*agents)]

    def close(self) -> None:
        for agent in self.made:
            self.crash(agent)
        self.pool.shutdown(wait=False)

    def crash(self, agent: ReconnectingHandler) -> None:
        """End its process abruptly: without a leave notice and with its store."""
        agent._closed.__self__.close(0.0)  # type: ignore[attr-defined]
        if agent._handler is not None:
            agent._handler._release()  # type: ignore[attr-defined]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_agents_meet_at_store_of_host(job: Job) -> None:
    early = job.join(job.agent(least=3), job.agent(least=3))  # before there is a store
    host = job.agent(hosts=True, least=3)
    infos = [host.next_rendezvous(), *(f.result(SECONDS) for f in early)]
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    infos[0].store.set("k", "v")
    assert infos[1].store.get("k") == b"v"
    assert job.made[0].num_nodes_waiting() == 0


def test_next_round_does_not_wait_for_unknown_members(job: Job) -> None:
    agents = [job.agent(hosts=True, least=2), job.agent(least=2)]
    first = job.joined(*agents)
    assert {info.world_size for info in first} == {2}
    second = job.joined(*agents)
    assert {info.world_size for info in second} == {2}
    assert {info.round for info in second} == {first[0].round + 1}


def test_rounds_continue_with_replacement_host(job: Job) -> None:
    host, survivor, other = agents = [job.agent(hosts, least=3) for hosts in (True, False, False)]
    for _ in range(3):
        number = job.joined(*agents)[0].round
    job.crash(host)
    seeking = job.join(survivor, other)
    replacement = job.agent(hosts=True, least=3)
    infos = [replacement.next_rendezvous(), *(f.result(SECONDS) for f in seeking)]
    assert {info.world_size for info in infos} == {3}
    assert {info.round for info in infos} == {infos[0].round}
    assert infos[0].round > number


def test_host_lost_between_rounds_is_detected(job: Job) -> None:
    host, survivor = job.agent(hosts=True, least=2), job.agent(least=2)
    job.joined(host, survivor)
    job.crash(host)
    job.agent(hosts=True).next_rendezvous()

    def asked() -> bool:
        try:
            return survivor.num_nodes_waiting() > 0
        except RendezvousConnectionError:
            return False

    until(asked, "the survivor to see that its round is over")


def test_shutdown_closes_all_agents_and_host_waits_for_them(job: Job) -> None:
    host, other = job.agent(hosts=True, least=2), job.agent(least=2)
    job.joined(host, other)
    host.shutdown()
    leaving = job.pool.submit(host.close)
    until(other.is_closed, "the other to see that it is over")
    assert not leaving.done()
    other.shutdown()
    job.crash(other)
    leaving.result(SECONDS)


def test_torch_handler_joins_same_gang(job: Job) -> None:
    host = job.agent(hosts=True, most=2, least=2)
    ours = job.join(host)[0]
    parameters = TorchParameters(
        "c10d", f"127.0.0.1:{job.port}", "uid-1", 2, 2, local_addr="127.0.0.1", is_host="false"
    )
    until(lambda: host._handler is not None, "the store")
    backend, store = torchs_backend(parameters)
    theirs = torchs_handler(store, backend, parameters)
    info = theirs.next_rendezvous()
    assert {info.world_size, ours.result(SECONDS).world_size} == {2}
    info.store.set("k", "v")
    assert ours.result().store.get("k") == b"v"
    assert isinstance(info.store, torch_distributed.PrefixStore)
    theirs_at, ours_at = info.bootstrap_store_info, ours.result().bootstrap_store_info
    assert theirs_at.master_port == ours_at.master_port
    if ours.result().rank == 0:  # torch's nodes keep one address: that of the backend's store
        assert ours_at.master_port == job.port
        assert host.use_agent_store, "so rank 0's worker must not host another"
    theirs.shutdown()


def test_several_endpoints_are_refused() -> None:
    settings = replace(Job().settings(), etcd=EtcdAccess(("a:1", "b:2")))
    with pytest.raises(SettingsError, match="one endpoint"):
        job_handler(settings)


def test_store_of_limited_memory_serves_any_number_of_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_STORE_BYTES", 64 * 1024)
    host = native.Host("127.0.0.1", 0)
    backend, store, own = native.connect("127.0.0.1", host.port, "run", 10.0)
    backend.set_state(b"state")
    keys = [f"torchelastic/role_info/{rank}" for rank in range(16)]
    rounds = [PrefixedStore(round_prefix("run", number), store) for number in range(100)]
    for each in rounds:
        each.multi_set(keys, ["role"] * len(keys))
    assert all(each.check(keys) for each in rounds[-2:])
    state = backend.get_state()
    assert state is not None
    assert state[0] == b"state"
    for client in (store, own):
        client.close()
    host.close()


def test_store_client_and_host_work_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # to import it fails
from datetime import timedelta
from elasticjob_rendezvous.c10d import native
host = native.Host("127.0.0.1", 0)
backend, *stores = native.connect("127.0.0.1", host.port, "run", 10.0)
print(backend.set_state(b"state")[::2], backend.get_state()[0])
for store in stores:
    store.close()
host.close(10.0)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert told.stdout == "(b'state', True) b'state'\n", told.stderr
