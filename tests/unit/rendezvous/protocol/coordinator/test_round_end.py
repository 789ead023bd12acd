"""Coordinator's findings in a final round, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.round_end import (
    LEAVE_COALESCE_SECONDS,
    LEAVE_QUIET_SECONDS,
    RoundEnd,
    round_end,
)
from elasticjob_rendezvous.protocol.coordinator.scale_up import must_wait, waiting_reason
from elasticjob_rendezvous.protocol.events import PeerHeartbeat, PeerUp, Probed, Verdict
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    LeaveNotice,
    MemberState,
    Save,
    cause_with_reasons,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from tests.unit.rendezvous.builders import Job, identity, lose_link

RUNNING, LEAVING = MemberState.RUNNING, MemberState.LEAVING
LEASE = 5.0


class Round:
    """Final round of `seated`, and the coordinator's memory of it."""

    def __init__(self, seated: str = "abc", **bounds: Any) -> None:
        self.job = Job(*seated, **{"max_nodes": 8, "expected": len(seated), **bounds})
        self.job.sealed(*seated)
        self.peers, self.timers = FailureDetector(), Timers()
        self.leavers: dict[str, str] = {}
        self.silent: set[str] = set()
        self.number = 1
        self.take_over()

    def take_over(self) -> None:
        self.timers.clear()
        self.timers.begin_step(self.job.now)
        self.timers.since("took over")
        self.look_after(60)

    def look_after(self, seconds: float) -> RoundEnd:
        """Look at the round again after this much time."""
        job = self.job.later(seconds)
        self.timers.begin_step(job.now)
        view = job.view()
        assert view.bounds is not None
        return round_end(
            view, job.roster(self.number), view.bounds.record, self.peers, self.timers,
            self.leavers, self.silent,
        )  # fmt: skip

    def seen(self, after: float = 0.0) -> tuple[CauseKind, tuple[str, ...]] | None:
        """Return the cause found by the coordinator."""
        cause = self.look_after(after).cause
        return None if cause is None else (cause.kind, cause.members)

    def abort(self, name: str) -> Round:
        self.job.failure(name, kind=FailureClass.PEER_ABORT)
        return self


def test_healthy_round_continues() -> None:
    round = Round()
    assert round.look_after(3600) == RoundEnd()
    assert round.timers.wake is None


# -- success --------------------------------------------------------------------------


def test_success_requires_the_whole_roster_done() -> None:
    round = Round("ab")
    round.job.done("a")
    assert round.look_after(1) == RoundEnd()
    round.job.done("b")
    assert round.look_after(1).succeeded


def test_done_members_may_vanish_fail_or_leave() -> None:
    round = Round("ab")
    round.job.done("a").gone("a")
    assert round.look_after(60) == RoundEnd()
    round.job.done("b").change("b", state=LEAVING).gone("b")
    assert round.look_after(0).succeeded


def test_done_records_of_another_round_do_not_count() -> None:
    round = Round("ab")
    round.job.done("a", "b", round=2)
    assert not round.look_after(1).succeeded


# -- failures and losses --------------------------------------------------------------


def test_failure_opens_the_next_round_at_once() -> None:
    round = Round()
    round.job.failure("b", message="boom")
    look = round.look_after(0.5)
    assert look.cause is not None
    assert (look.cause.kind, look.cause.members) == (CauseKind.FAILURE, ("b",))
    assert "boom" in look.cause.detail
    assert look.symptom == round.job.now


@pytest.mark.parametrize("kind", [FailureClass.USER_ERROR, FailureClass.PEER_ABORT])
def test_failure_of_member_without_rank_assignment_ends_no_round(kind: FailureClass) -> None:
    """A loss of etcd's data has this effect: the failure is of another round of the same number."""
    round = Round("ab")
    round.job.member("c", round=1, known=1).failure("c", kind=kind)
    assert round.seen() == (CauseKind.JOIN, ("c",)), "it is a newcomer like any other"


