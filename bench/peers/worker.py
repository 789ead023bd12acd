"""The training script of every gang in the recovery benchmark, under torchrun and under ours.

It joins the process group, reduces in a loop, and writes one line to a file of its own when the
first all-reduce of its world is complete, and the time of its last one to another. A worker lives
in one world only: a new world is a new process. That the platform starts it again is all that it
asks of its platform.
"""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist

PAUSE_SECONDS = 0.05  # between all-reduces: a training step, without its use of the processor


def record(folder: Path, rank: int, world: int) -> None:
    """Write the line whole or not at all: the reader polls."""
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
        raise SystemExit(f"{world} ones add up to {ones.item()}: the gang is not what it says")
    folder = Path(os.environ["BENCH_EVENTS"])
    record(folder, rank, world)
    benchmark = Path("/proc") / os.environ["BENCH_PID"]
    with (folder / f"{os.getpid()}.last").open("wb", buffering=0) as last:
        while benchmark.exists():  # nothing of a gang outlives the benchmark, not even its orphans
            os.pwrite(last.fileno(), struct.pack("d", time.monotonic()), 0)
            time.sleep(PAUSE_SECONDS)
            dist.all_reduce(ones)


if __name__ == "__main__":
    main()
