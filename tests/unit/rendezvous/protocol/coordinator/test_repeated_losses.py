"""Back-off of members that are lost again without progress."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator import repeated_losses
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import (
    LONGEST_DELAY_SECONDS,
    LONGEST_SHARED_DELAY_SECONDS,
    MAX_ROWS,
    TRAINED_SECONDS,
    after_loss,
    delay_seconds,
    explained,
)
from elasticjob_rendezvous.protocol.coordinator.round_writes import KEPT_ROUNDS
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    ABORTED,
    Cause,
    CauseKind,
    LossRow,
    Member,
    MemberState,
    Round,
    RoundState,
    cause_with_reasons,
    reasons_of,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster, seal
from elasticjob_rendezvous.protocol.replica import Versioned
from tests.unit.rendezvous.builders import KEYS, UTC_MS, Job, a_member, a_round, identity

WAITING, RUNNING = MemberState.WAITING, MemberState.RUNNING
LEASE = 5.0
LOSS = CauseKind.LOSS


def row(name: str, times: int, round: int = 1, **fields: Any) -> LossRow:
    return LossRow(identity(name), name, times, round, **{"first_ms": UTC_MS, **fields})


def ids(*names: str) -> tuple[str, ...]:
    return tuple(identity(name) for name in names)


def here(*names: str, session: str = "s1") -> dict[str, Versioned[Member]]:
    """Return registered members."""
    members = (a_member(name, session=session) for name in names)
    return {member.id: Versioned("", member, 1, 1) for member in members}


def roster(*names: str, number: int = 1) -> Roster:
    return seal(number, [a_member(name) for name in names], 0)


def lost(*names: str) -> Cause:
    return Cause(LOSS, names)


# -- rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "seconds"), [(0, 0), (1, 0), (2, 5), (3, 10), (4, 20), (7, 160), (8, 300), (900, 300)]
)
def test_delay_is_a_lease_from_the_second_loss_on_and_doubles(times: int, seconds: float) -> None:
    assert delay_seconds(row("a", times), RendezvousParams(1, 2)) == seconds
    assert LONGEST_DELAY_SECONDS == 300


def test_losses_of_a_member_are_counted_with_their_times() -> None:
    current = a_round(3, losses=(row("b", 1, 1), row("c", 4, 1)))
    found = after_loss(current, lost("b"), roster("a", "b", number=3), {}, UTC_MS + 9_000)
    assert found == (row("c", 4, 1), row("b", 2, 3, last_ms=UTC_MS + 9_000, session="s1"))
    (first,) = after_loss(a_round(3), lost("b"), roster("a", "b", number=3), {}, UTC_MS)
    assert first == row("b", 1, 3, last_ms=UTC_MS, session="s1")


@pytest.mark.parametrize("present", [(), ("b",)], ids=["absent", "returned"])
def test_end_of_one_session_is_one_loss_of_several_rounds(present: tuple[str, ...]) -> None:
    """A cut-off breaks round 3, and round 4, which still includes the member; then it is lost."""
    members = here(*present, session="s2")
    for numbers in ((3, 4), (4, 3)):
        losses: tuple[LossRow, ...] = ()
        for later, number in enumerate(numbers):
            seats, utc_ms = roster("a", "b", number=number), UTC_MS + later
            losses = after_loss(a_round(5, losses=losses), lost("b"), seats, members, utc_ms)
        assert losses == (row("b", 1, 4, last_ms=UTC_MS, session="s1"),)


def test_session_that_was_set_aside_is_the_same() -> None:
    aside = seal(4, [a_member("a"), a_member("b", session="s1~")], 0)
    known = (row("b", 2, 3, session="s1"),)
    (found,) = after_loss(a_round(5, losses=known), lost("b"), aside, {}, UTC_MS)
    assert found.times == 2


def test_each_cut_off_of_one_session_is_a_loss() -> None:
    """Its key stays: its launcher ended the workers, because nothing confirmed their round."""
    losses: tuple[LossRow, ...] = ()
    for number in (3, 4):
        seats = roster("a", "b", number=number)
        losses = after_loss(a_round(5, losses=losses), lost("b"), seats, here("b"), UTC_MS)
    assert losses == (row("b", 2, 4, last_ms=UTC_MS),)
    (found,) = after_loss(
        a_round(6, losses=losses), lost("b"), roster("a", "b", number=5), {}, UTC_MS
    )
    assert found.times == 3


def test_loss_that_is_known_late_does_not_set_the_round_back() -> None:
    """The failure of round 3 was excused after the loss in round 4 was counted."""
    current = a_round(5, losses=(row("b", 2, 4, session="s0"),))
    (found,) = after_loss(current, lost("b"), roster("a", "b", number=3), {}, UTC_MS)
    assert (found.times, found.round) == (3, 4)


@pytest.mark.parametrize("kind", [kind for kind in CauseKind if kind is not LOSS])
def test_rounds_that_end_for_another_cause_count_no_loss(kind: CauseKind) -> None:
    assert after_loss(a_round(3), Cause(kind, ("b",)), roster("a", "b"), {}, UTC_MS) == ()


def test_member_without_rank_is_not_counted_as_lost() -> None:
    assert after_loss(a_round(3), lost("c"), roster("a", "b"), {}, UTC_MS) == ()
    assert after_loss(a_round(3), lost("b"), None, {}, UTC_MS) == ()


def test_loss_of_most_of_a_gang_is_not_counted() -> None:
    """An outage of etcd, or of the network, says nothing about a member."""
    assert after_loss(a_round(3), lost("a", "b"), roster("a", "b", "c"), {}, UTC_MS) == ()
    half = after_loss(a_round(3), lost("a", "b"), roster("a", "b", "c", "d"), {}, UTC_MS)
    assert [each.name for each in half] == ["a", "b"]


def test_number_of_rows_is_bounded_and_the_longest_stay() -> None:
    names = [f"old-{index}" for index in range(MAX_ROWS)]
    seats = roster("a", "b", *(f"new-{index}" for index in range(70)), number=3)
    many = tuple(row(name, 2) for name in names)
    present = here(*names)
    found = after_loss(a_round(3, losses=many), lost("a", "new-1"), seats, present, UTC_MS)
    assert found == many
    short = tuple(row(name, 1) for name in names)
    found = after_loss(a_round(3, losses=short), lost("a"), seats, present, UTC_MS)
    assert len(found) == MAX_ROWS
    assert [each.name for each in (found[0], found[-1])] == ["old-1", "a"]


def test_rows_of_absent_members_are_dropped_first() -> None:
    """Rows of replaced pods do not keep new ones out."""
    absent = tuple(row(f"old-{index}", 9) for index in range(MAX_ROWS - 1))
    current = a_round(3, losses=(*absent, row("here", 1)))
    seats = roster("a", "b", "c", "d", number=3)
    found = after_loss(current, lost("a", "b"), seats, here("here"), UTC_MS)
    assert [each.name for each in found[-3:]] == ["here", "a", "b"]
    assert found[:-3] == absent[2:]


@pytest.mark.parametrize(("number", "kept"), [(KEPT_ROUNDS + 1, True), (KEPT_ROUNDS + 2, False)])
@pytest.mark.parametrize("kind", [LOSS, CauseKind.LEAVE])
def test_row_of_an_absent_member_ends_with_the_rounds_kept(
    kind: CauseKind, number: int, kept: bool
) -> None:
    """A replaced pod has another id: no round trains with its row's member again."""
    current = a_round(number, losses=(row("old", 4, 1), row("here", 4, 1)))
    seats = roster("a", "b", number=number)
    found = after_loss(current, Cause(kind, ("b",)), seats, here("here"), UTC_MS)
    counted = ["b"] if kind is LOSS else []
    assert [each.name for each in found] == [*(["old"] if kept else []), "here", *counted]


