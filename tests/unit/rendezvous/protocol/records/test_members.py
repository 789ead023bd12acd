"""Table of transitions, and small properties of the records."""

from __future__ import annotations

import json
from itertools import product

import pytest

from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.members import (
    ABORTED,
    NEXT_STATES,
    URGENT,
    Cause,
    CauseKind,
    MemberState,
    Round,
    RoundState,
    cause_with_reasons,
    reasons_of,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
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


def test_round_life_cycle_has_only_legal_transitions() -> None:
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
def test_wanted_size_is_expected_size_up_to_the_maximum(
    maximum: int, expected: int | None, wanted: int
) -> None:
    assert RendezvousParams(1, maximum, expected=expected).wanted == wanted


def test_workers_are_killed_only_for_causes_that_block_collectives() -> None:
    patient = {CauseKind.START, CauseKind.JOIN, CauseKind.LEAVE, CauseKind.SCALE_DOWN}
    assert URGENT & patient == set()
    assert {CauseKind.LOSS, CauseKind.FAILURE} <= URGENT


# -- reasons of a cause ---------------------------------------------------------------------

OLD_ABORTED = "its peers' collectives broke"
"""Text that stands for `ABORTED` in a detail."""


@pytest.mark.parametrize(
    ("kind", "detail", "reasons"),
    [
        (CauseKind.LEAVE, "SIGTERM", ("SIGTERM",)),
        (CauseKind.LEAVE, f"SIGTERM; Terminating; {OLD_ABORTED}",
         ("SIGTERM", "Terminating", ABORTED)),
        (CauseKind.PREEMPTION, f"EvictionByEvictionAPI; {OLD_ABORTED}",
         ("EvictionByEvictionAPI", ABORTED)),
        (CauseKind.LOSS, OLD_ABORTED, (ABORTED,)),
    ],
)  # fmt: skip
def test_old_and_new_record_of_a_cause_have_the_same_reasons_and_detail(
    kind: CauseKind, detail: str, reasons: tuple[str, ...]
) -> None:
    stored = {"kind": kind.value, "members": ["b"], "detail": detail}
    document = json.dumps({"number": 2, "state": "joinable", "cause": stored})
    old = decode(Round, "key", document.encode()).cause
    new = cause_with_reasons(kind, ("b",), reversed(reasons))
    assert reasons_of(old) == reasons_of(new) == reasons
    assert (old.kind, old.members, old.detail) == (new.kind, new.members, new.detail)


def test_new_record_of_a_cause_keeps_the_fields_of_the_previous_release() -> None:
    cause = cause_with_reasons(CauseKind.LEAVE, ("b",), ("SIGTERM", ABORTED), urgent=True)
    stored = json.loads(encode(Round(2, RoundState.JOINABLE, cause)))["cause"]
    assert stored.pop("reasons") == ["SIGTERM", ABORTED]
    assert stored == {
        "kind": "leave",
        "members": ["b"],
        "detail": f"SIGTERM; {OLD_ABORTED}",
        "urgent": True,
    }
    again = decode(Round, "key", encode(Round(2, RoundState.JOINABLE, cause)))
    assert again.cause == cause


@pytest.mark.parametrize(
    "cause",
    [
        Cause(CauseKind.FAILURE, ("b",), f"rank 0 on b failed: SIGTERM; {OLD_ABORTED}"),
        Cause(CauseKind.LOSS, ("b",), "a node of the round is gone; SIGTERM"),
        Cause(CauseKind.LEAVE, ("b",)),
    ],
)
def test_text_of_a_cause_is_no_reason(cause: Cause) -> None:
    assert reasons_of(cause) == ()


def test_empty_and_repeated_reasons_are_left_out() -> None:
    cause = cause_with_reasons(CauseKind.LEAVE, ("b",), ["z", "", "a", "z"])
    assert (cause.reasons, cause.detail) == (("a", "z"), "a; z")
