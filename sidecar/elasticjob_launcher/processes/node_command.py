"""Command of a node with `launch: PerNode`: one process, whose torchrun starts the workers.

The command runs once and outlives rounds. torchrun in it connects through the plug-in
`elasticjob_torchrun`, asks for a round, and gets the variables of its workers. To the agent
beside the trainer this module looks like `Workers`: a round that is started, fails, stops. A
round is over once torchrun asks for the next one and no process of the round is left; torch's
agent has then ended its workers. If that takes too long, or if nobody may rely on it (self-fencing,
orphans), every process of the command is killed, and the next round runs the command again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.command_process import CommandProcess, Ended
from elasticjob_launcher.processes.memory_cgroup import MemoryCgroup
from elasticjob_launcher.processes.node_round import NodeRound, Phase
from elasticjob_launcher.processes.output import Output
from elasticjob_launcher.processes.process_info import (
    descendants,
    is_tracker,
    kill_group,
    kill_unless_reused,
    reap_children,
    signal_if_caught,
)
from elasticjob_launcher.processes.stuck_processes import StuckWatch
from elasticjob_launcher.sockets import AgentServer, Connection
from elasticjob_launcher.wire import Stop, WireError

if TYPE_CHECKING:
    from elasticjob_launcher.processes.spawn import Spawn
    from elasticjob_launcher.wire import Command

ADDRESS = "ELASTICJOB_TORCHRUN"
"""Variable of the command with the token and the socket for the plug-in."""
ROUND = "ELASTICJOB_ROUND"
COLD = "with launch: PerNode torchrun starts the workers"

SWEEP_SECONDS = 0.02
TRACKER_SECONDS = 1.0
"""Time from the kill of a round's workers until their resource trackers are killed, too."""
STUCK_SWEEP_SECONDS = 0.2
RETURN_SECONDS = 5.0
"""Maximum time from the kill of a round's workers until torchrun asks for the next round."""
LOST_SECONDS = 1.0
"""Time for the command to end by itself after its torchrun has ended without success."""

NEVER_JOINED = (
    "the command ended without joining the rendezvous: no torchrun in it asked for a round, so it "
    "would have trained alone on each node. Let it call torchrun (or accelerate launch) with this "
    "image's torch 2.5 or later, without replacing PYTHONPATH; or set launch: PerWorker"
)
LEFT_RUNNING = "the command ended while torchrun's workers ran: let it wait for torchrun"
TORCHRUN_LOST = "torchrun ended before its workers succeeded, and the command continued"
UNEXPLAINED = "torchrun restarted its workers without naming a failed one"
SECOND = (
    "a second torchrun in the command of a job with several nodes: the nodes could not agree on "
    "which one they run. Start one torchrun per job, or set maxNodes: 1"
)
BUSY = "another torchrun of this command runs: start one at a time"


