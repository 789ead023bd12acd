"""Elastic training with DeepSpeed: handwritten digits, on one worker or many.

A checkpoint of ZeRO stage 1 to 3 is partitioned: at another world size DeepSpeed loads it only
after `ds_to_universal`. Stage 0, as here, has no such limit. The lines marked `elastic` are all
that differs from a script for a fixed number of workers.
"""

from __future__ import annotations

import argparse
import time

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from elasticjob import train  # elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", default="checkpoints")
    options = parser.parse_args()

    if not torch.cuda.is_available():
        # Otherwise the first start on CPUs compiles an operation for ranks that share a machine.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 2e-3),
        config={"train_batch_size": 96, "zero_optimization": {"stage": 0}},
    )
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32, device=engine.device)
    targets = torch.tensor(labels, device=engine.device)

    found, state = engine.load_checkpoint(options.folder)  # elastic
    step = state["step"] if found else 0  # elastic
    rank, world = engine.global_rank, engine.world_size
    while step < options.steps:
        batch = torch.randperm(len(targets), generator=torch.Generator().manual_seed(step))[:96]
        mine = batch[rank::world]  # elastic: the global batch is the same at every world size
        loss = cross_entropy(engine(pixels[mine]), targets[mine])
        engine.backward(loss)
        engine.step()
        time.sleep(options.step_seconds)
        step += 1
        train.progress(step, loss=loss.item())  # elastic
        if train.should_checkpoint() or step % 50 == 0:  # elastic
            engine.save_checkpoint(options.folder, f"checkpoint-{step}", {"step": step})
            if rank == 0:
                train.checkpointed(step)  # elastic
    if rank == 0:
        print(f"done at step {step}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
