"""Training loop that times its own steps, each a fixed amount of work.

`stepper.py FILE` writes one JSON line per block of steps, with the median step, the time and the
process id, until FILE's folder is gone or the process is killed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

BLOCK_STEPS = 40
SIDE = 384


def main(path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.ReLU(), torch.nn.Linear(SIDE, SIDE)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(256, SIDE), torch.randn(256, SIDE)
    while path.parent.exists():
        steps = []
        for _ in range(BLOCK_STEPS):
            began = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps.append(time.perf_counter() - began)
        line = {"at": time.monotonic(), "pid": os.getpid(), "step": statistics.median(steps)}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