class CountedSeats(tuple[RankAssignment, ...]):
    """Seats that count the loops over them."""

    loops = 0

    def __iter__(self) -> Iterator[RankAssignment]:
        self.loops += 1
        return super().__iter__()


@pytest.mark.parametrize(("times", "loops"), [(1, 0), (2, 1)])
def test_number_of_rows_does_not_multiply_the_loops_over_a_roster(times: int, loops: int) -> None:
    """Each decision of the coordinator of a large gang asks for these rows."""
    seats = CountedSeats(roster("a", "b", "c", number=3).seats)
    last = replace(roster("a", number=3), seats=seats)
    losses = (row("a", times, 3), row("b", times, 2), row("x", times, 2))
    found = tuple(repeated_losses.lost_again(a_round(4, losses=losses), last))
    assert found == ((losses[0], losses[2]) if times > 1 else ())
    assert seats.loops == loops


def test_record_of_the_previous_release_has_no_rows() -> None:
    stored = json.loads(encode(a_round(3)))
    assert "losses" not in stored
    assert decode(Round, "round", json.dumps(stored).encode()).losses == ()


def test_rows_survive_the_record() -> None:
    current = a_round(3, losses=(row("b", 2, 1, last_ms=UTC_MS + 1),))
    assert decode(Round, "round", encode(current)) == current


