"""Table of transitions, and small properties of the records."""

from __future__ import annotations

from itertools import product

import pytest

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.records import (
    NEXT_STATES,
    URGENT,
    CauseKind,
    MemberState,
    RoundState,
)
from tests.unit.rendezvous.builders import Job

JOINABLE, FROZEN, FINAL, CLOSED = RoundState
ALLOWED = {
    (JOINABLE, FROZEN),
    (JOINABLE, CLOSED),
    (FROZEN, FINAL),
    (FROZEN, JOINABLE),
    (FROZEN, CLOSED),
    (FINAL, JOINABLE),
    (FINAL, CLOSED),
}


@pytest.mark.parametrize(("before", "after"), list(product(RoundState, RoundState)))
def test_every_pair_of_states_is_allowed_or_refused(before: RoundState, after: RoundState) -> None:
    assert (after in NEXT_STATES[before]) is ((before, after) in ALLOWED)


def test_the_whole_life_of_a_round_takes_only_legal_steps() -> None:
    job = Job("a", min_nodes=2, max_nodes=2)
    seen = [job.act().state]
    seen.append(job.member("b").act().state)
    revision = job.view().round.modified  # type: ignore[union-attr]
    job.change("a", confirmed=revision).change("b", confirmed=revision)
    seen.append(job.act().state)
    job.gone("b", proven=True)
    seen.append(job.act().state)
    job.change("a", state=MemberState.WAITING, round=1).idle().later(700)
    seen.append(job.act().state)
    assert seen == [JOINABLE, FROZEN, FINAL, JOINABLE, CLOSED]


@pytest.mark.parametrize(
    ("maximum", "expected", "wanted"), [(4, None, 4), (4, 3, 3), (4, 9, 4), (4, 0, 0)]
)
def test_wanted_is_what_can_come_up_to_the_maximum(
    maximum: int, expected: int | None, wanted: int
) -> None:
    assert Bounds(1, maximum, expected=expected).wanted == wanted


def test_workers_are_killed_only_where_their_collectives_cannot_end() -> None:
    patient = {CauseKind.START, CauseKind.JOIN, CauseKind.LEAVE, CauseKind.SCALE_DOWN}
    assert URGENT & patient == set()
    assert {CauseKind.LOSS, CauseKind.FAILURE} <= URGENT
