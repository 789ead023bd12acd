"""Properties of every plan: sizes, indices, idempotence, convergence."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Self

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Observed,
    Pod,
    PodPhase,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.actions import (
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.planner import MAX_POD_ACTIONS, Plan, plan
from elasticjob_operator.domain.plan.sizes import count_pods, legal_sizes, wanted_size
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob, RendezvousState
from elasticjob_operator.model.types import MAX_NODES, Backend
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from tests.unit.operator.builders import NOW, ago, closed, job, member

CASES = settings(max_examples=150, deadline=None)


@st.composite
def jobs(draw: st.DrawFn, suspended: bool | None = None) -> ElasticJob:
    low = draw(st.integers(1, 4))
    return job(
        minNodes=low,
        maxNodes=low + draw(st.integers(0, 6)),
        nodes=draw(st.none() | st.integers(0, 12)),
        nodeIncrement=draw(st.integers(1, 3)),
        runPolicy={
            "suspend": draw(st.booleans()) if suspended is None else suspended,
            "cleanPodPolicy": draw(st.sampled_from(["None", "Running", "All"])),
            "ttlSecondsAfterFinished": draw(st.none() | st.integers(0, 50)),
        },
    )


@st.composite
def pods(draw: st.DrawFn) -> tuple[Pod, ...]:
    found = []
    for index in draw(st.sets(st.integers(0, 12), max_size=10)):
        phase = draw(st.sampled_from(list(PodPhase)))
        runs = phase is PodPhase.RUNNING and draw(st.booleans())
        found.append(
            Pod(
                index=index,
                name=f"job-{index}",
                uid=f"uid-{index}",
                created_at=ago(draw(st.integers(0, 200))),
                phase=phase,
                ready=runs,
                terminating=draw(st.booleans()),
                node=f"node-{index}",
                node_state=draw(st.sampled_from(list(NodeState))),
                launcher_since=ago(0) if runs else None,
            )
        )
    return tuple(found)


@st.composite
def views(draw: st.DrawFn) -> RendezvousView:
    ranked = draw(st.lists(st.integers(0, 12), unique=True, max_size=6))
    state = st.sampled_from(["running", "waiting", "done"])
    members = tuple(member(f"job-{index}", draw(state), id=f"uid-{index}") for index in ranked)
    ranks = {one.id: rank for rank, one in enumerate(members)}
    final = RendezvousView(
        state=RendezvousState.FINAL, round=1, nodes=len(members), members=members, ranks=ranks
    )
    ends = [closed(kind) for kind in OutcomeKind]
    suspended = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
    return draw(st.sampled_from([RendezvousView(), final, final, UNREADABLE, suspended, *ends]))


@st.composite
def worlds(draw: st.DrawFn) -> Observed:
    world = Observed(pods=draw(pods()), rendezvous=draw(views()))
    if draw(st.booleans()):
        return world
    other = plan(draw(jobs(suspended=False)), world, NOW)
    return replace(world, bounds=other.bounds)


def applied(a_job: ElasticJob, world: Observed, found: Plan) -> tuple[ElasticJob, Observed]:
    """Return the job and the world after the plan on a platform without faults."""
    existing = {one.uid: one for one in world.pods}
    for action in found.actions:
        match action:
            case WriteNodes(nodes):
                spec = a_job.spec.model_copy(update={"nodes": nodes})
                a_job = a_job.model_copy(update={"spec": spec})
            case WriteParams(incarnation, bounds):
                if incarnation != world.incarnation:
                    world = replace(world, rendezvous=RendezvousView(), incarnation=incarnation)
                world = replace(world, bounds=bounds)
            case CloseRendezvous(_, kind, reason):
                view = RendezvousView(
                    state=RendezvousState.CLOSED, outcome=Outcome(kind, reason=reason)
                )
                world = replace(world, rendezvous=view)
            case RemoveMembers(_, gone):
                view = world.rendezvous
                there = tuple(one for one in view.members if one.id not in gone)
                world = replace(world, rendezvous=replace(view, members=there))
            case CreatePod(index, name, _):
                uid = f"new-{index}-{len(existing)}"
                existing[uid] = Pod(index, name, uid, created_at=NOW)
            case DeletePod(_, uid, _):
                assert not existing[uid].terminating
                existing[uid] = replace(existing[uid], terminating=True)
            case DeleteJob():
                pass
    return a_job, replace(world, pods=tuple(existing.values()))


@given(jobs(), worlds())
@CASES
def test_second_plan_after_applying_the_first_is_empty(a_job: ElasticJob, world: Observed) -> None:
    found = plan(a_job, world, NOW)
    if DeleteJob() not in found.actions:
        assert plan(*applied(a_job, world, found), NOW).actions == ()


@given(jobs(), worlds(), st.data())
@CASES
def test_interrupted_plan_is_completed_by_the_next(
    a_job: ElasticJob, world: Observed, data: st.DataObject
) -> None:
    found = plan(a_job, world, NOW)
    done = data.draw(st.integers(0, len(found.actions)))
    partly = applied(a_job, world, replace(found, actions=found.actions[:done]))
    rest = applied(*partly, plan(*partly, NOW))
    assert plan(*rest, NOW).actions == ()
    whole = applied(a_job, world, found)
    assert names(count_pods(*rest, NOW).counted) == names(count_pods(*whole, NOW).counted)


def names(counted: tuple[Pod, ...]) -> list[str]:
    return [one.name for one in counted]


@given(jobs(), worlds())
@CASES
def test_no_index_is_used_twice(a_job: ElasticJob, world: Observed) -> None:
    _, after = applied(a_job, world, plan(a_job, world, NOW))
    indices = [one.index for one in after.pods]
    assert len(indices) == len(set(indices))


@given(jobs(suspended=False), worlds())
@CASES
def test_counted_pods_equal_wanted_size(a_job: ElasticJob, world: Observed) -> None:
    found = plan(a_job, world, NOW)
    after_job, after = applied(a_job, world, found)
    counted = len(count_pods(after_job, after, NOW).counted)
    wanted = wanted_size(a_job).nodes
    assert wanted in legal_sizes(a_job.spec)
    view = world.rendezvous
    if view.readable and view.outcome is None and not view.finishing:
        assert counted == wanted
    elif any(isinstance(action, CreatePod) for action in found.actions):
        assert counted <= wanted


@given(jobs(), worlds())
@CASES
def test_parameters_promise_only_possible_members(a_job: ElasticJob, world: Observed) -> None:
    found = plan(a_job, world, NOW)
    if found.bounds is None or found.expected is None:
        return
    spec = a_job.spec
    assert spec.min_nodes <= found.bounds.max_nodes <= spec.max_nodes
    assert 0 <= found.expected <= found.bounds.max_nodes
    present = {one.uid for one in world.pods}
    assert {mark.member for mark in found.bounds.marks} <= present


@given(jobs(), worlds())
@CASES
def test_deleted_pods_of_live_job_have_drain_requests(a_job: ElasticJob, world: Observed) -> None:
    found = plan(a_job, world, NOW)
    if found.bounds is None:
        return
    marked = {mark.member for mark in found.bounds.marks}
    failed = {one.uid for one in world.pods if one.phase is PodPhase.FAILED}
    deleted = [action.uid for action in found.actions if isinstance(action, DeletePod)]
    assert set(deleted) <= marked | failed
    assert len(deleted) == len(set(deleted))
    kinds = [type(action) for action in found.actions]
    if WriteParams in kinds and DeletePod in kinds:
        assert kinds.index(WriteParams) < kinds.index(DeletePod)


@given(jobs(), worlds(), st.integers(1, 1000))
@CASES
def test_status_becomes_stable(a_job: ElasticJob, world: Observed, seconds: int) -> None:
    later = NOW + timedelta(seconds=seconds)
    first = next_status(a_job, world, world.rendezvous, NOW)
    after = a_job.model_copy(update={"status": first})
    second = next_status(after, world, world.rendezvous, later)
    assert second == first


SIZES = st.one_of(st.integers(1, 40), st.integers(1, MAX_NODES), st.just(2**31 - 1))


@st.composite
def jobs_of_any_size(draw: st.DrawFn) -> ElasticJob:
    """Return a job of any size, also of sizes that only an earlier release accepted."""
    low = draw(SIZES)
    backend = draw(st.sampled_from(list(Backend)))
    made = draw(jobs())
    rendezvous = made.spec.rendezvous.model_copy(update={"backend": backend})
    changes = {
        "given_min_nodes": draw(st.none() | st.just(low)),
        "max_nodes": max(low, draw(SIZES)),
        "nodes": draw(st.none() | SIZES),
        "node_increment": draw(SIZES) if backend is Backend.ETCD else 1,
        "rendezvous": rendezvous,
    }
    return made.model_copy(update={"spec": made.spec.model_copy(update=changes)})


class Operations:
    """Counter of calls of Python functions and of steps of generators."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _profile(self, _frame: FrameType, event: str, _value: object) -> None:
        self.count += event == "call"


