"""Coordinator's writes: rounds from their opening to the seal, and fences."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.bootstrap import LARGE_GANG, LARGE_GANG_SECONDS
from elasticjob_rendezvous.protocol.coordinator.coordinator import decide
from elasticjob_rendezvous.protocol.coordinator.memory import FORGIVEN_SECONDS, SilentMembers
from elasticjob_rendezvous.protocol.coordinator.round_writes import DELETES_PER_TXN, KEPT_ROUNDS
from elasticjob_rendezvous.protocol.events import Verdict
from elasticjob_rendezvous.protocol.kv import Compare, Delete, Target
from elasticjob_rendezvous.protocol.liveness.member_loss import TOOK_OVER
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, seal
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.rendezvous.builders import KEYS, Job, a_member, identity, lose_link

JOINABLE, FROZEN, FINAL, CLOSED = RoundState
WAITING, RUNNING, STOPPING, LEAVING, DONE = MemberState


def ids(names: str) -> tuple[str, ...]:
    return tuple(identity(name) for name in names)


def confirm(job: Job, *names: str) -> Job:
    stored = job.view().round
    assert stored is not None
    for name in names:
        job.change(name, confirmed=stored.modified)
    return job


def frozen(*names: str, **bounds: Any) -> Job:
    """Return a job whose round 1 has just been frozen with all of these members."""
    job = Job(*names, **{"max_nodes": len(names), **bounds}).round(1)
    current = job.act()
    assert (current.state, current.ids) == (FROZEN, ids("".join(names)))
    job.decide()
    return job


# -- every write is fenced ------------------------------------------------------------


def joinable() -> Job:
    return Job("a", "b", max_nodes=2).round(1)


def lost() -> Job:
    job = Job("a", "b", "c", expected=3).sealed("a", "b", "c").idle().later(10)
    return job.gone("c")


def failed() -> Job:
    return Job("a", "b").sealed("a", "b").failure("b")


def confirmed() -> Job:
    return confirm(frozen("a", "b"), "a", "b")


def started() -> Job:
    job = Job("a", "b", expected=2).sealed("a", "b")
    return job.put(KEYS.history(1), History(1, job.current().cause, 2))


def duplicates() -> Job:
    return Job("a", "b").round(1).member("b", session="s2")


SITUATIONS = {
    "open": lambda: Job("a", "b"),
    "open with bounds": lambda: Job("a", "b").brings(RendezvousParams(1, 4)),
    "bounds alone": lambda: Job("a", "b").round(1).brings(RendezvousParams(1, 4)),
    "freeze": joinable,
    "seal": confirmed,
    "loss": lost,
    "failure": failed,
    "close": lambda: Job("a").sealed("a").done("a"),
    "start": started,
    "duplicate": duplicates,
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_deposed_coordinator_changes_nothing(situation: Any) -> None:
    job = situation()
    act = job.decide()
    assert act is not None
    job.gone("a")
    before = job.etcd.revision
    assert not job.commit(act.txn).succeeded
    assert job.etcd.revision == before


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_current_coordinator_can_write(situation: Any) -> None:
    job = situation()
    act = job.decide()
    assert act is not None
    assert act.note
    assert job.commit(act.txn).succeeded


@pytest.mark.parametrize(
    "name", ["open", "open with bounds", "freeze", "seal", "loss", "failure", "close"]
)
def test_round_is_not_written_over_an_unseen_one(name: str) -> None:
    job = SITUATIONS[name]()
    act = job.decide()
    assert act is not None
    job.round(9)
    assert not job.commit(act.txn).succeeded
    assert job.current().number == 9


@pytest.mark.parametrize(
    "name", ["open", "open with bounds", "freeze", "seal", "loss", "failure", "close"]
)
def test_round_write_compares_round_revision_and_own_session(name: str) -> None:
    job = SITUATIONS[name]()
    act = job.decide()
    assert act is not None
    at = job.view().round
    own = job.stored("a")
    compares = set(act.txn.compares)
    assert Compare(KEYS.round, Target.MOD, at.modified if at else 0) in compares
    assert Compare(own.key, Target.CREATE, own.created) in compares


def test_changed_own_key_does_not_stop_the_coordinator() -> None:
    job = joinable()
    act = job.decide()
    assert act is not None
    job.change("a", known=7)
    assert job.commit(act.txn).succeeded


def test_round_names_coordinator_and_successor() -> None:
    job = Job("b", "c", "a", max_nodes=3).round(1)
    current = job.act()
    assert (current.coordinator, current.successor) == (identity("b"), identity("c"))
    assert Job("a", max_nodes=1).act().successor == ""
    assert current.since_ms == job.clock.utc_ms


# -- opening --------------------------------------------------------------------------


def test_first_round_opens_once_parameters_exist() -> None:
    job = Job("a").delete(KEYS.bounds).idle()
    job.bounds()
    current = job.act()
    assert (current.number, current.state, current.cause.kind) == (1, JOINABLE, CauseKind.START)
    assert current.previous == 0


def test_first_member_writes_parameters_with_the_first_round() -> None:
    bounds = RendezvousParams(1, 2)
    job = Job("a", "b").brings(bounds)
    assert job.act().number == 1
    assert job.read(RendezvousParams, KEYS.bounds) == bounds


@pytest.mark.parametrize("brings", [True, False])
def test_first_round_freezes_at_once_with_enough_members(brings: bool) -> None:
    job = Job("a", "b", "c", min_nodes=3, max_nodes=3)
    if brings:
        job.delete(KEYS.bounds).brings(RendezvousParams(3, 3))
    current = job.act()
    assert (current.number, current.state, len(current.ids)) == (1, FROZEN, 3)


def test_first_round_of_a_large_gang_waits_briefly() -> None:
    names = [f"m-{index}" for index in range(LARGE_GANG)]
    job = Job(*names[:-1], min_nodes=LARGE_GANG, max_nodes=LARGE_GANG).idle()
    assert job.coordinator.timers.wake == pytest.approx(job.clock.now + LARGE_GANG_SECONDS)
    assert job.later(LARGE_GANG_SECONDS).act().state is JOINABLE


def test_number_of_awaited_members_is_known() -> None:
    job = Job("a", "b", min_nodes=4, max_nodes=4).round(1).idle()
    assert job.coordinator.awaited == 2
    job.member("c").member("d").act()
    assert job.coordinator.awaited == 0
    assert job.idle().coordinator.awaited == 4
    revision = job.view().round.modified  # type: ignore[union-attr]
    job.change("a", confirmed=revision).change("c", confirmed=revision).idle()
    assert job.coordinator.awaited == 2


def test_existing_parameters_are_not_overwritten() -> None:
    job = Job("a", "b").brings(RendezvousParams(1, 2))
    act = job.decide()
    assert act is not None
    job.bounds(max_nodes=7)
    assert not job.commit(act.txn).succeeded
    assert job.read(RendezvousParams, KEYS.bounds).max_nodes == 7


def test_parameters_come_without_first_round_if_members_know_a_later_one() -> None:
    job = Job("a", "b").brings(RendezvousParams(1, 2)).change("b", known=5)
    act = job.decide()
    assert act is not None
    assert job.commit(act.txn).succeeded
    assert job.view().bounds is not None
    assert job.view().round is None


@pytest.mark.parametrize("key", [KEYS.round, KEYS.bounds])
def test_malformed_records_prevent_decisions(key: str) -> None:
    job = joinable().put(key, ["not a record"])
    job.initial_bounds = RendezvousParams(1, 4)
    job.idle()


# -- joinable -------------------------------------------------------------------------


def test_first_round_waits_for_its_last_call() -> None:
    job = Job("a", "b", last_call_seconds=30).round(1).idle().later(29.9).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_last_call_begins_with_enough_members() -> None:
    job = Job("a", min_nodes=2, last_call_seconds=30).round(1).idle().later(100).idle()
    job.member("b").idle().later(29).idle().gone("b").idle().later(5).member("b").idle()
    job.later(29.9).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_member_joining_during_last_call_is_included_and_may_end_it() -> None:
    job = Job("a", "b", expected=3).round(1).idle().later(3).member("c")
    assert job.act().ids == ids("abc")


def recovering(*names: str, **bounds: Any) -> Job:
    """Return a job in round 2, joinable since z was proven gone; all of these ran round 1."""
    job = Job(*names, "z", **bounds).sealed(*names, "z")
    job.decide()
    job.later(60).gone("z", proven=True)
    return job.round(2, cause=job.current().cause, previous=1)


def test_recovering_gang_skips_the_last_call() -> None:
    job = recovering("a", "b", expected=4).change("a", state=WAITING).idle()
    job.change("b", state=STOPPING).idle().change("b", state=WAITING)
    assert job.act().ids == ids("ab")


def test_round_is_not_frozen_while_an_older_worker_may_run() -> None:
    job = recovering("a", "b", "c", stop_grace_seconds=10, confirm_seconds=5)
    for name in "ac":
        job.change(name, state=WAITING)
    job.idle().later(14.9).idle()
    job.later(0.1).act()
    assert job.names() == {"a", "c"}
    job.idle().answers("b", Verdict.GONE)
    assert job.act().ids == ids("ac")


def test_leaving_member_is_waited_for() -> None:
    """The wait lasts until it reports stopped workers, even while its key exists."""
    job = recovering("a", "b").change("a", state=WAITING).change("b", state=LEAVING).idle()
    assert job.change("b", stopped=True).act().ids == ids("a")


def test_leaving_member_removed_without_reported_stop_is_probed() -> None:
    job = recovering("a", "b").change("a", state=WAITING).change("b", state=LEAVING).idle()
    job.gone("b").idle()
    assert job.answers("b", Verdict.GONE).act().ids == ids("a")


def test_coordinator_fences_others_and_never_itself() -> None:
    job = recovering("a", "b").idle().later(15)
    job.act()
    assert job.names() == {"a"}
    job.idle().later(3600).idle()
    job.change("a", state=WAITING).idle().answers("b", Verdict.GONE)
    assert job.act().ids == ids("a")


def test_round_names_fenced_members_until_final() -> None:
    """A successor must not consider such a member's lease expired."""
    job = recovering("a", "b", "c").change("a", state=WAITING).idle().later(15)
    assert job.act().fenced == ids("bc")
    for name in "bc":
        job.idle().answers(name, Verdict.GONE)
    assert job.act().fenced == ids("bc")
    confirm(job, "a")
    assert job.act().fenced == ()


