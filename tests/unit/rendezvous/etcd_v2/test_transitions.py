"""Member's next write: its text, and the time to live, which each write sets anew."""

from __future__ import annotations

import random

import pytest

from elasticjob_rendezvous.etcd_v2.core.records import State, Status, printed, read
from elasticjob_rendezvous.etcd_v2.core.transitions import (
    Destroy,
    NoSpace,
    Write,
    announced,
    closed,
    confirmed,
    frozen,
    held,
    joined,
    opened,
    retracted,
    set_up,
    unconfirmed_below,
    withdrawn,
)


def joinable(size: int, version: str = "1") -> State:
    fields = {"status": "joinable", "version": version, "participants": list(range(size))}
    return printed(fields)


def key(rank: int) -> str:
    return f"/p/run_r/rdzv/v_1/rank_{rank}"


def final(size: int = 2, waiting: int = 0) -> State:
    state = frozen(joinable(size)).state
    for rank in range(size):
        write = confirmed(state, key(rank))
        assert write is not None
        state = write.state
    return printed({**state.fields, "num_workers_waiting": waiting})


def test_new_version() -> None:
    assert set_up() == Write(read('{"status": "setup"}'), 5)
    assert opened("3") == Write(
        read('{"status": "joinable", "version": "3", "participants": []}'), None
    )


@pytest.mark.parametrize(
    ("before", "ttl", "text"),
    [
        (0, None, '{"status": "joinable", "version": "1", "participants": [0]}'),
        (1, 10, '{"status": "joinable", "version": "1", "participants": [0, 1]}'),
        (
            2,
            10,
            '{"status": "frozen", "version": "1", "participants": [0, 1, 2], "keep_alives": []}',
        ),
    ],
)
def test_join_with_min_2_and_max_3(before: int, ttl: int | None, text: str) -> None:
    step = joined(joinable(before), 2, 3)
    assert (step.rank, step.write.ttl_seconds, step.write.state.text) == (before, ttl, text)


def test_full_joinable_version_is_refused() -> None:
    with pytest.raises(NoSpace, match=r"every member must be given the same min and max"):
        joined(joinable(3), 1, 3)


def test_last_call_waits_and_then_freezes() -> None:
    state = joinable(2)
    assert held(state) == Write(state, 10)
    write = frozen(state)
    assert write.ttl_seconds == 10
    assert write.state.text == (
        '{"status": "frozen", "version": "1", "participants": [0, 1], "keep_alives": []}'
    )


def test_last_confirmation_makes_the_version_final() -> None:
    first = confirmed(frozen(joinable(2)).state, key(1))
    assert first is not None
    assert (first.state.status, first.ttl_seconds) == (Status.FROZEN, 10)
    last = confirmed(first.state, key(0))
    assert last is not None
    assert last.ttl_seconds is None
    assert last.state.text == (
        '{"status": "final", "version": "1", "participants": [0, 1], "keep_alives":'
        f' ["{key(1)}", "{key(0)}"], "num_workers_waiting": 0}}'
    )


def test_second_confirmation_of_a_member_is_ignored() -> None:
    """A confirmation whose answer was lost: torch's member would count itself twice."""
    first = confirmed(frozen(joinable(2)).state, key(1))
    assert first is not None
    assert confirmed(first.state, key(1)) is None


def test_waiting_count_goes_up_and_down() -> None:
    one = announced(final())
    assert (one.state.waiting, one.ttl_seconds) == (1, None)
    back = retracted(one.state)
    assert back is not None
    assert back.state == final()
    assert retracted(back.state) is None


def test_close_keeps_the_other_fields() -> None:
    write = closed(final())
    assert write is not None
    assert write.state.text == final().text.replace('"final"', '"closed"')
    assert write.ttl_seconds is None
    assert closed(write.state) is None


def test_close_before_the_first_version() -> None:
    assert closed(None) == Write(read('{"status": "closed"}'))


@pytest.mark.parametrize(
    ("state", "rank", "expected"),
    [
        (joinable(3), 2, Write(joinable(2), 10)),  # the last: its place goes to the next
        (joinable(2), 1, Write(joinable(1), None)),  # below min again: no time limit
        (joinable(3), 1, Destroy()),
        (frozen(joinable(3)).state, 2, Destroy()),
        (final(), 1, None),
        (joinable(1), 1, None),  # another member's
        (joinable(3, version="2"), 2, None),
        (set_up().state, 0, None),
    ],
)
def test_leave_before_the_end(state: State, rank: int, expected: Write | Destroy | None) -> None:
    assert withdrawn(state, "1", rank, 2) == expected


def test_unconfirmed_lower_ranks() -> None:
    state = printed({**frozen(joinable(4)).state.fields, "keep_alives": [key(2), key(0)]})
    assert [unconfirmed_below(state, rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_joining_and_confirming_ends_final(seed: int) -> None:
    """Members take random turns, some with an outdated state: those lose."""
    chance = random.Random(seed)
    smallest, greatest = sorted(chance.choices(range(1, 9), k=2))
    state = opened("1").state
    ranks: dict[int, int] = {}
    members = list(range(greatest))
    seen = dict.fromkeys(members, state)
    while state.status is not Status.FINAL:
        member = chance.choice(members)
        view = seen[member]
        if chance.random() < 0.5:
            seen[member] = state
            continue
        if view.status is Status.JOINABLE and member not in ranks:
            step = joined(view, smallest, greatest)
            if view.text == state.text:
                ranks[member], state = step.rank, step.write.state
        elif view.status is Status.JOINABLE and ranks[member] == smallest - 1:
            if view.text == state.text and chance.random() < 0.2:
                state = frozen(view).state
        elif view.status is Status.FROZEN and member in ranks:
            write = confirmed(view, key(ranks[member]))
            if write is not None and view.text == state.text:
                state = write.state
    assert sorted(ranks.values()) == state.participants == list(range(len(ranks)))
    assert len(ranks) >= smallest
    assert sorted(state.keep_alives) == sorted(key(rank) for rank in ranks.values())
