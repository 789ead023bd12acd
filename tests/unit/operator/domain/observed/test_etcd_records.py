"""Conversion of stored bytes to the view used by plan and status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from elasticjob_operator.domain.observed.etcd_records import (
    closed_round,
    decode_records,
    is_progress_only,
    job_of,
    prefix_of,
    rendezvous_view,
)
from elasticjob_operator.domain.observed.state import RendezvousView, StopReason
from elasticjob_operator.domain.plan.actions import CloseRendezvous
from elasticjob_operator.model import RendezvousState
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import HeldBack
from elasticjob_rendezvous.protocol.kv import KeyValue, RangeResult, WatchBatch
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    LossRow,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
    Save,
    Snapshots,
    SnapshotTrouble,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import seal
from elasticjob_rendezvous.protocol.records.timings import History

PREFIX = job_prefix("team", "uid", 2)
KEYS = Keys(PREFIX)
CAUSE = Cause(CauseKind.LOSS, ("pod-1",), "gone")


def member(name: str, state: MemberState = MemberState.RUNNING, session: str = "s") -> Member:
    return Member(f"id-{name}", session, name, "10.0.0.1", 1, slots=2, state=state, round=3)


def kv(key: str, record: object, revision: int = 1) -> KeyValue:
    return KeyValue(key, encode(record), revision, revision)


def failure(number: int, rank: int, kind: FailureClass, at_ms: int) -> KeyValue:
    record = Failure(number, f"m{rank}", f"pod-{rank}", rank, 0, kind, at_ms, exit_code=1)
    return kv(KEYS.failure(number, record.member), record)


def final(**fields: Any) -> Round:
    members = [member("pod-0"), member("pod-2")]
    roster = seal(3, members, 0)
    return Round(
        3,
        RoundState.FINAL,
        CAUSE,
        nodes=2,
        world_size=roster.world_size,
        master_name="pod-0",
        since_ms=1_000_500,
        **fields,
    )


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        (KEYS.round, PREFIX),
        (KEYS.session("m", "s"), PREFIX),
        ("/elasticjob/stray", ""),
        ("/elasticjob/team/uid/2", ""),
        ("/other/team/uid/2/round", ""),
    ],
)
def test_record_prefix_of_a_key(key: str, prefix: str) -> None:
    assert prefix_of(key) == prefix


@pytest.mark.parametrize(
    ("prefix", "job"),
    [
        ("/elasticjob/team/uid/2/", ("team", "uid", 2)),
        ("/elasticjob/team/uid/two/", None),
        ("/elasticjob/team/uid/²/", None),
        ("/elasticjob/team/uid/" + "9" * 5000 + "/", None),  # more digits than `int` accepts
        ("", None),
    ],
)
def test_job_of_a_prefix(prefix: str, job: tuple[str, str, int] | None) -> None:
    assert job_of(prefix) == job


def test_invalid_timestamp() -> None:
    found = decode_records(PREFIX, [kv(KEYS.round, replace(final(), since_ms=10**18))])
    assert rendezvous_view(found).since is None


def test_malformed_round_can_be_closed() -> None:
    outcome = Outcome(OutcomeKind.STOPPED, "Deleted")
    value = closed_round(KeyValue(KEYS.round, b'{"number":"x"}', 1, 1), outcome, 5)
    assert value is not None
    found = decode(Round, KEYS.round, value)
    assert (found.state, found.outcome, found.since_ms) == (RoundState.CLOSED, outcome, 5)


def test_empty_store_is_an_empty_rendezvous() -> None:
    assert rendezvous_view(decode_records(PREFIX, [])) == RendezvousView()


def test_final_round() -> None:
    members = [member("pod-0"), member("pod-2"), member("pod-10", MemberState.WAITING)]
    view = rendezvous_view(
        decode_records(
            PREFIX,
            [
                kv(KEYS.round, final(charged=(1, 2), counts=Counts(3, 4, 5, 6, 7))),
                kv(KEYS.roster(3), seal(3, members[:2], 2)),
                kv(KEYS.history(3), History(3, CAUSE, 2, stop_ms=4)),
                kv(KEYS.history(2), History(2, Cause(CauseKind.START), 3)),
                *(kv(KEYS.session(m.id, "s"), m, 10 - i) for i, m in enumerate(members)),
            ],
        )
    )
    assert (view.state, view.round, view.nodes) == (RendezvousState.FINAL, 3, 2)
    assert (view.world_size, view.master, view.waiting) == (4, "pod-0", 1)
    assert view.since == datetime.fromtimestamp(1000.5, UTC)
    assert view.cause == Cause(CauseKind.LOSS, ("pod-1",), "gone")
    assert {m.name: view.ranks.get(m.id) for m in view.members} == {
        "pod-0": 0,
        "pod-2": 1,
        "pod-10": None,
    }
    assert [(r.number, r.cause.kind, r.stop_ms) for r in view.rounds] == [
        (2, "start", None),
        (3, "loss", 4),
    ]
    assert view.failures_charged == 2
    assert view.interruptions == Counts(3, 4, 5, 6, 7)
    assert view.outcome is None


def test_round_being_formed_has_neither_ranks_nor_master() -> None:
    forming = Round(4, RoundState.FROZEN, CAUSE, 3, ids=("a", "b", "c"), nodes=2, master_name="x")
    stored_roster = seal(3, [member("pod-0")], 0)
    view = rendezvous_view(
        decode_records(
            PREFIX,
            [
                kv(KEYS.round, forming),
                kv(KEYS.roster(3), stored_roster),
                kv(KEYS.session("id-pod-0", "s"), member("pod-0")),
            ],
        )
    )
    assert (view.state, view.nodes, view.world_size, view.master) == ("frozen", 3, 0, None)
    assert view.members == (member("pod-0"),)
    assert view.ranks_by_name() == {}


def test_newer_of_two_sessions_of_a_member_counts() -> None:
    older = member("pod-0", MemberState.RUNNING, "old")
    newer = member("pod-0", MemberState.LEAVING, "new")
    for order in ((0, 1), (1, 0)):
        kvs = [
            kv(KEYS.session("id-pod-0", "old"), older, 5),
            kv(KEYS.session("id-pod-0", "new"), newer, 9),
        ]
        found = decode_records(PREFIX, [kvs[i] for i in order])
        assert found.members == (newer,)


@pytest.mark.parametrize(
    ("charged", "kvs", "culprit"),
    [
        # The victims of a lost node failed too, but that is no failure of the job.
        ((), [failure(3, 0, FailureClass.PEER_ABORT, 5)], None),
        # No member was lost, so the aborted collective was charged in the end.
        ((3,), [failure(3, 0, FailureClass.PEER_ABORT, 5)], 0),
        # The cause is shown, though its consequence came first.
        (
            (3,),
            [
                failure(3, 0, FailureClass.PEER_ABORT, 5),
                failure(3, 1, FailureClass.USER_ERROR, 6),
            ],
            1,
        ),
        # The latest round that failed counts.
        (
            (1, 3),
            [
                failure(1, 0, FailureClass.USER_ERROR, 1),
                failure(3, 2, FailureClass.SIGNAL, 9),
            ],
            2,
        ),
        # A self-explanatory failure is shown before it is charged.
        ((), [failure(3, 1, FailureClass.OUT_OF_MEMORY, 5)], 1),
    ],
)
def test_first_failure_of_charged_round(
    charged: tuple[int, ...], kvs: list[KeyValue], culprit: int | None
) -> None:
    view = rendezvous_view(decode_records(PREFIX, [kv(KEYS.round, final(charged=charged)), *kvs]))
    found = view.first_failure
    assert (found.rank if found else None) == culprit


def test_first_failure_of_ended_job_is_the_one_in_its_outcome() -> None:
    """One of several concurrent failures may be reported after the job was closed."""
    blamed = failure(3, 2, FailureClass.USER_ERROR, 9)
    told_later = failure(3, 0, FailureClass.USER_ERROR, 5)
    of_no_account = failure(4, 1, FailureClass.SIGNAL, 1)
    outcome = Outcome(OutcomeKind.FAILED, "rank 2 …", "m2")
    ended = replace(final(charged=(3,)), state=RoundState.CLOSED, outcome=outcome)
    found = decode_records(PREFIX, [kv(KEYS.round, ended), blamed, told_later, of_no_account])
    first = rendezvous_view(found).first_failure
    assert first is not None
    assert (first.round, first.rank) == (3, 2)


def test_malformed_records_are_named_and_skipped() -> None:
    good = member("pod-0")
    found = decode_records(
        PREFIX,
        [
            KeyValue(KEYS.round, b"[]", 1, 1),
            KeyValue(KEYS.session("x", "s"), b"\xff", 2, 2),
            kv(KEYS.session("id-pod-0", "s"), good, 3),
            KeyValue(PREFIX + "from/a/newer/release", b"?", 4, 4),
        ],
    )
    assert found.members == (good,)
    assert found.round is None
    assert len(found.malformed) == 2
    assert KEYS.round in found.malformed[0]


def test_closing_keeps_the_round_and_closes_once() -> None:
    outcome = CloseRendezvous(0, OutcomeKind.STOPPED, StopReason.SUSPENDED).outcome
    first = closed_round(kv(KEYS.round, final()), outcome, 77)
    assert first is not None
    written = decode(Round, KEYS.round, first)
    assert (written.number, written.state, written.since_ms) == (3, RoundState.CLOSED, 77)
    assert written.nodes == 2
    assert closed_round(KeyValue(KEYS.round, first, 1, 2), outcome, 78) is None

    view = rendezvous_view(decode_records(PREFIX, [KeyValue(KEYS.round, first, 1, 2)]))
    assert view.suspended
    assert view.outcome is not None
    assert view.outcome.kind is OutcomeKind.STOPPED


@pytest.mark.parametrize(
    ("outcome", "view"),
    [
        (
            CloseRendezvous(0, OutcomeKind.STOPPED, StopReason.LAUNCH_FAILED, "a: b").outcome,
            Outcome(OutcomeKind.STOPPED, "a: b", reason=StopReason.LAUNCH_FAILED),
        ),
        (
            Outcome(OutcomeKind.STOPPED, "LaunchFailed: a: b"),
            Outcome(OutcomeKind.STOPPED, "a: b", reason=StopReason.LAUNCH_FAILED),
        ),
        (
            Outcome(OutcomeKind.STOPPED, "Suspended"),
            Outcome(OutcomeKind.STOPPED, "", reason=StopReason.SUSPENDED),
        ),
        (
            Outcome(OutcomeKind.STOPPED, "x: y", reason="Suspended"),
            Outcome(OutcomeKind.STOPPED, "x: y", reason=StopReason.SUSPENDED),
        ),
        (
            Outcome(OutcomeKind.STOPPED, "by hand"),
            Outcome(OutcomeKind.STOPPED, "by hand"),
        ),
        (
            Outcome(OutcomeKind.FAILED, "Suspended: said by a worker"),
            Outcome(OutcomeKind.FAILED, "Suspended: said by a worker"),
        ),
    ],
    ids=["typed", "of the previous release", "without text", "other text", "by hand", "failed"],
)
def test_outcome_reason_is_typed(outcome: Outcome, view: Outcome) -> None:
    current = replace(final(), state=RoundState.CLOSED, outcome=outcome)
    assert rendezvous_view(decode_records(PREFIX, [kv(KEYS.round, current)])).outcome == view


@pytest.mark.parametrize("reasons", [(), ("SIGTERM", "Terminating")], ids=["old", "new"])
def test_cause_of_a_leave_has_its_reasons_typed(reasons: tuple[str, ...]) -> None:
    cause = Cause(CauseKind.LEAVE, ("pod-1",), "SIGTERM; Terminating", reasons=reasons)
    current = replace(final(), cause=cause)
    kvs = [kv(KEYS.round, current), kv(KEYS.history(3), History(3, cause, 2))]
    view = rendezvous_view(decode_records(PREFIX, kvs))
    assert view.cause is not None
    assert view.cause.reasons == view.rounds[0].cause.reasons == ("SIGTERM", "Terminating")


def test_previous_release_reads_reason_of_new_record() -> None:
    outcome = CloseRendezvous(0, OutcomeKind.STOPPED, StopReason.SUSPENDED).outcome
    assert outcome.detail == "Suspended"


def told(name: str = "pod-0", **fields: Any) -> KeyValue:
    record = replace(member(name), **fields)
    return kv(KEYS.session(record.id, record.session), record)


@pytest.mark.parametrize(
    ("before", "after", "mere"),
    [
        (told(step=1), told(step=2), True),
        (told(), told(step=2, checkpoint_step=2), True),
        (told(step=1), told(step=2, state=MemberState.LEAVING), False),
        (told(step=1), told(step=2, round=4), False),
        (told(), told(round=4), False),
        (None, told(step=2), False),
        (told(snapshots=Snapshots(4)), told(step=2, snapshots=Snapshots(5, stored=4)), True),
        (told(step=1), told(step=2, snapshots=Snapshots(5)), False),
        (told(snapshots=Snapshots(4)), told(step=2, snapshots=Snapshots(5, replicated=4)), False),
        (
            told(snapshots=Snapshots(4)),
            told(step=2, snapshots=Snapshots(4, trouble=SnapshotTrouble.NO_ROOM)),
            False,
        ),
        (
            told(snapshots=Snapshots(4)),
            told(step=2, snapshots=Snapshots(4, storage_error=5)),
            False,
        ),
        (told(step=1), replace(told(step=2), value=b'{"step":'), False),
        (told(step=1), replace(told(step=2), create_revision=7), False),
        (told(step=1), replace(told(step=2), value=told(step=2).value + b" " * 9000), False),
    ],
)
def test_progress_only_change_is_distinguished_from_other_changes(
    before: KeyValue | None, after: KeyValue, mere: bool
) -> None:
    assert is_progress_only(before, after) is mere


def test_record_of_a_member_below_the_key_of_another_is_malformed() -> None:
    """Otherwise one pod's uid would stand for any number of members."""
    record = member("pod-0")
    kvs = [
        KeyValue(KEYS.session(name, "s"), encode(record), at, at)
        for at, name in enumerate(("a", record.id, "b"), 1)
    ]
    found = decode_records(PREFIX, kvs)
    assert found.members == (record,)
    assert len(found.malformed) == 2


