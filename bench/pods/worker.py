"""Training script of the gang of pods: reports its first step and the previous worker's last step.

Each worker prints one line, `first {…}`, with times in seconds since the epoch. The time of the
last step is in a file of the container, where the next worker reads it.
"""

from __future__ import annotations

import json
import os
import struct
import time

BEGAN = time.time()

import torch  # noqa: E402 (the import is part of what is measured)
import torch.distributed as dist  # noqa: E402

from elasticjob import train  # noqa: E402

LAST = "/tmp/last"
STEP_SECONDS = 0.05


def launched() -> float:
    """Return the start time of this container's first process, to a hundredth of a second."""
    with open("/proc/1/stat") as stat, open("/proc/uptime") as uptime:  # noqa: PTH123
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        up = float(uptime.read().split()[0])
    return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    at = time.time()
    last = os.open(LAST, os.O_RDWR | os.O_CREAT, 0o644)
    before = os.pread(last, 8, 0)
    event = {
        "round": int(os.environ["ELASTICJOB_ROUND"]),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "pid": os.getpid(),
        "launched": launched(),
        "began": BEGAN,
        "at": at,
        "before": struct.unpack("d", before)[0] if before else None,
    }
    print(f"first {json.dumps(event)}", flush=True)
    while True:
        # The step follows the clock, so that it continues after a restart, as from a checkpoint.
        train.progress(int(time.time() / STEP_SECONDS))
        os.pwrite(last, struct.pack("d", time.time()), 0)
        time.sleep(STEP_SECONDS)
        dist.all_reduce(ones)


if __name__ == "__main__":
    main()
