"""Rendezvous of jobs on torch's backends, from the reports of their agents and pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.observed.agent_records import agent_view, undecided_until
from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.domain.observed.state import NodeState, Pod, PodPhase, RendezvousView
from elasticjob_operator.domain.plan.actions import CreatePod
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.status.events import job_events
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob, Phase, RendezvousState
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.operator.builders import NOW, ago, final_round, job, later, observed, pod, running

C10D = {"backend": "C10d"}


def c10d(status: Status | None = None, **spec: Any) -> ElasticJob:
    return job(status, rendezvous=C10D, **spec)


def view(*pods: Pod, found: Records | None = None, status: Status | None = None) -> RendezvousView:
    return agent_view(c10d(status), pods, found, NOW)


def records(number: int, state: RoundState = RoundState.FINAL, **facts: Any) -> Records:
    cause = Cause(CauseKind.START)
    member = Member("uid-0-0", "s", "job-0", "10.0.0.1", 0, state=MemberState.RUNNING, round=number)
    return Records(
        "/elasticjob/default/job-uid/1/",
        round=Round(number, state, cause, nodes=1, **facts),
        members=(member,),
        histories={number: History(number, cause, 1)},
    )


def gave_up(index: int, seconds: float = 1, code: int | None = 1, **changes: Any) -> Pod:
    ended = pod(index).failed(300).get()
    return replace(
        ended, launcher_since=None, exit_code=code, ended_at=ago(seconds), over=True, **changes
    )


def succeeded(index: int, seconds: float = 1) -> Pod:
    done = pod(index).succeeded().get()
    return replace(done, launcher_since=None, exit_code=0, ended_at=ago(seconds), over=True)


def test_agent_reports_become_the_rendezvous_state() -> None:
    found = view(*running(2), found=records(3))
    assert (found.state, found.round) == (RendezvousState.FINAL, 3)
    assert [member.name for member in found.members] == ["job-0"]


def test_silent_agents_make_the_rendezvous_unreadable() -> None:
    assert not view(*running(2)).readable
    assert view(pod(0).pending().get()).readable, "nobody is there to answer"
    assert view().state is RendezvousState.JOINABLE


@pytest.mark.parametrize(
    ("found", "rounds"),
    [
        (records(4), [2, 3, 4]),
        (replace(records(4), histories={}), [2, 3, 4]),
        (records(1), [1]),
        (None, [2, 3, 4]),
    ],
    ids=["known", "what the round cost went with an agent", "another gang", "nobody answers"],
)
def test_rounds_known_only_to_earlier_agents_are_kept(
    found: Records | None, rounds: list[int]
) -> None:
    before = next_status(c10d(), observed(*running(1)), final_round(2, 4), NOW)
    before = before.model_copy(update={"rounds": _rounds(2, 3, 4)})
    seen = view(*running(1), found=found, status=before)
    after = next_status(c10d(before), observed(*running(1)), seen, NOW)
    assert [one.round for one in after.rounds] == rounds


def test_resumed_job_shows_nothing_of_the_previous_gang() -> None:
    """Rounds of the resumed job are counted from one, and each of them is to be reported."""
    trained = next_status(c10d(), observed(*running(1)), final_round(1), NOW)
    trained = trained.model_copy(update={"rounds": _rounds(1, 2), "restarts": 1})
    stopped = view_of(c10d(trained, runPolicy={"suspend": True}))
    paused = next_status(c10d(trained, runPolicy={"suspend": True}), observed(), stopped, NOW)
    assert paused.phase is Phase.SUSPENDED
    assert [one.round for one in paused.rounds] == [1, 2], "it is still to be seen"
    resumed = view_of(c10d(paused))
    fresh = next_status(c10d(paused), observed(), resumed, NOW)
    assert (fresh.phase, fresh.restarts, fresh.rounds) == (Phase.PENDING, 0, [])
    begun = agent_view(c10d(fresh), running(1), records(1), NOW)
    after = next_status(c10d(fresh), observed(*running(1)), begun, NOW)
    told = [said.message for said in job_events(fresh, after, ())]
    assert any(said.startswith("round 1 is final") for said in told)


def test_finished_job_keeps_its_members() -> None:
    trained = next_status(c10d(), observed(*running(2)), final_round(2), NOW)
    ended = trained.model_copy(update={"phase": Phase.SUCCEEDED, "completion_time": NOW})
    after = next_status(c10d(ended), observed(), view_of(c10d(ended)), NOW)
    assert [(one.pod, one.rank) for one in after.members] == [("job-0", 0), ("job-1", 1)]
    assert (after.members, after.rendezvous) == (ended.members, ended.rendezvous)


def view_of(a_job: ElasticJob) -> RendezvousView:
    return agent_view(a_job, (), None, NOW)


def _rounds(*numbers: int) -> Any:
    histories = {n: History(n, Cause(CauseKind.START), 1) for n in numbers}
    base = replace(records(numbers[-1]), histories=histories)
    shown = agent_view(c10d(), running(1), base, NOW)
    return next_status(c10d(), observed(*running(1)), shown, NOW).rounds


def test_outcome_in_agent_report_ends_the_job() -> None:
    closed = records(3, RoundState.CLOSED, outcome=Outcome(OutcomeKind.FAILED, "budget"))
    found = view(*running(1), found=closed)
    assert found.outcome is not None
    assert (found.outcome.kind, found.outcome.detail) == (OutcomeKind.FAILED, "budget")


KILLED = 137


@pytest.mark.parametrize(
    ("pods", "outcome"),
    [
        ((succeeded(0), succeeded(1)), OutcomeKind.SUCCEEDED),
        ((succeeded(0), pod(1).get()), None),
        ((succeeded(0), replace(pod(1).get(), terminating=True)), None),
        ((succeeded(0), pod(1).on(NodeState.NOT_READY).get()), OutcomeKind.SUCCEEDED),
        ((gave_up(0, 50), succeeded(1), succeeded(2)), OutcomeKind.SUCCEEDED),
        ((succeeded(0, 9), gave_up(1, 5)), OutcomeKind.FAILED),
        ((gave_up(0), gave_up(1, code=3)), OutcomeKind.FAILED),
        ((gave_up(0), pod(1).get()), None),
        ((gave_up(0, code=KILLED), gave_up(1, code=None)), None),
        ((gave_up(0, code=KILLED), gave_up(1)), OutcomeKind.FAILED),
        ((gave_up(0, 60), pod(1).pending(30).get()), None),
        ((gave_up(0, 10), pod(1).pending(30).get()), OutcomeKind.FAILED),
        ((gave_up(0, terminating=True),), None),
        ((pod(0).pending().get(),), None),
        (tuple(pod(n).stillborn(n, "no python3").get() for n in range(5)), OutcomeKind.STOPPED),
    ],
    ids=[
        "all well", "one trains on", "one is on its way out", "one is cut off",
        "a failure before was survived", "a failure after was not", "all gave up", "one trains",
        "killed, not given up", "the last one gave up", "replaced since", "given up since",
        "told to go", "not started", "cannot start",
    ],
)  # fmt: skip
def test_pod_exit_states_give_the_job_outcome(
    pods: tuple[Pod, ...], outcome: OutcomeKind | None
) -> None:
    found = view(*pods).outcome
    assert (found.kind if found else None) is outcome


def test_finished_job_keeps_its_status() -> None:
    status = next_status(c10d(), observed(*running(2)), final_round(2, 5), NOW)
    status = status.model_copy(update={"phase": Phase.SUCCEEDED})
    found = view(succeeded(0), status=status)
    assert (found.state, found.round) == (RendezvousState.CLOSED, 5)
    assert next_status(c10d(status), observed(succeeded(0)), found, NOW).members == status.members


def test_pod_that_gave_up_is_not_replaced_before_other_agents_report() -> None:
    given_up = gave_up(1, 1)
    seen = observed(pod(0).get(), given_up, view=final_round(2))
    planned = plan(c10d(minNodes=1, maxNodes=2), seen, NOW)
    assert planned.actions == ()
    assert planned.wake_at == later(14) == undecided_until(c10d(), (given_up,), NOW)
    killed = observed(pod(0).get(), gave_up(1, code=KILLED), view=final_round(2))
    [created] = plan(c10d(minNodes=1, maxNodes=2), killed, NOW).actions
    assert isinstance(created, CreatePod)
    assert created.name == "job-2"


def test_success_is_derived_from_pods_without_agents() -> None:
    found = view(succeeded(0), pod(1).get(), found=None)
    assert not found.readable
    found = view(succeeded(1), pod(0).get(), found=records(1))
    assert found.finishing
    assert PodPhase.SUCCEEDED is succeeded(0).phase
