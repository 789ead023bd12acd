"""Lost steps of a round: the number that workers report, else the minimum by the last steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Member, MemberState
from elasticjob_rendezvous.protocol.records.timings import History, after_start, slowest

HISTORY = History(3, Cause(CauseKind.LOSS), 2)


def member(step: int = 400, ended: tuple[int, int] = (2, 417), **more: Any) -> Member:
    """Return a member that runs round 3 and has made its first step."""
    found = Member("a", "s", "job-0", "10.0.0.1", 1, state=MemberState.RUNNING, round=3)
    found = replace(found, start_ms=5, first_step_ms=7, step=step)
    return replace(found, ended_round=ended[0], ended_step=ended[1], **more)


@pytest.mark.parametrize(
    ("members", "lost"),
    [
        ([member()], 18),
        ([member(), member(step=402, ended=(2, 419))], 20),  # the last to stop counts
        ([member(step=418)], 0),
        ([member(step=500)], 0),  # it continues after a gap, for example in another unit
        ([member(), member(ended=(1, 9000))], 18),  # from a round before the last one
        ([member(), member(ended=(0, -1))], 18),  # a new node
        ([member(ended=(0, -1))], None),
        ([member(step=-1)], None),
    ],
)
def test_steps_between_the_first_and_the_last_before_are_lost(
    members: list[Member], lost: int | None
) -> None:
    assert after_start(HISTORY, members).lost_steps == lost


def test_lost_steps_are_unknown_before_a_step_of_all_members_that_reported_steps() -> None:
    assert after_start(HISTORY, [member(), member(step=-1)]).lost_steps is None
    assert after_start(HISTORY, [member(), None]).lost_steps is None
    silent = member(step=-1, ended=(0, -1))
    assert after_start(HISTORY, [member(), silent]).lost_steps == 18


def test_lost_steps_are_known_without_the_time_of_the_first_step_and_kept() -> None:
    found = after_start(HISTORY, [member(first_step_ms=0)])
    assert (found.first_step_ms, found.lost_steps) == (None, 18)
    assert after_start(found, [member(step=410)]).lost_steps == 18


def test_large_numbers_of_steps_are_kept_in_records() -> None:
    tokens = 3 << 40
    found = member(ended=(2, tokens))
    assert decode(Member, "key", encode(found)).ended_step == tokens
    history = after_start(HISTORY, [found])
    assert decode(History, "key", encode(history)).lost_steps == tokens + 1 - 400


BEGUN = History(2, Cause(CauseKind.LOSS), 2)


def reporter(name: str, reason: str = "", **fields: int) -> Member:
    base = Member(name, "s", name, "host", 1, state=MemberState.RUNNING, round=2, start_ms=30)
    return replace(base, lost_reason=reason, **fields)  # type: ignore[arg-type]


def test_lost_steps_are_the_most_that_a_member_reports_at_the_first_step() -> None:
    newcomer = reporter("b", first_step_ms=70)
    waiting = after_start(BEGUN, [reporter("a", lost_steps=2, lost_ms=300), newcomer])
    assert (waiting.start_ms, waiting.first_step_ms, waiting.lost_steps) == (30, None, None)
    survivor = reporter("a", first_step_ms=80, lost_steps=2, lost_ms=300)
    known = after_start(waiting, [survivor, newcomer])
    assert (known.first_step_ms, known.lost_steps, known.lost_ms) == (80, 2, 300)
    again = after_start(known, [replace(survivor, lost_steps=9), newcomer])
    assert again.lost_steps == 2


def test_reason_for_lost_steps_is_that_of_the_workers() -> None:
    begun = [reporter(name, "Cost", first_step_ms=80, lost_steps=2) for name in "ab"]
    known = after_start(BEGUN, begun)
    assert known.lost_reason == "Cost"
    assert decode(History, "key", encode(known)) == known
    assert decode(Member, "key", encode(begun[0])) == begun[0]
    none = after_start(BEGUN, [reporter("a", "Cost", first_step_ms=80, lost_steps=0)])
    assert (none.lost_steps, none.lost_reason) == (0, "")
    assert slowest(none, known).lost_reason == slowest(known, none).lost_reason == "Cost"


def test_lost_steps_are_unknown_without_a_report() -> None:
    known = after_start(BEGUN, [reporter("a", first_step_ms=80)])
    assert (known.first_step_ms, known.lost_steps, known.lost_ms) == (80, None, None)


def test_reports_of_several_agents_are_merged_to_the_most_lost_steps() -> None:
    one = replace(BEGUN, start_ms=1, first_step_ms=2, lost_steps=1, lost_ms=90)
    other = replace(BEGUN, start_ms=1, first_step_ms=2)
    assert slowest(one, other).lost_steps == slowest(other, one).lost_steps == 1
    assert slowest(other, other).lost_ms is None


def test_reported_number_of_lost_steps_replaces_the_minimum() -> None:
    early = after_start(HISTORY, [member(first_step_ms=0)])
    assert (early.lost_steps, early.lost_ms) == (18, None)
    known = after_start(early, [member(lost_steps=20, lost_ms=900)])
    assert (known.lost_steps, known.lost_ms) == (20, 900)
