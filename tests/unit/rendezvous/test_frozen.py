"""The end of a frozen round: sealed with those that confirmed, or opened anew."""

from __future__ import annotations

from elasticjob_rendezvous.core.kv import Compare, Target
from elasticjob_rendezvous.core.records import CauseKind, RoundState
from tests.unit.rendezvous.builders import KEYS, Job


def unconfirmed() -> Job:
    """b and c did not confirm in time, and a alone makes no legal size."""
    job = Job("a", "b", "c", min_nodes=3, max_nodes=3).round(1)
    frozen = job.act()
    stored = job.view().round
    assert stored is not None
    assert frozen.state is RoundState.FROZEN
    return job.change("a", confirmed=stored.modified).idle().later(5)


def test_a_round_opened_anew_says_who_was_silent() -> None:
    cause = unconfirmed().act().cause
    assert (cause.kind, cause.members) == (CauseKind.UNCONFIRMED, ("b", "c"))
    assert cause.detail.startswith("too few")


def test_the_note_of_a_round_opened_anew_names_its_number() -> None:
    act = unconfirmed().look()
    assert act is not None
    assert "2" in act.note


def test_a_roster_is_sealed_where_there_is_none_of_its_number() -> None:
    job = Job("a", max_nodes=1).round(1)
    job.act()
    stored = job.view().round
    assert stored is not None
    act = job.change("a", confirmed=stored.modified).look()
    assert act is not None
    assert Compare(KEYS.roster(1), Target.CREATE, 0) in act.txn.compares
