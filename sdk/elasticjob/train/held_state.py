"""State of a step that is held for a copy at a stop: references, copies, and a check for changes.

Tensors that only the steps of the optimizers change are held by reference, all others are copied.
See docs/decisions/0087-a-copy-at-the-stop.md.
"""

from __future__ import annotations

import collections
import ctypes
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.train.codec import has_memory, with_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from elasticjob.train.agreement import Part, Version

COPIED_BYTES = 16 << 20
"""Maximum size of the state that each call of `save` copies."""
BLOCK_BYTES = 64
BLOCKS = 32
"""Maximum number of sampled blocks of all tensors together."""
_GOLDEN = 0.6180339887498949
"""Distance of the places of two samples, which so spread over all places."""
_IMMUTABLE = (int, float, bool, str, bytes, type(None))
_SEQUENCES = (list, tuple, set, frozenset)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)


class NotHeld(Exception):
    """State that cannot be held without a copy of most of it."""


class Held(NamedTuple):
    """State of a step.

    Args:
        part: the shared part that a copy writes.
        keep: newest version of all ranks, which a copy does not overwrite.
        size: bytes of its tensors.
        sources: what only the optimizers change, to find any other change.
    """

    part: Part
    keep: Version
    state: Any
    size: int
    sources: Sources


class Copies:
    """One pass over a state: containers and small tensors are copied, those of optimizers are not.

    Values of other types, which a snapshot refuses, stay as they are.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        import torch

        self._tensor, self._plain = torch.Tensor, (torch.Tensor, torch.nn.Parameter)
        self._strided = torch.strided
        self.sources = Sources(optimizers)
        self._copied = 0
        self.size = 0

    def held(self, value: Any) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if isinstance(value, self._tensor):
            return self._of_tensor(value)
        if kind in _MAPPINGS:
            return with_metadata(kind({key: self.held(item) for key, item in value.items()}), value)
        if kind in _SEQUENCES:
            return kind([self.held(item) for item in value])
        if kind is bytearray:
            return bytearray(value)
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "nbytes"):
            self._count(value.nbytes)
            return value.copy()
        return value

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = type(tensor) in self._plain and tensor.layout is self._strided
        if not is_plain or tensor.device.type != "cpu":
            raise NotHeld
        size = tensor.nbytes
        self.size += size
        if (tensor.data_ptr(), size) in self.sources.memory:
            # An assignment to the `data` of a parameter replaces its memory.
            return tensor.detach() if type(tensor) is self._plain[1] else tensor
        self._count(size)
        if not has_memory(tensor):
            raise NotHeld
        return tensor.detach().clone()

    def _count(self, size: int) -> None:
        self._copied += size
        if self._copied > COPIED_BYTES:
            raise NotHeld


class Sources:
    """Tensors that only the steps of the optimizers change: their memory, and marks of values.

    Other changes in place are against the rules, such as weights that are exchanged for a
    validation. The version of a tensor counts them, except those through `data`, which show in the
    samples of a parameter.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        import torch

        self._parameters: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._seed = new_seed()
        try:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    self._parameters += group["params"]
                for state in optimizer.state.values():
                    found = [each for each in state.values() if isinstance(each, torch.Tensor)]
                    self._states += found
            tensors = self._parameters + self._states
            self.memory = {(each.data_ptr(), each.nbytes) for each in tensors}
            self._marks = self._marked()
        except (AttributeError, RuntimeError, ValueError) as error:  # without memory of their own
            raise NotHeld from error
        self.memory.discard((0, 0))

    def have_changed(self) -> bool:
        """Return True if something has changed them in place, or moved them."""
        try:
            return self._marked() != self._marks
        except (NotHeld, RuntimeError):
            return True

    def _marked(self) -> tuple[list[int], list[bytes]]:
        versions = [each._version for each in self._parameters + self._states]
        found = samples(self._parameters, self._seed)
        if not all(found) and any(each.nbytes and not _address(each) for each in self._parameters):
            raise NotHeld
        return versions, found


_draw = random.Random()
"""Generator of its own: a state of the global one may be part of the training's."""


def new_seed() -> float:
    """Return the seed of new samples."""
    return _draw.random()


def samples(tensors: Sequence[torch.Tensor], seed: float) -> list[bytes]:
    """Return samples of tensors in CPU memory; empty for others, and for those without memory.

    They are the first element of each tensor, then blocks of `BLOCK_BYTES`, or the whole of a
    smaller tensor. The seed selects their places, and if there are more than `BLOCKS` tensors,
    those that have one. A change that leaves all of them alone is not found; the next seed selects
    others.
    """
    found = []
    for tensor in tensors:
        address = _address(tensor)
        found.append(ctypes.string_at(address, tensor.itemsize) if address else b"")
    is_drawn = len(tensors) > BLOCKS
    drawn = random.Random(seed).choices(tensors, k=BLOCKS) if is_drawn else tensors
    count = BLOCKS // max(1, len(drawn))
    for tensor in drawn:
        found += _blocks(tensor, seed, count)
        seed += count * _GOLDEN
    return found


def _address(tensor: torch.Tensor) -> int:
    """Return the place of a tensor in CPU memory; 0 for others, and for those without memory.

    To read at 0, as of a storage that was resized to nothing, would end the process.
    """
    return tensor.data_ptr() if tensor.is_cpu and tensor.nbytes else 0


def _blocks(tensor: torch.Tensor, seed: float, count: int) -> list[bytes]:
    """Return blocks of a tensor; elements of it if it is not dense in memory."""
    address, size, width = _address(tensor), tensor.nbytes, BLOCK_BYTES
    if not address:
        return []
    places = [(seed + each * _GOLDEN) % 1.0 for each in range(count)]
    if not tensor.is_contiguous():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        if last + 1 != tensor.numel():
            item = tensor.itemsize
            starts = [address + _offset(tensor, place) * item for place in places]
            return [ctypes.string_at(start, item) for start in starts]
    if size <= width:
        return [ctypes.string_at(address, size)]
    left = size - width + 1
    return [ctypes.string_at(address + int(place * left), width) for place in places]


def _offset(tensor: torch.Tensor, seed: float) -> int:
    """Return the place in memory of one element, from that of the first."""
    offset = 0
    for size, stride in zip(tensor.shape, tensor.stride()):
        seed = (seed * 97.0) % 1.0
        offset += int(seed * size) * stride
    return offset
