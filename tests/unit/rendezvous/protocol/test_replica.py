"""Replica: events in any order, from any source, lead to the same state."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_rendezvous.protocol.coordinator.round_writes import KEPT_ROUNDS
from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Deleted,
    KeyValue,
    Order,
    Put,
    Range,
    Target,
    Txn,
    WatchEvent,
)
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import (
    LeaveNotice,
    MemberState,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History
from elasticjob_rendezvous.protocol.replica import KEPT_ROSTERS, View
from tests.unit.rendezvous.builders import KEYS, Job, a_failure, a_member, a_round, identity

ALL = Range(KEYS.prefix, prefix=True)
MEMBERS = Range(KEYS.members, prefix=True)


def kv(key: str, record: object, modified: int, created: int = 0) -> KeyValue:
    return KeyValue(key, encode(record), created or modified, modified)


def at(number: int, modified: int) -> KeyValue:
    """Return the round with this number, written at this revision."""
    return kv(KEYS.round, a_round(number), modified, created=1)


def view_of(*events: WatchEvent) -> View:
    view = View(KEYS)
    for event in events:
        view.apply(event.mod_revision, (event,))
    return view


def number(view: View) -> int:
    return view.round.record.number if view.round else 0


def session(name: str, session: str, revision: int, **fields: Any) -> KeyValue:
    return kv(KEYS.session(identity(name), session), a_member(name, session=session, **fields),
              revision)  # fmt: skip


# -- order of events ------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_newest_event_wins_in_any_order(order: tuple[int, ...]) -> None:
    news: list[WatchEvent] = [at(1, 5), at(2, 6), Deleted(KEYS.round, 7), at(3, 9)]
    assert number(view_of(*(news[index] for index in order))) == 3


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_deletion_is_not_undone_by_an_older_event(order: tuple[int, ...]) -> None:
    news: list[WatchEvent] = [at(1, 5), at(2, 6), Deleted(KEYS.round, 7)]
    assert view_of(*(news[index] for index in order)).round is None


def test_deletion_of_an_unseen_key_is_remembered() -> None:
    assert view_of(Deleted(KEYS.round, 7), at(1, 5)).round is None
    assert number(view_of(Deleted(KEYS.round, 7), at(4, 8))) == 4


def test_repeated_event_changes_nothing() -> None:
    assert number(view_of(at(2, 6), at(2, 6), at(1, 5))) == 2


KEYS_OF_RECORDS = (
    KEYS.round,
    KEYS.bounds,
    KEYS.session(identity("a"), "s1"),
    KEYS.roster(3),
    KEYS.seats,
    KEYS.history(3),
    KEYS.failure(3, identity("a")),
    KEYS.done(3, identity("a")),
)


@pytest.mark.parametrize("key", KEYS_OF_RECORDS)
def test_deletion_of_an_unparsed_key_leaves_nothing(key: str) -> None:
    """It is gone already, or what it says cannot be read."""
    for view in (view_of(Deleted(key, 7)), view_of(KeyValue(key, b"[]", 7, 7), Deleted(key, 8))):
        assert (view.round, view.bounds, view.malformed) == (None, None, {})
        assert (view.sessions, view.members(), view.departed) == ({}, {}, {})
        assert (view.rosters, view.histories) == ({}, {})
        assert not any(view.failures.values())
        assert not any(view.dones.values())


def test_repeated_deletion_does_not_remove_later_data() -> None:
    """The copy of a roster outlives the roster's own key."""
    copy = kv(KEYS.seats, roster(3), 8)
    view = view_of(Deleted(KEYS.roster(3), 7), copy, Deleted(KEYS.roster(3), 7))
    assert view.rosters == {3: roster(3)}


def test_member_without_a_session_is_not_kept() -> None:
    key = KEYS.session(identity("a"), "s1")
    assert view_of(session("a", "s1", 5), Deleted(key, 6)).sessions == {}


def test_revision_only_grows() -> None:
    view = view_of(at(1, 5))
    view.apply(3, ())
    view.absorb(4, ())
    assert view.revision == 5


# -- reads ----------------------------------------------------------------------------