def test_fence_compares_the_judged_record() -> None:
    job = recovering("a", "b").change("a", state=WAITING).idle().later(15)
    act = job.decide()
    assert act is not None
    job.change("b", state=WAITING)
    assert not job.commit(act.txn).succeeded
    assert job.names() == {"a", "b"}


def test_duplicates_of_a_member_are_fenced_except_the_newest() -> None:
    job = Job("a", "b").round(1).member("b", session="s2").member("b", session="s3")
    job.act()
    assert list(job.view().sessions[identity("b")]) == ["s3"]


def test_newer_pod_of_the_same_name_wins() -> None:
    job = Job("a", "b").round(1).member("b", id="id-b-again")
    job.act()
    assert set(job.view().members()) == {identity("a"), "id-b-again"}


def test_coordinator_does_not_fence_itself_as_a_duplicate() -> None:
    job = Job("a", max_nodes=1).round(1)
    own = job.stored("a")
    job.member("a", session="s2")
    act = decide(job.coordinator, job.view(), own, job.clock)
    assert act is None or all(getattr(op, "key", "") != own.key for op in act.txn.success)


# -- join timeout ---------------------------------------------------------------------


def test_job_without_enough_members_times_out() -> None:
    job = Job("a", min_nodes=2, join_timeout_seconds=600).round(1).idle().later(599).idle()
    closed = job.later(1).act()
    assert closed.state is CLOSED
    assert closed.outcome is not None
    assert closed.outcome.kind is OutcomeKind.TIMED_OUT
    assert "1 of at least 2" in closed.outcome.detail


