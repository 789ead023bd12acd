"""Kubelet of a local job: pods made of a launcher and an agent process.

As in a cluster, a pod ends with its trainer; an agent that dies before its launcher is restarted
with a growing delay; a deleted pod gets SIGTERM at once and SIGKILL after its grace period; a pod
keeps its index until all of its processes are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from elasticjob_cli.local.logs import AGENT, TRAINER, WORKERS
from elasticjob_cli.local.processes import Exit, Processes, ProcessRefused, SupervisorGone
from elasticjob_operator.domain.observed import state
from elasticjob_operator.domain.observed.state import Obstacle, PodPhase
from elasticjob_rendezvous.protocol.text import one_line
from elasticjob_rendezvous.protocol.worker_group import STUCK_EXIT_CODE, STUCK_MESSAGE

UID_VARIABLE = "ELASTICJOB_POD_UID"
AGENT_END_SECONDS = 10.0
"""Maximum time for an agent to end after its launcher."""

AGENT_BACKOFF_SECONDS = (0.1, 1.0, 2.0, 5.0, 10.0)
AGENT_SETTLED_SECONDS = 30.0
"""Uptime after which an agent's restart delay is reset."""


@dataclass(frozen=True, slots=True)
class PodFiles:
    """Sockets and files of one pod's processes."""

    name: str
    uid: str
    incarnation: int
    socket: Path
    logs: Path

    @property
    def control(self) -> Path:
        """Socket of the agent."""
        return self.socket.with_suffix(".ctl")

    @property
    def worker_logs(self) -> Path:
        return self.logs / WORKERS

    @property
    def termination_log(self) -> Path:
        """Pod's termination message; created before the start, as the kubelet does."""
        return self.logs / "termination.log"

    def last_message(self) -> str:
        """Return the pod's termination message, or a general one if it cannot be read."""
        with contextlib.suppress(OSError):
            if text := self.termination_log.read_text(errors="replace").strip():
                return one_line(text)
        return STUCK_MESSAGE


@dataclass(frozen=True, slots=True)
class Program:
    """One process of a pod."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    is_trainer: bool = False
    """True if its files get the user's umask, as those of a training script."""


class Programs(Protocol):
    """Factory of a pod's two processes."""

    def launcher(self, files: PodFiles) -> Program: ...

    def agent(self, files: PodFiles) -> Program: ...


@dataclass(slots=True)
class LocalPod:
    """State of one pod and its processes. Only `Kubelet` changes it."""

    index: int
    files: PodFiles
    created_at: datetime
    launcher_since: datetime | None = None
    launcher_exit: Exit | None = None
    ended_at: datetime | None = None
    refused: str = ""
    stuck: str = ""
    terminating: bool = False
    killed: bool = False
    agent_starts: int = 0
    agent_since: float = 0.0

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def uid(self) -> str:
        return self.files.uid

    @property
    def launcher(self) -> str:
        """Name of its launcher's process."""
        return f"{self.name}/{self.uid}/launcher"

    @property
    def agent(self) -> str:
        """Name of its agent's process."""
        return f"{self.name}/{self.uid}/agent"

    @property
    def marker(self) -> str:
        """Environment entry that marks all of its processes."""
        return f"{UID_VARIABLE}={self.uid}"

    @property
    def phase(self) -> PodPhase:
        if self.launcher_exit is not None:
            return PodPhase.SUCCEEDED if self.launcher_exit.code == 0 else PodPhase.FAILED
        return PodPhase.PENDING if self.launcher_since is None else PodPhase.RUNNING