def test_key_missing_in_a_read_is_gone() -> None:
    view = view_of(session("a", "s1", 5), session("b", "s1", 6))
    view.absorb(8, ((MEMBERS, (session("b", "s1", 6),)),))
    assert set(view.members()) == {identity("b")}


def test_read_does_not_affect_keys_outside_its_ranges() -> None:
    view = view_of(at(3, 4), session("a", "s1", 5))
    view.absorb(8, ((MEMBERS, ()),))
    assert number(view) == 3
    assert view.members() == {}


def test_old_read_deletes_nothing_newer() -> None:
    view = view_of(session("a", "s1", 9))
    view.absorb(8, ((MEMBERS, ()),))
    assert set(view.members()) == {identity("a")}


def test_limited_read_proves_no_absence() -> None:
    view = view_of(session("a", "s1", 5), session("b", "s1", 6))
    first = Range(KEYS.members, prefix=True, order=Order.CREATE, limit=1)
    view.absorb(8, ((first, (session("a", "s1", 5),)),))
    assert set(view.members()) == {identity("a"), identity("b")}


def test_full_range_beside_a_limited_one_counts() -> None:
    view = view_of(at(1, 4), session("a", "s1", 5))
    first = Range(KEYS.members, prefix=True, order=Order.CREATE, limit=1)
    view.absorb(8, ((first, (session("a", "s1", 5),)), (Range(KEYS.round), ())))
    assert view.round is None
    view.absorb(9, ((first, ()), (Range(KEYS.round), (at(2, 9),))))
    assert number(view) == 2


def test_empty_read_rejects_older_events() -> None:
    view = view_of(at(1, 5))
    view.absorb(8, ((Range(KEYS.round), ()),))
    view.apply(6, (at(2, 6),))
    assert view.round is None


# -- own writes -----------------------------------------------------------------------


def test_own_writes_are_visible_at_once() -> None:
    job = Job("a")
    view = job.view()
    txn = Txn((), (Put(KEYS.round, encode(a_round(1))), Delete(job.stored("a").key)))
    view.wrote(txn, job.commit(txn))
    assert view.round is not None
    assert (view.round.modified, view.round.created) == (view.revision, view.revision)
    assert view.members() == {}
    assert view.revision == job.etcd.revision


def test_overwriting_keeps_the_creation_revision() -> None:
    job = Job("a", "b")
    created = job.stored("a").created
    view = job.view()
    record = a_member("a", state=MemberState.LEAVING)
    txn = Txn((), (Put(job.stored("a").key, encode(record)),))
    view.wrote(txn, job.commit(txn))
    mine = view.member(identity("a"))
    assert mine is not None
    assert (mine.created, mine.record.state) == (created, MemberState.LEAVING)
    assert mine.modified > created
    assert view.lowest() == mine


def test_own_write_recreates_a_deleted_key() -> None:
    job = Job("a")
    key = job.stored("a").key
    view = job.gone("a").view()
    txn = Txn((), (Put(key, encode(a_member("a"))),))
    view.wrote(txn, job.commit(txn))
    mine = view.member(identity("a"))
    assert mine is not None
    assert mine.created == mine.modified == view.revision


@pytest.mark.parametrize(
    ("key", "record"), [(KEYS.round, a_round(2)), (KEYS.bounds, RendezvousParams(1, 1))]
)
def test_own_write_keeps_the_creation_of_a_shared_record(key: str, record: object) -> None:
    job = Job("a").round(1)
    stored = job.etcd.get(key)
    view = job.view()
    txn = Txn((), (Put(key, encode(record)),))
    view.wrote(txn, job.commit(txn))
    known = view.round if key == KEYS.round else view.bounds
    assert known is not None
    assert stored is not None
    assert known.created == stored.create_revision < known.modified


@pytest.mark.parametrize(
    ("key", "record"), [(KEYS.round, a_round(1)), (KEYS.bounds, RendezvousParams(1, 1))]
)
def test_own_write_replaces_a_malformed_record(key: str, record: object) -> None:
    job = Job("a").put(key, [])
    view = job.view()
    assert key in view.malformed
    txn = Txn((), (Put(key, encode(record)),))
    view.wrote(txn, job.commit(txn))
    healed = view.round if key == KEYS.round else view.bounds
    assert healed is not None
    assert (healed.record, healed.created) == (record, view.revision)
    assert not view.malformed


