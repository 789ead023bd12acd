"""Worker processes of a round: start, signals, and reaping until their process groups are empty.

Owns the state of the running round. Driven by the event loop with SIGCHLD, readable pipes and
timers; nothing is polled while workers run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.memory_cgroup import MemoryCgroup
from elasticjob_launcher.processes.output import Output
from elasticjob_launcher.processes.process_info import (
    group_exists,
    group_has_only_zombies,
    has_handler,
    kill_except,
    kill_group,
    kill_sparing_trackers,
    members,
    reap_children,
    signal_if_caught,
)
from elasticjob_launcher.processes.spawn import LaunchError, Pipes
from elasticjob_launcher.processes.starter import ProcessPlan, Starter
from elasticjob_launcher.processes.stop_copies import (
    AT_ONCE,
    COPY_AFTER_STEP,
    COPY_SECONDS,
    END_STEP,
    StopCopies,
)
from elasticjob_launcher.processes.stuck_processes import StuckWatch
from elasticjob_launcher.processes.worker_stream import WorkerStream
from elasticjob_launcher.snapshot_folder import VARIABLE
from elasticjob_launcher.wire import Stop, exit_event

if TYPE_CHECKING:
    from elasticjob_launcher.processes.spawn import Spawned

# After SIGKILL, no SIGCHLD announces a dead group member whose parent left the group.
RECHECK_SECONDS = 0.2
TRACKER_RECHECKS = 5
"""Number of rechecks without another process after which a resource tracker is killed, too."""
# Python's faulthandler writes the stacks of all threads on it, then lets the signal kill.
DUMP_SIGNAL = signal.SIGABRT


class Worker:
    """Worker process and its two streams."""

    def __init__(self, local_rank: int, process: Spawned, streams: list[WorkerStream]) -> None:
        self.local_rank = local_rank
        self.process = process
        self.streams = streams
        self.exited = False
        self.group_gone = False


class Round:
    """Started round; `gone` is set once its process groups are empty, or given up as `stuck`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: list[Worker] = []
        self.exits: list[dict[str, Any]] = []
        self.begun = False
        self.gone = False
        self.terminated = False
        self.killed = False
        self.dumped = False
        self.unasked = False
        self.copies: StopCopies | None = None
        self.kills_after_copies = False
        # Grace period of the stop that began with a copy, and its end.
        self.grace_seconds = self.ends_at = 0.0
        self.kill_timer: Timer | None = None
        self.spares_trackers = True
        # Resource trackers left after SIGKILL, and the rechecks since nothing else is left.
        self.trackers: frozenset[int] = frozenset()
        self.rechecks = 0
        self.watch = StuckWatch()
        self.stuck = ""

    def left(self, dump: bool) -> float:
        """Return the remaining grace period; that of a stack dump begins after the copies."""
        return self.grace_seconds if dump else self.ends_at - time.monotonic()


