"""Lost steps in the record of a round."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Member, MemberState
from elasticjob_rendezvous.protocol.records.timings import History, after_start, slowest

BEGUN = History(2, Cause(CauseKind.LOSS), 2)


def member(name: str, **fields: int) -> Member:
    base = Member(name, "s", name, "host", 1, state=MemberState.RUNNING, round=2, start_ms=30)
    return replace(base, **fields)  # type: ignore[arg-type]


def test_lost_steps_are_the_most_that_a_member_reports_at_the_first_step() -> None:
    newcomer = member("b", first_step_ms=70)
    waiting = after_start(BEGUN, [member("a", lost_steps=2, lost_ms=300), newcomer])
    assert (waiting.start_ms, waiting.first_step_ms, waiting.lost_steps) == (30, None, None)
    survivor = member("a", first_step_ms=80, lost_steps=2, lost_ms=300)
    known = after_start(waiting, [survivor, newcomer])
    assert (known.first_step_ms, known.lost_steps, known.lost_ms) == (80, 2, 300)
    again = after_start(known, [replace(survivor, lost_steps=9), newcomer])
    assert again.lost_steps == 2


def test_lost_steps_are_unknown_without_a_report() -> None:
    known = after_start(BEGUN, [member("a", first_step_ms=80)])
    assert (known.first_step_ms, known.lost_steps, known.lost_ms) == (80, None, None)


def test_reports_of_several_agents_are_merged_to_the_most_lost_steps() -> None:
    one = replace(BEGUN, start_ms=1, first_step_ms=2, lost_steps=1, lost_ms=90)
    other = replace(BEGUN, start_ms=1, first_step_ms=2)
    assert slowest(one, other).lost_steps == slowest(other, one).lost_steps == 1
    assert slowest(other, other).lost_ms is None