class NodeCommand:
    """Runner of the node's command, one round at a time; `emit` receives the agent's events.

    Args:
        argv: the command.
        socket_path: path of the socket for the plug-in.
        joined: called once the number of workers is known; 0 if the command ended before.
    """

    def __init__(
        self,
        loop: Loop,
        output: Output,
        base_env: Mapping[str, str],
        emit: Callable[[dict[str, Any]], None],
        spawn: Spawn,
        argv: tuple[str, ...],
        socket_path: str,
        command: Command,
        joined: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._output = output
        self._emit = emit
        self._on_joined = joined
        self._token = secrets.token_hex(16)
        env = {**command.env, ADDRESS: f"{self._token}@{socket_path}"}
        self._command = CommandProcess(
            loop, output, spawn, argv, base_env, env, command.log_dir, command.max_log_bytes
        )
        self._server = AgentServer(loop, socket_path, self._connected, output.write_line)
        self._memory = MemoryCgroup()
        self._ended: Ended | None = None  # not yet reported in a round
        self._torchrun: Connection | None = None
        self._waits = False
        self._workers = 0
        self._round: NodeRound | None = None
        self._sweeping: Timer | None = None
        self._killing: Timer | None = None
        self._swept_at = 0.0
        self._watch = StuckWatch()
        self.joined: int | None = None
        failed = self._command.start()
        if failed is not None:
            self._ended = failed
            self._settle(0)

    # -- what the launcher uses, as of `Workers` ----------------------------------------

    @property
    def running_round(self) -> int | None:
        current = self._active
        return None if current is None else current.number

    @property
    def running_pids(self) -> dict[int, int]:
        current = self._active
        if current is None:
            return {}
        if current.pids:
            return current.running_pids
        return {} if self._command.pid is None else {0: self._command.pid}

    @property
    def stuck(self) -> str:
        """Reason for which processes of the last round were given up; empty if none were."""
        return "" if self._round is None else self._round.stuck

    @property
    def exits(self) -> list[dict[str, Any]]:
        return [] if self._round is None else list(self._round.exits)

    def start(self, number: int, specs: list[dict[str, Any]], max_log_bytes: int) -> None:
        """Start a round: answer the torchrun that waits, or run the command again."""
        running = self.running_round
        if running is not None:
            message = f"round {running} still has processes: stop it before starting {number}"
            self._emit({"type": "start_refused", "round": number, "message": message})
            return
        envs = {spec["local_rank"]: spec["env"] for spec in specs}
        current = self._round = NodeRound(number, envs, self._emit, COLD)
        self._memory = MemoryCgroup()
        if self._ended is None and self._command.pid is None:
            self._ended = self._command.start()
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self._report_end(current, ended)
        elif self._waits:
            self._answer(current)

    def stop(self, order: Stop, spares_trackers: bool = True) -> None:
        """Stop the round's workers. torchrun ends them by itself, without copies or their step.

        Without `spares_trackers`, also in an earlier order, SIGKILL reaches resource trackers, too.
        """
        current = self._active
        if current is None or current.number != order.round:
            self._emit({"type": "stopped", "round": order.round})
            return
        current.stopping = True
        current.spares_trackers = current.spares_trackers and spares_trackers
        if self._sweeping is not None:
            return
        if current.phase is Phase.PENDING:
            current.over()  # the command prepares, or runs something else before torchrun
        elif current.phase is Phase.FINISHED:
            if self._command.pid is not None and not current.terminated:
                current.terminated = True
                kill_group(self._command.pid, signal.SIGTERM)
            self._kill_within(current, order.grace_seconds, self._kill_everything)
        else:
            if self._torchrun is not None:
                self._torchrun.send({"type": "stop", "round": order.round})
            # torch's agent has no order for workers to dump their stacks.
            grace_seconds = 0.0 if order.dump else order.grace_seconds
            self._kill_within(current, grace_seconds, partial(self._kill_workers, current))

    def stop_unasked(self, number: int) -> None:
        """Kill every process of the command without an agent's order."""
        current = self._active
        if current is None or current.number != number:
            self._emit({"type": "stopped", "round": number})
            return
        current.stopping = current.unasked = True
        self._kill_everything()

    def signal(self, number: int, signum: int, caught: bool = False) -> None:
        """Signal the processes of the round's workers, or those with a handler for it."""
        current = self._active
        if current is None or current.number != number:
            return
        for pid in self._of_round(number):
            if caught:
                signal_if_caught(pid, signum)
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)

    def reap(self) -> None:
        """Reap every child that ended: the command, and orphans adopted by this subreaper."""
        for pid, status in reap_children():
            if pid == self._command.pid:
                self._command_ended(status)

    def drain(self) -> None:
        """Forward the output written so far."""
        self._command.drain()

    def close(self) -> None:
        self._server.close()

    # -- the command --------------------------------------------------------------------

    @property
    def _active(self) -> NodeRound | None:
        return None if self._round is None or self._round.gone else self._round

    def _command_ended(self, status: int) -> None:
        ended = self._command.ended(status)
        if ended.code != 0:
            ended = ended._replace(out_of_memory=self._memory.explains_exit())
        if self._sweeping is not None:
            return  # killed by us
        current = self._active
        if current is None:
            self._ended = ended
            self._settle(0)
        else:
            self._report_end(current, ended)

    def _report_end(self, current: NodeRound, ended: Ended) -> None:
        """Report the end of the command as the end of the round's workers, and end the round."""
        current.started({})
        joined = current.phase is not Phase.PENDING
        if current.stopping or ended.code != 0:
            current.exited(0, *ended)
        elif current.phase is Phase.FINISHED or (not joined and current.alone):
            for local_rank in current.envs:
                current.exited(local_rank, *ended)
        else:
            message = LEFT_RUNNING if joined else NEVER_JOINED
            self._output.write_line(message)
            current.exited(0, ended.pid, 1, None, message)
        self._kill_everything()

    def _settle(self, workers: int) -> None:
        if self.joined is None:
            self.joined = workers
            self._on_joined(workers)

    # -- torchrun -----------------------------------------------------------------------

    def _connected(self, connection: Connection) -> None:
        trusted: list[bool] = []

        def received(message: dict[str, Any]) -> None:
            if not trusted:
                if message.get("type") != "hello" or not secrets.compare_digest(
                    str(message.get("token")), self._token
                ):
                    raise WireError(
                        f"the first message must be `hello` with the token of {ADDRESS}"
                    )
                trusted.append(True)
            else:
                self._received(connection, message)

        connection.on_message = received
        connection.on_closed = lambda: self._disconnected(connection)

    def _received(self, connection: Connection, message: dict[str, Any]) -> None:
        kind, current = message.get("type"), self._active
        if kind == "join":
            self._join(connection, _whole(message.get("workers"), 1))
        elif connection is not self._torchrun:
            return
        elif kind == "bye":
            if current is not None and current.phase is Phase.RUNNING and message.get("succeeded"):
                current.phase = Phase.FINISHED
        elif current is None or message.get("round") != current.number:
            return
        elif kind == "running":
            pids = message.get("pids")
            if isinstance(pids, dict):
                current.started({int(rank): _whole(pid) for rank, pid in pids.items()})
        elif kind == "exited" and current.phase is Phase.RUNNING:
            self._worker_exited(current, message)

    def _worker_exited(self, current: NodeRound, message: dict[str, Any]) -> None:
        """Report a worker that failed. Success counts once the whole command has ended."""
        local_rank, pid = _whole(message.get("local_rank")), _whole(message.get("pid"))
        current.ended_pids.add(pid)
        code, signum = message.get("exit_code"), message.get("signal")
        if code == 0:
            current.succeeded(local_rank)
            return
        memory = not current.killed and self._memory.explains_exit()
        current.started({})
        current.exited(local_rank, pid, code, signum, "", self._command.tail(), memory)

    def _join(self, connection: Connection, workers: int) -> None:
        if self._torchrun is not None and self._torchrun is not connection:
            _refuse(connection, BUSY)
            return
        current = self._active
        finished = current is not None and current.phase is Phase.FINISHED
        if current is not None and finished and not current.alone:
            _refuse(connection, SECOND)
            return
        self._torchrun, self._waits, self._workers = connection, True, workers
        self._settle(workers)
        if current is None or self._sweeping is not None:
            return
        if current.phase is Phase.RUNNING:
            self._workers_ended(current, UNEXPLAINED)
        elif current.phase is not Phase.ENDED:
            self._answer(current)

    def _answer(self, current: NodeRound) -> None:
        """Give the round to the torchrun that waits for it."""
        assert self._torchrun is not None
        if self._workers != len(current.envs):
            _refuse(
                self._torchrun,
                f"this node's number of workers is {len(current.envs)}, but this torchrun would "
                f"start {self._workers}: use the same number for every torchrun of the command",
            )
            return
        self._waits = False
        current.phase = Phase.RUNNING
        envs = {str(rank): env for rank, env in current.envs.items()}
        self._torchrun.send({"type": "round", "round": current.number, "envs": envs})

    def _disconnected(self, connection: Connection) -> None:
        if connection is not self._torchrun:
            return
        self._torchrun, self._waits = None, False
        current = self._active
        if current is None or current.phase is not Phase.RUNNING or self._sweeping is not None:
            return
        self._kill_workers(current)
        self._loop.call_later(LOST_SECONDS, lambda: self._torchrun_lost(current))

    def _torchrun_lost(self, current: NodeRound) -> None:
        if not current.gone and self._sweeping is None and current.phase is Phase.RUNNING:
            self._workers_ended(current, TORCHRUN_LOST)

    # -- the end of a round -------------------------------------------------------------

    def _workers_ended(self, current: NodeRound, message: str) -> None:
        """End the round of a torchrun whose workers ended; `message` explains it if nothing does.

        The command continues.
        """
        current.started({})
        if not current.stopping and not current.exits:
            current.exited(0, 0, 1, None, message, self._command.tail())
        current.phase = Phase.ENDED
        self._kill_workers(current)

    def _kill_within(
        self, current: NodeRound, grace_seconds: float, kill: Callable[[], None]
    ) -> None:
        due = time.monotonic() + grace_seconds
        if current.kill_timer is not None:
            if current.kill_timer.due <= due:
                return
            current.kill_timer.cancel()
        current.kill_timer = self._loop.call_later(grace_seconds, kill)

    def _kill_workers(self, current: NodeRound) -> None:
        """Kill the round's workers until torchrun has asked for the next round and none is left."""
        if self._killing is not None:
            self._killing.cancel()
        if current.gone or self._sweeping is not None:
            return
        if not current.killed:
            current.killed = True
            now = time.monotonic()
            current.return_by = now + RETURN_SECONDS
            current.trackers_until = now + TRACKER_SECONDS
        left = self._of_round(current.number)
        spares = current.spares_trackers and time.monotonic() < current.trackers_until
        for pid, began in left.items():
            if spares and (pid in current.trackers or is_tracker(pid)):
                current.trackers.add(pid)
            else:
                kill_unless_reused(pid, began)
        if not left and current.phase is Phase.ENDED:
            current.over()
        elif time.monotonic() > current.return_by:
            self._output.write_line(
                f"killing the command: torchrun has not ended round {current.number} "
                f"within {RETURN_SECONDS:g} s"
            )
            self._kill_everything()
        else:
            again = partial(self._kill_workers, current)
            self._killing = self._loop.call_later(SWEEP_SECONDS, again)

    def _of_round(self, number: int) -> dict[int, str]:
        """Return the start times, by pid, of the processes below this one with the round's mark."""
        mark = f"{ROUND}={number}".encode()
        found = {}
        for pid, began in descendants(os.getpid()).items():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[pid] = began
        return found

    def _kill_everything(self) -> None:
        """Kill every process of the command until none is left, then end the round.

        Processes that can run no more, such as those that wait for a disk that does not answer,
        are given up, see `StuckWatch`.
        """
        now = time.monotonic()
        if self._sweeping is None:
            self._swept_at, self._watch = now, StuckWatch()
        else:
            self._sweeping.cancel()
        self.reap()
        left = descendants(os.getpid())
        stuck = self._watch.find_stuck(left)
        if stuck:
            self._output.write_line(stuck)
        elif left:
            for pid, began in left.items():
                kill_unless_reused(pid, began)
            pause = SWEEP_SECONDS if now - self._swept_at < 1.0 else STUCK_SWEEP_SECONDS
            self._sweeping = self._loop.call_later(pause, self._kill_everything)
            return
        self._sweeping = None
        current = self._active
        if current is not None:
            current.over(stuck)


def _refuse(connection: Connection, message: str) -> None:
    connection.send({"type": "refused", "message": message})


def _whole(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise WireError(f"expected a whole number of at least {least}, got {value!r}")
    return value
