"""Elastic training of a small network with a snapshot in memory after each step.

A failed worker costs at most two steps. The snapshots in `--folder` are for the case that all nodes
are lost; the nodes must share that folder. Lines marked `elastic` are those that
ElasticJob needs.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elasticjob import train as job  # elastic

SEED = 20
SAMPLES, FEATURES, CLASSES = 1024, 64, 10


def samples(step: int, global_batch: int, rank: int, world: int) -> torch.Tensor:
    """Return this rank's samples of a step: the order depends on the epoch, not on the ranks."""
    epoch, batch = divmod(step, SAMPLES // global_batch)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
    return order[batch * global_batch : (batch + 1) * global_batch][rank::world]


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    pixels, labels = torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,))
    model = nn.Sequential(
        nn.Linear(FEATURES, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(SEED + rank)  # dropout differs between the ranks

    step, rng = 0, torch.get_rng_state()
    snapshots = job.Snapshots(  # elastic
        options.folder, every_steps=1, store_every=options.store_every
    )
    if (found := snapshots.restore()) is not None:  # elastic
        step = found.step  # elastic
        model.load_state_dict(found.state["model"])  # elastic
        optimizer.load_state_dict(found.state["optimizer"])  # elastic
        torch.set_rng_state(rng if found.rank_state is None else found.rank_state)  # elastic

    parallel = DistributedDataParallel(model)
    while step < options.steps:
        began = time.monotonic()
        mine = samples(step, options.global_batch, rank, world)
        loss = cross_entropy(parallel(pixels[mine]), labels[mine], reduction="sum")
        loss = loss * world / options.global_batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world!r}", flush=True)
        job.progress(step, loss=total.item() / world)  # elastic
        stops = job.should_checkpoint() or step == options.steps  # elastic
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        snapshots.save(step, state, torch.get_rng_state(), store=stops)  # elastic
        time.sleep(max(0.0, began + options.step_seconds - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum time per step")
    parser.add_argument("--global-batch", type=int, default=96, help="samples per step, all ranks")
    parser.add_argument("--folder", default="snapshots", help="shared by all nodes")
    parser.add_argument("--store-every", type=int, default=100, metavar="STEPS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