def test_steps_and_wait_reason_are_read() -> None:
    here = replace(member("pod-0"), step=120, checkpoint_step=100)
    late = replace(member("pod-1", MemberState.WAITING), round=0)
    current = Round(3, RoundState.FINAL, CAUSE, nodes=1)
    bounds = RendezvousParams(1, 4, scale_up_wait_seconds=600.0)
    view = rendezvous_view(
        decode_records(
            PREFIX,
            [
                kv(KEYS.bounds, bounds),
                kv(KEYS.round, current),
                *(kv(KEYS.session(one.id, one.session), one) for one in (here, late)),
            ],
        )
    )
    assert view.waiting == 1
    assert view.waiting_reason == "newcomers wait for the next checkpoint, for 600 s at most"
    assert view.members == (here, late)


def test_save_before_the_end_of_the_round_is_the_reason_for_the_wait_of_a_newcomer() -> None:
    here, late = member("pod-0"), replace(member("pod-1", MemberState.WAITING), round=0)
    cause = Cause(CauseKind.JOIN, ("pod-1",))
    current = Round(3, RoundState.FINAL, CAUSE, nodes=1, save=Save(cause, 60.0))
    view = rendezvous_view(
        decode_records(
            PREFIX,
            [
                kv(KEYS.bounds, RendezvousParams(1, 4)),
                kv(KEYS.round, current),
                *(kv(KEYS.session(one.id, one.session), one) for one in (here, late)),
            ],
        )
    )
    assert view.waiting_reason == (
        "the workers save after their next step, and stop after 60 s at most"
    )


