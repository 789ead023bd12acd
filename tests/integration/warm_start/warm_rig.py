"""Test rig for warm starts: a worker runtime with a standby, and programs in a folder."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.worker_runtime import (
    Hello,
    Prepared,
    PrepareWorkers,
    Started,
    StartWorkers,
    Stopped,
    StoreServed,
    WorkerExited,
    WorkerStart,
)
from tests.integration.launcher_rig import Event, soon, until

SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LOADED = "import sys; there = sorted(n for n in sys.modules if n.endswith('_pkg'))\n"
"""First line of a script that records which of its modules were loaded before it."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages, with a harmless one."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "plain_pkg.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


class Warm:
    """Runtime with a requested standby, and its events."""

    def __init__(self, runtime: LocalRuntime, events: Any, folder: Path) -> None:
        self.runtime = runtime
        self.events = events
        self.folder = folder
        self.prepared = Prepared(False)
        self.store_port = 0
        self._round = 0

    async def ask(self, *argv: str, **options: Any) -> None:
        options.setdefault("env", SHARED)
        await self.runtime.prepare(PrepareWorkers(argv, **options))

    async def prepare(self, *argv: str, **options: Any) -> Prepared:
        await self.ask(*argv, **options)
        self.prepared = await self._until(Prepared)
        return self.prepared

    async def until_ready(self) -> None:
        """Wait for the standby, even if an earlier one was given up."""
        while not self.prepared.ready:
            await self._until(Prepared)

    async def until_store(self) -> None:
        """Wait for a served store."""
        while not self.store_port:
            await self._until(StoreServed)

    async def _until(self, kind: type[Event], round: int | None = None) -> Event:
        """Return the next event of that kind and round; record the store's port and the standby."""
        async for event in self.events:
            if isinstance(event, StoreServed):
                self.store_port = event.port
            if isinstance(event, Prepared):
                self.prepared = event
            if isinstance(event, Started) and not event.warm:
                self.prepared = Prepared(False)  # until the next standby reports
            if isinstance(event, kind) and round in (None, getattr(event, "round", None)):
                return event
        raise AssertionError(f"the events ended without {kind.__name__}")

    async def start(
        self, *argv: str, count: int = 1, env: Mapping[str, str] | None = None
    ) -> Started:
        await self.order(*argv, count=count, env=env)
        return await self.started()

    async def started(self) -> Started:
        return await self._until(Started, round=self._round)

    async def order(
        self,
        *argv: str,
        count: int = 1,
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        self._round += 1
        logs = self.folder / f"round-{self._round}"
        workers = []
        for rank in range(count):
            (logs / str(rank)).mkdir(parents=True)
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            files = {"TORCHELASTIC_ERROR_FILE": str(logs / str(rank) / "error.json")}
            whole = {**SHARED, **ranks, **files, **(env or {}), **env_of(rank)}
            workers.append(WorkerStart(rank, argv, whole, str(logs / str(rank)), f"[{rank}] "))
        await self.runtime.start(StartWorkers(self._round, tuple(workers), 1 << 20))

    async def ended(self, count: int = 1) -> dict[int, WorkerExited]:
        found = [await self._until(WorkerExited) for _ in range(count)]
        await self._until(Stopped, round=self._round)
        return {exited.local_rank: exited for exited in found}

    async def told(self, rank: int = 0) -> None:
        """Wait until a worker has written a whole line."""
        output = self.folder / f"round-{self._round}" / str(rank) / "stdout.log"
        await soon(lambda: output.exists() and output.read_text().endswith("\n"))

    async def kill(self, count: int = 1) -> dict[int, WorkerExited]:
        """Kill the round's workers at once; return their exits."""
        await self.runtime.stop(self._round, 0)
        return await self.ended(count)

    async def stopped(self) -> None:
        await self._until(Stopped, round=self._round)

    async def outcome(
        self, *argv: str, env: Mapping[str, str] | None = None
    ) -> tuple[Started, WorkerExited]:
        started = await self.start(*argv, env=env)
        return started, (await self.ended())[0]

    def error_file(self, rank: int = 0) -> Path:
        return self.folder / f"round-{self._round}" / str(rank) / "error.json"


def warm(folder: Path, scenario: Callable[[Warm], Awaitable[None]], seconds: float = 240.0) -> None:
    """Run the scenario with a started runtime, which is closed in every case."""

    async def whole() -> None:
        runtime = LocalRuntime(("train",))
        events = runtime.events()
        try:
            assert (await until(events, Hello)).warms
            async with asyncio.timeout(seconds):
                await scenario(Warm(runtime, events, folder))
        finally:
            await runtime.aclose()

    asyncio.run(whole())


def said(folder: Path, number: int, rank: int = 0) -> str:
    """Return a worker's output after the launcher's end: logs are written asynchronously."""
    logs = folder / f"round-{number}" / str(rank)
    return (logs / "stdout.log").read_text() + (logs / "stderr.log").read_text()


def script(folder: Path, source: str, name: str = "train.py") -> str:
    """Write a program into a folder of its own; return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return str(path)


def console_script(folder: Path, source: str) -> str:
    """Write a console script in pip's form; return its path."""
    path = Path(script(folder, f"#!{sys.executable}\n{source}", "train"))
    path.chmod(0o755)
    return str(path)


def in_folder(folder: Path) -> Callable[[], None]:
    """Change to that folder; return a function that changes back."""
    before = Path.cwd()
    os.chdir(folder)
    return lambda: os.chdir(before)


def said_warm(folder: Path, path: str, *modules: str) -> str:
    """Return the output of a worker forked from the program's standby, which must succeed.

    `modules` are preloaded additionally.
    """

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, modules=modules)
        assert runtime.prepared.ready, runtime.prepared.reason
        started, exited = await runtime.outcome(sys.executable, path, env={"ELASTICJOB_ROUND": "1"})
        assert started.warm, started.cold_reason
        assert exited.exit_code == 0, exited.stderr_tail

    warm(folder, scenario)
    return said(folder, 1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and parent_of(int(entry.name)) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def standby_of(started: Started) -> int:
    """Return the pid of the standby that has no worker beside these."""
    (found,) = standbys_of(started)
    return found


def standbys_of(started: Started) -> list[int]:
    """Return the pids of the launcher's children that are no workers; more than one while a standby
    replaces another."""
    launcher = parent_of(started.pids[0])
    return [pid for pid in children_of(launcher) if pid not in started.pids.values()]


async def replaced(started: Started) -> None:
    """Wait until the standby has a successor and has ended."""
    standby = standby_of(started)
    while Path("/proc", str(standby)).exists():
        await asyncio.sleep(0.02)
