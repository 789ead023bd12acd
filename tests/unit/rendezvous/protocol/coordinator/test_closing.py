"""The write that ends a job, and what it says of the end."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.coordinator.closing import close, outcome_of_charge
from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate, Snapshot
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind, RoundState, Streak
from tests.unit.rendezvous.builders import Job, identity


def snapshot(job: Job) -> Snapshot:
    view = job.view()
    assert view.bounds is not None
    return Snapshot(view, job.stored("a"), view.bounds.record, job.clock)


def closed(job: Job, outcome: Outcome) -> RoundUpdate:
    act = close(snapshot(job), outcome)
    assert job.commit(act.txn).succeeded
    return act


def test_closed_round_has_no_members() -> None:
    job = Job("a", "b").round(3, RoundState.FROZEN, ids=(identity("a"), identity("b")))
    closed(job, Outcome(OutcomeKind.STOPPED))
    current = job.current()
    assert (current.number, current.state, current.ids) == (3, RoundState.CLOSED, ())


@pytest.mark.parametrize("detail", ["", "by hand"])
def test_log_of_the_outcome_names_its_kind_and_detail(detail: str) -> None:
    said = closed(Job("a").round(1), Outcome(OutcomeKind.STOPPED, detail)).note
    assert said.endswith(f"stopped {detail}".rstrip())


@pytest.mark.parametrize(
    ("most", "said"),
    [(0, "(no restarts allowed)"), (2, "(3 failures charged, maxRestarts is 2)")],
)
def test_spent_budget_names_the_charged_failures(most: int, said: str) -> None:
    job = Job("a", max_restarts=most).sealed("a").failure("a")
    outcome = outcome_of_charge(snapshot(job), tuple(range(most + 1)), Streak(), 1)
    assert outcome is not None
    assert said in outcome.detail
    assert outcome.culprit == identity("a")


def test_outcome_without_failure_records_names_no_member() -> None:
    """They were cleared away, or never arrived."""
    job = Job("a", max_restarts=0).sealed("a")
    outcome = outcome_of_charge(snapshot(job), (1,), Streak(), 1)
    assert outcome is not None
    assert (outcome.kind, outcome.culprit) == (OutcomeKind.FAILED, "")
