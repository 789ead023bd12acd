"""Training script of mixed gangs: data parallel over gloo, a checkpoint, and a consistency check.

It sums gradients and updates weights itself: DistributedDataParallel and torch's optimizers load
torch._dynamo, which takes each worker as long as torch does.

Before the first step all workers exchange their settings (rank, world size, master) and fail if two
disagree. The argument is a folder shared by all nodes:

    world-<token>-<rank>.json  settings of the worker; `token` names this process group
    step-<pid>                 its last completed step
    checkpoint                 the step, saved by rank 0
    finish                     if present, all workers end with success
    ended-<token>-<rank>       the worker's last collective is complete
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PAUSE_SECONDS = 0.05
STEPS_PER_CHECKPOINT = 4
COLLECTIVE_SECONDS = 60
LAST_SECONDS = 60.0


def written(path: Path, text: str) -> None:
    """Write a file atomically: others may read it at any time."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def own_report() -> dict[str, Any]:
    environment = os.environ
    return {
        "token": uuid.uuid4().hex[:12],
        "pid": os.getpid(),
        "member": environment["MIXED_MEMBER"],
        "rank": int(environment["RANK"]),
        "world": int(environment["WORLD_SIZE"]),
        "master": f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
    }


def agreed(mine: dict[str, Any]) -> dict[str, Any]:
    """Return our settings with rank 0's token; exit with an error if the others' disagree."""
    world = dist.get_world_size()
    reports: list[Any] = [None] * world
    dist.all_gather_object(reports, mine)
    ranks = sorted(each["rank"] for each in reports)
    if ranks != list(range(world)) or len({each["world"] for each in reports}) > 1:
        raise SystemExit(f"ranks or sizes disagree: {reports}")
    if len({each["master"] for each in reports}) > 1:
        raise SystemExit(f"masters disagree: {reports}")
    return {**mine, "token": reports[0]["token"]}


def loaded(checkpoint: Path) -> int:
    """Return the step to resume from, as read by rank 0 and broadcast to all."""
    found = int(checkpoint.read_text()) if dist.get_rank() == 0 and checkpoint.exists() else 0
    step = torch.tensor([found])
    dist.broadcast(step, 0)
    return int(step)


def end_together(folder: Path, token: str) -> None:
    """Wait until all workers have completed the last collective.

    A worker that exits earlier may break it for another, whose agent treats that as a failure and
    restarts, while torch's agents with finished workers do not.
    """
    written(folder / f"ended-{token}-{dist.get_rank()}", "")
    deadline = time.monotonic() + LAST_SECONDS
    while len(list(folder.glob(f"ended-{token}-*"))) < dist.get_world_size():
        if time.monotonic() > deadline:
            raise SystemExit(f"other workers did not finish within {LAST_SECONDS:g} s")
        time.sleep(PAUSE_SECONDS)


def trained(model: torch.nn.Linear) -> None:
    """Take one step with the sum of all workers' gradients."""
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter -= 0.01 * parameter.grad


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    mine = agreed(own_report())
    rank, step = dist.get_rank(), loaded(folder / "checkpoint")
    model = torch.nn.Linear(4, 1)
    event = {**mine, "at": time.monotonic(), "loaded": step}
    written(folder / f"world-{mine['token']}-{rank}.json", json.dumps(event))
    harness = Path("/proc") / os.environ["MIXED_PID"]
    while True:
        trained(model)
        step += 1
        written(folder / f"step-{os.getpid()}", str(step))
        if rank == 0 and step % STEPS_PER_CHECKPOINT == 0:
            written(folder / "checkpoint", str(step))
        over = (folder / "finish").exists() or not harness.exists()
        ending = torch.tensor([int(over)])
        dist.all_reduce(ending, dist.ReduceOp.MAX)
        if int(ending):
            break
        time.sleep(PAUSE_SECONDS)
    end_together(folder, mine["token"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
