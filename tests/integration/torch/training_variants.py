"""Training of a small model in many ways, each killed and restored from its snapshots.

`compared` trains once without a disturbance and once with kills, and returns the losses of both.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, before the forks: optimizers import it at their first step
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from elasticjob import train
from tests.integration.torch import forked_gang
from tests.integration.torch.training_steps import KILLS, STEPS

FEATURES, HIDDEN, CLASSES, BATCH = 16, 24, 4, 8
FREEZE_AT = 6
_LOSS = struct.Struct("<qf")


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless samples of one rank, of which `first` are skipped."""

    def __init__(self, rank: int, first: int) -> None:
        self._rank, self._first = rank, first

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(100 + self._rank)
        samples = iter(lambda: (torch.randn(FEATURES, generator=generator),), None)
        for (sample,) in islice(samples, self._first, None):
            yield sample, (sample.sum() > 0).long() + 2 * (sample[0] > 0).long()


class Model(nn.Module):
    """Two blocks with dropout; the second one is recomputed with `checkpointing`."""

    def __init__(self, ways: Sequence[str]) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(HIDDEN) if "batchnorm" in ways else nn.LayerNorm(HIDDEN)
        self.first = nn.Sequential(nn.Linear(FEATURES, HIDDEN), norm, nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.2))
        self.last = nn.Linear(HIDDEN, CLASSES)
        self._recomputes = "checkpointing" in ways

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        hidden = self.first(samples)
        if self._recomputes:
            hidden = checkpoint(self.second, hidden, use_reentrant=False)
        else:
            hidden = self.second(hidden)
        found: torch.Tensor = self.last(hidden)
        return found


class Training:
    """Everything that one rank trains, and its state."""

    def __init__(self, ways: Sequence[str], found: Any) -> None:
        self.ways = ways
        torch.manual_seed(7)
        if "meta" in ways:
            with torch.device("meta"):
                self.model = Model(ways)
            if found is None:
                self.model.to_empty(device="cpu")
                for module in self.model.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
        else:
            with train.skip_initialization("skip" in ways and found is not None):
                self.model = Model(ways)
        if found is not None:
            assigns = "meta" in ways or "skip" in ways
            self.model.load_state_dict(found.state["model"], assign=assigns)
        fast = {name: True for name in ("foreach", "fused") if name in ways}
        body = [*self.model.first.parameters(), *self.model.second.parameters()]
        last = list(self.model.last.parameters())
        if "second" in ways:
            self.optimizers: list[Any] = [
                torch.optim.Adam(body, lr=0.01, **fast),
                torch.optim.SGD(last, lr=0.1, momentum=0.9),
            ]
        else:
            self.optimizers = [torch.optim.AdamW([*body, *last], lr=0.01, **fast)]
        self.parts: dict[str, Any] = {f"optimizer {n}": o for n, o in enumerate(self.optimizers)}
        if "scheduler" in ways:
            self.parts["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizers[0], max_lr=0.05, total_steps=STEPS + 1
            )
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=4.0, growth_interval=3, enabled="autocast" in ways
        )
        self.parts["scaler"] = self.scaler
        self.average = None
        if "ema" in ways:
            mean = swa_utils.get_ema_multi_avg_fn(0.9)
            self.average = swa_utils.AveragedModel(self.model, multi_avg_fn=mean, use_buffers=True)
            self.parts["average"] = self.average
        if found is not None:
            for name, part in self.parts.items():
                part.load_state_dict(found.state[name])
        self.call: Any = self.model
        if "compile" in ways:
            self.call = torch.compile(self.model, backend="eager")
        if dist.get_world_size() > 1:
            syncs = "skip" not in ways or found is None
            is_fixed = "fixed order" in ways
            self.call = DistributedDataParallel(
                self.call, init_sync=syncs, find_unused_parameters=is_fixed
            )

    def state(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"model": self.model.state_dict(), **parts}

    def step(self, step: int, batches: list[Any]) -> float:
        """Train one step; return the mean loss of this rank."""
        if "freeze" in self.ways:
            for parameter in self.model.first.parameters():
                parameter.requires_grad_(step < FREEZE_AT)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = 0.0
        for number, (samples, labels) in enumerate(batches):
            is_last = number == len(batches) - 1
            waits = isinstance(self.call, DistributedDataParallel) and not is_last
            self.call.require_backward_grad_sync = not waits  # as `no_sync` does
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in self.ways):
                loss = cross_entropy(self.call(samples), labels) / len(batches)
            self.scaler.scale(loss).backward()
            total += float(loss.detach())
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(optimizer)
        self.scaler.update()
        if "scheduler" in self.ways:
            self.parts["scheduler"].step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return total


def _train(
    folder: Path, ways: Sequence[str], kill: tuple[int, str] | None, rank: int, world: int
) -> None:
    """Train to the last step, or to the kill of the last rank."""
    torch.set_num_threads(1)
    training: Training
    optimizers = () if "no overlap" in ways else lambda: training.optimizers
    snapshots = train.Snapshots(every_steps=1, replicas=0, optimizers=optimizers)
    found = snapshots.restore()
    training = Training(ways, found)
    step = 0 if found is None else found.step
    micro = 3 if "accumulate" in ways else 1
    # A new iterator draws a random number: the state that is restored comes after it.
    torch.manual_seed(1000 + rank)
    batches = iter(DataLoader(Stream(rank, step * micro * BATCH), batch_size=BATCH))
    if found is not None:
        torch.set_rng_state(found.rank_state["rng"])
    with (folder / f"losses-{rank}").open("ab", buffering=0) as losses:
        while step < STEPS:
            is_victim = kill is not None and kill[0] == step and rank == world - 1
            if is_victim and kill is not None and kill[1] == "before the step":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = training.step(step, list(islice(batches, micro)))
            step += 1
            losses.write(_LOSS.pack(step, loss))
            snapshots.save(step, training.state, lambda: {"rng": torch.get_rng_state()})
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
    snapshots.close()


def compared(top: Path, name: str, ways: Sequence[str], world: int) -> list[tuple[Any, Any]]:
    """Return the losses of each rank without and with kills, by step; all of a repeated one."""
    found = []
    for run, kills in (("calm", (None,)), ("killed", (*KILLS, None))):
        folder = top / f"{name}-{run}"
        folder.mkdir()
        for attempt, kill in enumerate(kills):
            work = partial(_train, folder, ways, kill)
            codes = forked_gang.forked(folder, f"attempt-{attempt}", ["node"] * world, work)
            assert (codes == [0] * world) is (kill is None), (name, run, attempt, codes)
        found.append([_by_step(folder / f"losses-{rank}") for rank in range(world)])
    return list(zip(*found, strict=True))


def _by_step(path: Path) -> dict[int, list[float]]:
    losses: dict[int, list[float]] = {}
    for step, loss in _LOSS.iter_unpack(path.read_bytes()):
        losses.setdefault(step, []).append(loss)
    return losses
