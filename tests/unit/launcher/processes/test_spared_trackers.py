"""Kills that spare resource trackers of workers, and those that spare none, of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob_launcher.processes import node_command, process_info, workers
from elasticjob_launcher.processes.node_command import TRACKER_SECONDS, NodeCommand
from elasticjob_launcher.processes.node_round import NodeRound, Phase
from elasticjob_launcher.processes.process_info import PROC, Stat, stat_fields
from elasticjob_launcher.processes.workers import TRACKER_RECHECKS, Round, Worker, Workers
from elasticjob_launcher.wire import Stop

SOURCE = """
import subprocess, sys, time
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
child = subprocess.Popen(["sleep", "1000"])
print(resource_tracker._resource_tracker._pid, child.pid, flush=True)
time.sleep(1000)
"""


class Group:
    """Process group of a worker with a resource tracker and a child."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.leader = self.process.pid
        self.tracker, self.child = map(int, self.process.stdout.readline().split())


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made = [Group(), Group()]
    yield made
    for group in made:
        process_info.kill_group(group.leader, signal.SIGKILL)
        group.process.communicate()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | str]]:
    """Record each signal, by pid or negative group, and each scan of the processes as `scan`.

    Signals to trackers and groups are not delivered: they neither end nor stop the trackers.
    """
    found: list[tuple[int, int | str]] = []
    scan = process_info.processes

    def scanned() -> Iterator[Stat]:
        found.append((0, "scan"))
        return scan()

    monkeypatch.setattr(process_info, "processes", scanned)
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    monkeypatch.setattr(os, "killpg", lambda group, number: found.append((-group, number)))
    return found


def test_leaders_die_and_groups_stop_before_the_only_scan(
    groups: list[Group], sent: list[tuple[int, int | str]]
) -> None:
    leaders = [each.leader for each in groups]
    spared = process_info.kill_sparing_trackers(leaders)
    assert spared == {each.tracker for each in groups}
    at = sent.index((0, "scan"))
    assert sent[:at] == [
        *((leader, signal.SIGKILL) for leader in leaders),
        *((-leader, signal.SIGSTOP) for leader in leaders),
    ]
    assert {(each.child, signal.SIGKILL) for each in groups} <= set(sent[at:])
    assert sent[-2:] == [(-leader, signal.SIGCONT) for leader in leaders]
    assert sent.count((0, "scan")) == 1