class Workers:
    """Runner of one round at a time; `emit` receives its events as protocol messages.

    `starter` starts the processes; a round with a deferred start counts as running.
    """

    def __init__(
        self,
        loop: Loop,
        output: Output,
        base_env: Mapping[str, str],
        emit: Callable[[dict[str, Any]], None],
        starter: Starter,
    ) -> None:
        self._loop = loop
        self._output = output
        self._base_env = base_env
        self._emit = emit
        self._starter = starter
        self._memory = MemoryCgroup()
        self._round: Round | None = None

    @property
    def running_round(self) -> int | None:
        return self._round.number if self._round is not None and not self._round.gone else None

    @property
    def running_pids(self) -> dict[int, int]:
        """Pids of the workers that have not exited, by local rank."""
        workers = self._round.workers if self._round is not None else []
        return {w.local_rank: w.process.pid for w in workers if not w.exited}

    @property
    def stuck(self) -> str:
        """Reason for which processes of the last round were given up; empty if none were."""
        return self._round.stuck if self._round is not None else ""

    @property
    def exits(self) -> list[dict[str, Any]]:
        return list(self._round.exits) if self._round is not None else []

    def start(self, number: int, specs: list[dict[str, Any]], max_log_bytes: int) -> None:
        running = self.running_round
        if running is not None:
            message = f"round {running} still has processes: stop it before starting {number}"
            self._emit({"type": "start_refused", "round": number, "message": message})
            return
        current = self._round = Round(number)
        self._memory = MemoryCgroup()  # looked up again: this process may have changed cgroups
        envs = [{**self._base_env, **spec["env"]} for spec in specs]
        plans = [ProcessPlan(tuple(spec["argv"]), env) for spec, env in zip(specs, envs)]
        self._starter.when_able(plans, lambda: self._start(current, specs, plans, max_log_bytes))

    def _start(
        self,
        current: Round,
        specs: list[dict[str, Any]],
        plans: list[ProcessPlan],
        max_log_bytes: int,
    ) -> None:
        if current.gone or current is not self._round:
            return  # stopped before it began
        current.begun = True
        pipes: list[Pipes | LaunchError] = []
        for _ in specs:
            try:
                pipes.append(Pipes())
            except LaunchError as error:
                pipes.append(error)
        ready = [(plan, each) for plan, each in zip(plans, pipes) if isinstance(each, Pipes)]
        group = self._starter.start([plan.to(each.write_fds) for plan, each in ready])
        started = iter(group.processes)
        failed = []
        for spec, each in zip(specs, pipes):
            result = next(started) if isinstance(each, Pipes) else each
            if isinstance(each, Pipes):
                each.close_write()
            if not isinstance(each, Pipes) or isinstance(result, LaunchError):
                assert isinstance(result, LaunchError)
                failed.append((spec["local_rank"], result))
                if isinstance(each, Pipes):
                    each.close_read()
            else:
                streams = self._streams(spec, each.read_fds, max_log_bytes)
                current.workers.append(Worker(spec["local_rank"], result, streams))
        pids = {str(w.local_rank): w.process.pid for w in current.workers}
        self._emit(
            {
                "type": "started",
                "round": current.number,
                "pids": pids,
                "warm": not group.cold_reason,
                "cold_reason": group.cold_reason,
            }
        )
        for local_rank, failure in failed:
            self._output.write_line(f"worker {local_rank}: {failure.message}")
            self._record_exit(current, local_rank, 0, failure.exit_code, None, failure.message, "")
        self._check_groups()

    def stop(self, order: Stop, spares_trackers: bool = True) -> None:
        """Stop the round's workers: with SIGTERM and a grace period, or without one with SIGKILL.

        With `copies` the workers first make stop copies, in at most half of the grace period, also
        of one that a further order shortens. With `ends_step`, a grace period and no `dump` they
        first finish their step, also without `copies`, so that the workers of other nodes can
        finish theirs. Without copies, a handler of SIGTERM in any worker ends that wait: it gets
        the whole grace period.

        A repeated order, as after a reconnect of the agent, changes nothing. A further order may
        shorten the grace period and never extends it. One without `copies` ends the copies, one
        with neither ends the wait for the step, and one without a grace period, as after the
        deadline of the workers, ends both. Once any order lacks `spares_trackers`, SIGKILL reaches
        whole groups at once.
        """
        number, grace_seconds, dump, copies, ends_step = order
        current = self._round
        if current is not None and current.number == number and not spares_trackers:
            current.spares_trackers = False
        ends_step = ends_step and grace_seconds > 0 and not dump
        if current is None or current.gone or current.number != number:
            self._emit({"type": "stopped", "round": number})
        elif not current.begun:
            self._check_groups()
        elif copies and not current.terminated and current.copies is None:
            kind = COPY_AFTER_STEP if ends_step else AT_ONCE
            self._copy(current, grace_seconds, dump, kind)
        elif current.copies is not None and current.copies.pending:
            handles = current.copies.handles_sigterm or _handles(current, signal.SIGTERM)
            awaits = ends_step and not handles
            kinds = {AT_ONCE: copies, COPY_AFTER_STEP: copies or awaits, END_STEP: ends_step}
            goes_on = kinds[current.copies.kind]
            self._shorten(current, current.copies, grace_seconds, dump, goes_on)
        elif (
            ends_step
            and current.copies is None
            and not (current.terminated or _handles(current, signal.SIGTERM))
        ):
            self._copy(current, grace_seconds, dump, END_STEP)
        else:
            self._end(current, grace_seconds, dump)

    def _shorten(
        self, current: Round, copies: StopCopies, grace_seconds: float, dump: bool, goes_on: bool
    ) -> None:
        """Shorten the grace period during copies; end the copies unless `goes_on`."""
        current.grace_seconds = min(current.grace_seconds, grace_seconds)
        current.ends_at = min(current.ends_at, time.monotonic() + grace_seconds)
        if not goes_on:
            self._end(current, current.left(dump), dump)
        elif grace_seconds > 0:
            if not dump:
                copies.shorten(grace_seconds / 2)
        elif not current.kills_after_copies:
            self._kill(current)

    def _end(self, current: Round, grace_seconds: float, dump: bool) -> None:
        if current.copies is not None:
            current.copies.close()
        if grace_seconds <= 0:
            self._kill(current)
        elif dump and not current.terminated:
            self._dump(current, grace_seconds)
        else:
            self._terminate(current, grace_seconds)

    def stop_unasked(self, number: int) -> None:
        """Kill the round's workers without an agent's order; their exits are not failures."""
        if self._round is not None and self._round.number == number:
            self._round.unasked = True
        self.stop(Stop(number, 0, copies=False), spares_trackers=False)

    def signal(self, number: int, signum: int, caught: bool = False) -> None:
        """Signal all processes of the round, or with `caught` only those with a handler for it.

        The children of a worker with a handler get no signal: forks inherit its handler.
        """
        current = self._round
        if current is None or current.number != number:
            return
        if not caught:
            self._signal_groups(current, signum)
            return
        for worker in current.workers:
            if not worker.exited and not signal_if_caught(worker.process.pid, signum):
                for pid in members(worker.process.pid):
                    signal_if_caught(pid, signum)

    def reap(self) -> None:
        """Reap every child that ended: workers, and orphans adopted by this subreaper."""
        for pid, status in reap_children():
            self._ended(pid, status)
            self._starter.reaped(pid, status)
        if self._round is not None and self._round.begun:
            self._check_groups()

    def drain(self) -> None:
        """Forward the output that workers have written so far."""
        for worker in self._round.workers if self._round is not None else []:
            for stream in worker.streams:
                stream.drain()
                stream.close()

    def _streams(
        self, spec: dict[str, Any], read_fds: list[int], max_log_bytes: int
    ) -> list[WorkerStream]:
        names = ("stdout.log", "stderr.log")
        log_dir = spec["log_dir"] if max_log_bytes > 0 else ""
        prefix = os.fsencode(spec["prefix"])
        unlogged, silent = spec.get("unlogged", ()), spec.get("silent", ())
        paths = [
            Path(log_dir, name) if log_dir and number not in unlogged else None
            for number, name in enumerate(names, 1)
        ]
        return [
            WorkerStream(
                self._loop,
                self._output,
                fd,
                0 if number in silent else number,
                prefix,
                path,
                max_log_bytes,
            )
            for number, (fd, path) in enumerate(zip(read_fds, paths), 1)
        ]

    def _dump(self, current: Round, grace_seconds: float) -> None:
        """Send workers the signal that makes them write their threads' stacks and then end.

        Without a handler the signal only kills, possibly slowly because of a core file.
        """
        running = [worker for worker in current.workers if not worker.exited]
        able = [w for w in running if has_handler(w.process.pid, DUMP_SIGNAL)]
        if not able:
            self._kill(current)
            return
        current.terminated = current.dumped = True
        for worker in running:  # not reaped yet: the pids are still valid
            os.kill(worker.process.pid, DUMP_SIGNAL if worker in able else signal.SIGTERM)
        self._terminate(current, grace_seconds)

    def _terminate(self, current: Round, grace_seconds: float) -> None:
        if not current.terminated:
            current.terminated = True
            self._signal_groups(current, signal.SIGTERM)
        due = time.monotonic() + grace_seconds
        if not current.killed and (current.kill_timer is None or due < current.kill_timer.due):
            if current.kill_timer is not None:
                current.kill_timer.cancel()
            current.kill_timer = self._loop.call_later(grace_seconds, lambda: self._kill(current))

    def _copy(self, current: Round, grace_seconds: float, dump: bool, kind: int) -> None:
        """End the workers once those that can have done what this kind of request asks for."""
        current.grace_seconds = grace_seconds
        current.ends_at = time.monotonic() + grace_seconds
        current.kills_after_copies = grace_seconds <= 0

        def end() -> None:
            self._end(current, current.left(dump), dump)

        running = [worker.local_rank for worker in current.workers if not worker.exited]
        folder = self._base_env.get(VARIABLE, "")
        limit = grace_seconds / 2 if grace_seconds > 0 and not dump else COPY_SECONDS
        current.copies = StopCopies(self._loop, folder, running, end, limit, kind)
        if not current.copies.pending:
            end()

    def _kill(self, current: Round) -> None:
        if current.gone:
            return
        if not current.spares_trackers:
            self._kill_groups(current)
        if not current.killed:
            self._loop.call_later(RECHECK_SECONDS, lambda: self._recheck(current))
        current.terminated = current.killed = True
        if current.copies is not None:
            current.copies.close()
        if current.kill_timer is not None:
            current.kill_timer.cancel()
        if current.spares_trackers:
            current.trackers = kill_sparing_trackers(_groups_left(current))

    def _kill_groups(self, current: Round) -> None:
        self._signal_groups(current, signal.SIGKILL)
        current.trackers = frozenset()

    def _recheck(self, current: Round) -> None:
        if current.gone:
            return
        if current.trackers and not kill_except(_groups_left(current), current.trackers):
            current.rechecks += 1
            if current.rechecks >= TRACKER_RECHECKS:
                self._kill_groups(current)
        if current is self._round:
            self.reap()
            self._check_groups(zombies_count=False)
            self._give_up_if_stuck(current)
        if not current.gone:
            self._loop.call_later(RECHECK_SECONDS, lambda: self._recheck(current))

    def _give_up_if_stuck(self, current: Round) -> None:
        """End the round without the end of processes that can run no more, such as those that wait
        for a disk that does not answer."""
        if current.gone:
            return
        left = {pid for group in _groups_left(current) for pid in members(group)}
        current.stuck = current.watch.find_stuck(left - current.trackers)
        if not current.stuck:
            return
        self._kill_groups(current)
        current.gone = True
        self._output.write_line(current.stuck)
        self._emit({"type": "stuck", "round": current.number, "message": current.stuck})

    def _signal_groups(self, current: Round, signum: int) -> None:
        for worker in current.workers:
            # The number of an empty group may have been reused.
            if not worker.group_gone:
                kill_group(worker.process.pid, signum)

    def _ended(self, pid: int, status: int) -> None:
        current = self._round
        workers = current.workers if current is not None else []
        worker = next((w for w in workers if w.process.pid == pid and not w.exited), None)
        if current is None or worker is None:
            return
        worker.exited = True
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if signum is None else None
        # Popen must not wait for the process again: its pid may have been reused by then.
        worker.process.returncode = code if code is not None else -(signum or 0)
        for stream in worker.streams:
            stream.drain()
        errors = worker.streams[1]
        tail = errors.long_tail if current.dumped else errors.tail
        memory = code != 0 and not current.killed and self._memory.explains_exit()
        self._record_exit(current, worker.local_rank, pid, code, signum, "", tail, memory)
        if current.copies is not None:
            current.copies.ended(worker.local_rank)

    def _record_exit(
        self,
        current: Round,
        local_rank: int,
        pid: int,
        code: int | None,
        signum: int | None,
        message: str,
        stderr_tail: str,
        out_of_memory: bool = False,
    ) -> None:
        if out_of_memory and signum == signal.SIGKILL:
            limit = self._memory.limit_text()
            message = "killed by the kernel, because the memory ran out" + (
                f": the limit is {limit}" if limit else ""
            )
        event = exit_event(
            current.number, local_rank, pid, code, signum, message, stderr_tail, out_of_memory,
            current.unasked,
        )  # fmt: skip
        current.exits.append(event)
        self._emit(event)

    def _check_groups(self, zombies_count: bool = True) -> None:
        current = self._round
        if current is None or current.gone:
            return
        for worker in current.workers:
            if worker.exited and not worker.group_gone and _empty(worker, zombies_count):
                worker.group_gone = True
                for stream in worker.streams:
                    stream.drain()
                    stream.close()
        if current.dumped and not current.killed and all(w.exited for w in current.workers):
            self._kill(current)  # all stacks are written; leftover processes do not matter
        if all(worker.group_gone for worker in current.workers):
            current.gone = True
            if current.kill_timer is not None:
                current.kill_timer.cancel()
            if current.copies is not None:
                current.copies.close()
            self._emit({"type": "stopped", "round": current.number})


def _groups_left(current: Round) -> list[int]:
    return [each.process.pid for each in current.workers if not each.group_gone]


def _handles(current: Round, signum: int) -> bool:
    """Return True if a running worker has a handler for a signal."""
    return any(has_handler(w.process.pid, signum) for w in current.workers if not w.exited)


def _empty(worker: Worker, zombies_count: bool) -> bool:
    group = worker.process.pid
    return not group_exists(group) or (not zombies_count and group_has_only_zombies(group))
