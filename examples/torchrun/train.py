"""Training with DistributedDataParallel as in torchrun's documentation: handwritten digits.

`torchrun --nproc-per-node=2 train.py` runs it with and without ElasticJob. The script saves and
resumes; the lines marked `elastic` add the report of its steps, a checkpoint before a planned stop,
and a global batch that is the same at every world size.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticjob import train  # elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    pixels, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    step = 0
    options.folder.mkdir(parents=True, exist_ok=True)
    saved = [int(path.stem.rpartition("-")[2]) for path in options.folder.glob("checkpoint-*.pt")]
    if saved:
        state = torch.load(options.folder / f"checkpoint-{max(saved)}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    parallel = DistributedDataParallel(model)
    while step < options.steps:
        batch = torch.randperm(len(targets), generator=torch.Generator().manual_seed(step))[:96]
        mine = batch[rank::world]  # elastic
        loss = cross_entropy(parallel(pixels[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.step_seconds)
        step += 1
        train.progress(step, loss=loss.item())  # elastic
        if train.should_checkpoint() or step % 50 == 0:  # elastic
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                draft = options.folder / "unfinished.pt"
                torch.save({**state, "step": step}, draft)
                draft.rename(options.folder / f"checkpoint-{step}.pt")
                train.checkpointed(step)  # elastic
            dist.barrier()
    if rank == 0:
        print(f"done at step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
