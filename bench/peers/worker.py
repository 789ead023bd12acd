"""Training script of every gang in the recovery benchmark, under torchrun and under ours.

It joins the process group and reduces in a loop. It writes a line to its own file after the first
all-reduce of its world, and the time of its latest one to another file. A worker belongs to one
world: a new world is a new process. It relies on the platform only to restart it.
"""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist

PAUSE_SECONDS = 0.05  # between all-reduces: a training step without its CPU usage


def record(folder: Path, rank: int, world: int) -> None:
    """Write the line atomically, because the reader polls."""
    event = {
        "event": "first_allreduce",
        "at": time.monotonic(),
        "pid": os.getpid(),
        "agent_pid": os.getppid(),
        "member": int(os.environ["BENCH_MEMBER"]),
        "rank": rank,
        "world": world,
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    draft = folder / f".{os.getpid()}"
    draft.write_text(json.dumps(event) + "\n")
    draft.replace(folder / f"{os.getpid()}-{time.monotonic_ns()}.jsonl")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if int(ones.item()) != world:
        raise SystemExit(f"{world} ones add up to {ones.item()}: the world size is wrong")
    folder = Path(os.environ["BENCH_EVENTS"])
    record(folder, rank, world)
    benchmark = Path("/proc") / os.environ["BENCH_PID"]
    with (folder / f"{os.getpid()}.last").open("wb", buffering=0) as last:
        while benchmark.exists():  # not even orphans may outlive the benchmark
            os.pwrite(last.fileno(), struct.pack("d", time.monotonic()), 0)
            time.sleep(PAUSE_SECONDS)
            dist.all_reduce(ones)


if __name__ == "__main__":
    main()