def lost_again(
    *members: Member, bounds: RendezvousParams | None = None, **fields: Any
) -> RendezvousView:
    """Return the view of round 3 with pod-0, after pod-1 was lost again in round 2."""
    seats = seal(3, [member("pod-0")], 0)
    before = seal(2, [member("pod-0"), member("pod-1")], 0)
    row = LossRow("id-pod-1", "pod-1", 2, 2, 1_000, 13_000)
    current = Round(3, RoundState.FINAL, CAUSE, nodes=1, losses=(row,))
    return rendezvous_view(
        decode_records(
            PREFIX,
            [
                kv(KEYS.bounds, bounds or RendezvousParams(1, 2)),
                kv(KEYS.round, replace(current, **fields)),
                *(kv(KEYS.roster(one.number), one) for one in (before, seats)),
                *(
                    kv(KEYS.session(one.id, one.session), one)
                    for one in (member("pod-0"), *members)
                ),
            ],
        )
    )


def test_member_that_was_lost_again_is_held_back_and_named() -> None:
    view = lost_again(member("pod-1", MemberState.WAITING))
    assert view.held_back == (HeldBack("pod-1", 2, 12, 5.0),)
    assert view.waiting_reason == (
        "pod-1 was lost 2 times in 12 s without progress, so it waits for 5 s after it "
        "registers, unless other nodes need it"
    )


