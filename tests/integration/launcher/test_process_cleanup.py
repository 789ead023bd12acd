"""End of every worker descendant when processes of a node without a container are killed.

All pairs are killed: of a bare agent's node (agent, both init processes, launcher, zygote), and of
a local job (`elasticjob run`, its supervisor, and a pod's processes).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.integration.launcher_rig import (
    SIDECAR,
    alive,
    process_tag,
    tagged_processes,
    wait_for_end,
)
from tests.integration.local_rig import LocalRig, until
from tests.integration.local_rig import rig as rig
from tests.integration.warm_start.warm_rig import children_of, parent_of
from tests.paths import ROOT

__all__ = ["process_tag", "rig"]

# A helper in the worker's session, and one that left its session and its parent.
WORKER = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "1000"])
    os._exit(0)
os.wait()
open(sys.argv[1] + os.environ["LOCAL_RANK"], "w").close()
time.sleep(1000)
"""
AGENT = """
import asyncio, sys
from tests.integration.launcher_rig import *
from elasticjob_agent.worker_runtime import *

async def main(script, made):
    runtime = local_runtime(("train",))
    events = runtime.events()
    await until(events, Hello)
    argv = (sys.executable, script, made)
    await runtime.prepare(PrepareWorkers(argv, {{}}))
    assert (await until(events, Prepared)).ready
    workers = [WorkerStart(n, argv, {{"LOCAL_RANK": str(n)}}, "", "") for n in range(2)]
    await runtime.start(StartWorkers(1, tuple(workers), 1 << 20))
    started = await until(events, Started)
    assert started.warm, started.cold_reason
    print(*started.pids.values(), flush=True)
    async for event in events:
        pass
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
BARE = ("agent", "outer init", "inner init", "launcher", "zygote")
LOCAL = ("run", "supervisor", "agent", "outer init", "launcher")


def kill(pids: Collection[int]) -> None:
    """Send SIGKILL to all at once: none of them acts on another's end first."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # killed by the end of another already
            os.kill(pid, signal.SIGKILL)


class BareNode:
    """Agent that runs its launcher as its child, with two workers and their helpers."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(WORKER)
        made = folder / "made"
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT.format(), str(folder / "train.py"), str(made)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{SIDECAR}"},
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.workers = [int(word) for word in self.process.stdout.readline().split()]
        ready = [folder / f"made{n}" for n in range(2)]
        until(lambda: all(path.exists() for path in ready), "the workers' helpers")
        launcher = parent_of(self.workers[0])
        zygote = until(lambda: only(zygotes(launcher, self.workers)), "one zygote")
        inner = parent_of(launcher)
        self.pids = {
            "agent": self.process.pid,
            "outer init": parent_of(inner),
            "inner init": inner,
            "launcher": launcher,
            "zygote": zygote,
        }

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def zygotes(launcher: int, workers: Collection[int]) -> list[int]:
    """Return the launcher's children that are neither worker nor helper; some are short-lived."""
    return [
        pid
        for pid in children_of(launcher)
        if pid not in workers and b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def only(pids: list[int]) -> int | None:
    return pids[0] if len(pids) == 1 else None


@pytest.fixture
def node(tmp_path: Path, process_tag: str) -> Iterator[BareNode]:
    made = BareNode(tmp_path)
    yield made
    made.close()


def combinations(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return every single name and every pair."""
    return [*((one,) for one in names), *itertools.combinations(names, 2)]


@pytest.mark.parametrize(
    "victims", [c for c in combinations(BARE) if c != ("zygote",)], ids=" and ".join
)
def test_killed_processes_of_bare_node_leave_no_worker_descendant(
    node: BareNode, process_tag: str, victims: tuple[str, ...]
) -> None:
    assert parent_of(node.pids["outer init"]) == node.pids["agent"]
    helpers = [pid for pid in tagged_processes(process_tag) if pid not in node.pids.values()]
    assert len(helpers) >= 6, "two workers with two helpers each"

    kill([node.pids[name] for name in victims])

    wait_for_end([*helpers, *(pid for name, pid in node.pids.items() if name != "agent")])


def test_killed_zygote_leaves_its_workers_running(node: BareNode) -> None:
    kill([node.pids["zygote"]])
    until(lambda: not alive(node.pids["zygote"]), "the zygote's end")
    time.sleep(0.2)
    assert all(alive(pid) for pid in node.workers)


@pytest.mark.parametrize(
    "victims",
    [c for c in combinations(LOCAL) if c[0] in ("run", "supervisor")],
    ids=" and ".join,
)
def test_killed_processes_of_local_job_leave_nothing_running(
    rig: LocalRig, victims: tuple[str, ...]
) -> None:
    (rig.job / "daemon").touch()
    runner = rig.start(rig.manifest(nodes=1, maxNodes=1))
    rig.running(1)
    worker = until(lambda: rig.workers().get(0), "a worker")
    launcher = parent_of(worker)
    inner = parent_of(launcher)
    outer = parent_of(inner)
    supervisor = parent_of(outer)
    agents = [pid for pid in children_of(supervisor) if is_agent(pid)]
    pids = {
        "run": runner.pid,
        "supervisor": supervisor,
        "agent": agents[0],
        "outer init": outer,
        "launcher": launcher,
    }
    assert parent_of(supervisor) == runner.pid

    kill([pids[name] for name in victims])

    if victims == ("run", "supervisor"):  # the two that could remove the run's folder
        until(lambda: not rig.processes(), "the end of every process")
    else:
        rig.nothing_left()


def is_agent(pid: int) -> bool:
    return b"elasticjob_agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
