"""Stalled training: the hang time, the stack requests to the workers, and their answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticjob_agent.core.commands import StopGroup
from elasticjob_agent.core.events import (
    Event,
    RuntimeEvent,
    Timer,
    WorkersProgressed,
)
from elasticjob_agent.core.hang import ALMOST, DUMP_SECONDS, START_SECONDS, hangs_at, parse_stack
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.core.state import State
from elasticjob_agent.core.step import step, wake_at
from elasticjob_agent.worker_runtime import WorkersSucceeded
from elasticjob_rendezvous.protocol.coordinator.failure_policy import culprit
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import CauseKind
from tests.unit.agent.builders import FACTS, ended, hello, run, started, stop, stopped

HANG_SECONDS = 60.0
BUSY = """Fatal Python error: Aborted

Thread 0x00007f10b6ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f11f5c5a740 (most recent call first):
  File "/usr/lib/python3.11/site-packages/numpy/lib/npyio.py", line 4 in load
  File "/app/data.py", line 12 in read_batch
  File "/app/train.py", line 40 in main
  File "/app/train.py", line 44 in <module>

Extension modules: numpy._core, torch._C (total: 2)
"""
WAITING = BUSY.replace("numpy/lib/npyio", "torch/distributed/distributed_c10d")
# Its peer was inspected first, its collective broke, and torch was writing down the traceback.
ENDING = """\
Fatal Python error: Aborted

Current thread 0x00007f11f5c5a740 (most recent call first):
  File "/usr/lib/python3.11/traceback.py", line 125 in print_exception
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 1928 in \
_distributed_excepthook
"""
# The same, before the error was written.
RAISED = """\
Fatal Python error: Aborted

Current thread 0x00007f11f5c5a740 (most recent call first):
  File "/tmp/elasticjob/launcher.pyz/elasticjob_launcher/zygote/run_module.py", line 112 in shown
  File "<string>", line 29 in <module>
  File "<string>", line 1 in <module>