class Kubelet:
    """Manager of the pods of one job: creates, ends and observes them."""

    def __init__(
        self,
        processes: Processes,
        run_dir: Path,
        logs: Path,
        programs: Programs,
        tasks: asyncio.TaskGroup,
        changed: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._run_dir = run_dir
        self._logs = logs
        self._programs = programs
        self._changed = changed
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.pods: dict[str, LocalPod] = {}

    def observed(self, members: Iterable[str]) -> tuple[state.Pod, ...]:
        """Return the pods in the planner's form; `members` are the uids that hold a lease."""
        leased = set(members)
        return tuple(
            state.Pod(
                index=pod.index,
                name=pod.name,
                uid=pod.uid,
                created_at=pod.created_at,
                phase=pod.phase,
                ready=pod.phase is PodPhase.RUNNING and pod.uid in leased,
                terminating=pod.terminating,
                node=socket.gethostname(),
                launcher_since=pod.launcher_since,
                obstacle=Obstacle.CONFIG if pod.refused else None,
                obstacle_message=pod.refused,
                ended_at=pod.ended_at,
                exit_code=None if pod.launcher_exit is None else pod.launcher_exit.code,
                stuck=pod.stuck if pod.launcher_exit is not None else "",
            )
            for pod in self.pods.values()
        )

    def agent_runs(self, pod: LocalPod) -> bool:
        """Return True if the pod's agent runs; it may outlive its launcher briefly."""
        return pod.agent in self._processes.pids

    def without_agents(self) -> set[str]:
        """Return the uids of the ended pods whose agents have ended, too."""
        return {
            uid
            for uid, pod in self.pods.items()
            if pod.launcher_exit is not None and not self.agent_runs(pod)
        }

    def find(self, name: str) -> LocalPod | None:
        """Return the pod of this name, preferably one that still runs."""
        named = [pod for pod in self.pods.values() if pod.name == name]
        return max(named, key=lambda pod: pod.launcher_exit is None, default=None)

    async def create(self, index: int, name: str, incarnation: int) -> None:
        """Start a pod; if its launcher cannot be started it stays Pending, with the reason."""
        uid = str(uuid4())
        socket_path = self._run_dir / f"{uid[:8]}.sock"
        files = PodFiles(name, uid, incarnation, socket_path, self._logs / name)
        try:
            files.worker_logs.mkdir(parents=True, exist_ok=True)
            files.termination_log.touch()
        except OSError as error:  # a full disk stops the logs, not the training
            self._changed(f"logs of {name} cannot be written: {error}")
        pod = self.pods[uid] = LocalPod(index, files, datetime.now(UTC))
        try:
            await self._start(pod.launcher, self._programs.launcher(files), files.logs / TRAINER)
            pod.launcher_since = datetime.now(UTC)
            await self._start_agent(pod)
        except ProcessRefused as error:
            pod.refused = str(error)
        self._changed(f"pod {name} started" if not pod.refused else f"pod {name}: {pod.refused}")

    def delete(self, uid: str, grace_seconds: float) -> None:
        """Delete a pod: SIGTERM now, SIGKILL after the grace period."""
        pod = self.pods.get(uid)
        if pod is None or pod.terminating:
            return
        pod.terminating = True
        # As in a cluster: the sidecar's preStop and the trainer's SIGTERM at the same time.
        for process in (pod.agent, pod.launcher):
            self._processes.signal(process, signal.SIGTERM)
        self.spawn(self._ending(pod, grace_seconds))

    def kill(self, pod: LocalPod) -> None:
        """Send SIGKILL to every process of a pod, as if its machine had failed."""
        pod.killed = True  # a failed machine does not restart the agent
        self._processes.kill([pod.launcher, pod.agent], pod.marker)

    def exited(self, end: Exit) -> LocalPod | None:
        """Handle the end of a pod's process; return the pod if it was the launcher."""
        name, uid, part = end.name.split("/")
        pod = self.pods.get(uid)
        if pod is None:
            return None
        if part == "launcher":
            pod.launcher_exit, pod.ended_at = end, datetime.now(UTC)
            if not pod.terminating:
                self.spawn(self._after_launcher(pod))
            self._changed(f"pod {name} ended: {end}")
            return pod
        if end.code == STUCK_EXIT_CODE:
            pod.stuck = pod.files.last_message()
            self._changed(f"pod {name} is given up: {pod.stuck}")
            self.spawn(self._end_stuck(pod))
        elif pod.launcher_exit is None and not pod.terminating and not pod.killed:
            self.spawn(self._restart_agent(pod, end))
        return None

    def stop(self) -> None:
        """Stop managing the pods; the supervisor kills the processes that still run."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    async def _start(self, name: str, program: Program, log: Path) -> None:
        await self._processes.start(
            name, program.argv, program.env, program.cwd, log, program.is_trainer
        )

    async def _start_agent(self, pod: LocalPod) -> None:
        pod.agent_starts += 1
        pod.agent_since = asyncio.get_running_loop().time()
        await self._start(pod.agent, self._programs.agent(pod.files), pod.files.logs / AGENT)

    async def _restart_agent(self, pod: LocalPod, end: Exit) -> None:
        """Restart an agent that ended first, unless its launcher ends within the delay."""
        lived = asyncio.get_running_loop().time() - pod.agent_since
        if lived > AGENT_SETTLED_SECONDS:
            pod.agent_starts = 1
        if pod.agent_starts > len(AGENT_BACKOFF_SECONDS):
            self._changed(f"agent of {pod.name} keeps exiting ({end}): killing the pod")
            self._processes.kill([pod.launcher, pod.agent], pod.marker)
            return
        delay_seconds = AGENT_BACKOFF_SECONDS[pod.agent_starts - 1]
        if await self._processes.ended(pod.launcher, delay_seconds) is None:
            await self._start_agent(pod)
            self._changed(f"agent of {pod.name} ended ({end}): restarted")

    async def _end_stuck(self, pod: LocalPod) -> None:
        """Kill a pod whose agent gave it up, unless its launcher ends by itself."""
        if await self._processes.ended(pod.launcher, AGENT_END_SECONDS) is None:
            self._processes.kill([pod.launcher], pod.marker)

    async def _after_launcher(self, pod: LocalPod) -> None:
        """End the agent after its trainer, with time to report the trainer's end."""
        if await self._processes.ended(pod.agent, AGENT_END_SECONDS / 2) is None:
            self._processes.signal(pod.agent, signal.SIGTERM)
            await self._processes.ended(pod.agent, AGENT_END_SECONDS / 2)
        self._processes.kill([pod.agent], pod.marker)
        self._changed("")

    async def _ending(self, pod: LocalPod, grace_seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + grace_seconds
        for process in (pod.launcher, pod.agent):
            if process in self._processes.pids:
                left = max(0.0, deadline - asyncio.get_running_loop().time())
                await self._processes.ended(process, left)
        self._processes.kill([pod.launcher, pod.agent], pod.marker)
        for process in (pod.launcher, pod.agent):
            if process in self._processes.pids:
                await self._processes.ended(process, AGENT_END_SECONDS)
        self.pods.pop(pod.uid, None)
        self._changed(f"pod {pod.name} is gone")

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run this in the background until `stop`."""

        async def guarded() -> None:
            try:
                await work
            except (SupervisorGone, ProcessRefused) as error:
                self._changed(str(error))

        guard = guarded()
        try:
            task = None if self._stopped else self._group.create_task(guard)
        except RuntimeError:  # the run is ending with an error: its group accepts no more tasks
            task = None
        if task is None:
            guard.close()
            work.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # needed if cancelled before it began