def test_time_without_possible_members_does_not_count() -> None:
    job = Job("a", min_nodes=2, expected=1, join_timeout_seconds=600).round(1).idle()
    job.later(3600).idle().bounds(min_nodes=2, expected=2).idle().later(599).idle()
    assert job.later(1).act().state is CLOSED


def test_running_job_does_not_time_out() -> None:
    Job("a", "b", expected=2).sealed("a", "b").idle().later(1e6).idle()


# -- frozen ---------------------------------------------------------------------------


def test_fully_confirmed_round_is_final_at_once() -> None:
    job = confirm(frozen("a", "b"), "a").idle()
    current = confirm(job, "b").act()
    assert (current.number, current.state, current.ids) == (1, FINAL, ())
    assert (current.previous, current.nodes, current.world_size) == (1, 2, 2)
    assert (current.master_name, current.master_address) == ("a", "host-a")
    assert current.master_port == 20000
    assert job.roster(1) == seal(1, [job.stored(name).record for name in "ab"], 0, ceiling_nodes=2)
    assert job.read(Roster, KEYS.seats) == job.read(Roster, KEYS.roster(1))


def test_confirmation_of_another_revision_does_not_count() -> None:
    job = frozen("a", "b")
    stale = job.view().round
    assert stale is not None
    confirm(job, "a").change("b", confirmed=stale.modified - 1).idle()
    job.change("b", confirmed=stale.modified + 1).idle()
    assert confirm(job, "b").act().state is FINAL


