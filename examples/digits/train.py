"""Elastic training of a small network on scikit-learn's handwritten digits.

Plain PyTorch: it runs under `elasticjob`, under `torchrun`, and alone with RANK=0 WORLD_SIZE=1.
The number of workers may change at any restart. The code that makes this safe is marked `elastic`:

* the position in the data is one number, the step, which is in the checkpoint;
* the global batch is constant, so a step means the same at every world size;
* every node replaces its checkpoint atomically, and all ranks start from the newest one;
* under ElasticJob it saves before a planned change and loses no step, and snapshots in memory keep
  the last steps when a worker or a node fails.
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
    from elasticjob import train as job  # optional; provided by ElasticJob's agent
except ImportError:
    job = None  # type: ignore[assignment]

TEST_SAMPLES = 360
SEED = 20


def load_digits() -> tuple[Tensor, Tensor]:
    """Return all 1,797 images (64 pixels in 0..1) and their labels in a fixed shuffled order.

    The bundled file is sorted by writer: unshuffled, the last images are by writers missing from
    the training set. It is read directly: `import sklearn` would add a second to each restart.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("scikit-learn is not installed; it has the data: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    table = np.random.default_rng(SEED).permutation(table)
    pixels = torch.tensor(table[:, :64] / 16, dtype=torch.float32)
    return pixels, torch.tensor(table[:, 64], dtype=torch.int64)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


# ------------------------------------------------------------------------------- elastic: begin
def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that readers, also after a kill, see the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The host name, because processes on different nodes may have the same pid.
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state that is the same on all ranks."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save all state the next step depends on. Called by one rank of each node."""
    buffer = io.BytesIO()
    state = states(model, optimizer)
    torch.save({**state, "step": step, "rng": torch.get_rng_state()}, buffer)
    write_atomically(path, buffer.getvalue())


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint of any rank; return the first step still to be done.

    One rank sends its copy to the others, so that all agree on the step. A node that is new, or
    returned with an old disk, gets the checkpoint from a node that continued.
    """
    mine = torch.load(path, weights_only=True) if path.exists() else None
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, mine["step"] if mine else 0)
    newest = steps.index(max(steps))
    shared: list[Any] = [mine if dist.get_rank() == newest else None]
    dist.broadcast_object_list(shared, src=newest)
    if (state := shared[0]) is None:
        return 0
    load(state, model, optimizer)
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def shard(step: int, samples: int, global_batch: int, rank: int, world: int) -> Tensor:
    """Return a rank's samples of the global batch of a step.

    The order depends on the epoch, and the epoch on the step. So at any world size the steps of an
    epoch use no sample twice, and a resize repeats only the steps after the checkpoint.
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
    """Print a progress line."""
    print(
        f"step {step} loss {loss:.3f} accuracy {right:.3f} world {dist.get_world_size()}"
        f" restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        flush=True,
    )


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    saves = os.environ.get("LOCAL_RANK", "0") == "0"  # on each node, since any may be lost
    pixels, labels = load_digits()
    train_x, train_y = pixels[:-TEST_SAMPLES], labels[:-TEST_SAMPLES]
    test_x, test_y = pixels[-TEST_SAMPLES:], labels[-TEST_SAMPLES:]

    torch.manual_seed(SEED)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    checkpoint = options.checkpoint_dir / "checkpoint.pt"
    first = resume(checkpoint, model, optimizer)
    snapshots = job.Snapshots(optimizers=optimizer) if job else None  # elastic
    found = snapshots.restore() if snapshots else None  # elastic
    if found and found.step > first:  # elastic: newer than the checkpoint
        first = found.step  # elastic
        load(found.state, model, optimizer)  # elastic
    if rank == 0 and first >= options.steps:
        print(f"all {first} steps are done already: remove {checkpoint} to start over", flush=True)
    if rank:  # rank 0 continues the saved random sequence; the others use their own
        torch.manual_seed(SEED + 1000 * first + rank)
    if found and found.step == first and found.rank_state is not None:  # elastic
        torch.set_rng_state(found.rank_state)  # elastic: of this rank, at the same size
    parallel = DistributedDataParallel(model)

    reported = float("-inf")
    for step in range(first, options.steps):
        began = time.monotonic()
        mine = shard(step, len(train_x), options.global_batch, rank, world)
        # The sum over this rank's samples, scaled so that DDP's mean over ranks is the mean over
        # the global batch, even if the world size does not divide it.
        loss = cross_entropy(parallel(train_x[mine]), train_y[mine], reduction="sum")
        loss = loss * world / options.global_batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        done = step + 1
        if snapshots:  # elastic: directly after the step, so that a fault repeats none
            snapshots.save(done, lambda: states(model, optimizer), torch.get_rng_state)  # elastic
        measured = {}
        if rank == 0 and (began - reported >= options.report_seconds or done == options.steps):
            reported = began
            measured = {"loss": loss.item(), "accuracy": accuracy(model, test_x, test_y)}
            report(done, measured["loss"], measured["accuracy"])
        if job:
            job.progress(done, **measured)
        # Called in every step by every rank, so that all get True in the same step.
        stops = job is not None and job.should_checkpoint()
        if stops or done % options.checkpoint_every == 0 or done == options.steps:
            if saves:
                save(checkpoint, done, model, optimizer)
            dist.barrier()  # every node has the checkpoint, so that any of them may leave now
            if job and rank == 0:
                job.checkpointed(done)
        time.sleep(max(0.0, began + options.step_seconds - time.monotonic()))

    if rank == 0:
        right = accuracy(model, test_x, test_y)
        result = {"accuracy": round(right, 4), "steps": options.steps, "world_size": world}
        write_atomically(options.checkpoint_dir / "result.json", json.dumps(result).encode())
    dist.barrier()  # no rank reports success before the result is on disk


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, elastically.")
    where = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints"))
    parser.add_argument("--steps", type=int, default=300, help="total steps over all restarts")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum time per step")
    parser.add_argument("--global-batch", type=int, default=96, help="samples per step, all ranks")
    parser.add_argument("--checkpoint-dir", type=Path, default=where, help="per node or shared")
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--report-seconds", type=float, default=1.0)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # the network is too small for more threads
    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this round
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
