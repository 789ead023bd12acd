"""Held state: the training state of a step, kept until the next step for a stop copy.

Tensors that only the steps of the optimizers change are held by reference, all others are copied.
`Marks` detect other changes of the referenced tensors before a stop copy is written. See
docs/decisions/0087-a-copy-at-the-stop.md.
"""

from __future__ import annotations

import collections
import ctypes
import operator
import random
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.layout import Loss
from elasticjob.train.snapshots.state.codec import has_memory, with_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from elasticjob.train.snapshots.core.agreement import Part, Version
    from elasticjob.train.snapshots.memory.part_files import Body

COPIED_BYTES = 16 << 20
"""Maximum size of the state that each call of `save` copies."""
BLOCK_BYTES = 64
BLOCKS = 32
"""Maximum number of sampled blocks of all tensors together."""
_GOLDEN = 0.6180339887498949
"""Fraction of the golden ratio: its multiples modulo 1, the places of samples, spread evenly."""
_IMMUTABLE = frozenset((int, float, bool, str, bytes, type(None)))
_NUMBERS = frozenset((int, float, bool))
_SEQUENCES = (list, tuple, set, frozenset)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)


class NotHeld(Exception):
    """Error of a state that cannot be held by reference.

    Args:
        loss: the reason.
    """

    def __init__(self, loss: Loss = Loss.UNSUPPORTED_STATE) -> None:
        super().__init__(loss)
        self.loss = loss


class Held(NamedTuple):
    """Held state of a step.

    Args:
        part: the shared part that a stop copy writes.
        keep: newest version that all ranks have, which a stop copy does not overwrite.
        state: containers of the state, with references to tensors or copies of them.
        size: bytes of its tensors.
        marks: marks of the tensors that are held by reference.
        own: own state of this rank, from the same call of `save`; None without one.
    """

    part: Part
    keep: Version
    state: Any
    size: int
    marks: Marks
    own: Body | None = None


class Copies:
    """Copy of a state for holding it: all values but the tensors of the optimizers are copied.

    Values of types that a snapshot refuses are left in place.
    """

    def __init__(self, sources: Sources) -> None:
        import torch

        self._tensor, self._parameter = torch.Tensor, torch.nn.Parameter
        self._strided = torch.strided
        self._sources = sources
        self._copied = 0
        self.size = 0

    def held(self, value: Any) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if isinstance(value, self._tensor):
            return self._of_tensor(value)
        if kind in _MAPPINGS:
            found = self._mapping(value)
            return found if kind is dict else with_metadata(kind(found), value)
        if kind in _SEQUENCES:
            if _IMMUTABLE.issuperset(map(type, value)):
                return kind(value)
            return kind([self.held(item) for item in value])
        if kind is bytearray:
            return bytearray(value)
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "nbytes"):
            self._count(value.nbytes)
            return value.copy()
        return value

    def _mapping(self, value: Any) -> dict[Any, Any]:
        """Copy a mapping. Values of optimizers, which are most values, need no further call."""
        known, memory, plain = self._sources.known, self._sources.memory, self._tensor
        found, size = {}, 0
        for key, item in value.items():
            kind = type(item)
            if kind in _IMMUTABLE:
                found[key] = item
            elif id(item) in known:
                found[key], count = known[id(item)]
                size += count
            elif kind is plain and (item.data_ptr(), item.nbytes) in memory:
                found[key] = item
                size += item.nbytes
            else:
                found[key] = self.held(item)
        self.size += size
        return found

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = type(tensor)
        if kind is not self._tensor and kind is not self._parameter:
            raise NotHeld
        size = tensor.nbytes
        self.size += size
        if self._sources.have(tensor):
            # An assignment to the `data` of a parameter replaces its memory.
            return tensor.detach() if kind is self._parameter else tensor
        if tensor.layout is not self._strided or not tensor.is_cpu:
            raise NotHeld
        self._count(size)
        if not has_memory(tensor):
            raise NotHeld
        return tensor.detach().clone()

    def _count(self, size: int) -> None:
        self._copied += size
        if self._copied > COPIED_BYTES:
            raise NotHeld(Loss.STATE_TOO_LARGE)


