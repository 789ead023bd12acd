"""Test rig for the launcher and its clients: real launchers, small agents, and a check that no
process is left running.

All processes of a test have a tag in their environment; after the test the `process_tag` fixture
waits until no process with that tag is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elasticjob_agent.runtimes.launcher_channel import Attach
from elasticjob_agent.runtimes.launcher_client import LauncherClient
from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.worker_runtime import (
    Hello,
    NodeCommand,
    Started,
    StartWorkers,
    WorkerExited,
    WorkerStart,
)
from elasticjob_agent.zipapp_build import build_zipapp
from tests.paths import ROOT

PROCESS_TAG = "ELASTICJOB_TEST_TAG"
PATIENCE_SECONDS = 120.0
JOB_KEY = bytes(range(32))
SIDECAR = str(ROOT / "sidecar")

Event = TypeVar("Event")


def python(source: str) -> tuple[str, ...]:
    """Return a worker command: a quickly starting Python that runs `source`."""
    return (sys.executable, "-I", "-S", "-c", source)


def start_workers(
    round: int, *commands: tuple[str, ...], log_dir: Path | None = None, **env: str
) -> StartWorkers:
    workers = tuple(
        WorkerStart(rank, argv, env, str(log_dir / str(rank)) if log_dir else "", f"[{rank}] ")
        for rank, argv in enumerate(commands)
    )
    return StartWorkers(round, workers, max_log_bytes=1 << 20)


async def until(events: AsyncIterator[Any], kind: type[Event], **values: Any) -> Event:
    """Return the next event of that kind with those values; skip others."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for event in events:
            if isinstance(event, kind) and all(
                getattr(event, name) == value for name, value in values.items()
            ):
                return event
    raise AssertionError(f"the events ended without {kind.__name__} {values}")


async def exits(events: AsyncIterator[Any], count: int) -> dict[int, WorkerExited]:
    """Return the next exits, by local rank."""
    found = [await until(events, WorkerExited) for _ in range(count)]
    return {exited.local_rank: exited for exited in found}


async def soon(condition: Callable[[], Any]) -> Any:
    """Poll `condition` until it returns a true value and return it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)
    return value


def alive(pid: int) -> bool:
    """Return True if the process still runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"processes still run: {left}"
        time.sleep(0.005)


def few_descriptors(pid: int) -> Callable[[], None]:
    """Limit a process to the files that it has open; return a function that lifts the limit."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    there = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (there, most))

    def more() -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))

    return more


def tagged_processes(tag: str) -> list[int]:
    """Return the processes whose initial environment contained the tag."""
    wanted = f"{PROCESS_TAG}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def process_tag(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the tag of this test's processes; fail the test if one is left behind."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(PROCESS_TAG, value)
    yield value
    left: list[int] = []
    try:
        wait_for_end(tagged_processes(value))
    finally:
        left = [pid for pid in tagged_processes(value) if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


@pytest.fixture(scope="session")
def launcher_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_zipapp(tmp_path_factory.mktemp("launcher") / "launcher.pyz")


class LauncherProcess:
    """Launcher as run by a training container: the zip file, on a socket of its own."""

    def __init__(
        self,
        file: Path,
        interpreter: str = sys.executable,
        command: Sequence[str] = ("train", "--lr=1"),
        arguments: Sequence[str] = (),
        **env: str,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ej-"))  # short: socket paths are limited
        self.socket = str(self.directory / "launcher.sock")
        self.stdout = self.directory / "stdout"
        self.stderr = self.directory / "stderr"
        self.termination_log = self.directory / "termination-log"
        self.termination_log.touch()
        environ = {
            **os.environ,
            "ELASTICJOB_SOCKET": self.socket,
            "ELASTICJOB_PROBE_ADDRESS": "127.0.0.1",
            "ELASTICJOB_TERMINATION_LOG": str(self.termination_log),
            **env,
        }
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [interpreter, "-I", "-S", str(file), *(arguments or ("--", *command))],
                env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip

    def runtime(
        self,
        session: str = "s1",
        orphan_seconds: float = 30.0,
        command: NodeCommand | None = None,
        per_node: bool = True,
    ) -> LauncherClient:
        """Return a runtime; without `per_node` the command runs if the launcher decides so."""
        attach = Attach("pod-0", session, JOB_KEY, orphan_seconds)

        async def order() -> NodeCommand:
            assert command is not None
            return command

        per_node = per_node and command is not None
        return LauncherClient(self.socket, attach, order, per_node)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            shutil.rmtree(self.directory)


StartLauncher = Callable[..., LauncherProcess]


@pytest.fixture
def start_launcher(launcher_file: Path, process_tag: str) -> Iterator[StartLauncher]:
    """Yield a function that starts launchers, which end with the test."""
    started: list[LauncherProcess] = []

    def start(**options: Any) -> LauncherProcess:
        started.append(LauncherProcess(launcher_file, **options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.close()


AGENT = """
import asyncio
from tests.integration.launcher_rig import *
asyncio.run(hold_workers(lambda: {runtime}, {commands!r}, {fork}))
"""


def local_runtime(
    *arguments: Any, live_seconds: float | None = None, **options: Any
) -> LocalRuntime:
    """Return a runtime with a launcher of its own; `live_seconds` extends the deadline."""
    runtime = LocalRuntime(*arguments, **options)
    if live_seconds is not None:
        _extend_deadline(runtime, live_seconds)
    return runtime


def attached_runtime(
    socket: str, orphan_seconds: float, live_seconds: float | None = None
) -> LauncherClient:
    """Return a runtime that attaches to a launcher; `live_seconds` extends the deadline."""
    runtime = LauncherClient(socket, Attach("pod-0", "s0", JOB_KEY, orphan_seconds))
    if live_seconds is not None:
        _extend_deadline(runtime, live_seconds)
    return runtime


def _extend_deadline(runtime: Any, seconds: float) -> None:
    """Let each heartbeat of the agent extend the workers' deadline by `seconds`."""
    runtime.set_deadline(lambda: time.monotonic() + seconds)