"""


def at_step(number: int, at: float, **more: Any) -> tuple[Event, float]:
    progress = {rank: WorkerProgress(step=number, at_ms=int(at * 1000), **more) for rank in (0, 1)}
    return WorkersProgressed(1, progress, int(at * 1000)), at


def after(*events: tuple[Event, float], seconds: float = HANG_SECONDS) -> State:
    """Return the state of two workers of a round that began at 10."""
    state = State(replace(FACTS, hang_seconds=seconds))
    story: list[tuple[Event, float]] = [(hello(), 0.0), (run(), 10.0), (started(), 11.0)]
    for event, now in (*story, *events):
        state, _ = step(state, event, now)
    return state


def stops(state: State, event: Event, now: float) -> list[StopGroup]:
    return [each for each in step(state, event, now)[1] if isinstance(each, StopGroup)]


def test_training_without_new_step_gets_a_stack_dump() -> None:
    state = after(at_step(1, 20.0), at_step(2, 30.0))
    assert wake_at(state) is not None
    assert hangs_at(state) == 30.0 + HANG_SECONDS
    assert stops(state, Timer(), 89.0) == []
    assert stops(state, Timer(), 90.0) == [StopGroup(1, DUMP_SECONDS, dump=True)]


def test_checkpoint_is_progress_and_repeated_report_is_not() -> None:
    assert hangs_at(after(at_step(2, 30.0), at_step(2, 50.0))) == 30.0 + HANG_SECONDS
    assert hangs_at(after(at_step(2, 30.0), at_step(2, 50.0, checkpoint_step=2))) == 110.0


def test_script_without_reported_step_never_hangs() -> None:
    assert hangs_at(after()) is None


def test_hang_limit_includes_start_time_after_first_reported_step() -> None:
    state = after(at_step(1, 20.0))
    story: list[tuple[Event, float]] = [(stop(1, CauseKind.LOSS), 21.0), (stopped(), 22.0)]
    for event, now in (*story, (run(2), 23.0), (started(2), 24.0)):
        state, _ = step(state, event, now)
    assert hangs_at(state) == 23.0 + START_SECONDS + HANG_SECONDS


def test_rest_of_a_command_whose_workers_succeeded_does_not_hang() -> None:
    succeeded = (RuntimeEvent(WorkersSucceeded(1)), 31.0)
    assert hangs_at(after(at_step(2, 30.0), succeeded)) is None
    other = (RuntimeEvent(WorkersSucceeded(2)), 31.0)
    assert hangs_at(after(at_step(2, 30.0), other)) is not None


def test_hang_detection_is_off_by_default() -> None:
    assert hangs_at(after(at_step(1, 20.0), seconds=0.0)) is None


def test_worker_group_near_hang_limit_dumps_stacks_on_peer_failure() -> None:
    state = after(at_step(1, 20.0))
    failed = stop(1, CauseKind.FAILURE)
    assert stops(state, failed, 21.0) == [StopGroup(1, 0.0)]
    still = 20.0 + HANG_SECONDS * ALMOST
    assert stops(state, failed, still) == [StopGroup(1, DUMP_SECONDS, dump=True)]
    assert stops(state, stop(1, CauseKind.LOSS), still) == [StopGroup(1, 0.0)]


def failure(first: str, second: str) -> Failure:
    """Return the failure of two workers that wrote these stacks and were ended by the signal."""
    state, _ = step(after(at_step(7, 20.0)), Timer(), 80.0)
    state, orders = step(state, ended(0, signum=6, stderr=first), 80.1)
    assert not [each for each in orders if isinstance(each, StopGroup)], "the other is not done yet"
    state, _ = step(state, ended(1, signum=6, stderr=second), 80.2)
    assert state.group is not None
    assert state.group.failure is not None
    return state.group.failure


def test_worker_outside_collective_is_named_as_hang() -> None:
    for found in (failure(BUSY, WAITING), failure(WAITING, BUSY)):
        assert found.kind is FailureClass.HANG
        assert found.message == (
            "no progress for 60 s after step 7: it was in read_batch (data.py, line 12)"
        )
        assert found.traceback.splitlines()[0] == "Stack (most recent call last):"
        assert found.traceback.splitlines()[-1].endswith("line 4, in load")
    assert failure(BUSY, WAITING).local_rank == 0
    assert failure(WAITING, BUSY).local_rank == 1


def test_among_stalled_nodes_the_one_not_in_a_collective_is_first_failure() -> None:
    waits = failure(WAITING, WAITING)
    assert waits.kind is FailureClass.COLLECTIVE_TIMEOUT
    assert "it waited for its peers in read_batch (data.py, line 12)" in waits.message
    assert culprit([waits, failure(BUSY, WAITING)]) == failure(BUSY, WAITING)


def test_worker_whose_collective_broke_first_did_not_hang() -> None:
    raised = "RuntimeError: Connection closed by peer [1]"
    lost = f"Traceback (most recent call last):\n  File x\n{raised}\n"
    found = failure(lost + BUSY, BUSY)
    assert (found.kind, found.local_rank) == (FailureClass.HANG, 1)
    echo = failure(lost + BUSY, lost + BUSY)
    assert echo.kind is FailureClass.PEER_ABORT
    assert echo.message == raised


def test_worker_reporting_a_broken_collective_did_not_hang() -> None:
    assert (failure(ENDING, BUSY).kind, failure(ENDING, BUSY).local_rank) == (FailureClass.HANG, 1)
    assert failure(ENDING, ENDING).kind is FailureClass.COLLECTIVE_TIMEOUT


def test_worker_whose_program_has_ended_is_no_cause_of_the_hang() -> None:
    for first, second in ((RAISED, BUSY), (BUSY, RAISED)):
        found = failure(first, second)
        assert found.kind is FailureClass.HANG
        assert found.local_rank == (first, second).index(BUSY)
    alone = failure(RAISED, RAISED)
    assert alone.kind is FailureClass.COLLECTIVE_TIMEOUT
    assert alone.message.endswith("after step 7: its program had ended")


def test_hang_in_the_code_of_a_command_line_is_a_hang() -> None:
    frame = '  File "<string>", line 1 in <module>\n'
    stack = f"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n{frame}"
    assert failure(stack, WAITING).kind is FailureClass.HANG


def test_hang_without_stack_dump_is_still_a_hang() -> None:
    found = failure("", "")
    assert found.kind is FailureClass.HANG
    assert found.message.endswith("it did not report its place")


def test_stack_is_read_from_interrupted_thread_or_else_last_thread() -> None:
    found = parse_stack("noise\n" + BUSY)
    assert found is not None
    assert found.frames[0] == (
        "/usr/lib/python3.11/site-packages/numpy/lib/npyio.py", 4, "load"
    )  # fmt: skip
    other = parse_stack(BUSY.replace("Current thread", "Thread"))
    assert other == found
    assert parse_stack("Traceback (most recent call last):\n  File x\n") is None
    assert (
        parse_stack("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") is None
    )
