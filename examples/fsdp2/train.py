"""Elastic training with FSDP2 (`fully_shard`) and snapshots of its shards: handwritten digits.

A snapshot of n workers is restored by m, from the memory of the nodes that are left, or from
storage. It is also taken before a planned stop. The lines marked `elastic` are all that differs
from a script for a fixed number of workers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from elasticjob import train  # elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cuda" if cuda else "cpu", (world,))
    images, labels = load_digits(return_X_y=True)
    pixels, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    step = 0
    snapshots = train.Snapshots(options.folder, sharded=True, store_every=50)  # elastic
    if (found := snapshots.restore(into=state)) is not None:  # elastic
        weights, moments = found.state["model"], found.state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = found.step  # elastic
    while step < options.steps:
        batch = torch.randperm(len(targets), generator=torch.Generator().manual_seed(step))[:96]
        mine = batch[rank::world]  # elastic: the global batch is the same at every world size
        loss = cross_entropy(model(pixels[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.step_seconds)
        step += 1
        train.progress(step, loss=loss.item())  # elastic
        snapshots.save(step, state)  # elastic
    if rank == 0:
        print(f"done at step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
