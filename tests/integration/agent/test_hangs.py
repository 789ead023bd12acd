"""Real hangs in training: attribution, stacks, and recovery."""

from __future__ import annotations

import asyncio
import signal
import sys

from elasticjob_agent.worker_runtime import Started, Stopped
from elasticjob_launcher.processes.process_info import has_handler
from tests.integration.launcher_rig import (
    StartLauncher,
    attached,
    exits,
    launcher_file,
    process_tag,
    python,
    soon,
    start_launcher,
    start_workers,
    until,
)
from tests.integration.local_rig import LocalRig, rig

__all__ = ["launcher_file", "process_tag", "rig", "start_launcher"]

# Rank 1 stops reading in the first attempt; rank 0 waits for its gradients.
TRAIN = """
import os, pathlib, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elasticjob import train

def read_batch(step):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and step == 4 and dist.get_rank() == 1:
        threading.Event().wait()
    return torch.ones(8)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(20):
    model(read_batch(step)).backward()
    train.progress(step)
dist.barrier()
dist.destroy_process_group()
"""


def test_hung_rank_is_reported_with_its_stack(rig: LocalRig) -> None:
    (rig.job / "train.py").write_text(TRAIN)
    manifest = rig.manifest(
        command=[sys.executable, "train.py"],
        minNodes=2,
        maxNodes=2,
        recovery={"hangTimeoutSeconds": 6},
    )
    runner = rig.start(str(manifest))
    output, _ = runner.communicate(timeout=240)
    status = rig.status()
    assert status["phase"] == "Succeeded", output
    assert status["restarts"] == 1
    failure = status["firstFailure"]
    assert failure["class"] == "Hang", output
    assert (failure["rank"], failure["pod"], failure["signal"]) == (1, "job-1", signal.SIGABRT)
    assert failure["message"].startswith("no progress for 6 s after step 3: it was in read_batch")
    assert "in read_batch" in failure["traceback"]
    (waited,) = rig.state.glob("elasticjob/default/job/logs/job-0/workers/*/round_1/0/stderr.log")
    # Each node inspects its own workers. If rank 1 came first, rank 0's gradients broke off, and
    # rank 0 may have been inspected at any later point of its process.
    stack = waited.read_text()
    waiting = "_engine_run_backward" in stack or "_distributed_excepthook" in stack
    assert waiting or "Connection closed by peer" in stack or "elasticjob_launcher" in stack, stack


ABLE = python("import faulthandler, time; faulthandler.enable(); time.sleep(60)")
UNABLE = python("import time; time.sleep(60)")


def test_stack_dump_signal_is_sent_only_to_workers_with_handler(
    start_launcher: StartLauncher, process_tag: str
) -> None:
    async def scenario() -> None:
        runtime, events, _ = await attached(start_launcher())
        await runtime.start(start_workers(1, ABLE, UNABLE))
        pids = (await until(events, Started)).pids
        await soon(lambda: has_handler(pids[0], signal.SIGABRT))
        assert not has_handler(pids[1], signal.SIGABRT)
        await runtime.stop(1, 10, dump=True)
        found = await exits(events, 2)
        assert found[0].signal == signal.SIGABRT
        assert "Current thread" in found[0].stderr_tail
        assert found[1].signal == signal.SIGTERM
        assert found[1].stderr_tail == ""
        await until(events, Stopped, round=1)
        await runtime.aclose()

    asyncio.run(scenario())


def test_stop_without_stack_dump_handlers_skips_grace_period(
    start_launcher: StartLauncher, process_tag: str
) -> None:
    async def scenario() -> None:
        runtime, events, _ = await attached(start_launcher())
        await runtime.start(start_workers(1, UNABLE))
        await until(events, Started)
        await runtime.stop(1, 3600, dump=True)
        assert (await exits(events, 1))[0].signal == signal.SIGKILL
        await until(events, Stopped, round=1)
        await runtime.aclose()

    asyncio.run(scenario())
