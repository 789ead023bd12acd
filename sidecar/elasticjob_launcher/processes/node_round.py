"""Round of a node whose workers torchrun starts: its phase and the events reported of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from elasticjob_launcher.loop import Timer
from elasticjob_launcher.wire import exit_event

MAX_WORLD_SIZE = "ELASTICJOB_MAX_WORLD_SIZE"


class Phase(Enum):
    """Phase of a round on this node."""

    PENDING = "pending"  # no torchrun has asked for it yet
    RUNNING = "running"  # torch's agent has the ranks, and starts or runs the workers
    FINISHED = "finished"  # torchrun succeeded; the rest of the command runs
    ENDED = "ended"  # torch's agent has ended its workers


class NodeRound:
    """Round with the variables of its workers by local rank; each event is emitted once."""

    def __init__(
        self,
        number: int,
        envs: Mapping[int, dict[str, str]],
        emit: Callable[[dict[str, Any]], None],
        cold_reason: str,
    ) -> None:
        self.number = number
        self.envs = envs
        self._emit = emit
        self._cold_reason = cold_reason
        self.phase = Phase.PENDING
        self.pids: dict[int, int] = {}
        self.ended_pids: set[int] = set()
        self.exits: list[dict[str, Any]] = []
        self.gone = False
        self.stopping = False
        self.unasked = False
        self.terminated = False
        self.killed = False
        self.return_by = 0.0
        self.spares_trackers = True
        # Resource trackers left after SIGKILL, and the end of that.
        self.trackers: set[int] = set()
        self.trackers_until = 0.0
        self.stuck = ""
        self.kill_timer: Timer | None = None
        self._started = False
        self._succeeded: set[int] = set()

    @property
    def alone(self) -> bool:
        """True if no other node can take part in the job."""
        env = self.envs.get(0, {})
        workers = env.get("LOCAL_WORLD_SIZE", "")
        return env.get("WORLD_SIZE") == workers and env.get(MAX_WORLD_SIZE, workers) == workers

    @property
    def running_pids(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self.pids.items() if pid not in self.ended_pids}

    def started(self, pids: Mapping[int, int]) -> None:
        """Report the start, once; `pids` of a later torchrun replace the earlier ones."""
        if pids:
            self.pids = dict(pids)
        if not self._started:
            self._started = True
            self._emit(
                {
                    "type": "started",
                    "round": self.number,
                    "pids": {str(rank): pid for rank, pid in pids.items()},
                    "warm": False,
                    "cold_reason": self._cold_reason,
                }
            )

    def exited(
        self,
        local_rank: int,
        pid: int,
        code: int | None,
        signum: int | None,
        message: str = "",
        stderr_tail: str = "",
        out_of_memory: bool = False,
    ) -> None:
        """Report the exit of a local rank, once."""
        if any(known["local_rank"] == local_rank for known in self.exits):
            return
        event = exit_event(
            self.number, local_rank, pid, code, signum, message, stderr_tail, out_of_memory,
            self.unasked,
        )  # fmt: skip
        self.exits.append(event)
        self._emit(event)

    def succeeded(self, local_rank: int) -> None:
        """Record the success of a worker; report it once all have succeeded."""
        self._succeeded.add(local_rank)
        if self._succeeded == set(self.envs):
            self._emit({"type": "succeeded", "round": self.number})

    def over(self, stuck: str = "") -> None:
        """Report that no process of the round is left; `stuck` describes those given up."""
        if not self.gone:
            self.gone, self.stuck = True, stuck
            if self.kill_timer is not None:
                self.kill_timer.cancel()
            if stuck:
                self._emit({"type": "stuck", "round": self.number, "message": stuck})
            else:
                self._emit({"type": "stopped", "round": self.number})