def test_wait_of_a_member_that_was_lost_again_includes_the_next_checkpoint() -> None:
    bounds = RendezvousParams(1, 2, scale_up_wait_seconds=600.0)
    view = lost_again(member("pod-1", MemberState.WAITING), bounds=bounds)
    assert view.waiting_reason.endswith(
        "unless other nodes need it; newcomers wait for the next checkpoint, for 600 s at most"
    )


def test_member_that_was_lost_again_is_not_held_back_while_it_is_away_or_no_round_is_final() -> (
    None
):
    waits = member("pod-1", MemberState.WAITING)
    for view in (lost_again(), lost_again(waits, state=RoundState.JOINABLE)):
        assert (view.held_back, view.waiting_reason) == ((), "")


def test_ids_of_lost_members_are_known_by_round_and_name() -> None:
    assert lost_again().lost == {(2, "pod-1"): "id-pod-1"}
    assert lost_again(cause=Cause(CauseKind.JOIN, ("pod-1",))).lost == {}


class Scripted:
    """Etcd with one member, whose later records come over the watch."""

    def __init__(self, *values: KeyValue) -> None:
        self._first, *self._later = values

    async def watch(self, targets: object) -> AsyncGenerator[WatchBatch, None]:
        yield WatchBatch(1, (), 1)
        for value in self._later:
            yield WatchBatch(value.mod_revision, (value,), 1)
        await asyncio.Event().wait()

    async def range(self, target: object) -> RangeResult:
        return RangeResult(1, 1, (self._first,))

    async def page(self, target: object, start: str, revision: int) -> RangeResult:
        return await self.range(target)


def test_progress_triggers_reconcile_at_a_limited_rate() -> None:
    asyncio.run(_a_member_progresses())


async def _a_member_progresses() -> None:
    words = [KeyValue(told().key, told(step=n).value, 1, n) for n in range(1, 40)]
    news = KeyValue(told().key, told(step=40, state=MemberState.LEAVING).value, 1, 40)
    cache = InformerCache(Scripted(*words, news))
    seen: list[int] = []

    async def look() -> None:
        async for _ in cache.changes():
            found = cache.records(PREFIX)
            assert found is not None
            seen.append(found.members[0].step)

    tasks = [asyncio.create_task(cache.run()), asyncio.create_task(look())]
    async with asyncio.timeout(60):
        while 40 not in seen:
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(seen) <= 3, "the range, one word of progress, the news"
