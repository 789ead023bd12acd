"""Pods of a local run as the operator's sources read them, and polls over unix sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elasticjob_cli.local.cluster import POLLING, KubeletPods, NoSecrets, fetch_report
from elasticjob_cli.local.kubelet import Kubelet, LocalPod, PodFiles, Programs
from elasticjob_cli.local.processes import Exit, Processes
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.observed.state import PodPhase
from elasticjob_operator.reconcile.job_memory import (
    JobKey,
    JobMemory,
    OwnedMemory,
    RendezvousMemory,
)
from elasticjob_operator.rendezvous.agent_poller import AgentPoller
from elasticjob_operator.rendezvous.agents_source import AgentsSource
from elasticjob_operator.rendezvous.report_client import Agent
from elasticjob_rendezvous.protocol.records.agent_reports import (
    agent_report,
    answer_headers,
    proven,
    read_headers,
    written,
)
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Round,
    RoundState,
)
from tests.unit.operator.builders import NOW, job

KEY = b"key"
C10D = {"backend": "C10d"}
SECONDS = 60.0


@dataclass
class Rig:
    """Kubelet with pods whose processes a test sets."""

    folder: Path
    seen_end: set[str] = field(default_factory=set)
    members: list[str] = field(default_factory=list)
    kubelet: Kubelet = field(init=False)

    def __post_init__(self) -> None:
        self.processes = SimpleNamespace(pids={})
        self.kubelet = Kubelet(
            cast("Processes", self.processes),
            self.folder,
            self.folder,
            cast("Programs", SimpleNamespace()),
            cast("asyncio.TaskGroup", SimpleNamespace()),
            lambda _: None,
        )

    def pod(self, index: int, incarnation: int = 1, agent: bool = True) -> LocalPod:
        uid = f"uid-{index}"
        files = PodFiles(f"job-{index}", uid, incarnation, self.folder / uid, self.folder)
        pod = self.kubelet.pods[uid] = LocalPod(index, files, NOW, launcher_since=NOW)
        self.processes.pids[pod.launcher] = 1
        if agent:
            self.processes.pids[pod.agent] = 2
        return pod

    def end(self, pod: LocalPod, *, agent: bool) -> None:
        """End the launcher of a pod, and its agent too unless `agent`."""
        pod.launcher_exit, pod.ended_at = Exit(pod.launcher, 1, 1, 0), NOW
        if not agent:
            del self.processes.pids[pod.agent]

    def pods(self, **rendezvous: str) -> KubeletPods:
        return KubeletPods(
            self.kubelet,
            job(rendezvous=rendezvous),
            lambda: self.members,
            lambda uid: uid in self.seen_end,
        )


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_ended_pod_counts_as_running_until_its_agent_reported_or_ended(rig: Rig) -> None:
    """A torch backend: the agent alone knows the outcome of the job."""
    pods, pod = rig.pods(**C10D), rig.pod(0)
    rig.end(pod, agent=True)
    [seen] = pods.pods()
    assert (seen.phase, seen.exit_code, seen.over) == (PodPhase.RUNNING, None, False)
    rig.seen_end = {pod.uid}
    [seen] = pods.pods()
    assert (seen.phase, seen.exit_code) == (PodPhase.FAILED, 1)
    rig.seen_end = set()
    rig.end(pod, agent=False)
    [seen] = pods.pods()
    assert (seen.phase, seen.exit_code, seen.over) == (PodPhase.FAILED, 1, True)


def test_end_of_a_pod_over_etcd_is_the_end_of_its_launcher(rig: Rig) -> None:
    pods, pod = rig.pods(), rig.pod(0)
    rig.end(pod, agent=True)
    [seen] = pods.pods()
    assert seen.phase is PodPhase.FAILED
    rig.end(pod, agent=False)
    [seen] = pods.pods()
    assert not seen.over, "the other members detect the loss, as in a cluster that loses a node"


def test_only_a_running_member_is_ready(rig: Rig) -> None:
    pods = rig.pods()
    rig.pod(0)
    rig.pod(1)
    rig.members = ["uid-1"]
    assert [pod.ready for pod in pods.pods()] == [False, True]


def test_incarnation_and_agents_are_those_of_the_pods(rig: Rig) -> None:
    pods = rig.pods()
    assert pods.newest == 0
    old, new = rig.pod(0, incarnation=1), rig.pod(1, incarnation=2)
    rig.pod(2, incarnation=2, agent=False)
    assert pods.newest == 2
    assert pods.has(1)
    old.terminating = True
    assert not pods.has(1)
    assert pods.agents(2) == (Agent("uid-1", str(new.files.control)),)
    assert pods.names == {"job-0", "job-1", "job-2"}
    assert pods.uids == {"uid-0", "uid-1", "uid-2"}


@dataclass
class AgentServer:
    """Agent of one member on its unix socket; `key` signs its answers."""

    path: Path
    member: str
    key: bytes = KEY

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        request = proven(self.key, read_headers(head), self.member, now_ms)
        if request is None:
            writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        else:
            body = self.body()
            proof = answer_headers(self.key, request, body)
            lines = "".join(f"{name}: {value}\r\n" for name, value in proof.items())
            writer.write(f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode() + body)
        writer.close()

    def body(self) -> bytes:
        prefix = job_prefix("default", "job-uid", 1)
        keys = Keys(prefix)
        records: dict[str, object] = {
            keys.session(self.member, "s"): Member(self.member, "s", "job-0", "", 0, round=3),
            keys.round: Round(3, RoundState.FINAL, Cause(CauseKind.START)),
        }
        return json.dumps(written(agent_report(prefix, "c10d", self.member, records))).encode()


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_agents_are_polled_over_their_sockets(rig: Rig, loop: asyncio.Runner) -> None:
    """By the operator's poller and source, without an API server."""

    async def scenario() -> None:
        pod = rig.pod(0)
        server = AgentServer(pod.files.control, pod.uid)
        clock = asyncio.get_running_loop().time
        woken = asyncio.Event()
        poller = AgentPoller(lambda *_: woken.set(), clock, POLLING, fetch_report)
        source = AgentsSource(poller, NoSecrets(), "default", "job-uid")
        memory = JobMemory(
            JobKey("default", "job"),
            "job-uid",
            rendezvous=RendezvousMemory(1),
            owned=OwnedMemory(Access(KEY, None, None, None)),
        )
        polling = asyncio.create_task(poller.run())
        async with await asyncio.start_unix_server(server.answer, server.path):
            pods = rig.pods(**C10D)
            first = await source.observe(pods.job, memory, pods)
            assert first.observed.rendezvous.round == 0
            async with asyncio.timeout(SECONDS):
                await woken.wait()
            seen = (await source.observe(pods.job, memory, pods)).observed
            assert seen.rendezvous.round == 3
            assert [member.id for member in seen.rendezvous.members] == [pod.uid]
        polling.cancel()

    loop.run(scenario())


def test_answer_of_another_process_on_the_socket_is_ignored(rig: Rig, loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        server = AgentServer(rig.folder / "agent", "uid-0", key=b"another")
        async with await asyncio.start_unix_server(server.answer, server.path):
            with pytest.raises(MalformedRecord, match="403"):
                await fetch_report(Agent("uid-0", str(server.path)), 0, KEY, 4096)

    loop.run(scenario())