# -- texts ----------------------------------------------------------------------------


def test_cause_names_losses_time_and_delay() -> None:
    losses = (row("b", 3, 1, last_ms=UTC_MS + 40_000),)
    cause = explained(lost("b"), losses, roster("a", "b"), RendezvousParams(1, 2))
    said = (
        "3 times in 40 s without progress, so it waits for 10 s after it registers, unless other "
        "nodes need it"
    )
    assert (cause.kind, cause.members, cause.detail) == (LOSS, ("b",), said)
    assert reasons_of(cause) == (said,)


def test_cause_of_several_losses_names_each_member_that_was_lost_again() -> None:
    losses = (row("b", 2), row("c", 3), row("d", 1))
    seats = roster("a", "b", "c", "d", "e", "f")
    cause = explained(lost("b", "c", "d"), losses, seats, RendezvousParams(1, 6))
    assert [reason[:9] for reason in reasons_of(cause)] == ["b 2 times", "c 3 times"]


def test_cause_keeps_its_other_reasons() -> None:
    cause = cause_with_reasons(LOSS, ("b",), (ABORTED,))
    found = explained(cause, (row("b", 2),), roster("a", "b"), RendezvousParams(1, 2))
    assert reasons_of(found)[-1] == ABORTED
    assert len(reasons_of(found)) == 2


@pytest.mark.parametrize("least", [1, 2])
def test_cause_says_that_other_nodes_may_need_the_member(least: int) -> None:
    """The members that return before the next round are not known yet."""
    cause = explained(lost("b"), (row("b", 2),), roster("a", "b"), RendezvousParams(least, 2))
    assert cause.detail.endswith("5 s after it registers, unless other nodes need it")


@pytest.mark.parametrize(
    "losses", [(), (row("b", 1),), (row("c", 4),), (row("b", 2, round=0),)], ids=str
)
def test_cause_of_a_first_loss_has_no_further_text(losses: tuple[LossRow, ...]) -> None:
    assert explained(lost("b"), losses, roster("a", "b"), RendezvousParams(1, 2)) == lost("b")


# -- in the coordinator ---------------------------------------------------------------


def flapping(times: int = 1, names: str = "abc", **bounds: Any) -> Job:
    """Return a job in round 1, whose member c was lost this often without progress."""
    bounds = {"min_nodes": 1, "max_nodes": 3, "settle_seconds": 0, **bounds}
    job = Job("z", *names, **bounds)
    losses = (row("c", times, 0),) if times else ()
    return job.sealed("z", *names, losses=losses).idle()


def stop(job: Job, *names: str, round: int = 1) -> Job:
    for name in names:
        job.change(name, state=WAITING, round=round)
    return job


def lose(job: Job, number: int = 1, others: str = "zab") -> Job:
    """Lose c, and stop the other workers."""
    current = job.later(2).gone("c", proven=True).act()
    assert current.number == number + 1
    return stop(job, *others, round=number)


def train(job: Job, names: Iterable[str] = "zab", frozen: bool = False) -> Round:
    """Freeze, seal and start round 2 with these members."""
    current = job.current() if frozen else job.act()
    assert set(current.ids) == set(ids(*names))
    stored = job.view().round
    assert stored is not None
    for name in names:
        job.change(name, confirmed=stored.modified)
    assert job.act().state is RoundState.FINAL
    for name in names:
        job.change(name, state=RUNNING, round=2)
    current = job.act()
    job.idle()
    return current


def test_member_lost_again_is_left_out_until_it_was_registered_for_the_delay() -> None:
    job = lose(flapping(max_nodes=4)).member("c", session="s2", round=1)
    (found,) = job.current().losses
    assert (found.times, found.round) == (2, 1)
    assert train(job).nodes == 3
    job.later(LEASE - 0.1).idle()
    joined = job.later(0.1).act()
    assert (joined.number, joined.cause) == (3, Cause(CauseKind.JOIN, ("c",)))
    assert job.current().losses == (found,)


def test_member_lost_once_is_admitted_at_once() -> None:
    job = lose(flapping(times=0, max_nodes=4)).member("c", session="s2", round=1)
    assert set(job.act().ids) == set(ids("a", "b", "c", "z"))