def test_done_member_without_rank_assignment_does_not_block_newcomers() -> None:
    round = Round("ab")
    round.job.member("c", state=MemberState.DONE, round=1).done("c").member("d")
    assert round.seen() == (CauseKind.JOIN, ("d",))


def test_failure_after_a_member_is_done_counts() -> None:
    round = Round("ab")
    round.job.done("a").failure("b")
    assert round.seen() == (CauseKind.FAILURE, ("b",))


def test_taken_port_is_its_own_cause() -> None:
    round = Round()
    round.job.failure("a", kind=FailureClass.MASTER_PORT)
    round.abort("b")
    assert round.seen() == (CauseKind.MASTER_PORT, ("a",))


def test_member_without_key_is_lost() -> None:
    round = Round()
    round.job.gone("b")
    assert round.seen() == (CauseKind.LOSS, ("b",))


def test_several_losses_share_a_round() -> None:
    round = Round()
    round.job.gone("b", "c")
    assert round.seen() == (CauseKind.LOSS, ("b", "c"))


def test_loss_explains_aborted_collectives_of_peers() -> None:
    round = Round()
    round.abort("a").job.gone("b")
    assert round.seen() == (CauseKind.LOSS, ("b",))


def test_loss_does_not_explain_error_of_another_member() -> None:
    round = Round()
    round.job.failure("a").gone("b")
    assert round.seen() == (CauseKind.FAILURE, ("a",))


def test_loss_is_dated_from_its_first_symptom() -> None:
    round = Round()
    lose_link(round.peers, identity("b"), round.job.now - 4.0)
    round.job.gone("b")
    look = round.look_after(1.0)
    assert look.symptom == round.job.now - 5.0


@pytest.mark.parametrize("trouble", ["failure", "loss"])
def test_each_round_has_its_own_first_symptom(trouble: str) -> None:
    round = Round()
    for number in (1, 2):
        round.job.later(60)
        if number == 2 and trouble == "loss":
            round.job.member("b", session="s2")
        round.job.sealed(*"abc", number=number)
        round.number = number
        assert round.look_after(1) == RoundEnd()
        if trouble == "failure":
            round.job.failure("b", round=number)
        else:
            round.job.gone("b" if number == 1 else "c")
        look = round.look_after(1)
        assert look.symptom == round.job.now
        assert round.look_after(5).symptom == look.symptom


def test_aborted_collective_names_members_done_by_then() -> None:
    round = Round("ab")
    round.job.done("a")
    cause = round.abort("b").look_after(0).cause
    assert cause is not None
    assert cause.members == ("b",)
    assert "a had ended" in cause.detail


def test_member_that_stopped_its_workers_itself_is_lost() -> None:
    """The member was cut off for longer than its lease, and came back."""
    round = Round()
    round.job.change("b", state=MemberState.WAITING, round=1)
    assert round.seen() == (CauseKind.LOSS, ("b",))


def test_member_that_has_not_started_is_not_lost() -> None:
    round = Round()
    round.job.change("b", state=MemberState.WAITING, round=0)
    assert round.seen(60) is None


# -- delayed losses -------------------------------------------------------------------


def test_after_takeover_the_roster_has_a_lease_time_to_register_again() -> None:
    round = Round()
    round.job.gone("b", "c")
    round.timers.clear()
    round.timers.since("took over")
    assert round.seen() is None
    round.job.member("b", state=RUNNING, round=1)
    assert round.seen(LEASE - 0.1) is None
    assert round.seen(0.1) == (CauseKind.LOSS, ("c",))


def test_planned_round_waits_while_a_member_may_register_again() -> None:
    round = Round("ab", expected=3)
    round.job.gone("b").member("c")
    round.timers.clear()
    round.timers.since("took over")
    assert round.seen() is None
    assert round.seen(LEASE) == (CauseKind.LOSS, ("b",))


