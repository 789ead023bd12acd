"""Counters of ended rounds: each counts once, as a charged failure or by its other cause."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator.cause_counts import (
    counted,
    leave_cause,
    with_late_preemption,
    with_later_leaves,
)
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    ABORTED,
    Cause,
    CauseKind,
    Counts,
    MemberState,
    Round,
    RoundState,
    cause_with_reasons,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, seal
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.rendezvous.builders import KEYS, Job, a_member, identity

ABORT, PORT = FailureClass.PEER_ABORT, FailureClass.MASTER_PORT
EVICTED = (DrainRequest(identity("b"), "EvictionByEvictionAPI", preempted=True),)
BEFORE = Counts(1, 1, 1, 1, 1)
OLD_ABORTED = "its peers' collectives broke"
"""Text by which the previous release knows `ABORTED`."""


def gang(**bounds: Any) -> Job:
    """Return a job in which three members run round 1; a fourth without workers coordinates."""
    job = Job("z", "a", "b", "c", **{"max_nodes": 3, "max_restarts": 3, **bounds})
    return job.sealed("a", "b", "c", counts=BEFORE).idle().later(60)


@pytest.mark.parametrize("kind", list(CauseKind))
def test_cause_increments_at_most_one_count(kind: CauseKind) -> None:
    after = counted(Counts(), kind)
    moved = after.losses + after.leaves + after.preemptions + after.joins + after.others
    elsewhere = {CauseKind.START, CauseKind.UNCONFIRMED, CauseKind.FAILURE}
    assert moved == (0 if kind in elsewhere else 1)


@pytest.mark.parametrize(
    ("trouble", "counts"),
    [
        ("loss", Counts(2, 1, 1, 1, 1)),
        ("leave", Counts(1, 2, 1, 1, 1)),
        ("preemption", Counts(1, 1, 2, 1, 1)),
        ("join", Counts(1, 1, 1, 2, 1)),
        ("scale down", Counts(1, 1, 1, 1, 2)),
        ("port", Counts(1, 1, 1, 1, 2)),
        ("failure", BEFORE),
        ("abort", BEFORE),
    ],
)
def test_round_end_is_counted_by_cause(trouble: str, counts: Counts) -> None:
    job = gang()
    match trouble:
        case "loss":
            job.gone("b")
        case "leave" | "preemption":
            if trouble == "preemption":
                job.bounds(max_nodes=3, marks=EVICTED)
            job.change("b", state=MemberState.LEAVING).idle().later(1)
        case "join":
            job.bounds(max_nodes=8).idle().later(3)
        case "scale down":
            job.bounds(max_nodes=2).idle().later(10)
        case "port":
            job.failure("a", kind=PORT)
        case "failure":
            job.failure("a")
        case "abort":
            job.failure("a", kind=ABORT)
    current = job.act()
    assert (current.number, current.counts) == (2, counts)


def aborted() -> Job:
    """Return a job with an abort at a; round 2 is joinable and the verdict is pending."""
    job = gang().failure("a", kind=ABORT)
    job.act()
    return job.idle()


def test_loss_that_prevents_a_charge_is_counted() -> None:
    current = aborted().gone("c").act()
    assert (current.charged, current.counts) == ((), Counts(2, 1, 1, 1, 1))
    assert current.cause.kind is CauseKind.LOSS


def test_leave_that_prevents_a_charge_is_counted() -> None:
    """The leaver's peers are killed nevertheless: they may be stuck in a collective."""
    job = aborted().change("c", state=MemberState.LEAVING, reason="drained")
    current = job.act()
    assert (current.charged, current.counts) == ((), Counts(1, 2, 1, 1, 1))
    assert current.cause.kind is CauseKind.LEAVE
    assert current.cause.members == ("c",)
    assert current.cause.detail.startswith("drained; ")
    assert current.cause.kills


