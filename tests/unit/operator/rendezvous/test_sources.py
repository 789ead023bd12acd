"""Rendezvous sources: incarnation, and content of the job's Secret."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.names import AGENT_CONTAINER, INCARNATION_LABEL
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.observed.agent_records import Participant, PodHistory
from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.domain.observed.pod_identity import PREFIX_VARIABLE
from elasticjob_operator.domain.observed.state import UNREADABLE, Observed, Pod
from elasticjob_operator.kubernetes.client import Json, Kind, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory, RendezvousMemory
from elasticjob_operator.reconcile.live_pods import SPARE_AGENTS, PodObjects, agents_of
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.agent_poller import AgentPoller
from elasticjob_operator.rendezvous.agents_source import AgentsSource
from elasticjob_operator.rendezvous.etcd_source import Etcd, EtcdSource
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_operator.rendezvous.sources import RendezvousSource, UnusableSource
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.protocol.records.keys import job_prefix
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.unit.operator.builders import NOW, job, member, observed, pod

AUTHORS = {"username": b"author", "password": b"pass"}


def raw(uid: str, incarnation: int, name: str = "", **status: str) -> Json:
    """Return a Pod object of this incarnation, with the container of an agent."""
    metadata = {"uid": uid, "name": name or uid, "labels": {INCARNATION_LABEL: str(incarnation)}}
    prefix = {"name": PREFIX_VARIABLE, "value": job_prefix("default", "job-uid", incarnation)}
    spec = {"initContainers": [{"name": AGENT_CONTAINER, "env": [prefix]}]}
    return {"metadata": metadata, "spec": spec, "status": status}


@dataclass
class Pods:
    """Pods of a job, by the incarnation in their labels."""

    incarnations: tuple[int, ...] = ()
    terminating: bool = False

    async def read(self, job: ElasticJob, memory: JobMemory) -> PodObjects:
        found = [raw(f"u{one}", one) for one in self.incarnations]
        if self.terminating:
            for one in found:
                one["metadata"]["deletionTimestamp"] = "now"
        return PodObjects(self, job, memory, found)

    async def unlisted(
        self, job: object, memory: JobMemory, own: list[Json], names: Set[str]
    ) -> list[Json]:
        raise AssertionError("no record names a member")

    async def convert(self, job: object, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        return tuple(pod(index).get() for index, _ in enumerate(own))


@dataclass
class Secrets:
    """Kubernetes client that reads Secrets by name; `read` holds the names."""

    held: dict[str, dict[str, bytes]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        self.read.append(name)
        if name not in self.held:
            raise NotFound("get secrets", f"secrets {name} not found")
        data = {key: base64.b64encode(value).decode() for key, value in self.held[name].items()}
        return {"metadata": {"name": name}, "data": data}

    def now(self) -> datetime:
        return NOW


def memory(**fields: Any) -> JobMemory:
    return JobMemory(JobKey("default", "job"), "job-uid", rendezvous=RendezvousMemory(**fields))


def in_etcd(**fields: Any) -> EtcdSource:
    """Return a source in an etcd that was never read."""
    client = Client(["http://127.0.0.1:1"])
    kube = Secrets({"mine": AUTHORS})
    return EtcdSource(Etcd(client, InformerCache(client), **fields), kube, "default", "job-uid")


def agents() -> AgentsSource:
    status = AgentPoller(lambda *_: None, lambda: 0.0)
    return AgentsSource(status, Secrets({"mine": AUTHORS}), "default", "job-uid")


@pytest.mark.parametrize("source", [UnusableSource(), in_etcd()], ids=["unusable", "unreadable"])
@pytest.mark.parametrize(
    ("remembered", "goes_on", "pods", "incarnation", "known"),
    [
        (None, False, Pods(), 1, False),
        (3, False, Pods(), 3, False),
        (3, True, Pods(), 3, True),
        (3, False, Pods((3,)), 3, True),
        (3, False, Pods((3,), terminating=True), 3, False),
        (3, False, Pods((2, 4)), 4, True),
        (None, False, Pods((2,)), 2, True),
    ],
    ids=["new", "suspended", "goes on", "has pods", "ending pods", "newer pods", "only pods"],
)
def test_incarnation_without_records_comes_from_pods_and_memory(
    source: RendezvousSource,
    remembered: int | None,
    goes_on: bool,
    pods: Pods,
    incarnation: int,
    known: bool,
) -> None:
    kept = memory(incarnation=remembered, goes_on=goes_on, bounds=RendezvousParams(1, 2))
    observation = asyncio.run(source.observe(job(), kept, pods))
    assert observation.observed.incarnation == incarnation
    assert observation.incarnation_known is known
    assert kept.rendezvous.incarnation == (incarnation if known else remembered)
    assert observation.observed.rendezvous == UNREADABLE
    assert observation.observed.bounds == RendezvousParams(1, 2), "those written last"
    assert not source.has_lost(observation.observed), "unreadable is not lost"


def test_incarnation_of_agents_is_the_generation_until_there_are_pods() -> None:
    source, kept = agents(), memory()
    there = PodHistory({"u1": Participant("job-0", 1)})
    c10d = job(rendezvous={"backend": "C10d"})
    observation = asyncio.run(source.observe(c10d, kept, Pods()))
    assert observation.observed.incarnation == max(c10d.metadata.generation, 1)
    kept.rendezvous = RendezvousMemory(4, pod_history=there)
    observation = asyncio.run(source.observe(c10d, kept, Pods((5, 4))))
    assert observation.observed.incarnation == 5
    assert "u1" not in kept.rendezvous.pod_history.departures, "it was of another incarnation"


@dataclass
class StillbornPods(Pods):
    """Pods that failed without ever being Ready."""

    async def convert(self, job: object, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        return tuple(pod(index).stillborn().get() for index, _ in enumerate(own))


class Reported(AgentPoller):
    """Poller that has these records of every job."""

    def __init__(self, found: Records) -> None:
        super().__init__(lambda *_: None, lambda: 0.0)
        self.found = found

    def records(
        self, uid: str, pods: Collection[str], ended: Set[str] = frozenset()
    ) -> Records | None:
        return self.found


@pytest.mark.parametrize(("reported", "launch_failed"), [("job-0", False), ("job-1", True)])
def test_failure_of_a_pod_that_an_agent_reported_is_no_launch_failure(
    reported: str, launch_failed: bool
) -> None:
    found = Records(job_prefix("default", "job-uid", 1), members=(member(reported),))
    source = AgentsSource(Reported(found), Secrets(), "default", "job-uid")
    c10d = job(rendezvous={"backend": "C10d"})
    seen = asyncio.run(source.observe(c10d, memory(), StillbornPods((1,)))).observed
    assert [one.launch_failed for one in seen.pods] == [launch_failed]


def test_only_lost_records_of_a_readable_etcd_are_lost() -> None:
    readable, bounds = observed(pod(0).get()), RendezvousParams(1, 2)
    assert in_etcd().has_lost(readable)
    assert not in_etcd().has_lost(Observed(readable.pods, readable.rendezvous, bounds))
    assert not in_etcd().has_lost(Observed((), readable.rendezvous))
    assert not in_etcd().has_lost(Observed(readable.pods, UNREADABLE))
    assert not agents().has_lost(readable), "agents hold no bounds"


@pytest.mark.parametrize("secret", [None, "mine"], ids=["none", "a Secret"])
@pytest.mark.parametrize(
    ("source", "uses_secret"),
    [(in_etcd(), False), (in_etcd(own=False), True), (agents(), True)],
    ids=["own etcd", "named etcd", "agents"],
)
def test_credentials_come_from_the_author_unless_the_etcd_is_the_operators(
    source: RendezvousSource, uses_secret: bool, secret: str | None
) -> None:
    wanted = {"endpoints": ["http://etcd:2379"]} | ({"secretName": secret} if secret else {})
    made = asyncio.run(source.access(job(rendezvous=wanted), None))
    assert made.user == ("author" if secret and uses_secret else None)
    assert made.job_key
    kept = Access(b"key", None, None, None)
    assert asyncio.run(source.access(job(rendezvous=wanted), kept)).job_key == b"key"


@pytest.mark.parametrize(
    ("source", "stale"),
    [
        (in_etcd(), True),
        (in_etcd(own=False), False),
        (in_etcd(own=False, held=AUTHORS), True),
        (agents(), False),
        (UnusableSource(), False),
    ],
    ids=["other authority", "no Secret", "other password", "agents", "unusable"],
)
def test_secret_is_stale_once_its_source_differs(source: RendezvousSource, stale: bool) -> None:
    assert source.is_stale(Access(b"key", b"authority", "author", "before")) is stale


@pytest.mark.parametrize(
    "source", [in_etcd(), in_etcd(own=False, held=AUTHORS)], ids=["own etcd", "named etcd"]
)
def test_current_secret_is_not_stale(source: RendezvousSource) -> None:
    assert not source.is_stale(Access(b"key", None, "author", "pass"))


@pytest.mark.parametrize("source", [agents(), UnusableSource()], ids=["agents", "unusable"])
def test_rendezvous_without_writes_refuses_them(source: RendezvousSource) -> None:
    outcome = Outcome(OutcomeKind.STOPPED)
    for write in (
        source.write_params(memory(), 1, RendezvousParams(1, 2), 0),
        source.close(1, outcome, 0),
        source.remove_members(1, ("u1",)),
    ):
        with pytest.raises(Retry):
            asyncio.run(write)


def test_only_running_pods_of_the_incarnation_are_polled() -> None:
    own = [
        raw("a", 2, podIP="10.0.0.1", phase="Running"),
        raw("b", 1, podIP="10.0.0.2", phase="Running"),
        raw("c", 2, podIP="10.0.0.3", phase="Pending"),
        raw("d", 2, phase="Running"),
    ]
    assert [agent.member for agent in agents_of(job(), own, 2)] == ["a"]


def test_agents_are_polled_up_to_max_nodes_and_those_of_the_operators_pods_first() -> None:
    foreign = [raw(f"x{n}", 2, podIP="10.0.0.1", phase="Running") for n in range(600)]
    own = [
        raw(f"u{n}", 2, name=f"job-{n}", podIP="10.0.0.1", phase="Running")
        for n in range(3, -1, -1)
    ]
    found = [agent.member for agent in agents_of(job(), [*foreign, *own], 2)]
    assert found == ["u0", "u1", "u2", "u3", *(f"x{n}" for n in range(SPARE_AGENTS))]


def test_agents_of_pods_without_the_agents_container_are_not_polled() -> None:
    bare = raw("a", 2, podIP="10.0.0.1", phase="Running")
    bare["spec"] = {"containers": [{"name": "agent"}]}
    assert agents_of(job(), [bare], 2) == ()