def test_member_that_registered_again_and_vanished_gets_no_second_wait() -> None:
    round = Round()
    round.job.gone("b")
    round.timers.clear()
    round.timers.since("took over")
    assert round.seen() is None
    round.job.member("b", state=RUNNING, round=1, session="s2")
    assert round.seen(1) is None
    round.job.gone("b")
    assert round.seen(1) == (CauseKind.LOSS, ("b",))


def test_member_that_vanishes_later_gets_no_wait() -> None:
    round = Round()
    round.job.gone("b")
    assert round.seen(1) == (CauseKind.LOSS, ("b",))


def test_proof_of_end_ends_the_wait() -> None:
    round = Round()
    view = round.job.view()
    round.peers.probed(Probed(identity("b"), "s1", Verdict.GONE), view, round.job.now, 30)
    round.job.gone("b")
    round.timers.clear()
    round.timers.since("took over")
    assert round.seen() == (CauseKind.LOSS, ("b",))


def test_linked_member_may_register_again() -> None:
    """An etcd outage may have cost the member its lease: a healthy gang continues."""
    round = Round()
    round.peers.up(PeerUp(identity("b"), "s1"), round.job.now)
    round.job.gone("b")
    assert round.seen() is None
    assert round.timers.wake is not None
    for _ in range(4):
        round.peers.up(PeerHeartbeat(identity("b"), "s1"), round.job.now)
        assert round.seen(1) is None
    round.job.member("b", state=RUNNING, round=1, session="s2")
    assert round.seen(3600) is None


# -- leaving --------------------------------------------------------------------------


def test_leaves_close_in_time_share_a_round() -> None:
    round = Round()
    round.job.change("b", state=LEAVING, reason="drained")
    assert round.seen() is None
    assert round.timers.wake == pytest.approx(round.job.now + LEAVE_QUIET_SECONDS)
    round.job.change("a", state=LEAVING, reason="scaled down")
    assert round.seen(LEAVE_QUIET_SECONDS - 0.01) is None  # the quiet period restarts
    look = round.look_after(LEAVE_QUIET_SECONDS)
    assert look.cause is not None
    assert (look.cause.kind, look.cause.members) == (CauseKind.LEAVE, ("a", "b"))
    assert look.cause.detail == "drained; scaled down"
    assert look.symptom == pytest.approx(round.job.now - 2 * LEAVE_QUIET_SECONDS + 0.01)


def test_wait_for_successive_leaves_is_bounded() -> None:
    round = Round("abcdef")
    for name in "abcd":
        round.job.change(name, state=LEAVING, reason="drained")
        assert round.seen(LEAVE_QUIET_SECONDS - 0.005) is None
    round.job.change("e", state=LEAVING, reason="drained")
    assert round.seen(LEAVE_QUIET_SECONDS - 0.005) == (CauseKind.LEAVE, tuple("abcde"))


def test_leave_with_a_drain_request_is_waited_for() -> None:
    round = Round(
        marks=(
            DrainRequest(identity("a"), "scaled down"),
            DrainRequest(identity("b"), "scaled down"),
        )
    )
    round.job.change("b", state=LEAVING, reason="scaled down")
    assert round.seen() is None
    assert round.seen(LEAVE_COALESCE_SECONDS - 0.01) is None
    round.job.change("a", state=LEAVING, reason="scaled down")
    assert round.seen() is None
    look = round.look_after(LEAVE_QUIET_SECONDS)
    assert look.cause is not None
    assert look.cause.members == ("a", "b")


def test_wait_for_leave_after_drain_request_is_bounded() -> None:
    round = Round(marks=(DrainRequest(identity("a"), "scaled down"),))
    round.job.change("b", state=LEAVING, reason="drained")
    assert round.seen() is None
    look = round.look_after(LEAVE_COALESCE_SECONDS)
    assert look.cause is not None
    assert look.cause.members == ("b",)