def test_preemption_that_prevents_a_charge_is_counted() -> None:
    job = aborted().bounds(max_nodes=3, max_restarts=3, marks=EVICTED)
    current = job.change("b", state=MemberState.LEAVING).act()
    assert (current.charged, current.counts) == ((), Counts(1, 1, 2, 1, 1))
    assert current.cause.kind is CauseKind.PREEMPTION


def test_drain_request_reason_precedes_the_reason_of_the_member() -> None:
    """The member itself only knows that it was asked to end; the mark takes precedence."""
    slow = (
        DrainRequest(identity("b"), "SurplusStraggler"),
        DrainRequest(identity("c"), "SurplusStraggler"),
    )
    job = gang().bounds(max_nodes=2, marks=slow)
    job.change("b", state=MemberState.LEAVING, reason="SIGTERM").idle().later(1)
    opened = job.act()
    assert (opened.cause.kind, opened.cause.detail) == (CauseKind.LEAVE, "SurplusStraggler")
    job.change("a", state=MemberState.WAITING, round=1)
    for name in "bc":
        job.change(name, state=MemberState.LEAVING, reason="SIGTERM", stopped=True)
    again = job.act()
    assert again.state is RoundState.FROZEN
    assert (again.cause.members, again.cause.detail) == (("b", "c"), "SurplusStraggler")


# -- late marks of the operator ---------------------------------------------------------


def left() -> Job:
    """Return a job in which b left, and round 2 is open because of it."""
    job = gang().change("b", state=MemberState.LEAVING, reason="its pod is to end").idle().later(1)
    assert job.act().counts == Counts(1, 2, 1, 1, 1)
    return job


def frozen(job: Job, *staying: str) -> Round:
    """Return the open round once these wait in it, and b and c have gone."""
    for name in staying:
        job.change(name, state=MemberState.WAITING)
    job.gone("b", "c", proven=True)
    current = job.act()
    assert current.state is RoundState.FROZEN
    return current


def test_leave_becomes_preemption_when_a_drain_request_says_so() -> None:
    current = left().bounds(max_nodes=3, marks=EVICTED).act()
    assert current.counts == Counts(1, 1, 2, 1, 1)
    assert current.cause == cause_with_reasons(
        CauseKind.PREEMPTION, ("b",), ["EvictionByEvictionAPI"]
    )
    assert (current.number, current.state) == (2, RoundState.JOINABLE)


def test_sealed_round_and_history_become_preemption_too() -> None:
    job = left().idle()
    open_round = job.current()
    job.sealed("a", "c", "z", number=2, counts=open_round.counts, cause=open_round.cause)
    job.put(KEYS.history(2), History(2, open_round.cause, 2, join_ms=9, start_ms=1)).idle()
    current = job.bounds(max_nodes=3, marks=EVICTED).act()
    assert (current.number, current.state) == (2, RoundState.FINAL)
    assert current.counts == Counts(1, 1, 2, 1, 1)
    history = job.read(History, KEYS.history(2))
    assert (history.cause, history.join_ms) == (current.cause, 9)
    job.idle()


@pytest.mark.parametrize(
    "mark",
    [
        DrainRequest(identity("b"), "SurplusHighestRank"),
        DrainRequest(identity("a"), "Preempted", preempted=True),
    ],
    ids=["chosen by ourselves", "another member"],
)
def test_other_drain_requests_change_nothing(mark: DrainRequest) -> None:
    left().bounds(max_nodes=3, marks=(mark,)).idle()


# -- leaves while the next round is open --------------------------------------------------


def test_later_leave_before_freeze_is_named_with_the_first() -> None:
    job = left().idle()
    job.change("c", state=MemberState.LEAVING, reason="its node is drained")
    current = frozen(job, "a")
    assert current.cause.kind is CauseKind.LEAVE
    assert current.cause.members == ("b", "c")
    assert current.cause.detail == "its node is drained; its pod is to end"
    assert current.counts == Counts(1, 2, 1, 1, 1)


