"""Cost of snapshots in memory: `python -m bench.snapshots`, or with `--device cuda` on a GPU.

Each model trains with and without snapshots in turns, in one process, so that both see the same
machine: a snapshot after each step, complete on return; the same, copied during the next step; and
at the default interval, which adapts to the cost. The small model is that of `examples/digits`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from elasticjob import layout, train
from elasticjob_launcher.snapshot_folder import SnapshotFolder

TURNS = 9
MODES: Mapping[str, Callable[[torch.optim.Optimizer], dict[str, Any]]] = MappingProxyType(
    {
        "step": lambda _: {"every_steps": 1},
        "overlapping": lambda optimizer: {"every_steps": 1, "optimizers": optimizer},
        "default": lambda optimizer: {"optimizers": optimizer},
    }
)


def training(
    width: int, depth: int, samples: int, device: str = "cpu"
) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Return a training step of a network with `depth` layers, and its objects."""
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    pixels = torch.randn(samples, 64, device=device)
    labels = torch.randint(10, (samples,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

    return step, model, optimizer


def measure(
    name: str,
    mode: str,
    shape: tuple[int, int, int],
    steps: int,
    turns: int = TURNS,
    device: str = "cpu",
) -> None:
    """Print the cost of snapshots in blocks of `steps` steps, with and without them in turns."""
    step, model, optimizer = training(*shape, device)
    folder = Path(os.environ[layout.SNAPSHOT_FOLDER])
    for path in folder.iterdir():
        path.unlink()
    snapshots = train.Snapshots(**MODES[mode](optimizer))
    snapshots.restore()
    done = taken = 0

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def seconds(saves: bool) -> float:
        nonlocal done, taken
        began = time.perf_counter()
        for _ in range(steps):
            step()
            if saves:
                done += 1
                taken += snapshots.save(done, state, torch.get_rng_state)
        if saves:
            snapshots.close()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    seconds(True)
    done_before, taken_before = done, taken
    pairs = [(seconds(False), seconds(True)) for _ in range(turns)]
    plain = statistics.median(first for first, _ in pairs)
    cost = statistics.median(second - first for first, second in pairs)
    size = (folder / "shared.0").stat().st_size
    interval = (done - done_before) / max(1, taken - taken_before)
    print(
        f"{name:8} {mode:12} state {size / 1e6:7.2f} MB  step {plain * 1e3:8.2f} ms  "
        f"a snapshot in {interval:6.1f} steps  cost {cost * 1e3:7.3f} ms a step  "
        f"ratio {1 + cost / plain:6.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.snapshots")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    folder = SnapshotFolder()
    os.environ.update(folder.environment)
    try:
        for mode in MODES:
            if device == "cuda":
                measure("8 MB", mode, (800, 1, 8192), 100, device=device)
                measure("100 MB", mode, (2000, 2, 16384), 40, turns=5, device=device)
                measure("770 MB", mode, (8000, 1, 16384), 20, turns=3, device=device)
                continue
            measure("digits", mode, (128, 0, 96), 500)
            measure("8 MB", mode, (800, 1, 512), 30)
            measure("100 MB", mode, (2000, 2, 1024), 8, turns=3)
    finally:
        folder.close()


if __name__ == "__main__":
    main()
