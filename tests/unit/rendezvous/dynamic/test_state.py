"""Changes of the shared state."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings, RendezvousTimeout
from elasticjob_rendezvous.dynamic.core.state import (
    OUR_LOCAL_IDS,
    WORLD,
    NodeDesc,
    RankAssignment,
    State,
    alive,
    assignment,
    completed,
    gang_time,
    gone,
    joined,
    moved_on,
    nodes_waiting,
    rank_order,
    redundant,
    rejoined,
    waiting,
    without,
)
from tests.unit.rendezvous.dynamic.builders import UTC_NOW, node, nodes, settings, state

SECOND = timedelta(seconds=1)


def test_ranks_are_ordered_by_natural_name_then_pid_then_handler() -> None:
    ordered = [
        NodeDesc("10.0.0.2", 1, 0),
        NodeDesc("10.0.0.10", 1, 0),
        NodeDesc("node-2", 1, 0),
        NodeDesc("node-2", 1, 5),
        NodeDesc("node-2", 3, 0),
        NodeDesc("node-02", 1, 0),
        NodeDesc("node-10", 1, 0),
        NodeDesc("node-10" + "0" * 5000, 1, 0),
    ]
    moved = [ordered[5], *ordered[2:5]]  # equal numbers: the plain name decides
    shuffled = [*ordered[4:], *ordered[:4]]
    assert sorted(shuffled, key=rank_order) == [*ordered[:2], *moved, *ordered[6:]]


def test_first_node_joins_and_minimum_node_sets_the_last_call() -> None:
    one = joined(State(), node("a"), settings(), UTC_NOW)
    assert (one.participants, one.deadline) == ({node("a"): 0}, None)
    two = joined(one, node("b"), settings(), UTC_NOW)
    assert two.deadline is not None
    assert timedelta(0) < two.deadline - UTC_NOW - 30 * SECOND < SECOND
    assert not two.complete


def test_further_join_keeps_the_last_call() -> None:
    before = state("ab", deadline=UTC_NOW + SECOND)
    after = joined(before, node("c"), settings(max_nodes=4), UTC_NOW)
    assert after.deadline == before.deadline


def test_maximum_node_completes_the_round() -> None:
    done = joined(state("cb", waits="a", deadline=UTC_NOW), node("a"), settings(), UTC_NOW)
    assert done.complete
    assert done.deadline is None
    assert done.wait_list == frozenset()
    assert done.participants == {node("a"): 0, node("b"): 1, node("c"): 2}
    assert done.extra == {WORLD: (0, 3)}


def test_waiting_and_standby_lists_exclude_each_other() -> None:
    spare = redundant(state("bc", waits="a", complete=True), node("a"), UTC_NOW)
    assert (spare.wait_list, spare.redundancy_list) == (frozenset(), frozenset(nodes("a")))
    again = waiting(spare, node("a"), UTC_NOW)
    assert (again.wait_list, again.redundancy_list) == (frozenset(nodes("a")), frozenset())


def test_last_node_leaving_a_complete_round_opens_the_next() -> None:
    left = without(state("ab", complete=True, round=4), [node("a")], settings())
    assert (left.complete, left.round) == (True, 4)
    assert node("a") not in left.last_heartbeats
    gone = without(left, [node("b")], settings())
    assert (gone.complete, gone.round) == (False, 5)


def test_rejoin_waits_and_the_last_one_opens_the_next_round() -> None:
    one = rejoined(state("ab", complete=True, round=4), node("a"), settings(), UTC_NOW)
    assert set(one.participants) == {node("b")}
    assert one.wait_list == {node("a")}
    two = rejoined(one, node("b"), settings(), UTC_NOW)
    assert (two.round, two.complete, set(two.participants)) == (5, False, {node("b")})
    assert two.wait_list == {node("a")}


def test_too_few_remaining_nodes_cancel_the_last_call() -> None:
    before = state("abc", deadline=UTC_NOW)
    assert without(before, nodes("a"), settings()).deadline == UTC_NOW
    assert without(before, nodes("ab"), settings()).deadline is None


def test_removal_of_a_waiting_node_changes_no_round() -> None:
    before = state("", waits="a", spare="b", complete=True, round=2)
    after = without(before, nodes("ab"), settings())
    assert (after.round, after.complete) == (2, True)
    assert not after.knows(node("a"))
    assert not after.knows(node("b"))


@pytest.mark.parametrize("skew_seconds", [-3600, 0, 3600])
def test_heartbeat_is_later_than_all_others_and_always_a_change(skew_seconds: int) -> None:
    ours = UTC_NOW + skew_seconds * SECOND
    before = state("ab")
    after = alive(before, node("a"), ours)
    assert after.last_heartbeats[node("a")] > UTC_NOW
    assert after.last_heartbeats[node("a")] >= ours
    again = alive(after, node("a"), ours)
    assert again.last_heartbeats[node("a")] > after.last_heartbeats[node("a")]


def test_gang_time_of_an_empty_state_is_local_time() -> None:
    assert gang_time(State(), UTC_NOW) == UTC_NOW + timedelta(microseconds=1)


# -- places ------------------------------------------------------------------------------


def test_rank_assignment_has_rank_roster_and_master() -> None:
    done = completed(state("ba", round=3))
    assert assignment(done, node("b")) == RankAssignment(3, 1, {node("a"): 0, node("b"): 1})
    assert RankAssignment(3, 1, done.participants).master == node("a")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (state("ab"), "not complete"),
        (completed(state("bc")), "not in it"),
        (without(completed(state("abc")), nodes("b"), settings()), "a hole in the ranks"),
        (without(completed(state("abc")), nodes("c"), settings()), "the last one gone"),
        (replace(completed(state("ab")), participants={node("a"): 0, node("b"): 0}), "ranks"),
    ],
)
def test_incomplete_round_has_no_rank_assignment(broken: State, why: str) -> None:
    assert assignment(broken, node("a")) is None, why


@pytest.mark.parametrize("world", [(1, 9), "nonsense", (), [2, 1]])
def test_world_size_of_another_round_is_ignored(world: object) -> None:
    done = state("ab", complete=True, round=2, extra={WORLD: world})
    assert assignment(done, node("a")) is not None


# -- number of waiting nodes -------------------------------------------------------------

HELD = RankAssignment(1, 0, {node("a"): 0, node("b"): 1})


@pytest.mark.parametrize(
    ("now", "held", "count"),
    [
        (state("ab", complete=True, round=1), HELD, 0),
        (state("ab", waits="cd", complete=True, round=1), HELD, 2),
        (state("a", complete=True, round=1), HELD, 1),
        (state("a", waits="cd", complete=True, round=1), HELD, 2),
        (state("b", complete=True, round=1), HELD, 1),
        (state("ab", round=2), HELD, 1),
        (State(), HELD, 1),
        (state("a", complete=True, round=1, closed=True), HELD, 0),
        (state("abc", waits="d", complete=True, round=1), RankAssignment(1, 0, {node("a"): 0}), 0),
        (state("bc", waits="a", complete=True), None, 1),
        (State(), None, 0),
    ],
    ids=[
        "whole",
        "newcomers",
        "a peer is gone",
        "a peer is gone and newcomers",
        "we are gone",
        "the next round began",
        "the state is gone",
        "closed: no next round",
        "no room",
        "no round yet",
        "nothing",
    ],
)
def test_nodes_waiting(now: State, held: RankAssignment | None, count: int) -> None:
    assert nodes_waiting(now, held, settings()) == count


HELD_ABC = RankAssignment(3, 0, {each: rank for rank, each in enumerate(nodes("abc"))})


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (state("abc", round=3, complete=True), False),
        (state("abc", round=3, complete=True, waits="d"), False),
        (state("ab", round=3, complete=True), False),
        (state("ab", round=3, complete=True, waits="c"), True),
        (state("ab", round=3, complete=True, spare="c"), True),
        (state("ab", round=3, complete=True, waits="d"), True),
        (state("bc", round=3, complete=True, waits="d"), False),
        (state("bc", round=4), True),
        (state("bc", round=4, complete=True), True),
        (state("", round=4), False),
        (state("bc", round=4, closed=True), False),
    ],
    ids=[
        "all are there",
        "a newcomer",
        "one is gone, and nobody waits",
        "one came back for another round",
        "one came back and is to spare",
        "one is gone, and another is there for it",
        "we are taken for dead",
        "a newer round begins",
        "a newer round",
        "the store was lost",
        "closed",
    ],
)
def test_other_nodes_moved_on(now: State, expected: bool) -> None:
    assert moved_on(now, HELD_ABC, node("a")) is expected


def our(name: str) -> NodeDesc:
    return NodeDesc(name, 1, OUR_LOCAL_IDS)


@pytest.mark.parametrize(
    ("there", "waits", "fields", "ranks"),
    [
        ("abc", "", {}, set()),
        ("ab", "", {}, {2}),
        ("a", "", {}, {1, 2}),
        ("a", "c", {}, {1}),
        ("bc", "", {}, set()),  # this node is
        ("ab", "", {"closed": True}, set()),
        ("ab", "", {"round": 4}, set()),
    ],
)
def test_gone_nodes_of_a_round(
    there: str, waits: str, fields: dict[str, Any], ranks: set[int]
) -> None:
    held = RankAssignment(3, 0, {our(name): rank for rank, name in enumerate("abc")})
    now = State(
        **{"round": 3, "complete": True, **fields},
        participants={our(name): 0 for name in there},
        wait_list=frozenset(map(our, waits)),
    )
    assert gone(now, held, our("a")) == ranks


def test_beside_a_torch_node_no_node_is_missed() -> None:
    """The torch node may be done, and then delays the others until its exit barrier ends."""
    held = RankAssignment(3, 0, {our("a"): 0, node("b"): 1, our("c"): 2})
    now = State(round=3, complete=True, participants={our("a"): 0, node("b"): 1})
    assert gone(now, held, our("a")) == frozenset()


# -- settings ----------------------------------------------------------------------------


def test_defaults_match_torch() -> None:
    limits = RendezvousTimeout()
    assert (limits.join, limits.last_call) == (600 * SECOND, 30 * SECOND)
    assert (limits.close, limits.heartbeat) == (30 * SECOND, 5 * SECOND)
    assert RendezvousTimeout(join=SECOND, close=None).join == SECOND


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
@pytest.mark.parametrize("limit", [timedelta(0), -SECOND])
def test_limit_that_is_not_positive_is_refused(name: str, limit: timedelta) -> None:
    with pytest.raises(ValueError, match=f"{name} timeout must be positive"):
        RendezvousTimeout(**{name: limit})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run_id": ""}, "run id"),
        ({"min_nodes": 0}, "min_nodes"),
        ({"max_nodes": 1}, "max_nodes"),
        ({"keep_alive_interval": timedelta(0)}, "keep_alive_interval"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(change: dict, named: str) -> None:
    good = settings()
    fields = {name: getattr(good, name) for name in RendezvousSettings.__slots__}
    with pytest.raises(ValueError, match=named):
        RendezvousSettings(**{**fields, **change})