@pytest.mark.parametrize("marked", [False, True])
def test_leaves_of_a_later_round_are_waited_for_again(marked: bool) -> None:
    marks = (DrainRequest(identity("a"), "scaled down"),) if marked else ()
    seconds = LEAVE_COALESCE_SECONDS if marked else LEAVE_QUIET_SECONDS
    round = Round(marks=marks)
    for number in (1, 2):
        round.job.sealed(*"abc", number=number)
        round.number = number
        round.leavers.clear()
        round.job.later(60).change("b", state=LEAVING, reason="drained")
        assert round.seen() is None
        first = round.job.now
        assert round.seen(seconds - 0.01) is None
        look = round.look_after(0.02)
        assert look == RoundEnd(
            cause=cause_with_reasons(CauseKind.LEAVE, ("b",), ["drained"]), symptom=first
        )


@pytest.mark.parametrize(
    ("said", "gone", "urgent"),
    [
        (MemberState.LEAVING, False, False),
        (MemberState.LEAVING, True, False),
        (MemberState.RUNNING, True, True),
    ],
    ids=["by its key, which stands", "by its key, which went", "by a link alone"],
)
def test_leave_known_only_from_a_leave_notice_is_urgent(
    said: MemberState, gone: bool, urgent: bool
) -> None:
    """Its peers may be stuck in collectives for a while."""
    round = Round()
    round.job.view().merge_leave_notices((LeaveNotice(identity("b"), "", "drained"),))
    round.job.change("b", state=said, reason="drained" if said is LEAVING else "")
    round.seen()
    if gone:
        round.job.gone("b")
        round.seen()
    cause = round.look_after(LEAVE_COALESCE_SECONDS).cause
    assert cause == cause_with_reasons(CauseKind.LEAVE, ("b",), ["drained"], urgent=urgent)


def test_withdrawn_leave_is_not_urgent() -> None:
    """Its key stands, so it told its peers in time."""
    round = Round()
    round.job.change("b", state=LEAVING, reason="drained")
    round.seen()
    round.job.change("b", state=RUNNING)
    cause = round.look_after(LEAVE_COALESCE_SECONDS).cause
    assert cause == cause_with_reasons(CauseKind.LEAVE, ("b",), ["drained"])


def test_leave_with_unread_last_record_is_urgent() -> None:
    round = Round()
    round.job.view().merge_leave_notices((LeaveNotice(identity("b"), "", "drained"),))
    round.job.gone("b").view().departed.clear()
    round.seen()
    cause = round.look_after(LEAVE_COALESCE_SECONDS).cause
    assert cause == cause_with_reasons(CauseKind.LEAVE, ("b",), ["drained"], urgent=True)


def test_member_that_reported_leaving_is_never_lost() -> None:
    round = Round()
    round.job.change("b", state=LEAVING, reason="drained")
    assert round.seen() is None
    round.job.gone("b")
    look = round.look_after(1)
    assert look.cause is not None
    assert (look.cause.kind, look.cause.detail) == (CauseKind.LEAVE, "drained")


def test_aborted_peers_of_leaving_member_are_consequences_and_stop_at_once() -> None:
    round = Round().abort("c")
    round.job.change("b", state=LEAVING, reason="drained")
    assert round.seen() is None
    cause = round.look_after(LEAVE_COALESCE_SECONDS).cause
    assert cause == cause_with_reasons(CauseKind.LEAVE, ("b",), ["drained"], urgent=True)
    assert cause.kills


@pytest.mark.parametrize(
    ("preempted", "kind", "detail"),
    [
        (True, CauseKind.PREEMPTION, "EvictionByEvictionAPI"),
        (False, CauseKind.LEAVE, "Terminating"),
        (None, CauseKind.LEAVE, "its pod is to end"),
    ],
)
def test_drain_request_makes_a_leave_a_preemption(
    preempted: bool | None, kind: CauseKind, detail: str
) -> None:
    marks = () if preempted is None else (DrainRequest(identity("b"), detail, preempted),)
    round = Round(marks=marks)
    round.job.change("b", state=LEAVING, reason="its pod is to end")
    round.seen()
    cause = round.look_after(LEAVE_COALESCE_SECONDS).cause
    assert cause == cause_with_reasons(kind, ("b",), [detail])
    assert not cause.kills


def test_error_precedes_a_leave() -> None:
    round = Round()
    round.job.change("b", state=LEAVING).failure("c")
    assert round.seen() == (CauseKind.FAILURE, ("c",))


def test_leaving_done_member_opens_no_round() -> None:
    round = Round()
    round.job.done("b").change("b", state=LEAVING)
    assert round.seen(60) is None


def test_drain_request_alone_opens_no_round() -> None:
    """The marked member itself reports its leave."""
    round = Round(marks=(DrainRequest(identity("b"), "scaled down"),))
    assert round.seen(60) is None


# -- newcomers ------------------------------------------------------------------------


def test_newcomers_settle_before_they_are_included() -> None:
    round = Round("ab", expected=6)
    round.job.member("c")
    assert round.seen() is None
    assert round.timers.wake == round.job.now + 3.0
    round.job.later(2).member("d")
    assert round.seen() is None
    assert round.seen(1) == (CauseKind.JOIN, ("c", "d"))


def test_unknown_number_of_newcomers_settles_after_a_quiet_period() -> None:
    round = Round("ab", expected=None)
    round.job.member("c")
    assert round.seen() is None
    round.job.later(0.4).member("d")
    assert round.seen() is None
    assert round.seen(0.4) is None
    assert round.seen(0.1) == (CauseKind.JOIN, ("c", "d"))


def test_settling_ends_when_all_expected_members_are_present() -> None:
    round = Round("ab", expected=4)
    round.job.member("c")
    assert round.seen() is None
    round.job.member("d")
    assert round.seen() == (CauseKind.JOIN, ("c", "d"))


def test_newcomer_that_vanished_opens_no_round() -> None:
    round = Round("ab", expected=6)
    round.job.member("c")
    assert round.seen() is None
    round.job.gone("c")
    assert round.seen(10) is None
    round.job.member("c", session="s2")
    assert round.seen() is None  # settling restarts
    assert round.seen(3) == (CauseKind.JOIN, ("c",))


@pytest.mark.parametrize(
    ("newcomer", "bounds"),
    [
        ({}, {"max_nodes": 2, "expected": 2}),
        ({}, {"min_nodes": 2, "increment": 2, "expected": 4}),
        ({"state": RUNNING, "round": 0}, {"expected": 3}),
        ({"state": LEAVING}, {"expected": 3}),
        ({}, {"expected": 3, "marks": (DrainRequest(identity("z"), "scaled down"),)}),
        ({"sizes": "1:99:1"}, {"expected": 3}),
    ],
    ids=["at the maximum", "off the grid", "not waiting", "leaving", "marked", "other sizes"],
)
def test_newcomers_that_open_no_round(newcomer: dict[str, Any], bounds: dict[str, Any]) -> None:
    round = Round("ab", **bounds)
    round.job.member("z", **newcomer)
    assert round.seen() is None
    assert round.seen(3600) is None


def test_newcomer_that_failed_to_confirm_opens_no_round() -> None:
    round = Round("ab", expected=3)
    round.job.member("z")
    round.silent = {identity("z")}
    assert round.seen(60) is None
    round.silent = set()
    assert round.seen() == (CauseKind.JOIN, ("z",))


