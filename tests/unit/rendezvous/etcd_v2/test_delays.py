"""Delays before a member acts, which leave others the time to act first."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.etcd_v2.core.delays import (
    Free,
    Stay,
    after_conflict,
    after_failure,
    before_confirming,
    gone,
    missing_members,
    moved_on,
    nodes_waiting,
    spare_nodes,
    takes_part,
    verdict_on_final,
)
from elasticjob_rendezvous.etcd_v2.core.records import State, read

FOLDER = "/p/run_r/rdzv/v_1"
KEYS = [f"{FOLDER}/rank_{rank}" for rank in range(3)]
NOTICE = 1.0


def final(waiting: int = 0, version: str = "1", keys: list[str] = KEYS) -> State:
    names = ", ".join(f'"{key}"' for key in keys)
    return read(
        f'{{"status": "final", "version": "{version}", "participants": [0, 1, 2],'
        f' "keep_alives": [{names}], "num_workers_waiting": {waiting}}}'
    )


JOINABLE = read('{"status": "joinable", "version": "2", "participants": [0, 1]}')


def test_large_gang_spreads_its_retries_and_a_pair_does_not() -> None:
    longest = [after_conflict(conflicts, 64, 1.0) for conflicts in range(1, 12)]
    assert longest == sorted(longest)
    assert longest[-1] == after_conflict(10_000, 64, 1.0) < 0.5
    assert after_conflict(9, 1, 1.0) < 0.01
    assert after_conflict(9, 64, 0.0) == 0.0


def test_back_off_after_failures_grows_up_to_a_maximum() -> None:
    waits = [after_failure(failures, 1.0) for failures in range(1, 30)]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.1)
    assert waits[-1] == pytest.approx(2.0)
    assert after_failure(1, 0.0) == pytest.approx(0.05)


def test_lowest_rank_confirms_at_once() -> None:
    assert before_confirming(0) == 0.0
    assert before_confirming(1) < before_confirming(2)


@pytest.mark.parametrize(
    ("waiting", "alive", "own", "announced_seconds", "expected"),
    [
        (1, KEYS, None, 100.0, Stay()),  # nothing to do but wait for a change
        (1, KEYS[:2], None, 0.2, Stay(0.8)),  # a member died; the others must see the wait
        (1, KEYS[:2], None, 1.0, Free(f"{KEYS[2]} is not renewed")),
        (2, KEYS[:2], None, 0.0, Free(f"{KEYS[2]} is not renewed")),  # no member is left to notify
        (1, [], None, 0.2, Stay(0.8)),  # all may just be coming back
        (1, [], None, 1.0, Free(f"{KEYS[0]} is not renewed")),
        (3, [], None, 0.0, Free(f"{KEYS[0]} is not renewed")),  # all three wait again
        (1, KEYS, KEYS[1], 0.0, Stay(1.0)),  # it was a member
        (1, KEYS, KEYS[1], 1.5, Free(f"{KEYS[1]} has come back")),
        (3, KEYS, KEYS[1], 0.0, Free(f"{KEYS[1]} has come back")),
        (1, KEYS, "/p/run_r/rdzv/v_1/rank_9", 9.0, Stay()),
    ],
)
def test_action_of_a_waiting_member(
    waiting: int, alive: list[str], own: str | None, announced_seconds: float, expected: Stay | Free
) -> None:
    verdict = verdict_on_final(final(waiting), alive, own, announced_seconds, NOTICE)
    if isinstance(verdict, Stay) and verdict.seconds is not None:
        assert isinstance(expected, Stay)
        assert verdict.seconds == pytest.approx(expected.seconds)
    else:
        assert verdict == expected


def test_keys_are_compared_in_the_form_of_etcd() -> None:
    """torch writes a prefix without its slash as it was given."""
    state = final(1, keys=[key.lstrip("/") for key in KEYS])
    assert verdict_on_final(state, KEYS, None, 9.0, NOTICE) == Stay()
    assert nodes_waiting(state, "1", KEYS) == 1


@pytest.mark.parametrize(
    ("state", "ours", "alive", "expected"),
    [
        (None, None, None, 0),
        (None, "1", None, 1),  # destroyed
        (read('{"status": "setup"}'), None, None, 0),
        (read('{"status": "setup"}'), "1", None, 1),
        (read('{"status": "closed"}'), "1", None, 0),
        (JOINABLE, None, None, 0),
        (JOINABLE, "1", None, 2),  # overtaken
        (final(0), "1", None, 0),
        (final(2), "1", None, 2),
        (final(2), None, None, 2),
        (final(0, "2"), "1", None, 1),
        (final(0), "1", KEYS, 0),
        (final(0), "1", KEYS[1:], 1),  # a member is gone, and none waits yet
    ],
)
def test_number_of_waiting_nodes(
    state: State | None, ours: str | None, alive: list[str] | None, expected: int
) -> None:
    assert nodes_waiting(state, ours, alive) == expected


@pytest.mark.parametrize(
    ("state", "alive", "expected"),
    [
        (None, None, True),  # destroyed
        (read('{"status": "setup"}'), None, True),
        (JOINABLE, None, True),
        (final(0, "2"), None, True),
        (read('{"status": "closed", "version": "2", "participants": [0]}'), None, False),
        (final(0), KEYS[1:], False),  # gone, and no other is wanted
        (final(1), None, False),  # none looked
        (final(1), KEYS, False),  # a newcomer
        (final(1), KEYS[1:], True),
    ],
)
def test_other_nodes_moved_on(state: State | None, alive: list[str] | None, expected: bool) -> None:
    assert moved_on(state, "1", alive) is expected


def test_missing_keep_alive_keys() -> None:
    assert gone(final(1), None) == frozenset(), "nobody looked"
    assert gone(final(1), KEYS) == frozenset()
    assert gone(final(1, keys=[key.lstrip("/") for key in KEYS]), KEYS[1:]) == {0}
    assert gone(final(1), []) == {0, 1, 2}


def test_participant_is_missed_once_its_key_expired() -> None:
    assert missing_members(JOINABLE, frozenset(), FOLDER) == []
    assert missing_members(JOINABLE, frozenset({KEYS[1], KEYS[2]}), FOLDER) == [KEYS[1]]


def test_only_a_participant_can_be_missed() -> None:
    """A timely leaver gave its rank back: its key says nothing about the rank's present owner."""
    assert takes_part(JOINABLE.text, "/p/run_r/rdzv/v_2/rank_1")
    assert not takes_part(JOINABLE.text, "/p/run_r/rdzv/v_2/rank_2")
    assert not takes_part(JOINABLE.text, "/p/run_r/rdzv/v_1/rank_1")
    assert not takes_part(None, "/p/run_r/rdzv/v_1/rank_1")


@pytest.mark.parametrize(
    ("greatest", "waiting", "before", "young", "spare"),
    [
        (3, 1, 0, True, 1),  # it waited when the version was made
        (3, 2, 1, False, 1),  # one more came later
        (3, 0, 1, False, 0),  # it went
        (4, 1, 0, True, 0),  # there is a place for it
    ],
)
def test_spare_nodes_waiting_for_a_full_version(
    greatest: int, waiting: int, before: int, young: bool, spare: int
) -> None:
    state = final(waiting)
    assert len(state.participants) == 3
    assert spare_nodes(state, greatest, before, young) == spare
    assert nodes_waiting(state, "1", KEYS, spare) == waiting - spare