def test_silent_members_are_dropped_after_confirm_timeout() -> None:
    job = confirm(frozen("a", "b", "c", confirm_seconds=5), "a", "c").later(4.9).idle()
    assert job.later(0.1).act().state is FINAL
    assert [assignment.name for assignment in job.roster(1).seats] == ["a", "c"]


def test_vanished_member_is_dropped_without_waiting() -> None:
    job = confirm(frozen("a", "b", "c"), "a", "c").idle().gone("b")
    assert job.act().state is FINAL
    assert job.roster(1).world_size == 2


def test_member_leaving_instead_of_confirming_is_dropped() -> None:
    job = confirm(frozen("a", "b"), "a").change("b", state=LEAVING)
    assert job.act().state is FINAL
    assert job.roster(1).world_size == 1


def test_confirmed_members_form_a_legal_size() -> None:
    job = confirm(frozen("a", "b", "c", increment=2), "a", "b").later(6)
    job.act()
    assert [assignment.name for assignment in job.roster(1).seats] == ["a"]


def test_too_few_confirmations_open_a_new_round() -> None:
    job = confirm(frozen("a", "b", min_nodes=2), "a").later(6)
    again = job.act()
    assert (again.number, again.state, again.ids) == (2, JOINABLE, ())
    assert (again.cause.kind, again.cause.members) == (CauseKind.UNCONFIRMED, ("b",))
    assert again.previous == 0
    assert 1 not in job.view().rosters


@pytest.mark.parametrize(("failures", "penalty"), [(1, 15), (2, 30), (3, 60)])
def test_silent_member_counts_again_after_15_30_60_seconds(failures: int, penalty: int) -> None:
    """`b` never confirms: `a` runs alone until `b` counts as a newcomer again."""
    job = Job("a", "b", expected=2, keep_alive_seconds=100.0).round(1)
    for turn in range(1, failures + 1):
        assert job.act().ids == ids("ab")
        confirm(job, "a").idle().later(5)
        assert job.act().state is FINAL
        waits = [15, 30, 60][turn - 1]
        job.change("a", state=MemberState.RUNNING, round=turn, confirmed=0, start_ms=1)
        job.act()  # the start is recorded
        job.later(waits - 0.1).idle()
        if turn < failures:
            assert job.later(0.1).act().cause.kind is CauseKind.JOIN
            job.change("a", state=MemberState.WAITING, round=turn)
    assert penalty == waits
    assert job.later(0.1).act().cause.kind is CauseKind.JOIN


def test_failure_to_confirm_counts_once_while_etcd_refuses_the_seal() -> None:
    """Each refused write is decided again, and its members cannot write either."""
    job = confirm(frozen("a", "b", keep_alive_seconds=100.0), "a").idle().later(5)
    for _ in range(30):
        assert job.decide() is not None
        job.later(0.01)
    assert job.act().state is FINAL
    job.change("a", state=MemberState.RUNNING, round=1, confirmed=0, start_ms=1)
    job.act()  # the start is recorded
    job.later(14).idle()
    assert job.later(1).act().cause == Cause(CauseKind.JOIN, ("b",))


