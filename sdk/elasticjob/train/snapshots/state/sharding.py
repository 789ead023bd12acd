"""Shards of distributed tensors in a snapshot, restored by any number of ranks.

The shared part of a snapshot describes each distributed tensor, the own part of each rank has its
shards. The planners of torch.distributed.checkpoint give the slice of each shard, and the slices of
stored shards that a rank needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.train.snapshots.memory.part_files import CorruptSnapshot
from elasticjob.train.snapshots.state.codec import Sharded, with_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_SHARDS, _STATE = "shards", "state"


class Shard(NamedTuple):
    """Slice of a distributed tensor: its number in the state, its offsets, its values."""

    number: int
    offsets: tuple[int, ...]
    values: torch.Tensor


class ShapeMismatch(ValueError):
    """Distributed tensor whose shape or type differs from that in the snapshot."""


def is_distributed(value: object) -> bool:
    """Return True for a DTensor."""
    import torch
    import torch.distributed as dist

    if not isinstance(value, torch.Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


class Parts(NamedTuple):
    """State of a rank with distributed tensors.

    Args:
        shared: shared state with descriptions of the distributed tensors.
        own: shards and own state of the rank.
        tensors: path, type and shape of each distributed tensor, by its number.
    """

    shared: Any
    own: Any
    tensors: list[str]


def split(state: Any, rank_state: Any) -> Parts | None:
    """Return the shared state and the own state; None if the state has no distributed tensor.

    Raises TypeError for one whose ranks hold terms of a sum: its shards are not slices of the
    tensor.
    """
    found: list[Any] = []
    tensors: list[str] = []

    def described(value: Any, path: str) -> Any:
        if not is_distributed(value):
            return value
        if any(each.is_partial() for each in value.placements):
            raise TypeError(
                f"{path} is a distributed tensor with partial placement, which a snapshot cannot "
                "hold: call redistribute() first"
            )
        found.append(value)
        made = Sharded(len(found) - 1, str(value.dtype).partition(".")[2], tuple(value.shape))
        tensors.append(f"{path} ({made.dtype}, shape {list(made.shape)})")
        return made

    shared = _mapped(state, described, "state")
    if not found:
        return None
    shards = [[each.number, each.offsets, each.values] for each in _shards(found)]
    return Parts(shared, {_SHARDS: shards, _STATE: rank_state}, tensors)


def own_state(own: Any) -> tuple[list[Shard], Any]:
    """Return the shards and the rank's own state of an own part."""
    try:
        shards = [Shard(number, tuple(at), values) for number, at, values in own[_SHARDS]]
        return shards, own[_STATE]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshot(f"the shards of the snapshot are invalid: {error!r}") from error


class Assembly:
    """Restored state, into which the shards of all former ranks are read one after another.

    Args:
        shared: restored shared state, with descriptions of distributed tensors.
        into: state of the same structure with the distributed tensors to load; any other one is
            restored whole.

    Raises:
        ShapeMismatch: a distributed tensor of `into` has another shape or type.
    """

    def __init__(self, shared: Any, into: Any) -> None:
        self._targets: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self.state = self._with_targets(shared, into, "state")

    def needs_own_alone(self, shards: list[Shard]) -> bool:
        """Return True if these shards are exactly the slices that this rank loads."""
        if self._targets.keys() != self._given.keys():
            return False
        wanted = {(each.number, each.offsets, tuple(each.values.shape)) for each in self._wanted()}
        stored = {(each.number, each.offsets, tuple(each.values.shape)) for each in shards}
        return wanted == stored

    def add(self, shards: list[Shard]) -> None:
        """Copy the slices of these shards that this rank loads."""
        for shard in shards:
            target = self._targets.get(shard.number)
            if target is None:
                raise CorruptSnapshot(f"a shard of the unknown tensor {shard.number}")
            if shard.number in self._given:
                _load(target, shard)
            elif shard.values.numel():
                _slice(target, shard.offsets, shard.values.shape).copy_(shard.values)

    def _wanted(self) -> Iterator[Shard]:
        numbers = sorted(self._given)
        for each in _shards([self._given[number] for number in numbers]):
            yield each._replace(number=numbers[each.number])

    def _with_targets(self, value: Any, into: Any, path: str) -> Any:
        import torch

        if isinstance(value, Sharded):
            if not is_distributed(into):
                dtype = getattr(torch, value.dtype)
                whole = torch.zeros(value.shape, dtype=dtype, device="cpu")
                return self._targets.setdefault(value.number, whole)
            if tuple(into.shape) != value.shape or not str(into.dtype).endswith(f".{value.dtype}"):
                raise ShapeMismatch(
                    f"{path} is a {value.dtype} tensor of shape {list(value.shape)} in the "
                    f"snapshot, and a {str(into.dtype).partition('.')[2]} tensor of shape "
                    f"{list(into.shape)} here: restore it with the model that it was taken of"
                )
            self._given[value.number] = self._targets[value.number] = into
            return into
        if isinstance(value, dict):
            inner = into if isinstance(into, dict) else {}
            for key, item in value.items():
                value[key] = self._with_targets(item, inner.get(key), f"{path}[{key!r}]")
            return value
        if type(value) in (list, tuple):
            is_alike = isinstance(into, (list, tuple)) and len(into) == len(value)
            given = into if is_alike else [None] * len(value)
            return type(value)(
                self._with_targets(item, other, f"{path}[{at}]")
                for at, (item, other) in enumerate(zip(value, given))
            )
        return value


def _mapped(value: Any, change: Callable[[Any, str], Any], path: str) -> Any:
    """Return a copy of nested dicts, lists and tuples with changed leaves.

    `change` gets each leaf and its path.
    """
    if isinstance(value, dict) and hasattr(type(value), "items"):
        made = with_metadata(value.copy(), value)
        for key, item in value.items():
            made[key] = _mapped(item, change, f"{path}[{key!r}]")
        return made
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change, f"{path}[{at}]") for at, item in enumerate(value))
    return change(value, path)


def _shards(tensors: list[Any]) -> Iterator[Shard]:
    """Yield the local shards of distributed tensors, numbered by their positions."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({str(at): each for at, each in enumerate(tensors)})
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        values: Any = planner.resolve_data(item)
        yield Shard(int(item.index.fqn), tuple(item.tensor_data.chunk.offsets), values)


def _load(target: Any, shard: Shard) -> None:
    """Copy the slices of a stored shard that belong to this rank's shard of the target."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    if not shard.values.numel():
        return
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.values.shape)
    described = TensorStorageMetadata(TensorProperties(shard.values.dtype), target.size(), [chunk])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"it": target}, Metadata({"it": described}))
    for item in planner.create_local_plan().items:
        to = planner.resolve_tensor(item).detach()
        source = _slice(shard.values, item.storage_offsets, item.lengths)
        to.copy_(source)


def _slice(tensor: torch.Tensor, offsets: Any, lengths: Any) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor
