"""Lost steps of a round: from its first step to the last one of the round before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Member, MemberState
from elasticjob_rendezvous.protocol.records.timings import History, after_start

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