@pytest.mark.parametrize(
    ("pause", "penalties"),
    [
        (0.0, [15, 30, 60, 120, 240, 480, 900, 900]),
        (FORGIVEN_SECONDS - 1, [15, 30]),
        (FORGIVEN_SECONDS, [15, 15]),
    ],
)
def test_penalties_of_a_silent_member_are_bounded_and_end(
    pause: float, penalties: list[float]
) -> None:
    silenced, timers = SilentMembers(), Timers()
    now = 1000.0
    for asked, seconds in enumerate(penalties):
        silenced.silence("b", asked, now)
        timers.begin_step(now + seconds - 0.1)
        assert silenced.ids(timers) == {"b"}
        assert timers.wake == now + seconds
        now += seconds
        timers.begin_step(now)
        assert silenced.ids(timers) == set()
        now += pause


def test_penalty_of_a_member_that_is_always_silent_does_not_overflow() -> None:
    silenced = SilentMembers()
    for asked in range(2000):
        silenced.silence("b", asked, 1000.0)


def test_silent_member_is_included_if_no_round_is_possible_without_it() -> None:
    job = Job("a", "b", min_nodes=2, max_nodes=2, expected=2).round(1)
    job.act()
    confirm(job, "a").idle().later(5)
    again = job.act()
    assert (again.number, again.state) == (2, JOINABLE)
    assert job.act().ids == ids("ab")


def test_round_number_is_sealed_once() -> None:
    """Even if another member sealed it and the round's own record was lost."""
    job = confirm(frozen("a", "b"), "a", "b")
    act = job.decide()
    assert act is not None
    job.put(KEYS.roster(1), Roster(1, 0, "", 0, ()))
    assert not job.commit(act.txn).succeeded


def test_records_ten_rounds_old_are_deleted_with_the_seal() -> None:
    job = Job("a", "b", max_nodes=2)
    number = 12
    for old in range(1, number):
        job.put(KEYS.roster(old), seal(old, [a_member("a")], 0)).failure("a", round=old)
        job.put(KEYS.history(old), History(old, Round(old, FINAL, job_cause()).cause, 1))
        job.done("a", round=old)
    job.round(number, FROZEN, ids=ids("ab"), previous=number - 1)
    confirm(job, "a", "b").act()
    view = job.view()
    kept = set(range(number - KEPT_ROUNDS + 1, number))
    assert set(view.rosters) == kept | {number}
    assert set(view.histories) == kept | {number}
    assert {old for old, found in view.failures.items() if found} == kept
    assert {old for old, found in view.dones.items() if found} == kept


def test_seal_deletes_the_records_of_a_round_once() -> None:
    """etcd refuses a transaction of more than 128 operations: no round would be sealed again."""
    job = Job("a", "b", min_nodes=2, max_nodes=2, max_restarts=1000).sealed("a", "b").idle()
    for number in range(1, 4 * KEPT_ROUNDS):
        job.failure("a", round=number, step=number).done("b", round=number).later(100).act()
        for name in ("a", "b"):
            job.change(name, state=MemberState.WAITING, round=number)
        assert job.act().state is FROZEN
        seal_of = confirm(job, "a", "b").decide()
        assert seal_of is not None
        deleted = [op.key for op in seal_of.txn.success if isinstance(op, Delete)]
        job.act()
        for name in ("a", "b"):
            job.change(name, state=MemberState.RUNNING, round=number + 1)
        job.act()
    old = number + 1 - KEPT_ROUNDS
    keys = (KEYS.roster(old), KEYS.history(old), KEYS.failures(old), KEYS.dones(old))
    assert sorted(deleted) == sorted(keys)


def test_seal_deletes_no_more_than_a_transaction_holds() -> None:
    job = Job("a", "b", max_nodes=2)
    number, many = 100, range(1, 80)
    for old in many:
        job.failure("a", round=old)
    job.round(number, FROZEN, ids=ids("ab"), previous=number - 1)
    confirm(job, "a", "b").act()
    assert len(job.view().failures) == len(many) - DELETES_PER_TXN


