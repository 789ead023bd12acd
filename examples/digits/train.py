"""Elastic training of a small network on scikit-learn's handwritten digits.

Plain PyTorch: it runs under `elasticjob`, under `torchrun`, and alone with RANK=0 WORLD_SIZE=1.
The number of workers may change at any restart. What makes that safe is marked `elastic` below:

* the position in the data is one number, the step, and it is in the checkpoint;
* the global batch is constant, so a step means the same at every world size;
* every node replaces its checkpoint atomically, and all ranks start from the newest one there is;
* where ElasticJob started it, it saves before a planned change, and loses no step.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

try:
    from elasticjob import train as job  # comes with ElasticJob's agent; the script runs without
except ImportError:
    job = None  # type: ignore[assignment]

TEST_SAMPLES = 360
SEED = 20


def load_digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images (64 pixels in 0..1) and their labels, in one fixed shuffled order.

    The bundled file is sorted by writer: unshuffled, the last images are by people that training
    never saw. It is read directly: `import sklearn` takes a second, which each restart would pay.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("scikit-learn is not installed: its digits are the data (pip install it)")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    table = np.random.default_rng(SEED).permutation(table)
    pixels = torch.tensor(table[:, :64] / 16, dtype=torch.float32)
    return pixels, torch.tensor(table[:, 64], dtype=torch.int64)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


# ------------------------------------------------------------------------------- elastic: begin
def write_atomically(path: Path, content: bytes) -> None:
    """A reader, or a restart after a kill, sees the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # On storage that nodes share, two of them may have the same pid.
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Everything the next step depends on. Called by one rank of each node."""
    buffer = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": step, "rng": torch.get_rng_state()}, buffer)
    write_atomically(path, buffer.getvalue())


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that any rank can see; return the first step still to be done.

    One rank sends its copy and the others receive, so that all agree on the step by construction.
    A node that is new, or came back with an old disk, learns it from one that trained on.
    """
    mine = torch.load(path, weights_only=True) if path.exists() else None
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, mine["step"] if mine else 0)
    newest = steps.index(max(steps))
    shared: list[Any] = [mine if dist.get_rank() == newest else None]
    dist.broadcast_object_list(shared, src=newest)
    if (state := shared[0]) is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def shard(step: int, samples: int, global_batch: int, rank: int, world: int) -> Tensor:
    """The samples that a rank takes of the global batch of a step.

    The order is a function of the epoch, and the epoch of the step. So at any world size the steps
    of an epoch see no sample twice, and a resize repeats only what came after the checkpoint.
    """
    epoch, batch = divmod(step, samples // global_batch)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch))
    whole = order[batch * global_batch : (batch + 1) * global_batch]
    return whole[rank::world]


# --------------------------------------------------------------------------------- elastic: end


def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = int((model(pixels).argmax(dim=1) == labels).sum())
    model.train()
    return right / len(labels)


def report(step: int, loss: float, right: float) -> None:
    """One line for people."""
    print(
        f"step {step} loss {loss:.3f} accuracy {right:.3f} world {dist.get_world_size()}"
        f" restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        flush=True,
    )


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    saves = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank of each node: any may be lost
    pixels, labels = load_digits()
    train_x, train_y = pixels[:-TEST_SAMPLES], labels[:-TEST_SAMPLES]
    test_x, test_y = pixels[-TEST_SAMPLES:], labels[-TEST_SAMPLES:]

    torch.manual_seed(SEED)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    checkpoint = options.checkpoint_dir / "checkpoint.pt"
    first = resume(checkpoint, model, optimizer)
    if rank == 0 and first >= options.steps:
        print(f"all {first} steps are done already: remove {checkpoint} to begin again", flush=True)
    if rank:  # rank 0 goes on with the saved sequence; the others draw dropout of their own
        torch.manual_seed(SEED + 1000 * first + rank)
    parallel = DistributedDataParallel(model)

    reported = float("-inf")
    for step in range(first, options.steps):
        began = time.monotonic()
        mine = shard(step, len(train_x), options.global_batch, rank, world)
        # The sum over this rank's samples, scaled so that DDP's mean over ranks is the mean over
        # the global batch, also where it does not divide evenly by the world size.
        loss = cross_entropy(parallel(train_x[mine]), train_y[mine], reduction="sum")
        loss = loss * world / options.global_batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        done = step + 1
        measured = {}
        if rank == 0 and (began - reported >= options.report_seconds or done == options.steps):
            reported = began
            measured = {"loss": loss.item(), "accuracy": accuracy(model, test_x, test_y)}
            report(done, measured["loss"], measured["accuracy"])
        if job:
            job.progress(done, **measured)
        # Asked in every step by every rank: so all are told yes in the same step.
        stops = job is not None and job.should_checkpoint()
        if stops or done % options.checkpoint_every == 0 or done == options.steps:
            if saves:
                save(checkpoint, done, model, optimizer)
            dist.barrier()  # every node has it: whichever goes now, none is missed
            if job and rank == 0:
                job.checkpointed(done)
        time.sleep(max(0.0, began + options.step_seconds - time.monotonic()))

    if rank == 0:
        right = accuracy(model, test_x, test_y)
        result = {"accuracy": round(right, 4), "steps": options.steps, "world_size": world}
        write_atomically(options.checkpoint_dir / "result.json", json.dumps(result).encode())
    dist.barrier()  # nobody reports success before the result is on disk


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, elastically.")
    where = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints"))
    parser.add_argument("--steps", type=int, default=300, help="steps in all, over every restart")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="shortest time of a step")
    parser.add_argument("--global-batch", type=int, default=96, help="samples of a step, all ranks")
    parser.add_argument("--checkpoint-dir", type=Path, default=where, help="a node's own or shared")
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--report-seconds", type=float, default=1.0)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # the network is small: more threads would only wait for each other
    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this round
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
