"""The end of a frozen round: sealed with those that confirmed, or opened anew."""

from __future__ import annotations

from elasticjob_rendezvous.protocol.kv import Compare, Target
from elasticjob_rendezvous.protocol.records.members import CauseKind, RoundState
from tests.unit.rendezvous.builders import KEYS, Job


def unconfirmed() -> Job:
    """b and c did not confirm in time, and a alone makes no legal size."""
    job = Job("a", "b", "c", min_nodes=3, max_nodes=3).round(1)
    frozen = job.act()
    stored = job.view().round
    assert stored is not None
    assert frozen.state is RoundState.FROZEN
    return job.change("a", confirmed=stored.modified).idle().later(5)


def test_reopened_round_names_silent_members() -> None:
    cause = unconfirmed().act().cause
    assert (cause.kind, cause.members) == (CauseKind.UNCONFIRMED, ("b", "c"))
    assert cause.detail.startswith("too few")


def test_log_of_reopened_round_names_its_number() -> None:
    act = unconfirmed().decide()
    assert act is not None
    assert "2" in act.note


def test_seal_requires_that_no_roster_of_its_number_exists() -> None:
    job = Job("a", max_nodes=1).round(1)
    job.act()
    stored = job.view().round
    assert stored is not None
    act = job.change("a", confirmed=stored.modified).decide()
    assert act is not None
    assert Compare(KEYS.roster(1), Target.CREATE, 0) in act.txn.compares
