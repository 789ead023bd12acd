"""First round after a loss of etcd's data."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import seal
from tests.unit.rendezvous.builders import Job, a_member


def lost() -> Job:
    """Nothing stands in etcd; b remembers that there was a round 7."""
    return Job("a", "b", keep_alive_seconds=5).change("b", known=7).idle().later(5)


@pytest.mark.parametrize(("state", "others"), [("joinable", 3), ("frozen", 3), ("final", 4)])
def test_final_round_older_than_a_known_one_counts_as_interruption(state: str, others: int) -> None:
    job = Job("a", "b").round(1, RoundState(state), counts=Counts(losses=2, others=3))
    assert job.change("b", known=7).act().counts == Counts(losses=2, others=others)


def due(job: Job) -> RoundUpdate:
    act = job.decide()
    assert act is not None
    return act


def test_round_after_data_loss_has_its_cause() -> None:
    cause = lost().act().cause
    assert (cause.kind, cause.members) == (CauseKind.DATA_LOST, ())
    assert cause.detail.startswith("etcd")


def test_log_of_round_after_data_loss_names_its_number() -> None:
    said = due(lost()).note
    assert "8" in said
    assert "7" not in said


def test_log_of_restored_round_names_its_number() -> None:
    job = Job("a", "b").change("a", known=7).change("b", known=7)
    final = Round(7, RoundState.FINAL, Cause(CauseKind.START), previous=7)
    job.coordinator.last = (final, seal(7, [a_member("a"), a_member("b")], 0))
    assert "7" in due(job.idle().later(5)).note
