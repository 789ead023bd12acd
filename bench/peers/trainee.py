"""Training script of `bench.goodput`, for every system: data parallel, one worker on each node.

Each worker appends a record of each completed step to `<pid>.steps` in the folder of events: time
on the machine's monotonic clock, step, rank, world size.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.peers.records import FSDP2, RECORD, STARTED, WIDTHS
from bench.peers.worker import record
from elasticjob import train
from elasticjob.train.data import ElasticSampler

SAMPLES, FEATURES, CLASSES, BATCH = 4096, 64, 10, 64


class Steps:
    """Records of this worker's steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None

    def done(self, step: int, rank: int, world: int) -> None:
        if self._file is None:
            record(self._folder, rank, world)
            self._file = (self._folder / f"{os.getpid()}.steps").open("ab", buffering=0)
        self._file.write(RECORD.pack(time.monotonic(), step, rank, world))


class Replicated:
    """Model with DDP: each rank has the whole state; `is_same` once all have loaded the same."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, is_same: bool) -> None:
        self._model, self._optimizer, self._is_same = model, optimizer, is_same

    def state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def whole(self) -> dict[str, Any]:
        return self.state()

    def parallel(self) -> nn.Module:
        return DistributedDataParallel(self._model, init_sync=not self._is_same)


class Sharded:
    """Model with FSDP2: each rank has its shards. A collective for all ranks makes them whole."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state(self, *, is_whole: bool = False) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=is_whole, cpu_offload=is_whole)
        weights, moments = get_state_dict(self._model, self._optimizer, options=options)
        return {"model": weights, "optimizer": moments}

    def load(self, state: dict[str, Any], *, is_whole: bool) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=is_whole),
        )

    def whole(self) -> dict[str, Any]:
        return self.state(is_whole=True)

    def parallel(self) -> nn.Module:
        return self._model


def shard(model: nn.Module) -> None:
    """Shard the layers over all ranks of the process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Storage:
    """Checkpoint in a shared folder at an interval, written in the background from a copy.

    The interval continues after a restart: faults do not postpone the next checkpoint.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        last = path if path.exists() else path.with_name(STARTED)
        age = time.time() - last.stat().st_mtime
        self._due = time.monotonic() + max(0.0, seconds - age)
        self._thread: threading.Thread | None = None

    def load(self) -> Any:
        return torch.load(self._path, weights_only=True) if self._path.exists() else None

    def is_due(self) -> bool:
        """Return True on all ranks if a checkpoint is due for rank 0. A collective."""
        due = torch.tensor(int(time.monotonic() >= self._due))
        dist.broadcast(due, 0)
        return bool(due)

    def save(self, state: Callable[[], Any], at_once: bool) -> None:
        if not at_once and time.monotonic() < self._due:
            return
        if self._thread is not None:
            self._thread.join()
        self._due = time.monotonic() + self._seconds
        copied = _copied(state())
        self._thread = threading.Thread(target=self._write, args=(copied,))
        self._thread.start()
        if at_once:
            self._thread.join()

    def _write(self, state: Any) -> None:
        draft = self._path.with_name(f"draft-{os.getpid()}.pt")  # torch.save refuses ".123"
        torch.save(state, draft)
        draft.replace(self._path)


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def network(size: str) -> nn.Module:
    torch.manual_seed(1)
    width, depth = WIDTHS[size]
    layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


@contextlib.contextmanager
def paced(seconds: float) -> Iterator[None]:
    """Let the block last at least that long."""
    end = time.monotonic() + seconds
    yield
    time.sleep(max(0.0, end - time.monotonic()))


def restored(snapshots: train.Snapshots, into: Any = None) -> dict[str, Any] | None:
    """Return the state of the newest snapshot with its step; None without a snapshot."""
    if (found := snapshots.restore(into=into)) is None:
        return None
    return {**found.state, "step": found.step}


