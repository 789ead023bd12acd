"""The kubelet of a local job: pods made of a launcher and an agent, on this machine.

As in a cluster: the trainer's end is the pod's end; an agent that died while its launcher lives is
started again, more slowly each time; a deleted pod is told at once and killed after its grace; a
pod holds its index until all of its processes are gone.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from elasticjob_cli.local.logs import AGENT, TRAINER, WORKERS
from elasticjob_cli.local.processes import Exit, Processes, ProcessRefused, WardenGone
from elasticjob_operator.core import observed
from elasticjob_operator.core.observed import Obstacle, PodPhase

UID_VARIABLE = "ELASTICJOB_POD_UID"
AGENT_END_SECONDS = 10.0
"""What an agent may take after its launcher has ended."""

AGENT_BACKOFF_SECONDS = (0.1, 1.0, 2.0, 5.0, 10.0)
AGENT_SETTLED_SECONDS = 30.0
"""An agent that lived this long is started again without delay."""


@dataclass(frozen=True, slots=True)
class PodFiles:
    """Where one pod's processes meet and write."""

    name: str
    uid: str
    incarnation: int
    socket: Path
    logs: Path

    @property
    def control(self) -> Path:
        """The agent's own socket."""
        return self.socket.with_suffix(".ctl")

    @property
    def worker_logs(self) -> Path:
        return self.logs / WORKERS

    @property
    def termination_log(self) -> Path:
        """Where the end of the pod is explained; made first, as the kubelet does."""
        return self.logs / "termination.log"


@dataclass(frozen=True, slots=True)
class Program:
    """One process of a pod."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path


class Programs(Protocol):
    """What the two processes of a pod are."""

    def launcher(self, files: PodFiles) -> Program: ...

    def agent(self, files: PodFiles) -> Program: ...


@dataclass(slots=True)
class LocalPod:
    """One pod and what its processes did so far. Changed by `Kubelet` alone."""

    index: int
    files: PodFiles
    created_at: datetime
    launcher_since: datetime | None = None
    launcher_exit: Exit | None = None
    ended_at: datetime | None = None
    refused: str = ""
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
        """The name of its launcher's process."""
        return f"{self.name}/{self.uid}/launcher"

    @property
    def agent(self) -> str:
        """The name of its agent's process."""
        return f"{self.name}/{self.uid}/agent"

    @property
    def marker(self) -> str:
        """What all of its processes carry in their environment."""
        return f"{UID_VARIABLE}={self.uid}"

    @property
    def phase(self) -> PodPhase:
        if self.launcher_exit is not None:
            return PodPhase.SUCCEEDED if self.launcher_exit.code == 0 else PodPhase.FAILED
        return PodPhase.PENDING if self.launcher_since is None else PodPhase.RUNNING


class Kubelet:
    """Creates, ends and observes the pods of one job."""

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

    def observed(self, members: Iterable[str]) -> tuple[observed.Pod, ...]:
        """The pods as the plan sees them; `members` are the uids that hold a lease."""
        leased = set(members)
        return tuple(
            observed.Pod(
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
            )
            for pod in self.pods.values()
        )

    def agent_runs(self, pod: LocalPod) -> bool:
        """Whether the pod's agent lives; it may outlive its launcher by a moment."""
        return pod.agent in self._processes.pids

    def find(self, name: str) -> LocalPod | None:
        """The pod of this name, rather one that still runs."""
        named = [pod for pod in self.pods.values() if pod.name == name]
        return max(named, key=lambda pod: pod.launcher_exit is None, default=None)

    async def create(self, index: int, name: str, incarnation: int) -> None:
        """Start a pod; one whose launcher cannot be started stays Pending and says why."""
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
        """Tell a pod to go; it is gone after its grace at the latest."""
        pod = self.pods.get(uid)
        if pod is None or pod.terminating:
            return
        pod.terminating = True
        # What a cluster does: the sidecar's preStop and the trainer's SIGTERM, at once.
        for process in (pod.agent, pod.launcher):
            self._processes.signal(process, signal.SIGTERM)
        self.spawn(self._ending(pod, grace_seconds))

    def kill(self, pod: LocalPod) -> None:
        """SIGKILL to every process of a pod, as when its machine dies."""
        pod.killed = True  # a dead machine starts no agent again
        self._processes.kill([pod.launcher, pod.agent], pod.marker)

    def exited(self, end: Exit) -> LocalPod | None:
        """The warden's word that a process of a pod has ended; the pod, if it was the launcher."""
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
        if pod.launcher_exit is None and not pod.terminating and not pod.killed:
            self.spawn(self._restart_agent(pod, end))
        return None

    def stop(self) -> None:
        """Watch over the pods no longer; the warden ends what still runs."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    async def _start(self, name: str, program: Program, log: Path) -> None:
        await self._processes.start(name, program.argv, program.env, program.cwd, log)

    async def _start_agent(self, pod: LocalPod) -> None:
        pod.agent_starts += 1
        pod.agent_since = asyncio.get_running_loop().time()
        await self._start(pod.agent, self._programs.agent(pod.files), pod.files.logs / AGENT)

    async def _restart_agent(self, pod: LocalPod, end: Exit) -> None:
        """An agent that ended before its launcher: usually the launcher is about to follow it."""
        lived = asyncio.get_running_loop().time() - pod.agent_since
        if lived > AGENT_SETTLED_SECONDS:
            pod.agent_starts = 1
        if pod.agent_starts > len(AGENT_BACKOFF_SECONDS):
            self._changed(f"agent of {pod.name} ended again and again ({end}): giving the pod up")
            self._processes.kill([pod.launcher, pod.agent], pod.marker)
            return
        delay_seconds = AGENT_BACKOFF_SECONDS[pod.agent_starts - 1]
        if await self._processes.ended(pod.launcher, delay_seconds) is None:
            await self._start_agent(pod)
            self._changed(f"agent of {pod.name} ended ({end}): started again")

    async def _after_launcher(self, pod: LocalPod) -> None:
        """The trainer has ended: its agent gets the time to say so, then goes too."""
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
        """Do this in the background, for as long as the pods are watched over."""

        async def guarded() -> None:
            try:
                await work
            except (WardenGone, ProcessRefused) as error:
                self._changed(str(error))

        guard = guarded()
        try:
            task = None if self._stopped else self._group.create_task(guard)
        except RuntimeError:  # the run is ending by an error: its group takes no more
            task = None
        if task is None:
            guard.close()
            work.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