def job_cause() -> Any:
    return Job("a").round(1).current().cause


# -- costs of a round -----------------------------------------------------------------


def test_detection_time_of_a_second_loss_does_not_count_from_the_first() -> None:
    """The member's link shows no symptom: it reports that it stopped its workers."""
    job = Job("a", "b", min_nodes=2, max_nodes=2).sealed("a", "b").idle()
    for number in (1, 2):
        job.later(100).change("b", state=WAITING, round=number)
        assert job.act().cause.kind is CauseKind.LOSS
        assert job.change("a", state=WAITING, round=number).act().state is FROZEN
        confirm(job, "a", "b").act()
        assert job.read(History, KEYS.history(number + 1)).detect_ms == 0
        for name in ("a", "b"):
            job.change(name, state=RUNNING, round=number + 1)
        job.act()


def test_history_of_a_recovery() -> None:
    job = Job("a", "b", "c", expected=2).sealed("a", "b", "c").idle().later(100)
    lose_link(job.coordinator.peers, identity("c"), job.now - 0.25)
    job.gone("c", proven=True).act()
    job.idle().later(0.5).change("a", state=WAITING).change("b", state=WAITING)
    assert job.act().state is FROZEN
    job.decide()
    confirm(job.later(0.125), "a", "b").act()
    history = job.read(History, KEYS.history(2))
    assert history.confirm_ms == 125
    assert (history.number, history.cause.kind, history.nodes) == (2, CauseKind.LOSS, 2)
    assert (history.detect_ms, history.stop_ms, history.join_ms) == (250, 500, 0)
    assert history.start_ms is None
    assert history.final_ms == job.clock.utc_ms


def test_start_time_is_recorded_when_slowest_workers_run() -> None:
    job = started().change("a", start_ms=300).change("b", state=WAITING, round=0).idle()
    job.change("b", state=RUNNING, round=1, start_ms=200).act()
    assert job.read(History, KEYS.history(1)).start_ms == 300


def test_cold_starts_are_recorded_with_the_start_in_one_write() -> None:
    job = Job("a", "b", "c", expected=3).sealed("a", "b", "c")
    job.put(KEYS.history(1), History(1, job.current().cause, 3))
    for member in "bc":
        job.change(member, state=WAITING, round=0)
    job.change("a", start_ms=300, cold="a shell").idle()
    job.change("b", state=RUNNING, round=1, start_ms=900, cold="the command changed").idle()
    job.change("c", state=RUNNING, round=1, start_ms=2000, cold="").act()
    history = job.read(History, KEYS.history(1))
    assert (history.start_ms, history.cold_nodes) == (2000, 2)
    assert history.cold_reason == "the command changed", "of the slowest that started cold"
    job.change("c", cold="started again").idle()


@pytest.mark.parametrize(("cold", "known"), [("", 0), (None, None)], ids=["warm", "nobody says"])
def test_warm_round_has_no_cold_nodes(cold: str | None, known: int | None) -> None:
    job = started().change("a", start_ms=300, cold=cold).change("b", start_ms=200, cold=cold)
    job.act()
    history = job.read(History, KEYS.history(1))
    assert (history.cold_nodes, history.cold_reason) == (known, "")


def test_first_step_time_is_recorded_when_slowest_member_made_it() -> None:
    job = started().change("a", start_ms=300).change("b", start_ms=200)
    job.act()
    job.change("a", first_step_ms=900).idle()
    job.change("b", first_step_ms=1500).act()
    history = job.read(History, KEYS.history(1))
    assert (history.start_ms, history.first_step_ms) == (300, 1400), "200 + 1500 after `final`"
    job.change("a", first_step_ms=2000, start_ms=900).idle()
    job.idle()


# -- after a loss of etcd's data ------------------------------------------------------


def test_round_numbers_continue_after_etcd_lost_its_data() -> None:
    job = Job("a", "b", keep_alive_seconds=5).change("b", known=7).idle().later(4.9).idle()
    current = job.later(0.1).act()
    assert (current.number, current.state, current.previous) == (8, JOINABLE, 7)
    assert current.cause.kind is CauseKind.DATA_LOST


