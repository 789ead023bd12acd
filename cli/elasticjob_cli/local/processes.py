"""Runner's client of the supervisor, which starts and reaps a local run's processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local import supervisor

START_SECONDS = 15.0
MAX_LINE = 1 << 20


class ProcessRefused(CommandError):
    """Refusal of the operating system to start a program."""


class SupervisorGone(CommandError):
    """Loss of the supervisor before the end of the run, and with it of every process of the job."""

    def __init__(self) -> None:
        super().__init__(
            "the supervisor of this job's processes was killed, and the processes with it; "
            "run the job again: it resumes from its last checkpoint"
        )


@dataclass(frozen=True, slots=True)
class Exit:
    """End of a process; `code` is its exit code, or minus the signal's number."""

    name: str
    pid: int
    code: int
    at_ms: int

    def __str__(self) -> str:
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"


def _start_supervisor(
    run_dir: Path, lock: int, user_umask: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    where = [str(run_dir), str(user_umask)]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno()), *where],
            pass_fds=[theirs.fileno(), lock],
            start_new_session=True,  # only the runner gets Ctrl-C from the terminal
            stdin=subprocess.DEVNULL,
        )
    return process, ours


class Processes:
    """Named processes of one run: start, signal and observe. None outlives the runner."""

    def __init__(self, on_exit: Callable[[Exit], None], on_trouble: Callable[[str], None]) -> None:
        self.pids: dict[str, int] = {}
        self._on_exit = on_exit
        self._on_trouble = on_trouble
        self._starts: dict[str, asyncio.Future[int]] = {}
        self._exits: dict[str, asyncio.Future[Exit]] = {}
        self.gone = asyncio.Event()

    async def open(self, run_dir: Path, lock: int, user_umask: int) -> None:
        """Start the supervisor, which removes `run_dir` at the end.

        It shares the file descriptor `lock`, so that the lock is held until the last process is
        gone, even if the runner is killed. `user_umask` is the trainers' umask.
        """
        supervisor.become_subreaper()  # if the supervisor is killed, this process adopts orphans
        self._process, ours = _start_supervisor(run_dir, lock, user_umask)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        self._listening = asyncio.create_task(self._listen())

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        is_trainer: bool = False,
    ) -> int:
        """Start a process in its own session; return its pid. Raises `ProcessRefused`.

        A trainer gets the umask of the user, and its log a time before each line; the files of
        other processes are private.
        """
        loop = asyncio.get_running_loop()
        self._starts[name] = loop.create_future()
        self._exits[name] = loop.create_future()
        program = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "log": str(log)}
        self._send(op="start", id=name, is_trainer=is_trainer, **program)
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._starts[name]
        except TimeoutError as error:
            raise ProcessRefused(f"{name} did not start within {START_SECONDS:g} s") from error

    def signal(self, name: str, signum: int) -> None:
        """Signal a process; do nothing if it has ended."""
        if name in self.pids:
            self._send(op="signal", id=name, signal=int(signum))

    def kill(self, names: Sequence[str], marker: str) -> None:
        """Send SIGKILL to these, their descendants, and all with `marker` in their environment."""
        self._send(op="kill", ids=list(names), marker=marker)

    async def ended(self, name: str, timeout_seconds: float) -> Exit | None:
        """Wait for the end of a started process; return None on timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                return await asyncio.shield(self._exits[name])
        return None

    async def aclose(self) -> None:
        """Kill all remaining processes and the supervisor, which removes `run_dir`."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(supervisor.END_SECONDS + 5):
                await asyncio.to_thread(self._process.wait)
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        supervisor.kill_all_descendants(1.0)

    def _send(self, **command: object) -> None:
        if self.gone.is_set():
            raise SupervisorGone
        self._writer.write(json.dumps(command).encode() + b"\n")

    async def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while line := await self._reader.readline():
                self._handle_event(json.loads(line))
        self.gone.set()
        for waiting in self._starts.values():
            if not waiting.done():
                waiting.set_exception(SupervisorGone())

    def _handle_event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                self.pids[event["id"]] = event["pid"]
                self._settle(self._starts[event["id"]], event["pid"])
            case "refused":
                waiting = self._starts[event["id"]]
                if not waiting.done():
                    waiting.set_exception(ProcessRefused(f"{event['id']}: {event['message']}"))
            case "exited":
                self.pids.pop(event["id"], None)
                ended = Exit(event["id"], event["pid"], event["code"], event["at_ms"])
                self._settle(self._exits[event["id"]], ended)
                self._on_exit(ended)
            case "log-trouble":
                self._on_trouble(event["message"])

    @staticmethod
    def _settle(future: asyncio.Future[Any], value: object) -> None:
        if not future.done():
            future.set_result(value)