def test_gang_that_cannot_form_without_the_member_admits_it_at_once() -> None:
    job = lose(flapping(times=6, min_nodes=4, max_nodes=4)).idle()
    job.member("c", session="s2", round=1)
    assert set(job.act().ids) == set(ids("a", "b", "c", "z"))


@pytest.mark.parametrize(
    ("others", "held", "idle"),
    [(3, 1, True), (2, 1, False), (2, 2, False), (3, 3, True), (5, 1, True), (7, 1, False)],
)
def test_others_are_idle_in_the_gaps_of_a_node_increment(
    others: int, held: int, idle: bool
) -> None:
    bounds = RendezvousParams(2, 6, increment=2)
    assert repeated_losses.leaves_others_idle(bounds, others, held) is idle
    assert not repeated_losses.leaves_others_idle(replace(bounds, increment=1), others, held)


GAPS: dict[str, Any] = {"min_nodes": 2, "max_nodes": 4, "increment": 2}


def test_member_that_others_need_joins_after_the_shared_delay() -> None:
    """A round of two leaves one of the other three idle: not for 300 s."""
    job = lose(flapping(times=8, **GAPS)).member("c", session="s2", round=1)
    first = job.act().ids
    assert len(first) == 2
    assert identity("c") not in first
    train(job, [name for name in "zab" if identity(name) in first], frozen=True)
    job.later(LONGEST_SHARED_DELAY_SECONDS - 0.1).idle()
    joined = job.later(0.1).act()
    assert (joined.number, joined.cause.kind) == (3, CauseKind.JOIN)
    assert "c" in joined.cause.members


@pytest.mark.parametrize(("early", "size"), [(0.1, 2), (0.0, 4)])
def test_round_that_opens_after_the_shared_delay_includes_the_member(
    early: float, size: int
) -> None:
    job = flapping(times=8, stop_grace_seconds=60, **GAPS).later(2)
    job.change("c", state=WAITING, round=1).act()
    stop(job.idle().later(LONGEST_SHARED_DELAY_SECONDS - early), *"zab")
    frozen = job.act().ids
    assert (len(frozen), identity("c") in frozen) == (size, size == 4)


def test_members_that_were_not_lost_again_have_ranks_first() -> None:
    """Four have ranks; a and b are among them, although c, d and e are survivors as well."""
    job = Job(*"zcdeab", min_nodes=4, max_nodes=4, settle_seconds=0)
    losses = tuple(row(name, 3, 1) for name in "cde")
    job.sealed(*"zcde", losses=losses).round(2, previous=1, nodes=4, losses=losses)
    stop(job, *"zcde")
    frozen = job.act().ids
    assert len(frozen) == 4
    assert {identity(name) for name in "zab"} <= set(frozen)


def test_gang_that_needs_one_of_two_members_admits_the_one_with_fewer_losses() -> None:
    job = Job("z", *"abc", min_nodes=3, max_nodes=4, settle_seconds=0)
    job.sealed("z", *"abc", losses=(row("b", 3, 0), row("c", 1, 0))).idle()
    job.later(2).gone("b", proven=True).gone("c", proven=True).act()
    stop(job, "z", "a")
    job.member("b", session="s2", round=1).member("c", session="s2", round=1)
    assert set(job.act().ids) == set(ids("z", "a", "c"))


def test_new_session_of_the_member_starts_the_delay_again() -> None:
    """An agent that loses its lease while it waits is still starved."""
    job = lose(flapping(max_nodes=4)).member("c", session="s2", round=1)
    train(job)
    job.later(LEASE - 1).gone("c").idle().member("c", session="s3", round=1)
    job.idle().later(LEASE - 0.1).idle()
    assert job.later(0.1).act().number == 3


def test_first_session_waits_as_long_if_it_was_never_gone() -> None:
    """A member that was cut off had ended its workers; its key stayed."""
    job = flapping(max_nodes=4).later(2).change("c", state=WAITING, round=1)
    assert job.act().cause.members == ("c",)
    stop(job, *"zab")
    assert set(job.act().ids) == set(ids("a", "b", "z"))