def test_later_preempted_leave_makes_the_round_a_preemption() -> None:
    job = left().idle()
    job.change("c", state=MemberState.LEAVING)
    evicted = DrainRequest(identity("c"), "EvictionByEvictionAPI", preempted=True)
    job.bounds(max_nodes=3, marks=(evicted,))
    open_round = frozen(job, "a")
    assert open_round.cause.members == ("b", "c")
    job.sealed("a", "z", number=2, counts=open_round.counts, cause=open_round.cause)
    after = job.act()
    assert after.cause == cause_with_reasons(
        CauseKind.PREEMPTION, ("b", "c"), ["EvictionByEvictionAPI"]
    )
    assert after.counts == Counts(1, 1, 2, 1, 1)


def test_preemption_names_later_leaves_and_keeps_its_reason() -> None:
    job = left().bounds(max_nodes=3, marks=EVICTED)
    assert job.act().cause.kind is CauseKind.PREEMPTION
    job.change("c", state=MemberState.LEAVING, reason="its pod is to end")
    cause = frozen(job, "a").cause
    assert cause == cause_with_reasons(CauseKind.PREEMPTION, ("b", "c"), ["EvictionByEvictionAPI"])


def test_leaving_done_member_is_no_cause() -> None:
    job = left().idle().done("c")
    job.change("c", state=MemberState.LEAVING)
    assert frozen(job, "a").cause.members == ("b",)


def test_loss_before_freeze_is_no_leave() -> None:
    assert frozen(left().idle(), "a").cause.members == ("b",)


# -- causes of leaves, alone ----------------------------------------------------------------


def seats(*names: str) -> list[RankAssignment]:
    members = [a_member(name) for name in names]
    return list(seal(1, members, 0).seats)


def test_leave_without_reason_has_no_detail() -> None:
    cause = leave_cause(seats("a", "b"), {identity("b"): "drained"}, RendezvousParams(1, 3))
    assert cause == cause_with_reasons(CauseKind.LEAVE, ("a", "b"), ["drained"])
    assert leave_cause(seats("a"), {}, RendezvousParams(1, 3)).detail == ""


def test_reasons_of_later_leaves_are_listed_once_each() -> None:
    first = cause_with_reasons(CauseKind.LEAVE, ("a",), ["scaled", "drained"])
    words = {identity("a"): "drained", identity("b"): "drained", identity("c"): ""}
    cause = with_later_leaves(first, seats("a", "b", "c"), words.get, RendezvousParams(1, 3))
    assert cause == cause_with_reasons(CauseKind.LEAVE, ("a", "b", "c"), ["drained", "scaled"])
    assert cause.detail == "drained; scaled"
    unexplained = cause_with_reasons(CauseKind.LEAVE, ("a",), ())
    silent = with_later_leaves(unexplained, seats("a", "c"), words.get, RendezvousParams(1, 3))
    assert silent == Cause(CauseKind.LEAVE, ("a", "c"), "")


def test_leaves_join_those_that_the_previous_release_recorded() -> None:
    before = Cause(CauseKind.LEAVE, ("a",), f"drained; {OLD_ABORTED}", urgent=True)
    words = {identity("b"): "scaled"}
    cause = with_later_leaves(before, seats("a", "b"), words.get, RendezvousParams(1, 3))
    assert cause.reasons == ("drained", "scaled", ABORTED)
    assert cause.detail == f"drained; scaled; {OLD_ABORTED}"
    assert cause.urgent


def test_urgent_leave_that_was_a_preemption_stays_urgent_and_names_its_members() -> None:
    leave = Cause(CauseKind.LEAVE, ("b", "x"), "drained", urgent=True)
    told = with_late_preemption(
        leave, BEFORE, seats("a", "b"), RendezvousParams(1, 3, marks=EVICTED)
    )
    wanted = cause_with_reasons(
        CauseKind.PREEMPTION, ("b", "x"), ["EvictionByEvictionAPI"], urgent=True
    )
    assert told == (wanted, Counts(1, 0, 2, 1, 1))
