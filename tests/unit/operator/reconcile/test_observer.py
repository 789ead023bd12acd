"""Observation of a job's pods on a fake API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticjob_operator.domain.observed.state import Observation, Observed, Obstacle, Refusal
from elasticjob_operator.domain.plan.actions import CreatePod
from elasticjob_operator.kubernetes.client import Json, Kind, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.cluster import Applied
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory, PodMemory
from elasticjob_operator.reconcile.live_pods import LivePods
from elasticjob_operator.reconcile.plan_pass import Observer
from elasticjob_operator.reconcile.watches import NodeCache
from elasticjob_operator.rendezvous.sources import PodReader
from tests.unit.operator.builders import NOW, job
from tests.unit.operator.domain.observed.raw_pods import RawPod
from tests.unit.operator.rendezvous.fake_source import FakeSource

OWNER = {"uid": "job-uid", "controller": True, "kind": "ElasticJob"}
REFUSAL = Refusal(Obstacle.QUOTA, "exceeded quota", NOW)


def raw(index: int, owned: bool = True) -> Json:
    """Return a running pod of the job, or one of another owner with the same name."""
    found = RawPod(index).ready().raw
    found["metadata"]["ownerReferences"] = [OWNER] if owned else []
    return found


@dataclass
class Api:
    """API server with pods by name; a LIST lacks the `hidden` ones."""

    pods: dict[str, Json] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        if name not in self.pods:
            raise NotFound("get pods", f"pods {name} not found")
        return self.pods[name]

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        selector: str,
        *,
        keep: Callable[[Json], Json],
        most: int,
    ) -> list[Json]:
        return [keep(one) for name, one in self.pods.items() if name not in self.hidden]


class Records(FakeSource):
    """Rendezvous with a member in pod job-1."""

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Observation:
        own = await pods.read(job, memory)
        await own.look_up({"job-1"})
        return Observation(Observed(await own.convert()))


@dataclass
class Rig:
    """Observer and the memory of a job."""

    api: Api = field(default_factory=Api)
    memory: JobMemory = field(
        default_factory=lambda: JobMemory(JobKey("default", "job"), "job-uid", refusal=REFUSAL)
    )

    @property
    def observer(self) -> Observer:
        return Observer(LivePods(self.api, NodeCache(), lambda: NOW))

    def observe(self) -> Observed:
        observation = asyncio.run(self.observer.observe(job(), self.memory, Records()))
        return observation.observed

    def observe_again(self, before: Observed, applied: Applied) -> Observed:
        return self.observer.observe_again(job(), self.memory, Records(), before, applied)


def test_pods_and_their_machines_are_remembered() -> None:
    rig = Rig(Api({"job-0": raw(0), "job-2": raw(2)}))
    seen = rig.observe()
    assert [pod.name for pod in seen.pods] == ["job-0", "job-2"]
    assert rig.memory.pods.uids == {"uid-0-0", "uid-2-0"}
    assert rig.memory.pods.nodes == {"node-a"}
    assert seen.refusal == REFUSAL


def test_pod_of_a_member_is_found_although_no_list_shows_it() -> None:
    rig = Rig(Api({"job-0": raw(0), "job-1": raw(1)}, hidden={"job-1"}))
    for _ in range(2):
        assert [pod.name for pod in rig.observe().pods] == ["job-0", "job-1"]
        assert rig.memory.pods.unlisted == {"job-1"}
    del rig.api.pods["job-1"]
    assert [pod.name for pod in rig.observe().pods] == ["job-0"]
    assert rig.memory.pods.unlisted == frozenset()


def test_taken_pod_name_counts_until_its_owner_is_gone() -> None:
    rig = Rig(Api({"job-3": raw(3, owned=False)}))
    rig.memory.pods = PodMemory(foreign=frozenset({3, 4}))
    assert rig.observe().foreign == {3}, "name 4 is free"
    rig.api.pods["job-3"] = raw(3)
    assert rig.observe().foreign == frozenset()


def test_taken_pod_name_may_be_that_of_a_pod_of_a_deleted_job() -> None:
    rig = Rig(Api({f"job-{index}": raw(index, owned=False) for index in (3, 4)}))
    owner = {"uid": "other-uid", "controller": True, "kind": "ElasticJob", "name": "job"}
    rig.api.pods["job-3"]["metadata"]["ownerReferences"] = [owner]
    rig.memory.pods = PodMemory(foreign=frozenset({3, 4}))
    seen = rig.observe()
    assert seen.foreign == {3, 4}
    assert seen.predecessors == {3}


def test_result_of_a_plan_is_part_of_the_next_observation() -> None:
    rig = Rig(Api({"job-0": raw(0), "job-2": raw(2)}))
    before = rig.observe()
    rig.memory.pods = PodMemory(
        foreign=frozenset({7}), predecessors=frozenset({7}), unlisted=frozenset({"job-8"})
    )
    applied = Applied(
        [CreatePod(5, "job-5", 1)],
        created=[raw(5)],
        deleted={"uid-2-0"},
        foreign={3},
        predecessors={3},
        unlisted={"job-4"},
    )
    after = rig.observe_again(before, applied)
    assert [(pod.name, pod.terminating) for pod in after.pods] == [
        ("job-0", False),
        ("job-2", True),
        ("job-5", False),
    ]
    assert after.foreign == after.predecessors == {3, 7}
    assert rig.memory.pods.unlisted == {"job-4", "job-8"}
    assert rig.memory.pods.uids == {"uid-0-0", "uid-2-0", "uid-5-0"}