def test_group_is_killed_whole_if_processes_cannot_be_read(
    groups: list[Group], sent: list[tuple[int, int | str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> Iterator[Stat]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process_info, "processes", unreadable)
    leaders = [each.leader for each in groups]
    assert not process_info.kill_sparing_trackers(leaders)
    assert sent[-2:] == [(-leader, signal.SIGKILL) for leader in leaders]


def test_stopped_tracker_of_killed_leader_is_recognised(groups: list[Group]) -> None:
    group = groups[0]
    os.killpg(group.leader, signal.SIGSTOP)
    while stat_fields(PROC / str(group.tracker))[0] != "T":
        pass
    group.process.kill()
    group.process.wait()
    assert process_info.is_tracker(group.tracker)


@pytest.mark.parametrize(
    ("state", "threads", "leads"), [("D", 1, False), ("S", 2, False), ("S", 1, True)]
)
def test_command_of_process_that_may_be_held_up_is_not_read(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, state: str, threads: int, leads: bool
) -> None:
    tracker = groups[0].tracker
    assert process_info.is_tracker(tracker)
    group = tracker if leads else groups[0].leader
    monkeypatch.setattr(
        process_info, "_parse_stat", lambda _: Stat(tracker, state, 1, group, threads)
    )
    assert not process_info.is_tracker(tracker)


class Loop:
    """Loop that keeps timers and runs none."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], object]] = []

    def call_later(self, seconds: float, action: Callable[[], object]) -> Any:
        self.actions.append(action)
        return SimpleNamespace(due=seconds, cancel=lambda: None)


def running(groups: list[Group]) -> tuple[Workers, Loop, Round]:
    loop, unused = Loop(), SimpleNamespace()
    found = Workers(loop, unused, {}, lambda event: None, unused)  # type: ignore[arg-type]
    current = found._round = Round(1)
    current.begun = True
    current.workers = [Worker(number, group.process, []) for number, group in enumerate(groups)]
    return found, loop, current


def test_kill_without_order_reaches_whole_groups_without_a_scan(
    groups: list[Group], sent: list[tuple[int, int | str]]
) -> None:
    found, _, _ = running(groups)
    found.stop_unasked(1)
    assert sent == [(-each.leader, signal.SIGKILL) for each in groups]


def test_kill_without_order_reaches_trackers_spared_before(
    groups: list[Group], sent: list[tuple[int, int | str]]
) -> None:
    found, _, current = running(groups)
    found.stop(Stop(1, 0))
    assert current.trackers
    sent.clear()
    found.stop_unasked(1)
    assert not current.trackers
    assert sent == [(-each.leader, signal.SIGKILL) for each in groups]


def test_second_kill_begins_no_second_recheck(
    groups: list[Group], sent: list[tuple[int, int | str]]
) -> None:
    found, loop, _ = running(groups)
    found.stop(Stop(1, 0))
    found.stop(Stop(1, 0))
    assert len(loop.actions) == 1


def test_tracker_is_spared_while_another_process_has_not_ended(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch, sent: list[tuple[int, int | str]]
) -> None:
    found, loop, current = running(groups)
    monkeypatch.setattr(found, "reap", lambda: None)
    found.stop(Stop(1, 0))
    monkeypatch.setattr(workers, "kill_except", lambda groups, trackers: True)
    sent.clear()
    for _ in range(3 * TRACKER_RECHECKS):
        loop.actions.pop()()
    assert not any(number == signal.SIGKILL for _, number in sent)
    monkeypatch.setattr(workers, "kill_except", lambda groups, trackers: False)
    for _ in range(TRACKER_RECHECKS):
        assert current.trackers
        loop.actions.pop()()
    assert not current.trackers
    assert (-groups[0].leader, signal.SIGKILL) in sent


def test_other_processes_are_killed_until_they_have_ended(groups: list[Group]) -> None:
    leaders, trackers = [each.leader for each in groups], [each.tracker for each in groups]
    assert process_info.kill_except(leaders, trackers)
    for each in groups:
        each.process.wait()
        while process_info.kill_except([each.leader], trackers):
            pass


class NodeWithTracker:
    """Node command whose round has one process, a tracker, and a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.recognised = True
        self.killed: list[int] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(node_command, "time", clock)
        monkeypatch.setattr(node_command, "is_tracker", lambda pid: self.recognised)
        monkeypatch.setattr(
            node_command, "kill_unless_reused", lambda pid, began: self.killed.append(pid)
        )
        monkeypatch.setattr(NodeCommand, "_of_round", lambda node, number: {7: "1"})
        self.round = NodeRound(1, {}, lambda event: None, "")
        self.node = NodeCommand.__new__(NodeCommand)
        self.node._loop = Loop()  # type: ignore[assignment]
        self.node._killing = self.node._sweeping = None

    def sweep(self) -> None:
        self.node._kill_workers(self.round)


def test_tracker_of_node_command_is_spared_for_a_time_independent_of_sweeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_tracker = NodeWithTracker(monkeypatch)
    for _ in range(200):
        with_tracker.sweep()
    assert not with_tracker.killed
    with_tracker.now += TRACKER_SECONDS
    with_tracker.sweep()
    assert with_tracker.killed == [7]


def test_tracker_of_node_command_is_spared_also_while_it_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_tracker = NodeWithTracker(monkeypatch)
    with_tracker.sweep()
    with_tracker.recognised = False
    with_tracker.sweep()
    assert not with_tracker.killed


def test_end_of_launcher_spares_no_tracker_of_node_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_tracker = NodeWithTracker(monkeypatch)
    with_tracker.node._round = with_tracker.round
    with_tracker.node._torchrun = None
    with_tracker.round.phase = Phase.RUNNING
    with_tracker.node.stop(Stop(1, 0), spares_trackers=False)
    with_tracker.sweep()
    assert with_tracker.killed == [7]
