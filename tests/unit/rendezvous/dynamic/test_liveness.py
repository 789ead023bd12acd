"""Liveness of nodes and the end of the last call, by the local clock alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from elasticjob_rendezvous.dynamic.core.liveness import (
    MAX_LEFT_OUT,
    Memory,
    dead,
    observe,
    pause_seconds,
)
from elasticjob_rendezvous.dynamic.core.state import State, alive
from tests.unit.rendezvous.dynamic.builders import UTC_NOW, node, settings, state

SETTINGS = settings()


def look(
    memory: Memory, at: State, now: float, skew_seconds: float = 0, waited: float = 0
) -> Memory:
    utc = UTC_NOW + timedelta(seconds=now + skew_seconds)
    return observe(memory, at, SETTINGS, now, utc, now - waited)


def watched(until: float, start: float = 0.0, memory: Memory | None = None) -> Memory:
    """Return the memory of a node that looks every second: node a beats, node b is silent."""
    memory = memory or Memory()
    seen = state("ab")
    now = start
    while now <= until:
        seen = alive(seen, node("a"), UTC_NOW + timedelta(seconds=now))
        memory = look(memory, seen, now)
        now += 1
    return memory


def test_node_is_dead_after_three_silent_intervals_only() -> None:
    assert dead(watched(15), SETTINGS) == frozenset()
    assert dead(watched(16), SETTINGS) == {node("b")}


@pytest.mark.parametrize("skew_seconds", [-86400, 86400])
def test_clock_skew_makes_no_node_dead(skew_seconds: float) -> None:
    memory, seen = Memory(), state("ab")
    for now in range(60):
        if now % 5 == 0:
            for name in "ab":
                seen = alive(seen, node(name), UTC_NOW + timedelta(seconds=now))
        memory = look(memory, seen, now, skew_seconds)
        assert dead(memory, SETTINGS) == frozenset()


def test_old_heartbeat_gets_full_time_when_first_seen() -> None:
    long_ago = dict.fromkeys(state("ab").last_heartbeats, UTC_NOW - timedelta(days=1))
    memory = look(Memory(), replace(state("ab"), last_heartbeats=long_ago), 0)
    assert dead(memory, SETTINGS) == frozenset()


def test_after_a_gap_every_silence_restarts() -> None:
    memory = watched(10)
    memory = look(memory, state("ab"), 60)  # no node could write meanwhile
    assert dead(memory, SETTINGS) == frozenset()
    assert dead(watched(75, start=61, memory=memory), SETTINGS) == frozenset()
    assert dead(watched(77, start=61, memory=memory), SETTINGS) == {node("b")}


def test_wait_for_the_store_is_no_silence_of_the_others() -> None:
    memory = watched(10)
    memory = look(memory, state("ab"), 19, waited=8)
    assert dead(memory, SETTINGS) == frozenset()
    assert dead(watched(23, start=20, memory=memory), SETTINGS) == frozenset()
    assert dead(watched(24, start=20, memory=memory), SETTINGS) == {node("b")}


@pytest.mark.parametrize("waited", [0.6, 2, 8, 12])
def test_slow_store_hides_a_dead_node_for_a_limited_time(waited: float) -> None:
    """A store that answers each request late, with a pause of a second between two requests."""
    memory, now = look(Memory(), state("ab"), 0), 0.0
    while not dead(memory, SETTINGS):
        now += 1 + waited
        memory = look(memory, state("ab"), now, waited=waited)
        assert now <= SETTINGS.dead_after_seconds + (MAX_LEFT_OUT + 1) * (1 + waited)
    assert now > SETTINGS.dead_after_seconds


def test_late_answers_do_not_use_up_the_gaps_that_are_left_out() -> None:
    memory = look(Memory(), state("ab"), 0)
    for now in (1.6, 3.2, 4.8):
        memory = look(memory, state("ab"), now, waited=0.6)
    memory = look(memory, state("ab"), 17.8, waited=12)
    assert dead(memory, SETTINGS) == frozenset()


def test_waits_of_a_healthy_store_delay_no_detection() -> None:
    memory = Memory()
    for now in range(17):
        beats = alive(state("ab"), node("a"), UTC_NOW + timedelta(seconds=now))
        memory = look(memory, beats, now, waited=0.1)
    assert dead(memory, SETTINGS) == {node("b")}


@pytest.mark.parametrize(
    ("now", "beat_at", "listed", "seconds"),
    [
        (100.0, 100.0, True, 5),
        (100.2, 100.0, True, 4.8),
        (108.0, 100.0, True, 0.5),  # late
        (104.9, 100.0, True, 0.5),
        (100.0, float("-inf"), True, 0.5),
        (100.0, float("-inf"), False, 5),
        (108.0, 100.0, False, 5),  # removed: there is no heartbeat to write
        (99.0, 100.0, True, 5),
    ],
)
def test_pause_before_the_next_heartbeat(
    now: float, beat_at: float, listed: bool, seconds: float
) -> None:
    assert pause_seconds(SETTINGS, now, beat_at, listed) == pytest.approx(seconds)


def test_last_call_ends_at_its_deadline_with_equal_clocks() -> None:
    memory = look(Memory(), state("ab", deadline=UTC_NOW + timedelta(seconds=20)), 5)
    assert memory.last_call is not None
    assert memory.last_call.ends == 20


@pytest.mark.parametrize("off_seconds", [-3600, -1, 31, 3600])
def test_last_call_with_clock_skew_has_the_full_duration(off_seconds: float) -> None:
    calling = state("ab", deadline=UTC_NOW + timedelta(seconds=off_seconds))
    memory = look(Memory(), calling, 0)
    assert memory.last_call is not None
    assert memory.last_call.ends == 30
    again = look(memory, calling, 12)  # the same call: its end stays
    assert again.last_call == memory.last_call


def test_last_call_without_a_deadline_ends() -> None:
    memory = look(Memory(), state("ab"), 3)
    assert memory.last_call is not None
    assert memory.last_call.ends == 33


@pytest.mark.parametrize("without", [state("a"), state("ab", complete=True), State()])
def test_no_last_call_below_minimum_or_in_a_complete_round(without: State) -> None:
    memory = look(look(Memory(), state("ab"), 0), without, 1)
    assert memory.last_call is None