class Sources:
    """Tensors that only the steps of the optimizers change, and their memory.

    They are the same in most steps, so the caller creates this object once, and another one when
    `are_those_of` returns False. Raises NotHeld.

    Attributes:
        memory: address and size of each parameter in CPU memory.
        known: copies and sizes of the optimizers' states, by the identity of each of their dicts
            and tensors. These live as long as this object.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        import torch

        try:
            self._parameters, self._states = _changed_by(optimizers)
            values = _values(self._states, has_numbers=False)
            self._has_numbers = not _NUMBERS.isdisjoint(map(type, values))
            self._values = _values(self._states, self._has_numbers)
            tensors = [each for each in self._values if isinstance(each, torch.Tensor)]
            self._tensors = self._parameters + tensors
            self._addresses = [each.data_ptr() for each in self._parameters]
            self._sizes = [each.nbytes for each in self._parameters]
            self._state_memory = {(each.data_ptr(), each.nbytes): each for each in tensors}
            first = _first_places(self._parameters)
        except (AttributeError, RuntimeError, ValueError) as error:  # without memory of their own
            raise NotHeld from error
        if any(size and not place[0] for size, place in zip(self._sizes, first)):
            raise NotHeld
        self.memory = {pair for pair in zip(self._addresses, self._sizes) if pair[1]}
        plain = [each for each in tensors if type(each) is torch.Tensor and _address(each)]
        self.known: dict[int, tuple[Any, int]] = {id(each): (each, each.nbytes) for each in plain}
        for state in self._states:
            sizes = [self.known.get(id(each), (None, 0))[1] for each in state.values()]
            if type(state) is dict and all(sizes):
                self.known[id(state)] = dict(state), sum(sizes)
        self._is_dense = all(map(_is_dense, self._parameters))
        self._first_views = _views(first)
        self._drawn: tuple[object, float, list[Any]] = (None, 0.0, [])

    def are_those_of(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Return True if the optimizers have these tensors, and the parameters their memory."""
        try:
            parameters, states = _changed_by(optimizers)
            return (
                self._is_dense  # otherwise places of samples may be beyond the size of a tensor
                and _are_same(parameters, self._parameters)
                and _are_same(states, self._states)
                and _are_same(_values(states, self._has_numbers), self._values)
                and [each.data_ptr() for each in parameters] == self._addresses
                and [each.nbytes for each in parameters] == self._sizes
            )
        except (AttributeError, RuntimeError, ValueError):
            return False

    def have(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor with the memory of one of these."""
        place = tensor.data_ptr(), tensor.nbytes
        if place in self.memory:
            return True
        state = self._state_memory.get(place)  # unless it has been moved
        return state is not None and bool(_address(state)) and state.data_ptr() == place[0]

    def marks(self, period: object) -> Marks:
        """Return marks of the current values; the tensors must have the same memory as before.

        Each `period` samples other elements.
        """
        if self._drawn[0] != period:
            seed = new_seed()
            views = self._first_views + _views(_drawn_places(self._parameters, seed))
            self._drawn = period, seed, views
        _, seed, views = self._drawn
        return Marks(self, seed, self.versions(), b"".join(views))

    def versions(self) -> list[int]:
        """Return how often each tensor was changed. Raises NotHeld."""
        try:
            return [each._version for each in self._tensors]
        except RuntimeError as error:  # a tensor of the inference mode
            raise NotHeld from error

    def samples(self, seed: float) -> bytes:
        """Return the samples of a mark, also of parameters that are elsewhere now."""
        return b"".join(samples(self._parameters, seed))


class Marks(NamedTuple):
    """Version counters and samples of tensors at a step, to detect later changes.

    Only the optimizers may change the tensors in place; a script that swaps weights for a
    validation breaks this rule. torch counts such changes in the version of a tensor, except those
    through `data`, which the samples of the parameters detect.
    """

    sources: Sources
    seed: float
    versions: list[int]
    samples: bytes

    def have_changed(self) -> bool:
        """Return True if something has changed the tensors in place, or moved them."""
        try:
            versions, found = self.sources.versions(), self.sources.samples(self.seed)
        except (NotHeld, RuntimeError):
            return True
        return versions != self.versions or found != self.samples


class Gradients:
    """Gradients of parameters at one moment: their identity and number of changes.

    A backward changes them in place, or makes new ones. They are not kept alive.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        found = _gradients(parameters)
        self._references = list(map(weakref.ref, found))
        self._versions = _changes(found)

    def have_grown(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if there is a gradient now that was not there with its present value."""
        there = {id(each()): n for each, n in zip(self._references, self._versions)}
        found = _gradients(parameters)
        return any(there.get(id(each)) != n for each, n in zip(found, _changes(found)))


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [grad for each in parameters if (grad := each.grad) is not None]


def marked(optimizers: Sequence[torch.optim.Optimizer], most: int) -> list[torch.Tensor]:
    """Return the parameters of optimizers; with `most` about that many of each group."""
    found: list[torch.Tensor] = []
    for group in (group for each in optimizers for group in each.param_groups):
        found += group["params"][:: max(1, len(group["params"]) // most) if most else 1]
    return found


_version = operator.attrgetter("_version")


def _changes(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed; 0 if some are of the inference mode."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0] * len(tensors)


def _changed_by(
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[list[torch.Tensor], list[dict[Any, Any]]]:
    """Return the parameters, and the optimizers' states of them."""
    parameters: list[torch.Tensor] = []
    states: list[dict[Any, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
        states += optimizer.state.values()
    return parameters, states


def _values(states: Sequence[dict[Any, Any]], has_numbers: bool) -> list[Any]:
    """Return all keys and values of the states, but no numbers, such as those of steps."""
    found: list[Any] = []
    for state in states:
        found += state
        found += state.values()
    return [each for each in found if type(each) not in _NUMBERS] if has_numbers else found


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if both have the same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


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
    places = _first_places(tensors) + _drawn_places(tensors, seed)
    return [ctypes.string_at(*each) if each[1] else b"" for each in places]


def _views(places: Sequence[tuple[int, int]]) -> list[ctypes.Array[ctypes.c_char]]:
    """Return the memory at places, which must exist as long as it is read."""
    return [(ctypes.c_char * size).from_address(address) for address, size in places if size]


def _first_places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return address and size of the first element of each tensor; 0 and 0 for none."""
    addresses = map(_address, tensors)
    return [
        (address, each.itemsize) if address else (0, 0) for each, address in zip(tensors, addresses)
    ]


def _drawn_places(tensors: Sequence[torch.Tensor], seed: float) -> list[tuple[int, int]]:
    """Return address and size of the blocks that a seed selects."""
    is_drawn = len(tensors) > BLOCKS
    drawn = random.Random(seed).choices(tensors, k=BLOCKS) if is_drawn else tensors
    count = BLOCKS // max(1, len(drawn))
    found = []
    for tensor in drawn:
        found += _blocks(tensor, seed, count)
        seed += count * _GOLDEN
    return found


def _address(tensor: torch.Tensor) -> int:
    """Return the place of a tensor in CPU memory; 0 for others, and for those without memory.

    To read at 0, as of a storage that was resized to nothing, would end the process.
    """
    return tensor.data_ptr() if tensor.is_cpu and tensor.nbytes else 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills its memory, from its first element on."""
    if tensor.is_contiguous():
        return True
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return bool(last + 1 == tensor.numel())


def _blocks(tensor: torch.Tensor, seed: float, count: int) -> list[tuple[int, int]]:
    """Return address and size of blocks of a tensor; of elements if it is not dense in memory."""
    address, size, width = _address(tensor), tensor.nbytes, BLOCK_BYTES
    if not address:
        return []
    places = [(seed + each * _GOLDEN) % 1.0 for each in range(count)]
    if not _is_dense(tensor):
        item = tensor.itemsize
        return [(address + _offset(tensor, place) * item, item) for place in places]
    if size <= width:
        return [(address, size)]
    left = size - width + 1
    return [(address + int(place * left), width) for place in places]


def _offset(tensor: torch.Tensor, seed: float) -> int:
    """Return the place in memory of one element, from that of the first."""
    offset = 0
    for size, stride in zip(tensor.shape, tensor.stride()):
        seed = (seed * 97.0) % 1.0
        offset += int(seed * size) * stride
    return offset