async def hold_workers(
    make: Callable[[], Any], commands: Sequence[tuple[str, ...]], fork: bool
) -> None:
    """Start round 1, fork this process if requested, print the workers' ids and wait forever."""
    runtime = make()
    events = runtime.events()
    await until(events, Hello)
    await runtime.start(start_workers(1, *commands))
    started = await until(events, Started)
    if fork and os.fork() == 0:
        signal.pause()
    print(*started.pids.values(), flush=True)
    await asyncio.Event().wait()


class AgentProcess:
    """Small agent in a process of its own, to be killed: starts round 1, then does nothing."""

    def __init__(self, runtime: str, *commands: tuple[str, ...], fork: bool = False) -> None:
        source = AGENT.format(runtime=runtime, commands=commands, fork=fork)
        root = str(ROOT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONPATH": f"{root}:{SIDECAR}"},
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.worker_pids = [int(pid) for pid in self.process.stdout.readline().split()]

    @staticmethod
    def of(
        launcher: LauncherProcess,
        *commands: tuple[str, ...],
        orphan_seconds: float = 30.0,
        live_seconds: float | None = None,
    ):
        arguments = f"{launcher.socket!r}, {orphan_seconds}, {live_seconds}"
        return AgentProcess(f"attached_runtime({arguments})", *commands)

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class SilentAgent:
    """Manual connection to the launcher, which can fall silent and continue."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def attached(launcher: LauncherProcess, session: str) -> SilentAgent:
        runtime, _, _ = await attached(launcher)  # it is listening by now
        await runtime.aclose()
        agent = SilentAgent(*await asyncio.open_unix_connection(launcher.socket))
        key = JOB_KEY.hex()
        agent.say(type="attach", member="pod-0", session=session, job_key=key, orphan_seconds=30)
        agent.say(type="beat")
        return agent

    def say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def start(self, number: int, *argv: str) -> None:
        worker = {"local_rank": 0, "argv": argv, "env": {}, "log_dir": "", "prefix": ""}
        self.say(type="start", round=number, workers=[worker], max_log_bytes=0)

    async def hears(self, *kinds: str) -> dict[str, Any]:
        """Return the next message of one of these kinds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (message := json.loads(await self._reader.readline()))["type"] not in kinds:
                pass
        return message

    def close(self) -> None:
        self._writer.close()


async def attached(launcher: LauncherProcess, **options: Any) -> tuple[Any, Any, Hello]:
    """Attach to the launcher; return the runtime, its events and the launcher's hello."""
    runtime = launcher.runtime(**options)
    events = runtime.events()
    return runtime, events, await until(events, Hello)