def test_second_row_of_one_session_starts_the_delay_again() -> None:
    """The time since the same number of losses of an earlier row, which ended, does not count."""
    job = flapping(max_nodes=4).later(2).change("c", state=WAITING, round=1)
    job.act()
    stop(job, *"zab")
    train(job)
    job.later(LEASE).act()
    job.sealed(*"zabc", number=3, losses=(row("c", 1, 2),)).idle()
    job.later(2).change("c", state=WAITING, round=3)
    assert job.act().losses[0].times == 2
    stop(job, *"zab", round=3)
    assert set(job.act().ids) == set(ids("a", "b", "z"))


def test_members_that_were_not_lost_again_are_not_held_back() -> None:
    """c has a row from before round 1; round 1 ends because of b."""
    job = flapping(times=5, max_nodes=4).later(2).gone("b", proven=True)
    job.act()
    stop(job, *"zac")
    job.member("b", session="s2", round=1)
    assert set(job.act().ids) == set(ids("a", "b", "c", "z"))


def test_round_does_not_wait_for_the_last_call_because_of_a_member_held_back() -> None:
    """Of the wanted three two are there, one of them a replacement: no recovery."""
    job = flapping(names="c", max_nodes=3, min_nodes=2, last_call_seconds=30)
    job.later(2).gone("c", proven=True).act()
    job.change("z", state=WAITING, round=1).member("c", session="s2", round=1).member("d")
    assert set(job.act().ids) == set(ids("d", "z"))


def test_loss_that_first_showed_as_aborted_peers_is_counted() -> None:
    job = flapping(max_nodes=4, min_nodes=4).later(2)
    for name in "zab":
        job.failure(name, kind=FailureClass.PEER_ABORT)
    assert job.act().cause.kind is CauseKind.FAILURE
    assert job.current().losses[0].times == 1
    stop(job, *"zab")
    current = job.later(3).gone("c").act()
    assert current.losses[0].times == 2
    assert "2 times in" in current.cause.detail
    assert ABORTED in reasons_of(current.cause)


def test_charged_failure_is_no_loss() -> None:
    job = flapping(max_nodes=4).later(2).failure("a").gone("c", proven=True)
    current = job.act()
    assert (current.cause.kind, current.losses[0].times) == (CauseKind.FAILURE, 1)


# -- lost before the seal -------------------------------------------------------------


def opened_for(job: Job, *names: str) -> Job:
    """Let these members wait, open round 2 for them, and freeze it."""
    for name in names:
        job.member(name)
    assert job.act().cause == Cause(CauseKind.JOIN, names)
    return stop(job, "z", "a")


def seal_without(job: Job, *names: str) -> Round:
    """Seal round 2 with the members that are there."""
    current = job.act()
    assert set(ids(*names)) <= set(current.ids)
    stored = job.view().round
    assert stored is not None
    for name in names:
        job.change(name, confirmed=stored.modified)
    if set(ids(*names)) != set(current.ids):
        job.idle().later(10)  # the others do not confirm in time
    current = job.act()
    assert (current.number, current.state, current.nodes) == (2, RoundState.FINAL, len(names))
    return current


def growing(**fields: Any) -> Job:
    return flapping(0, "a", **{"max_nodes": 4, "expected": 3, **fields})


@pytest.mark.parametrize("frozen", [False, True])
def test_member_for_which_a_round_opened_that_is_lost_before_the_seal_is_counted(
    frozen: bool,
) -> None:
    """Its gang stopped for it, as it does for a member that is lost in its round."""
    job = opened_for(growing(), "c")
    if frozen:
        assert job.act().state is RoundState.FROZEN
        stored = job.view().round
        assert stored is not None
        job.gone("c").change("z", confirmed=stored.modified).change("a", confirmed=stored.modified)
        current = job.act()
    else:
        current = seal_without(job.gone("c"), "z", "a")
    assert current.state is RoundState.FINAL
    (found,) = current.losses
    assert (found.member, found.name, found.times) == (identity("c"), "c", 1)
    assert (found.round, found.session) == (2, "s1")


def test_member_lost_again_before_the_seal_opens_the_next_round_after_its_delay() -> None:
    job = growing()
    job.round(1, RoundState.FINAL, previous=1, nodes=2, losses=(row("c", 1, 0),))
    current = seal_without(opened_for(job, "c").gone("c"), "z", "a")
    assert [each.times for each in current.losses] == [2]
    for name in ("z", "a"):
        job.change(name, state=RUNNING, round=2)
    job.act()
    job.member("c", session="s2").idle().later(LEASE - 0.1).idle()
    assert job.later(0.1).act().cause == Cause(CauseKind.JOIN, ("c",))


