"""Memory of one member: its rounds, the times of its leave, and what it derives from them."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.effects import Note
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from elasticjob_rendezvous.protocol.state import (
    PATIENCE_SECONDS,
    SEEN_SECONDS,
    EngineState,
    LeaveState,
    RoundMemory,
)
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.rendezvous.builders import KEYS, Job, identity

# -- rounds ---------------------------------------------------------------------------


def test_without_a_round_nothing_is_known() -> None:
    rounds = RoundMemory()
    assert not rounds.update(Job("a").view())
    assert (rounds.known, rounds.last, rounds.roster) == (0, None, None)


def test_highest_number_ever_seen_is_kept() -> None:
    """Etcd that lost its data may begin again at a lower one."""
    job, rounds = Job("a"), RoundMemory()
    for number in (5, 3):
        rounds.update(job.round(number).view())
        assert rounds.known == 5
    rounds.update(job.round(6).view())
    assert rounds.known == 6


def test_each_final_round_is_new_once() -> None:
    job, rounds = Job("a", "b"), RoundMemory()
    assert rounds.update(job.sealed("a", "b", number=1).view())
    assert not rounds.update(job.view())
    assert rounds.last == (job.current(), job.roster(1))
    assert rounds.roster == job.roster(1)
    assert rounds.update(job.sealed("a", number=2).view())
    assert rounds.roster == job.roster(2)


@pytest.mark.parametrize("state", [state for state in RoundState if state != RoundState.FINAL])
def test_last_final_round_is_kept_while_another_is_not_final(state: RoundState) -> None:
    job, rounds = Job("a").sealed("a", number=1), RoundMemory()
    rounds.update(job.view())
    before = rounds.last
    job.sealed("a", number=2).round(2, state, previous=1)
    assert not rounds.update(job.view())
    assert (rounds.known, rounds.last) == (2, before)


def test_final_round_counts_once_its_roster_is_known() -> None:
    job, rounds = Job("a"), RoundMemory()
    assert not rounds.update(job.round(1, RoundState.FINAL).view())
    assert (rounds.known, rounds.last) == (1, None)
    assert rounds.update(job.sealed("a", number=1).view())


# -- leave ----------------------------------------------------------------------------


def test_staying_member_has_no_times_of_a_leave() -> None:
    leave, alarm = LeaveState(), Alarm()
    leave.update(Local(), 5.0, leaving=False)
    assert (leave.since, leave.idle_since) == (None, None)
    assert leave.was_seen(5.0, alarm), "nothing is to be seen"
    assert not leave.gave_up(500.0, alarm)
    assert alarm.at is None


def test_times_of_a_leave_are_those_of_its_first_steps() -> None:
    leave = LeaveState()
    running, idle = Local(workers=Workers.RUNNING), Local()
    for now, local in enumerate((running, running, idle, idle, running), 5):
        leave.update(local, now, leaving=True)
    assert (leave.since, leave.idle_since) == (5.0, 7.0)


def test_withdrawn_leave_is_forgotten() -> None:
    leave = LeaveState()
    leave.update(Local(), 5.0, leaving=True)
    leave.update(Local(), 6.0, leaving=False)
    assert (leave.since, leave.idle_since) == (None, None)
    leave.update(Local(), 7.0, leaving=True)
    assert (leave.since, leave.idle_since) == (7.0, 7.0)


def test_key_of_a_leaving_member_may_go_when_there_was_time_to_read_it() -> None:
    leave, alarm = LeaveState(since=5.0), Alarm()
    assert not leave.was_seen(5.0 + SEEN_SECONDS - 0.1, alarm)
    assert alarm.at == 5.0 + SEEN_SECONDS
    assert leave.was_seen(5.0 + SEEN_SECONDS, alarm)


def test_leaving_member_waits_for_etcd_from_the_end_of_its_workers() -> None:
    leave, alarm = LeaveState(since=1.0, idle_since=5.0), Alarm()
    assert not leave.gave_up(5.0 + PATIENCE_SECONDS - 0.1, alarm)
    assert alarm.at == 5.0 + PATIENCE_SECONDS
    assert leave.gave_up(5.0 + PATIENCE_SECONDS, alarm)


def member(job: Job, **config: Any) -> EngineState:
    """Return the state of member a, which knows all of the job."""
    me = Identity(identity("a"), "a", "host-a", 7000, 7001)
    state = EngineState(Config(KEYS.prefix, me, "n", **config))
    state.view = job.view()
    return state


@pytest.mark.parametrize(
    ("local", "marked", "reason"),
    [("", None, ""), ("", "", "marked to leave"), ("", "scaled down", "scaled down"),
     ("preempted", "scaled down", "preempted"), ("preempted", None, "preempted")],
)  # fmt: skip
def test_reason_for_a_leave_is_the_agents_or_else_the_operators(
    local: str, marked: str | None, reason: str
) -> None:
    """A drain request for another member is none."""
    marks = {"b": "upgraded"} if marked is None else {"b": "upgraded", "a": marked}
    job = Job("a").bounds(marks=tuple(DrainRequest(identity(name), marks[name]) for name in marks))
    state = member(job)
    state.worker_group.report(Local(leaving=local))
    assert state.leaving == reason


def test_without_bounds_only_the_agent_makes_a_member_leave() -> None:
    state = member(Job("a").delete(KEYS.bounds))
    assert state.leaving == ""
    state.worker_group.report(Local(leaving="drained"))
    assert state.leaving == "drained"


# -- parameters -----------------------------------------------------------------------


def test_parameters_of_the_job_replace_those_of_the_member() -> None:
    own = RendezvousParams(2, 2, keep_alive_seconds=7.0)
    job = Job("a", keep_alive_seconds=9.0)
    state = member(job, bounds=own, keep_alive_seconds=8.0)
    assert state.keep_alive_seconds == 9.0
    job.delete(KEYS.bounds).view()
    assert (state.bounds, state.keep_alive_seconds) == (own, 7.0)
    assert member(job, keep_alive_seconds=8.0).keep_alive_seconds == 8.0


def test_log_lines_are_warnings_only_if_marked_so() -> None:
    state = member(Job("a"))
    state.note("as usual")
    state.note("a surprise", warning=True)
    assert state.effects == [Note("as usual"), Note("a surprise", warning=True)]
