"""Order of the training data, and the position in it, independent of the number of ranks.

    loader = data.ElasticLoader(dataset, global_batch=96, seed=20, num_workers=4)
    if found is not None:
        loader.load_state_dict(found.state["data"])
    for epoch in range(loader.epoch, epochs):
        for pixels, labels in loader:  # the rest of the epoch
            ...
            snapshots.save(step, {"model": ..., "data": loader.state_dict()})

The position is the number of samples of the epoch that all ranks have consumed. A step consumes the
next `global_batch` samples of the epoch's order, of which each rank gets its share. So a change of
the world size neither repeats nor skips a sample. See docs/training.md.
"""

from __future__ import annotations

import hashlib
import importlib.util
import operator
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_Step = TypeVar("_Step")

DROP = "drop"
PAD = "pad"
_MAX_SEED = 2**31 - 1
_OWN_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "batch_size": ((1,), "give global_batch or batch_per_rank"),
    "drop_last": ((False,), "give remainder"),
    "sampler": ((None,), "its sampler is an ElasticSampler"),
    "batch_sampler": ((None,), "its sampler is an ElasticSampler"),
    "generator": ((None,), "the numbers of its workers follow from seed and epoch: give seed"),
    "in_order": ((True,), "leave it out, as the position counts batches in their order"),
}
"""Arguments of the DataLoader that are refused: the values without effect, and the remedy."""


