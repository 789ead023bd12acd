"""Training script of test_training.py: it reports its progress and saves on request.

Plain PyTorch and `elasticjob.train`, which no image of these tests has installed. Each pod keeps
the checkpoint in its own /tmp, and all start from the newest. A test leaves its requests there too.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticjob import train

CHECKPOINT = Path("/tmp/checkpoint.pt")
HANG, SAVE = Path("/tmp/hang"), Path("/tmp/save")
STEP_SECONDS = 0.1


def read_batch() -> torch.Tensor:
    if HANG.exists():
        HANG.unlink()
        threading.Event().wait()
    return torch.ones(8)


def save(step: int, model: torch.nn.Module) -> None:
    draft = CHECKPOINT.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict()}, draft)
    draft.replace(CHECKPOINT)
    dist.barrier()  # all pods have it
    if dist.get_rank() == 0:
        print(f"saved {step} in round {os.environ['ELASTICJOB_ROUND']}", flush=True)
        train.checkpointed(step)


def resume(model: torch.nn.Module) -> int:
    mine = torch.load(CHECKPOINT, weights_only=True) if CHECKPOINT.exists() else None
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, mine["step"] if mine else 0)
    newest = steps.index(max(steps))
    shared: list[Any] = [mine if dist.get_rank() == newest else None]
    dist.broadcast_object_list(shared, src=newest)
    if shared[0] is None:
        return 0
    model.load_state_dict(shared[0]["model"])
    return int(shared[0]["step"])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    step = resume(model)
    number = os.environ["ELASTICJOB_ROUND"]
    print(f"round {number} begins at {step} with {train.__file__}", flush=True)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001)
    while True:
        optimizer.zero_grad()
        loss = parallel(read_batch()).square().sum()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step} pid {os.getpid()}", flush=True)
        train.progress(step, loss=loss.item())
        wanted = torch.tensor([int(SAVE.exists())])
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        # Called on all ranks in every step, regardless of other requests.
        if train.should_checkpoint() or wanted.item():
            SAVE.unlink(missing_ok=True)
            save(step, model)
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
