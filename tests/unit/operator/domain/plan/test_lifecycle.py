"""Phases of a job and their complete set of transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Pod,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.lifecycle import FINISHED, NEXT_PHASES, next_phase
from elasticjob_operator.model import Phase, RendezvousState
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from tests.unit.operator.builders import (
    NOW,
    ago,
    closed,
    final_round,
    history,
    job,
    pod,
    running,
)

FORMING = RendezvousView(round=1, waiting=1)
AGAIN = RendezvousView(round=3, rounds=(history(2, "start", 4),))
SUSPENDED = replace(closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED), rounds=AGAIN.rounds)
VIEWS = {
    "nobody": RendezvousView(),
    "forming": FORMING,
    "frozen": RendezvousView(state=RendezvousState.FROZEN, round=1),
    "again": AGAIN,
    "final": final_round(4),
    "suspended": SUSPENDED,
    "succeeded": closed(OutcomeKind.SUCCEEDED),
    "failed": closed(OutcomeKind.FAILED),
    "timed out": closed(OutcomeKind.TIMED_OUT),
    "stopped": closed(OutcomeKind.STOPPED),
    "unreadable": UNREADABLE,
}
PHASES = [None, *Phase]
RUNNING = running(2)
P = Phase

TABLE: list[tuple[Phase | None, str, bool, Phase]] = [
    # previous phase, state of the rendezvous, suspended, next phase
    (None, "nobody", False, P.PENDING),
    (None, "nobody", True, P.SUSPENDED),
    (P.PENDING, "forming", False, P.PENDING),
    (P.PENDING, "frozen", False, P.PENDING),
    (P.PENDING, "final", False, P.RUNNING),
    (P.PENDING, "again", False, P.RESTARTING),
    (P.PENDING, "unreadable", False, P.PENDING),
    (P.RUNNING, "final", False, P.RUNNING),
    (P.RUNNING, "forming", False, P.RESTARTING),
    (P.RUNNING, "frozen", False, P.RESTARTING),
    (P.RUNNING, "unreadable", False, P.RUNNING),
    (P.RUNNING, "final", True, P.SUSPENDED),
    (P.RUNNING, "succeeded", True, P.SUCCEEDED),
    (P.RUNNING, "suspended", False, P.RESTARTING),
    (P.RESTARTING, "final", False, P.RUNNING),
    (P.RESTARTING, "failed", False, P.FAILED),
    (P.RESTARTING, "timed out", False, P.FAILED),
    (P.RESTARTING, "unreadable", False, P.RESTARTING),
    (P.SUSPENDED, "suspended", True, P.SUSPENDED),
    (P.SUSPENDED, "suspended", False, P.PENDING),
    (P.SUSPENDED, "unreadable", False, P.PENDING),
    (P.SUSPENDED, "stopped", True, P.FAILED),
    (P.SUCCEEDED, "nobody", False, P.SUCCEEDED),
    (P.FAILED, "final", True, P.FAILED),
]


@pytest.mark.parametrize(("before", "view", "suspended", "phase"), TABLE)
def test_phase_transitions_from_spec_and_rendezvous(
    before: Phase | None, view: str, suspended: bool, phase: Phase
) -> None:
    a_job = job(Status(phase=before), runPolicy={"suspend": suspended})
    assert next_phase(a_job, VIEWS[view], NOW) is phase


STUCK = replace(pod(0).terminating().get(), stuck="process 7 waits")
SUSPENSIONS: list[tuple[Phase, bool, str, Sequence[Pod], Phase]] = [
    # previous phase, suspended, backend, pods, next phase
    (P.RUNNING, True, "Etcd", RUNNING, P.SUSPENDING),
    (P.RUNNING, True, "C10d", RUNNING, P.SUSPENDING),
    (P.RUNNING, True, "Etcd", (), P.SUSPENDED),
    (P.SUSPENDING, True, "Etcd", (pod(0).terminating().get(),), P.SUSPENDING),
    (P.SUSPENDING, True, "Etcd", (pod(0).over().terminating().get(),), P.SUSPENDING),
    (P.SUSPENDING, True, "Etcd", (pod(0).on(NodeState.NOT_READY).get(),), P.SUSPENDING),
    (P.SUSPENDING, True, "C10d", (), P.SUSPENDED),
    (P.SUSPENDING, False, "Etcd", (pod(0).terminating().get(),), P.PENDING),
    (P.SUSPENDING, False, "C10d", (pod(0).terminating().get(),), P.SUSPENDING),
    (P.SUSPENDING, False, "C10d", (pod(0).over().terminating().get(),), P.SUSPENDED),
    (P.SUSPENDING, False, "C10d", (pod(0).on(NodeState.NOT_READY).get(),), P.SUSPENDED),
    (P.SUSPENDING, False, "C10d", (STUCK,), P.SUSPENDED),
    (P.SUSPENDED, False, "C10d", (), P.PENDING),
    (P.SUSPENDED, True, "Etcd", RUNNING, P.SUSPENDING),
]


@pytest.mark.parametrize(("before", "suspended", "backend", "pods", "phase"), SUSPENSIONS)
def test_suspension_is_complete_once_no_pod_is_left(
    before: Phase, suspended: bool, backend: str, pods: Sequence[Pod], phase: Phase
) -> None:
    policy, rendezvous = {"suspend": suspended}, {"backend": backend}
    a_job = job(Status(phase=before), runPolicy=policy, rendezvous=rendezvous)
    assert next_phase(a_job, SUSPENDED, NOW, pods) is phase


@pytest.mark.parametrize(("before", "view"), list(product(PHASES, VIEWS)))
def test_every_phase_change_is_in_the_table(before: Phase | None, view: str) -> None:
    either = (False, True)
    for suspended, late, deleted, pods in product(either, either, either, ((), RUNNING)):
        status = Status(phase=before, start_time=ago(200 if late else 1))
        policy = {"suspend": suspended, "activeDeadlineSeconds": 100}
        after = next_phase(job(status, deleted, runPolicy=policy), VIEWS[view], NOW, pods)
        current = before or Phase.PENDING
        assert after is current or after in NEXT_PHASES[current]
        again = job(status.model_copy(update={"phase": after}), deleted, runPolicy=policy)
        settled = next_phase(again, VIEWS[view], NOW, pods)
        assert settled is after, "a phase must not change while nothing else does"


def test_every_legal_phase_change_can_happen() -> None:
    seen = set()
    either = (False, True)
    situations = product(Phase, VIEWS.values(), either, either, ((), RUNNING))
    for before, view, suspended, deleted, pods in situations:
        a_job = job(Status(phase=before), deleted, runPolicy={"suspend": suspended})
        seen.add((before, next_phase(a_job, view, NOW, pods)))
    legal = {(before, after) for before, targets in NEXT_PHASES.items() for after in targets}
    assert {pair for pair in seen if pair[0] is not pair[1]} == legal


def test_finished_phases_have_no_successor() -> None:
    assert all(not NEXT_PHASES[phase] for phase in FINISHED)
    assert set(NEXT_PHASES) == set(Phase)


@pytest.mark.parametrize(
    ("seconds", "suspended", "phase"),
    [(99, False, P.RUNNING), (100, False, P.FAILED), (100, True, P.SUSPENDED)],
)
def test_deadline_counts_active_time_only(seconds: float, suspended: bool, phase: Phase) -> None:
    policy = {"suspend": suspended, "activeDeadlineSeconds": 100}
    a_job = job(Status(phase=P.RUNNING, start_time=ago(seconds)), runPolicy=policy)
    assert next_phase(a_job, final_round(4), NOW) is phase