class ElasticSampler:
    """Batches of indices of this rank, from the position to the end of the epoch.

    Iterating moves the position: a batch counts as consumed when it has been handed out. Use
    `ElasticLoader` with a DataLoader, whose workers fetch ahead of the training loop.

    Args:
        samples: number of samples in the data set.
        global_batch: samples of a step, over all ranks: the same at every world size.
        batch_per_rank: alternatively samples of a step for each rank; the step then has
            `batch_per_rank` times the world size, and their number in an epoch depends on that.
        rank, world: of this process; by default those of the process group, else of the
            environment.
        seed: the order of an epoch depends on the seed and the epoch alone.
        shuffle: use the order of the data set in each epoch if False.
        remainder: treatment of the samples at the end of an epoch that do not fill a step: "drop"
            leaves them out of this epoch, "pad" completes the step with the first samples of the
            epoch's order.

    Raises:
        ValueError: an argument is out of range, or a step has fewer samples than ranks.
    """

    def __init__(
        self,
        samples: int,
        *,
        global_batch: int | None = None,
        batch_per_rank: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        remainder: str = DROP,
    ) -> None:
        self.rank, self.world = _place(rank, world)
        if (global_batch is None) == (batch_per_rank is None):
            raise ValueError("give either global_batch or batch_per_rank")
        given = "global_batch" if batch_per_rank is None else "batch_per_rank"
        batch = global_batch if batch_per_rank is None else batch_per_rank
        samples = _whole("the number of samples", samples, 1)
        batch = _whole(given, batch, 1) * (1 if batch_per_rank is None else self.world)
        if batch < self.world:
            raise ValueError(
                f"global_batch must be at least the world size {self.world}, got {batch}: enlarge "
                "it, or limit the job's maxNodes"
            )
        if remainder not in (DROP, PAD):
            raise ValueError(f"remainder must be {DROP!r} or {PAD!r}, got {remainder!r}")
        if remainder == DROP and samples < batch:
            raise ValueError(
                f"a step of {batch} samples is larger than the data set of {samples}: choose a "
                f"smaller one, or remainder={PAD!r}"
            )
        seed = _whole("seed", seed, 0)
        if seed > _MAX_SEED:
            raise ValueError(f"seed must be from 0 to 2**31 - 1, got {seed!r}")
        self.samples = samples
        self.global_batch = batch
        self.epoch = 0
        self._seed = seed
        self._shuffle = shuffle
        self._remainder = remainder
        self._position = 0
        self._has_begun = False
        """True if an iteration has begun since a position was loaded."""
        self._order: tuple[int, Any] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch, then move to the next epoch."""
        return self.moving(self.begin())

    def begin(self) -> Ahead:
        """Begin an iteration. If no step of this epoch is left, move to the next epoch before.

        A loop of `len` steps does not ask for a further one, so its iterator does not find the end.
        The first iteration after `load_state_dict` stays in its epoch, because the code behind the
        epoch's loop may not have run.
        """
        if self._has_begun and not self._steps_from(self._position):
            self.next_epoch()
        self._has_begun = True
        return self.ahead()

    def moving(self, steps: Iterable[_Step]) -> Iterator[_Step]:
        """Yield steps of this epoch and move the position behind each; then to the next epoch."""
        epoch = self.epoch
        for step in steps:
            self.consume()
            yield step
        if self.epoch == epoch:  # not if another iteration has begun meanwhile
            self.next_epoch()

    def __len__(self) -> int:
        """Return the number of steps of an iteration that begins now.

        They are those from the position to the end of the epoch; after its last step those of the
        next epoch, or none if the position was loaded: see `begin`.
        """
        return self._steps_from(self._position) or (self._steps_from(0) if self._has_begun else 0)

    def _steps_from(self, position: int) -> int:
        rest = max(0, self.samples - position)
        return (
            rest // self.global_batch if self._remainder == DROP else -(-rest // self.global_batch)
        )

    @property
    def epoch_seed(self) -> int:
        """Seed of this epoch: 32 bits, as torch's CPU generator uses no more."""
        digest = hashlib.sha256(f"{self._seed} {self.epoch}".encode()).digest()
        return int.from_bytes(digest[:4], "little")

    def ahead(self) -> Ahead:
        """Return an iterator over the rest of the epoch that does not move the position."""
        return Ahead(self, self._position)

    def consume(self) -> None:
        """Move the position behind the next step."""
        self._position += self.global_batch

    def next_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.epoch += 1
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on all ranks."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "samples": self.samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Raises ValueError if it is invalid, or a position in another order of the data.
        """
        settings = self.state_dict()
        missing = [name for name in settings if name not in state]
        if missing:
            raise ValueError(
                f"the position has no {', '.join(missing)}: load what state_dict() returned"
            )
        epoch = _whole("epoch of a position", state["epoch"], 0)
        position = _whole("position of a position", state["position"], 0)
        for name, ours in settings.items():
            if name not in ("epoch", "position") and state[name] != ours:
                raise ValueError(
                    f"{name} is {ours!r}, and was {state[name]!r} when the position was saved: "
                    "it cannot change between restarts"
                )
        self.epoch, self._position = epoch, position
        self._has_begun = False

    def indices(self, position: int) -> list[int] | None:
        """Return this rank's share of the step at a position; None at the end of the epoch."""
        end = position + self.global_batch
        if position >= self.samples or (end > self.samples and self._remainder == DROP):
            return None
        order = self._ordered()
        if end <= self.samples:
            return [int(each) for each in order[position + self.rank : end : self.world]]
        numbers = range(position + self.rank, end, self.world)
        # Behind the end follow the first samples, more than once if a step is larger than the set.
        return [int(order[number % self.samples]) for number in numbers]

    def _ordered(self) -> Any:
        """Return the order of this epoch."""
        if self._order is None or self._order[0] != self.epoch:
            import torch

            if self._shuffle:
                generator = torch.Generator().manual_seed(self.epoch_seed)
                order = torch.randperm(self.samples, generator=generator, device="cpu")
            else:
                order = torch.arange(self.samples, device="cpu")
            self._order = (self.epoch, order)
        return self._order[1]


class Ahead:
    """Iterator over the steps of an epoch from a position on, with a state of its own."""

    def __init__(self, sampler: ElasticSampler, position: int) -> None:
        self._sampler = sampler
        self._position = position

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> list[int]:
        found = self._sampler.indices(self._position)
        if found is None:
            raise StopIteration
        self._position += self._sampler.global_batch
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