def test_deleted_prefix_is_empty() -> None:
    job = Job("a", "b").failure("a").failure("b").failure("b", round=10)
    view = job.view()
    txn = Txn((), (Delete(KEYS.failures(1), prefix=True),))
    view.wrote(txn, job.commit(txn))
    assert not view.failures.get(1)
    assert set(view.failures[10]) == {identity("b")}


def test_refused_write_keeps_the_result_of_its_reads() -> None:
    job = Job("a").round(5)
    view = View(KEYS)
    mistaken = Compare(KEYS.round, Target.MOD, 1)
    txn = Txn((mistaken,), (Put(KEYS.round, encode(a_round(9))),), (Range(KEYS.round),))
    view.wrote(txn, job.commit(txn))
    assert number(view) == 5


def test_watch_event_of_own_write_changes_nothing() -> None:
    job = Job("a")
    view = job.view()
    txn = Txn((), (Put(KEYS.round, encode(a_round(1))),))
    view.wrote(txn, job.commit(txn))
    before = view.round
    echo = job.etcd.get(KEYS.round)
    assert echo is not None
    view.apply(echo.mod_revision, (echo,))
    assert view.round == before


@given(st.lists(st.sampled_from(["put", "delete"]), min_size=1, max_size=8), st.randoms())
def test_shuffled_events_agree_with_a_read(steps: list[str], random: Any) -> None:
    """Watch events in any order, delivered twice, give the result of a read."""
    job = Job()
    news: list[WatchEvent] = []
    for index, step in enumerate(steps):
        if step == "put":
            job.round(index + 1)
            stored = job.etcd.get(KEYS.round)
            assert stored is not None
            news.append(stored)
        else:
            job.delete(KEYS.round)
            news.append(Deleted(KEYS.round, job.etcd.revision))
    news += random.sample(news, len(news) // 2)
    random.shuffle(news)
    assert view_of(*news).round == job.view().round


# -- another store --------------------------------------------------------------------


ROUND = Range(KEYS.round)
STATE = Range(KEYS.state, prefix=True)


@pytest.mark.parametrize("target", [ROUND, STATE])
@pytest.mark.parametrize(
    ("revision", "found", "contradicted"),
    [
        (9, (at(2, 6),), False),
        (9, (at(3, 8),), False),
        (9, (at(1, 5),), True),
        (4, (at(1, 3),), False),  # an answer sent before the event came
        (9, (), True),
        (5, (), False),
        (6, (at(1, 5),), True),
        (6, (), True),
    ],
    ids=[
        "as known", "newer", "gone back", "an older answer", "no round", "before the round",
        "gone back at once", "no round at once",
    ],
)  # fmt: skip
def test_recreated_store_contradicts_the_replica(
    target: Range, revision: int, found: tuple[KeyValue, ...], contradicted: bool
) -> None:
    assert view_of(at(2, 6)).contradicted_by(revision, ((target, found),)) is contradicted


def test_read_of_other_keys_does_not_contradict_the_round() -> None:
    limited = Range(KEYS.state, prefix=True, limit=1)
    view = view_of(at(2, 6))
    assert not view.contradicted_by(9, ((MEMBERS, ()), (limited, ()), (Range(KEYS.bounds), ())))


def test_empty_replica_is_never_contradicted() -> None:
    assert not view_of().contradicted_by(9, ((ROUND, (at(1, 5),)), (MEMBERS, ())))
    assert not view_of(session("a", "s1", 5)).contradicted_by(9, ((ROUND, ()), (MEMBERS, ())))


def test_replica_without_an_answer_has_neither_revision_nor_cluster() -> None:
    assert (View(KEYS).revision, View(KEYS).cluster_id) == (0, 0)


# -- sessions -------------------------------------------------------------------------


def test_later_of_two_sessions_of_a_member_is_valid() -> None:
    view = view_of(session("a", "new", 9), session("a", "old", 5))
    assert view.member(identity("a")) == view.members()[identity("a")]
    assert view.members()[identity("a")].record.session == "new"
    assert [s.record.session for s in [view.lowest()] if s] == ["old"]


def test_earlier_session_is_valid_again_when_the_later_one_goes() -> None:
    view = view_of(session("a", "old", 5), session("a", "new", 9))
    view.apply(10, (Deleted(KEYS.session(identity("a"), "new"), 10),))
    assert view.members()[identity("a")].record.session == "old"
    view.apply(11, (Deleted(KEYS.session(identity("a"), "old"), 11),))
    assert view.member(identity("a")) is None
    assert view.lowest() is None


def test_last_record_of_a_member_is_remembered_until_it_returns() -> None:
    said = MemberState.LEAVING
    key = KEYS.session(identity("a"), "old")
    view = view_of(session("a", "old", 5, state=said))
    assert view.departed == {}
    view.apply(6, (Deleted(key, 6),))
    assert view.departed[identity("a")].state is said
    view.apply(7, (session("a", "new", 7),))
    assert view.departed == {}


def test_member_with_another_session_has_not_departed() -> None:
    view = view_of(session("a", "old", 5), session("a", "new", 9))
    view.apply(10, (Deleted(KEYS.session(identity("a"), "old"), 10),))
    assert view.departed == {}


# -- leave notices ------------------------------------------------------------------


def notice(agent: str) -> LeaveNotice:
    return LeaveNotice(identity("a"), agent, "drained")


def test_leave_notice_is_kept_until_its_member_writes() -> None:
    view = view_of()
    view.merge_leave_notices((notice("x"),))
    assert view.leave_notices == {identity("a"): notice("x")}
    assert view.leaves(identity("a")) == "drained"


@pytest.mark.parametrize(("agent", "kept"), [("x", True), ("y", False)])
def test_leave_notice_of_an_agent_other_than_the_registered_one_is_dropped(
    agent: str, kept: bool
) -> None:
    view = view_of(session("a", "x-1", 5))
    view.merge_leave_notices((notice(agent),))
    assert (identity("a") in view.leave_notices) is kept


def test_event_from_before_a_leave_notice_does_not_refute_it() -> None:
    known = session("a", "x-1", 5)
    view = view_of(known)
    view.merge_leave_notices((notice("x"),))
    view.apply(5, (known,))
    assert identity("a") in view.leave_notices
    view.apply(6, (session("a", "x-1", 6),))
    assert not view.leave_notices


@pytest.mark.parametrize(
    ("said", "gone", "told", "leaves"),
    [
        (MemberState.RUNNING, False, False, None),
        (MemberState.RUNNING, True, False, None),
        (MemberState.LEAVING, False, False, "by its key"),
        (MemberState.LEAVING, True, False, "by its key"),
        (MemberState.LEAVING, True, True, "by its key"),
        (MemberState.RUNNING, False, True, None),
        (MemberState.RUNNING, True, True, "drained"),
    ],
)
def test_leave_reason_comes_from_the_key_or_else_a_leave_notice(
    said: MemberState, gone: bool, told: bool, leaves: str | None
) -> None:
    other = session("b", "x-1", 3, state=MemberState.LEAVING, reason="of another")
    view = view_of(other, session("a", "x-1", 5, state=said, reason="by its key"))
    view.merge_leave_notices((notice("x"),) if told else ())
    if gone:
        view.apply(6, (Deleted(KEYS.session(identity("a"), "x-1"), 6),))
    last = view.last_record(identity("a"))
    assert last is not None
    assert (last.state, view.leaves(identity("a"))) == (said, leaves)


def test_unknown_round_has_neither_failures_nor_successes() -> None:
    for view in (view_of(), view_of(kv(KEYS.seats, roster(5), 5))):
        assert (view.failures_of(5), view.dones_of(5), view.undone(5)) == ({}, {}, [])


def test_highest_number_known_to_any_member_is_known() -> None:
    members = [
        session(name, "s1", 5, known=known) for name, known in (("a", 3), ("b", 7), ("c", 0))
    ]
    assert view_of(*members).known() == 7


def test_unknown_member_has_no_last_record() -> None:
    view = view_of(session("b", "x-1", 3, state=MemberState.LEAVING, reason="drained"))
    assert view.last_record(identity("a")) is None
    assert view.leaves(identity("a")) is None


# -- record storage -------------------------------------------------------------------


def test_every_kind_of_record_is_stored() -> None:
    job = Job("a", "b").sealed("a", "b", number=3)
    job.failure("a", round=3).done("b", round=3)
    history = History(3, job.current().cause, 2)
    view = job.put(KEYS.history(3), history).view()
    assert view.bounds is not None
    assert view.histories[3].record == history
    assert view.rosters[3].assignment(identity("b")) is not None
    assert view.failures[3][identity("a")] == a_failure("a", round=3)
    assert view.dones[3][identity("b")].name == "b"
    job.delete(KEYS.roster(3)).delete(KEYS.failure(3, identity("a")))
    job.delete(KEYS.history(3)).delete(KEYS.done(3, identity("b"))).delete(KEYS.bounds).delete(
        KEYS.round
    )
    view.absorb(job.etcd.revision, ((ALL, job.etcd.range(ALL).kvs),))
    after = view_of()
    after.absorb(job.etcd.revision, ((ALL, job.etcd.range(ALL).kvs),))
    assert (view.bounds, view.round) == (after.bounds, after.round)
    assert after.bounds is None
    assert not view.rosters
    assert not view.histories
    assert not any(view.failures.values())
    assert not any(view.dones.values())


def test_failures_and_successes_count_only_with_a_rank_assignment() -> None:
    job = Job("a", "b", "c").sealed("a", "b", number=3)
    job.failure("a", round=3).failure("c", round=3).done("b", "c", round=3)
    job.failure("c", round=4).done("c", round=4)
    view = job.view()
    assert set(view.failures_of(3)) == {identity("a")}
    assert set(view.dones_of(3)) == {identity("b")}
    assert set(view.failures_of(4)) == {identity("c")}, "nobody here knows its roster"
    assert set(view.dones_of(4)) == {identity("c")}
    assert not view.failures_of(5)
    assert not view.dones_of(5)


def roster(number: int) -> Roster:
    return Roster(number, 1, "host-a", 20000 + number, ())


def test_roster_copy_in_the_round_write_is_equivalent() -> None:
    view = view_of(kv(KEYS.seats, roster(1), 5), kv(KEYS.seats, roster(2), 6))
    assert view.rosters == {1: roster(1), 2: roster(2)}
    view.apply(7, (Deleted(KEYS.seats, 7),))
    assert view.rosters == {1: roster(1), 2: roster(2)}


def test_number_of_kept_rosters_is_bounded() -> None:
    many = 3 * KEPT_ROSTERS
    view = view_of(*(kv(KEYS.seats, roster(number), 4 + number) for number in range(1, many + 1)))
    assert set(view.rosters) == set(range(many - KEPT_ROSTERS + 1, many + 1))
    assert KEPT_ROSTERS > KEPT_ROUNDS


def test_foreign_keys_are_ignored() -> None:
    view = view_of(
        kv("/elasticjob/team/other/0/state/round", a_round(9), 5),
        kv(KEYS.prefix + "roster/latest", a_round(9), 6),
        kv(KEYS.prefix + "notes/of/somebody", RendezvousParams(1, 1), 7),
    )
    assert view.round is None
    assert not view.rosters
    assert not view.malformed


# -- malformed records ----------------------------------------------------------------


def test_malformed_record_replaces_the_valid_one_and_is_named() -> None:
    view = view_of(at(3, 5), KeyValue(KEYS.round, b"{}", 1, 6))
    assert view.round is None
    assert KEYS.round in str(view.malformed[KEYS.round])


@pytest.mark.parametrize("key", KEYS_OF_RECORDS)
def test_malformed_record_is_named_with_its_key(key: str) -> None:
    assert key in str(view_of(KeyValue(key, b"[]", 1, 6)).malformed[key])


def test_valid_record_replaces_a_malformed_one() -> None:
    view = view_of(KeyValue(KEYS.round, b"{}", 1, 5), at(3, 6))
    assert number(view) == 3
    assert view.malformed == {}


def test_deletion_removes_a_malformed_record() -> None:
    view = view_of(KeyValue(KEYS.round, b"{}", 1, 5), Deleted(KEYS.round, 6))
    assert view.malformed == {}


def test_reading_does_not_write() -> None:
    view = Job("a").round(2, RoundState.FROZEN).view()
    assert view.member("nobody") is None
    assert "nobody" not in view.sessions
    assert isinstance(view.round.record, Round) if view.round else False