def test_newcomers_wait_for_a_checkpoint_after_their_arrival() -> None:
    round = Round("ab", expected=3, scale_up_wait_seconds=600, settle_seconds=0)
    round.job.change("a", checkpoint_step=10)
    round.job.later(5).member("c")
    assert round.seen() is None
    assert round.seen(300) is None
    round.job.change("a", step=19)
    assert round.seen(1) is None, "a step is no checkpoint"
    round.job.change("b", checkpoint_step=20)
    assert round.seen(1) == (CauseKind.JOIN, ("c",))


def test_wait_of_newcomers_is_bounded() -> None:
    round = Round("ab", expected=3, scale_up_wait_seconds=600)
    round.job.member("c")
    assert round.seen() is None
    assert round.timers.wake == round.job.now + 600
    assert round.seen(599) is None
    assert round.seen(1) == (CauseKind.JOIN, ("c",))


@pytest.mark.parametrize("most", [0.5, 1.0])
def test_newcomers_wait_for_a_checkpoint_even_within_a_second(
    most: float,
) -> None:
    round = Round("ab", expected=3, scale_up_wait_seconds=most, settle_seconds=0)
    round.job.member("c")
    assert round.seen() is None
    assert round.timers.wake == round.job.now + most
    assert round.seen(most) == (CauseKind.JOIN, ("c",))


@pytest.mark.parametrize("before", ["elsewhere", "nobody is there"])
def test_start_of_workers_is_no_checkpoint(before: str) -> None:
    """Until then none of the round's members had anything to tell."""
    job = Job("a", "b", "c").sealed("a", "b")
    for name in "ab":
        if before == "elsewhere":
            job.change(name, state=MemberState.WAITING, round=0)
        else:
            job.gone(name)
    bounds, timers = RendezvousParams(1, 8, scale_up_wait_seconds=600.0), Timers()
    roster, since = job.roster(1), job.now
    timers.begin_step(job.now)
    assert must_wait(job.view(), roster, bounds, timers, since)
    job.member("a", state=RUNNING, round=1)
    timers.begin_step(job.later(1).now)
    assert must_wait(job.view(), roster, bounds, timers, since)
    job.change("a", checkpoint_step=0)
    timers.begin_step(job.later(1).now)
    assert not must_wait(job.view(), roster, bounds, timers, since)


def test_checkpoint_at_a_step_of_an_earlier_round_includes_newcomers() -> None:
    """The later round began from an older checkpoint and came past the same step again."""
    job = Job("a", "b", "c").sealed("a", "b").change("a", checkpoint_step=100)
    bounds, timers = RendezvousParams(1, 8, scale_up_wait_seconds=600.0), Timers()
    timers.begin_step(job.now)
    assert must_wait(job.view(), job.roster(1), bounds, timers, job.now)
    job.later(60).sealed("a", "b", number=2).change("a", checkpoint_step=50)
    timers.begin_step(job.now)
    since = job.now
    assert must_wait(job.view(), job.roster(2), bounds, timers, since)
    job.change("a", checkpoint_step=100)
    timers.begin_step(job.later(1).now)
    assert not must_wait(job.view(), job.roster(2), bounds, timers, since)


def test_checkpoint_of_another_round_includes_no_newcomers() -> None:
    round = Round("ab", expected=3, scale_up_wait_seconds=600, settle_seconds=0)
    round.job.member("c")
    assert round.seen() is None
    round.job.change("a", round=0, checkpoint_step=99)
    assert round.seen(1) is None


def test_loss_opens_a_round_at_once_while_newcomers_wait() -> None:
    round = Round("ab", expected=3, scale_up_wait_seconds=600)
    round.job.member("c")
    assert round.seen() is None
    round.job.gone("b", proven=True)
    assert round.seen(1) == (CauseKind.LOSS, ("b",))


