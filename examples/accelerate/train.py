"""Elastic training with Accelerate: handwritten digits, on one worker or many.

The lines marked `elastic` are all that differs from a script for a fixed number of workers.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from elasticjob.train.integrations import AccelerateCheckpoints  # elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", default="checkpoints")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32, device=accelerator.device)
    labels = torch.tensor(digits.target, device=accelerator.device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 2e-3))

    checkpoints = AccelerateCheckpoints(accelerator, options.folder, every=50)  # elastic
    step = checkpoints.resume()  # elastic
    rank, world = accelerator.process_index, accelerator.num_processes
    while step < options.steps:
        batch = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:96]
        mine = batch[rank::world]  # elastic: the global batch is the same at every world size
        loss = cross_entropy(model(pixels[mine]), labels[mine])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.step_seconds)
        step += 1
        checkpoints.step(step, loss=loss.item())  # elastic
    with torch.no_grad():
        right = (model(pixels).argmax(1) == labels).float().mean().item()
    accelerator.print(f"done at step {step}: accuracy {right:.3f}")


if __name__ == "__main__":
    main()
