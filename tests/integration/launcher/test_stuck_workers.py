"""Workers that wait for a disk that does not answer, and that SIGKILL does not end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from elasticjob_agent.worker_runtime import (
    NodeCommand,
    Started,
    Stopped,
    WorkerExited,
    WorkersStuck,
)
from tests.integration.frozen_disk import FreezableDisk, freezable_disk, state_of
from tests.integration.launcher_rig import (
    StartLauncher,
    alive,
    attached,
    launcher_file,
    process_tag,
    python,
    soon,
    start_launcher,
    start_workers,
    until,
    wait_for_end,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

WRITER = """
import os, sys, threading, time
disk, notes = sys.argv[1:]
def count():
    while True:
        time.sleep(0.01)
threading.Thread(target=count, daemon=True).start()
while True:
    with open(disk, "a") as file:
        file.write("x")
    with open(notes, "a") as file:
        file.write("x")
    time.sleep(0.01)
"""


def writer(disk: FreezableDisk, notes: Path) -> tuple[str, ...]:
    return (*python(WRITER), str(disk.path / "file"), str(notes))


def test_worker_that_waits_for_disk_is_given_up_and_never_runs_again(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"

    async def scenario(disk: FreezableDisk) -> None:
        launcher = start_launcher()
        runtime, events, hello = await attached(launcher)
        assert hello.stuck == ""
        await runtime.start(start_workers(3, writer(disk, notes), ("sleep", "100")))
        pid = (await until(events, Started, round=3)).pids[0]
        await soon(notes.exists)
        disk.freeze()
        if disk.real:
            await soon(lambda: state_of(pid) == "D")
        await runtime.stop(3, 0)
        if not disk.real:
            await until(events, Stopped, round=3)
            return
        assert (await until(events, WorkerExited)).local_rank == 1
        message = (await until(events, WorkersStuck, round=3)).message
        assert f"process {pid} of the workers did not end within 10 s after SIGKILL" in message
        assert "uninterruptible wait in the kernel (" in message
        assert alive(pid)
        again, _, hello = await attached(launcher, session="s2")
        assert (hello.running, hello.stuck) == (None, message)
        await again.release(1, "")
        assert launcher.wait() == 1, "the launcher does not wait for the disk"
        assert alive(pid)
        before = notes.read_text()
        disk.thaw()
        wait_for_end([pid])
        assert notes.read_text() == before, "the worker ran after its SIGKILL"

    with freezable_disk(tmp_path) as disk:
        asyncio.run(scenario(disk))


def test_command_of_node_that_waits_for_disk_is_given_up(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"

    async def scenario(disk: FreezableDisk) -> None:
        launcher = start_launcher(command=writer(disk, notes))
        runtime = launcher.runtime(command=NodeCommand({}, "", 0), orphan_seconds=0.5)
        joining = asyncio.create_task(runtime.node_workers())
        await soon(notes.exists)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        await runtime.aclose()
        runtime, _, _ = await attached(launcher, session="s2", orphan_seconds=0.5)
        await runtime.start(start_workers(3, ("ignored",)))
        disk.freeze()
        await runtime.aclose()
        if disk.real:
            await soon(lambda: "uninterruptible wait" in launcher.stderr.read_text())
            _, _, hello = await attached(launcher, session="s3")
            assert hello.running is None
            assert "uninterruptible wait in the kernel" in hello.stuck
        launcher.process.terminate()
        assert launcher.wait() == 128 + signal.SIGTERM
        disk.thaw()

    with freezable_disk(tmp_path) as disk:
        asyncio.run(scenario(disk))