@given(jobs_of_any_size(), worlds())
@CASES
def test_one_plan_is_bounded_for_any_size(a_job: ElasticJob, world: Observed) -> None:
    with Operations() as operations:
        found = plan(a_job, world, NOW)
    on_pods = [one for one in found.actions if isinstance(one, CreatePod | DeletePod)]
    assert len(on_pods) <= MAX_POD_ACTIONS
    assert len(found.actions) <= MAX_POD_ACTIONS + 4
    assert operations.count < 20 * (MAX_POD_ACTIONS + 100)
    with Operations() as operations:
        next_status(a_job, world, world.rendezvous, NOW)
    assert operations.count < 50_000


@given(st.integers(1, 1500), st.integers(0, 1500), st.data())
@settings(max_examples=15, deadline=None)
def test_plans_in_a_row_reach_any_size_in_bounded_steps(
    wanted: int, present: int, data: st.DataObject
) -> None:
    a_job = job(minNodes=1, maxNodes=1500, nodes=wanted)
    some = tuple(
        Pod(index, f"job-{index}", f"uid-{index}", created_at=ago(10)) for index in range(present)
    )
    world, plans = Observed(pods=some), 0
    while True:
        found = plan(a_job, world, NOW)
        if data.draw(st.booleans()):
            done = data.draw(st.integers(1, max(len(found.actions), 1)))
            found = replace(found, actions=found.actions[:done])
        if not found.actions:
            break
        a_job, world = applied(a_job, world, found)
        plans += 1
        assert plans < 1500
    assert sum(not one.terminating for one in world.pods) == wanted


@given(jobs(suspended=False), worlds())
@CASES
def test_plan_is_unchanged_before_its_wake_time(a_job: ElasticJob, world: Observed) -> None:
    found = plan(a_job, world, NOW)
    after_job, after = applied(a_job, world, found)
    rest = plan(after_job, after, NOW)
    if rest.wake_at is None:
        assert plan(after_job, after, NOW + timedelta(days=9)).actions == ()
    else:
        moment = rest.wake_at - timedelta(microseconds=1)
        assert plan(after_job, after, moment).actions == ()
