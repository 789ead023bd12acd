"""Training script of the GPU check: one all-reduce a step, faults on request.

Each rank appends a line to `steps/<rank>.jsonl` for each step: Unix time, process id, world size,
round, step and loss. Under torchrun, which numbers no rounds, the round is a time in milliseconds.
A file in the job's folder requests a fault of the last rank, once:

    out-of-memory   allocate more memory than the device has
    abort           abort the process group while the others wait in an all-reduce
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticjob import train

WIDTH = 256
IMPOSSIBLE_BYTES = 1 << 50
OUT_OF_MEMORY, ABORT = "out-of-memory", "abort"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--backend", choices=["nccl", "gloo"], required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--snapshots", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    options = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
    ).to(device)
    compute = torch.compile(model) if options.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    snapshots, first = None, 0
    if options.snapshots:
        snapshots = train.Snapshots(every_steps=1, optimizers=optimizer)
        if (restored := snapshots.restore()) is not None:
            first = restored.step
            model.load_state_dict(restored.state["model"])
            optimizer.load_state_dict(restored.state["optimizer"])

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    folder, number = Path.cwd(), round_number(device)
    with (folder / "steps" / f"{rank}.jsonl").open("a") as steps:
        for step in range(first, sys.maxsize):
            if rank == world - 1:
                perform(folder, device)
            optimizer.zero_grad()
            loss = compute(torch.randn(64, WIDTH, device=device)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if snapshots is not None:
                snapshots.save(step + 1, state)
            line = {
                "time": time.time(),
                "pid": os.getpid(),
                "world": world,
                "round": number,
                "step": step,
                "loss": loss.item(),
            }
            print(json.dumps(line), file=steps, flush=True)
            time.sleep(options.step_seconds)


def round_number(device: torch.device) -> int:
    """Return a number that all ranks share and that grows with each process group."""
    number = torch.tensor(
        int(os.environ.get("ELASTICJOB_ROUND") or time.time() * 1000), device=device
    )
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def perform(folder: Path, device: torch.device) -> None:
    """Perform the requested fault, if there is one."""
    if taken(folder / OUT_OF_MEMORY):
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8, device=device)
    if taken(folder / ABORT):
        dist.distributed_c10d._abort_process_group()
        raise RuntimeError("the process group was aborted")


def taken(request: Path) -> bool:
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