def test_remembered_final_round_is_restored_unchanged() -> None:
    job = Job("a", "b").change("a", known=7).change("b", known=7)
    roster = seal(7, [a_member("a"), a_member("b")], 1)
    final = Round(7, FINAL, job_cause(), previous=7, charged=(2,), pending=(6,), nodes=2)
    job.coordinator.last = (final, roster)
    restored = job.idle().later(5).act()
    assert (restored.number, restored.state, restored.charged) == (7, FINAL, (2,))
    assert job.read(Roster, KEYS.roster(7)) == job.read(Roster, KEYS.seats) == roster
    assert restored.pending == (), "the failures to judge are lost with the data"
    job.idle().later(60).idle()


def test_remembered_round_older_than_known_one_is_not_restored() -> None:
    job = Job("a", "b").change("a", known=7).change("b", known=9)
    roster = seal(7, [a_member("a")], 0)
    job.coordinator.last = (Round(7, FINAL, job_cause()), roster)
    assert (job.idle().later(5).act().number, job.current().state) == (10, JOINABLE)


@pytest.mark.parametrize("state", [JOINABLE, FROZEN, FINAL])
def test_round_older_than_a_known_one_is_opened_anew(state: RoundState) -> None:
    job = Job("a", "b").round(1, state, ids=ids("ab")).change("b", known=7)
    current = job.act()
    assert (current.number, current.state, current.ids) == (8, JOINABLE, ())
    assert (current.cause.kind, current.previous) == (CauseKind.DATA_LOST, 7)


def test_round_after_an_unknown_one_waits_for_its_members() -> None:
    """The members outlived etcd, and one is slower to register than the others."""
    job = Job("a", "b", keep_alive_seconds=5, expected=2).round(1).change("b", known=7)
    assert job.act().number == 8
    job.idle().later(4.9).idle()
    assert job.later(0.1).act().state is FROZEN


def test_member_arriving_long_after_a_loss_is_not_the_last() -> None:
    job = Job("a", "b", keep_alive_seconds=5, expected=2).change("b", known=7).idle().later(5)
    assert job.act().number == 8
    job.later(1000).change("a", known=20)
    assert job.act().number == 21
    job.idle().later(4.9).idle()
    assert job.later(0.1).act().state is FROZEN


def test_members_already_waited_for_are_not_waited_for_again() -> None:
    job = Job("a", "b", keep_alive_seconds=5, expected=2).change("b", known=7).idle().later(5)
    assert job.act().number == 8
    assert job.act().state is FROZEN


@pytest.mark.parametrize(
    ("state", "number", "anew"),
    [(JOINABLE, 1, True), (JOINABLE, 0, False), (FROZEN, 1, True), (FINAL, 1, True)],
)
def test_used_round_number_is_not_sealed_again(state: RoundState, number: int, anew: bool) -> None:
    """A newcomer opened round 1 in an empty store; then b came back, which ran a round 1."""
    job = Job("a", "b", expected=3)
    if state is FINAL:
        job.sealed("a")
    else:
        job.round(1, state, ids=ids("a"))
    job.change("b", state=RUNNING if anew else WAITING, round=number, known=number)
    act = job.decide()
    assert (act is not None and "members know" in act.note) is anew
    if act and anew:
        job.commit(act.txn)
        assert (job.current().number, job.current().previous) == (2, 1)


def test_closed_round_is_not_reopened_for_a_higher_known_number() -> None:
    Job("a", "b").round(1, CLOSED).change("b", known=7).idle()


# -- after the end --------------------------------------------------------------------


def test_closed_round_stays_unchanged() -> None:
    job = Job("a", "b").sealed("a", "b").round(1, CLOSED).failure("a").gone("b")
    job.idle().later(1e6).idle()


def test_time_of_the_takeover_is_that_of_the_first_decision() -> None:
    """A member that was never heard is judged from then on."""
    job = Job("a", "b").sealed("a", "b").idle()
    began = job.now
    job.later(5).idle()
    assert job.coordinator.timers.known(TOOK_OVER) == began