def test_members_that_stay_or_leave_before_the_seal_are_not_counted() -> None:
    """b is marked to leave, c left, and d is there again but does not confirm."""
    job = opened_for(growing(max_nodes=6, expected=5), "b", "c", "d")
    mark = DrainRequest(identity("b"), "Evicted")
    job.bounds(max_nodes=6, expected=5, settle_seconds=0, marks=(mark,))
    job.change("c", state=MemberState.LEAVING, stopped=True).gone("b", "c", "d")
    job.member("d", session="s2")
    assert seal_without(job, "z", "a").losses == ()


@pytest.mark.parametrize(("names", "counted"), [(("b", "c"), True), (("b", "c", "d"), False)])
def test_loss_of_most_members_before_the_seal_is_not_counted(
    names: tuple[str, ...], counted: bool
) -> None:
    job = opened_for(growing(max_nodes=6, expected=2 + len(names)), *names).gone(*names)
    found = {each.name for each in seal_without(job, "z", "a").losses}
    assert found == (set(names) if counted else set())


def test_replaced_pod_has_the_row_of_the_one_that_went_last() -> None:
    job = growing()
    job.member("c", id="id-old", session="old").view()
    job.delete(KEYS.session("id-old", "old")).view()
    current = seal_without(opened_for(job, "c").gone("c"), "z", "a")
    assert [each.member for each in current.losses] == [identity("c")]


def test_members_that_are_lost_before_the_seal_of_another_round_are_not_counted() -> None:
    """The gang stopped for the loss of b."""
    job = flapping(0, "ab", max_nodes=4).later(2).gone("b", proven=True)
    assert job.act().cause.members == ("b",)
    stop(job.member("c"), "z", "a").gone("c")
    assert [each.name for each in seal_without(job, "z", "a").losses] == ["b"]


# -- the end of a row -----------------------------------------------------------------


def test_round_that_trained_ends_the_rows_of_its_members() -> None:
    job = flapping(times=3, max_nodes=4)
    current = job.current()
    other = row("gone", 7)
    job.round(1, RoundState.FINAL, nodes=4, previous=1, losses=(*current.losses, other))
    since_ms = job.current().since_ms
    job.later(TRAINED_SECONDS - 0.1).idle()
    after = job.later(0.1).act()
    assert (after.number, after.state, after.losses) == (1, RoundState.FINAL, (other,))
    assert after.since_ms == since_ms
    job.idle()


def test_row_does_not_end_before_a_step_of_a_script_that_reports_steps() -> None:
    job = flapping(times=3, max_nodes=4).change("a", ended_step=100)
    job.later(TRAINED_SECONDS).idle()
    assert job.change("b", step=101).act().losses == ()


def test_step_before_the_time_does_not_end_a_row() -> None:
    """Steps may take a tenth of a second; an agent loses its lease after five."""
    job = flapping(times=3, max_nodes=4).change("a", step=7)
    job.idle().later(TRAINED_SECONDS - 0.1).idle()
    assert job.later(0.1).act().losses == ()


def test_first_loss_after_training_is_the_first_of_a_new_row() -> None:
    job = flapping(times=3, max_nodes=4).later(TRAINED_SECONDS)
    job.act()
    assert [each.times for each in lose(job).current().losses] == [1]


def test_new_coordinator_starts_the_delay_again_and_keeps_the_row() -> None:
    job = lose(flapping(max_nodes=4)).member("c", session="s2", round=1)
    train(job)
    job.later(LEASE - 0.1)
    job.coordinator.take_over(job.now, ())
    job.idle().later(LEASE - 0.1).idle()
    assert job.later(0.2).act().number == 3


def test_older_coordinator_admits_the_member_and_drops_the_rows() -> None:
    """It ignores the field that it does not know; the next loss begins a new row."""
    job = lose(flapping(times=4, max_nodes=4)).member("c", session="s2", round=1)
    stored = replace(job.current(), losses=())
    job.round(stored.number, stored.state, previous=stored.previous)
    assert set(job.act().ids) == set(ids("a", "b", "c", "z"))


def test_text_of_a_held_back_member() -> None:
    shown = repeated_losses.described(
        row("c", 3, last_ms=UTC_MS + 40_400), RendezvousParams(1, 2, keep_alive_seconds=4)
    )
    assert shown.text == (
        "c was lost 3 times in 40 s without progress, so it waits for 8 s after it registers, "
        "unless other nodes need it"
    )