class ElasticLoader:
    """DataLoader over an `ElasticSampler`; a batch counts as consumed when the loop has got it.

    A data set with `state_dict` and `load_state_dict` is read with torchdata's StatefulDataLoader,
    which collects this state from the worker processes: `rank_state_dict`. It fits only the same
    rank, number of ranks and number of worker processes; otherwise the data set starts again at
    the position. All others are read with torch's DataLoader.

    Args:
        dataset: data set with a length.
        global_batch, batch_per_rank, rank, world, seed, shuffle, remainder: as of `ElasticSampler`.
        options: arguments of the DataLoader, such as `num_workers`, except those about batches.

    Raises:
        ValueError: as `ElasticSampler`.
        TypeError: the data set has no length or is read as a stream, or an option is about batches.
        ImportError: the data set has a state, and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        batch_per_rank: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        remainder: str = DROP,
        **options: Any,
    ) -> None:
        _check_options(options)
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                "the data set must have a length and items by index, got a "
                f"{type(dataset).__name__}: read a stream with torch's DataLoader, and save the "
                "number of samples that each rank has read"
            )
        self.sampler = ElasticSampler(
            len(dataset),
            global_batch=global_batch,
            batch_per_rank=batch_per_rank,
            rank=rank,
            world=world,
            seed=seed,
            shuffle=shuffle,
            remainder=remainder,
        )
        options = {name: given for name, given in options.items() if name not in _OWN_OPTIONS}
        self._has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._loader = _loader_class(self._has_state)(
            dataset,
            batch_sampler=_BatchSampler(self.sampler),
            generator=self._generator(),
            **options,
        )

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0 on."""
        return self.sampler.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch, then move to the next epoch."""
        self.sampler.begin()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        import torch

        self._loader.generator.manual_seed(self.sampler.epoch_seed)
        with torch.device("cpu"):  # that of the generator, with any default device
            steps = iter(self._loader)
        yield from self.sampler.moving(steps)

    def __len__(self) -> int:
        """Return the number of steps of an iteration that begins now, as `ElasticSampler` does."""
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on all ranks: part of the shared state."""
        return self.sampler.state_dict()

    def rank_state_dict(self) -> dict[str, Any] | None:
        """Return the state of the data set in this rank's workers; None if it has none."""
        found: dict[str, Any] | None = self._loader.state_dict() if self._has_state else None
        return found

    def load_state_dict(
        self, state: dict[str, Any], rank_state: dict[str, Any] | None = None
    ) -> None:
        """Continue at a position, with the state of this rank's data set if there is one."""
        self.sampler.load_state_dict(state)
        if rank_state is not None and self._has_state:
            self._loader.load_state_dict(rank_state)

    @staticmethod
    def _generator() -> Any:
        """Return the generator of the workers' seeds: drawn from torch's own one, they would
        change the random numbers of the training after a restart."""
        import torch

        return torch.Generator()


class _BatchSampler:
    """Batch sampler for a DataLoader, which asks for batches ahead of the training loop."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Ahead:
        return self._sampler.ahead()

    def __len__(self) -> int:
        return len(self._sampler)


def _loader_class(has_state: bool) -> Any:
    if not has_state:
        from torch.utils.data import DataLoader

        return DataLoader
    if importlib.util.find_spec("torchdata") is None:
        raise ImportError(
            "the data set has a state_dict, which torchdata's StatefulDataLoader saves: install "
            "torchdata"
        )
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def _whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of any type as an int. Raises ValueError unless it is one."""
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
    return found


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument of the DataLoader that `ElasticLoader` gives itself."""
    for name, (without_effect, remedy) in _OWN_OPTIONS.items():
        if name in options and options[name] not in without_effect:
            raise TypeError(f"ElasticLoader has no argument {name}: {remedy}")


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else of the process group or the environment."""
    if rank is None or world is None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            found = dist.get_rank(), dist.get_world_size()
        else:
            found = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        rank, world = found[0] if rank is None else rank, found[1] if world is None else world
    if not 0 <= rank < world:
        raise ValueError(f"rank must be from 0 to {world - 1}, got {rank}")
    return rank, world