def train_data_parallel(
    options: argparse.Namespace, steps: Steps, runs: Callable[[], bool]
) -> None:
    """Train with DDP or FSDP2, and with snapshots or checkpoints in storage.

    The state is read before the creation of the model, with whose shards FSDP2 restores a snapshot.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = ElasticSampler(SAMPLES, batch_per_rank=BATCH)
    pixels, labels = samples()
    is_sharded = options.model == FSDP2
    snapshots = storage = None
    step, found = 0, None

    def state(found: dict[str, Any] | None = None) -> dict[str, Any]:
        return {**(found or held.state()), "data": sampler.state_dict(), "step": step}

    if options.saves == "snapshots":
        snapshots = train.Snapshots(optimizers=lambda: optimizer, sharded=is_sharded)
        found = None if is_sharded else restored(snapshots)
    else:
        storage = Storage(options.folder / "checkpoint.pt", options.store_seconds)
        found = storage.load()
    with train.skip_initialization(found is not None):
        model = network(options.model)
    held: Sharded | Replicated
    optimizer: torch.optim.Optimizer
    if is_sharded:
        shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        held = Sharded(model, optimizer)
        if snapshots is not None:
            found = restored(snapshots, state)
        if found is not None:
            held.load(found, is_whole=snapshots is None)
    else:
        if found is not None:
            model.load_state_dict(found["model"], assign=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        if found is not None:
            optimizer.load_state_dict(found["optimizer"])
        held = Replicated(model, optimizer, is_same=found is not None)
    if found is not None:
        step = found["step"]
        sampler.load_state_dict(found["data"])
    parallel = held.parallel()
    while True:
        for mine in sampler:
            with paced(options.step_seconds):
                loss = cross_entropy(parallel(pixels[mine]), labels[mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                steps.done(step, rank, world)
                train.progress(step)
                # Snapshots in memory need no last one: a stop copies the state of its step.
                stops = snapshots is None and train.should_checkpoint()
                if snapshots is not None:
                    snapshots.save(step, state)
                elif storage is not None and is_sharded:
                    if storage.is_due() or stops:
                        whole = state(held.whole())
                        if rank == 0:
                            storage.save(functools.partial(state, whole), stops)
                elif storage is not None and rank == 0:
                    storage.save(state, stops)
                if stops and rank == 0:
                    train.checkpointed(step)
            if not runs():
                return


def train_with_torchft(options: argparse.Namespace, steps: Steps, runs: Callable[[], bool]) -> None:
    """Train with torchft: each node is a replica group, which loads its state from another.

    With FSDP2 the layers are sharded within the group, of one worker here, and their gradients
    averaged over the groups by the manager, in the hook of FSDP2 for that.
    """
    import torchft

    model, is_sharded = network(options.model), options.model == FSDP2
    if is_sharded:
        dist.init_process_group("gloo")
        shard(model)
    inner = torch.optim.Adam(model.parameters(), lr=1e-4)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"node_{os.environ['BENCH_MEMBER']}",
        timeout=timedelta(seconds=30),
        hostname="127.0.0.1",
    )
    parallel = model if is_sharded else torchft.DistributedDataParallel(manager, model)
    for module in model.modules() if is_sharded else ():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradients: manager.allreduce(gradients).wait())
    optimizer = torchft.Optimizer(manager, inner)
    pixels, labels = samples()
    generator = torch.Generator().manual_seed(int(os.environ["BENCH_MEMBER"]))
    done = -1
    while runs():
        with paced(options.step_seconds):
            mine = torch.randint(SAMPLES, (BATCH,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(parallel(pixels[mine]), labels[mine]).backward()
            optimizer.step()
            rank, step = manager.participating_rank(), manager.current_step()
            if step > done and rank is not None:
                steps.done(step, rank, manager.num_participants())
                done = step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", choices=["snapshots", "storage", "torchft"], required=True)
    parser.add_argument("--model", choices=list(WIDTHS), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--store-seconds", type=float, default=30.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = Steps(Path(os.environ["BENCH_EVENTS"]))
    benchmark = Path("/proc") / os.environ["BENCH_PID"]
    follow = train_with_torchft if options.saves == "torchft" else train_data_parallel
    follow(options, steps, benchmark.exists)  # not even orphans may outlive the benchmark


if __name__ == "__main__":
    main()