@pytest.mark.parametrize(
    ("bounds", "waiting", "said"),
    [
        ({"scale_up_wait_seconds": 600.0}, 1, "for 600 s at most"),
        ({"scale_up_wait_seconds": 1.0}, 1, "for 1 s at most"),
        ({}, 1, ""),
        ({"scale_up_wait_seconds": 600.0}, 0, ""),
        ({"scale_up_wait_seconds": 600.0, "max_nodes": 2}, 1, "they are spare"),
        ({"increment": 2, "min_nodes": 2}, 1, "does not grow by 1"),
    ],
)
def test_wait_reason_of_newcomers(bounds: dict[str, Any], waiting: int, said: str) -> None:
    reason = waiting_reason(
        RendezvousParams(**{"min_nodes": 1, "max_nodes": 8, **bounds}), 2, waiting
    )
    assert (said in reason) if said else reason == ""


@pytest.mark.parametrize(("waiting", "said"), [(0, ""), (1, "after 60 s at most")])
def test_wait_reason_of_newcomers_is_the_save_before_the_end_of_the_round(
    waiting: int, said: str
) -> None:
    save = Save(Cause(CauseKind.JOIN), 60.0)
    reason = waiting_reason(RendezvousParams(1, 8), 2, waiting, save)
    assert (said in reason) if said else reason == ""


def test_newcomers_are_excluded_after_the_first_done() -> None:
    round = Round("ab", expected=3)
    round.job.done("a").member("z")
    assert round.seen(3600) is None


# -- scaling down ---------------------------------------------------------------------


def test_smaller_wanted_size_alone_opens_no_round() -> None:
    round = Round("abc")
    round.job.bounds(max_nodes=8, expected=2)
    assert round.seen(3600) is None


def test_gang_over_its_maximum_has_a_grace_to_shrink() -> None:
    round = Round("abc")
    round.job.bounds(max_nodes=2, stop_grace_seconds=10)
    assert round.seen() is None
    assert round.seen(9.9) is None
    assert round.seen(0.1) == (CauseKind.SCALE_DOWN, ())


def test_raised_maximum_resets_the_grace() -> None:
    round = Round("abc")
    round.job.bounds(max_nodes=2)
    assert round.seen(9) is None
    round.job.bounds(max_nodes=3)
    assert round.seen(0) is None
    round.job.bounds(max_nodes=2)
    assert round.seen(9) is None


def test_gang_over_its_maximum_again_has_the_whole_grace() -> None:
    round = Round("abc")
    for most in (2, 3, 2):
        round.job.bounds(max_nodes=most, stop_grace_seconds=10)
        assert round.seen() is None
        assert round.seen(9.5) is None
    cause = round.look_after(0.5).cause
    assert cause is not None
    assert (cause.kind, cause.members) == (CauseKind.SCALE_DOWN, ())
    assert "3" in cause.detail
    assert "2" in cause.detail


@pytest.mark.parametrize(("expected", "seconds"), [(6, 3.0), (None, 0.5)])
def test_newcomers_settle_again_in_each_round(expected: int | None, seconds: float) -> None:
    round = Round("ab", expected=expected)
    round.job.member("c")
    for number in (1, 2):
        round.job.later(60).sealed(*"ab", number=number)
        round.number = number
        assert round.look_after(0) == RoundEnd()
        first = round.job.now
        assert round.seen(seconds - 0.1) is None
        look = round.look_after(0.2)
        assert look == RoundEnd(cause=Cause(CauseKind.JOIN, ("c",)), symptom=first)


def test_waiting_member_whose_workers_aborted_did_not_stop_by_itself() -> None:
    """Its failure tells why its workers ended: no member was cut off."""
    round = Round().abort("b")
    round.job.change("b", state=MemberState.WAITING)
    assert round.seen() == (CauseKind.FAILURE, ("b",))


def test_cause_of_a_join_names_sixteen_newcomers() -> None:
    round = Round("a", max_nodes=30, expected=18)
    for number in range(17):
        round.job.member(f"n{number:02}", state=MemberState.WAITING)
    found = round.seen()
    assert found is not None
    assert found[0] is CauseKind.JOIN
    assert len(found[1]) == 16
