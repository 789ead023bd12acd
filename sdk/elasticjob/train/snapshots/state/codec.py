"""Encoding of training state: a description in JSON, then the tensors' bytes. No pickle.

Only the types of `state_dict`s are encoded, so that loading a snapshot runs no code from it.
Tensors in CPU memory are not copied: the body refers to their memory.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import ctypes
import gc
import json
import re
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.train.snapshots.memory.part_files import Body, CorruptSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

_ALIGNMENT = 64
_MAX_DEPTH = 200
"""Maximum depth of nested containers. A decoder needs up to three times as many calls."""
_INVALID = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
"""Errors of a description that this version cannot decode; some are those of torch."""
_NUMBERS = re.compile(r"[<>|=][biufc]\d+")
"""Pattern of numpy's types of numbers."""
_AS_PYTHONS = frozenset(("bool", "int64", "uint64", "float64", "complex128"))
"""Numbers of numpy that are restored as Python's, which compute alike. Others have fewer bits."""
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[type[Any], str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}
_MAPPINGS: dict[type[Any], str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
}

_METADATA = "_metadata"
"""Attribute of the mapping that `Module.state_dict` returns: the version of each module's state, by
which `load_state_dict` converts older ones."""


class Sharded(NamedTuple):
    """Description of a distributed tensor, whose shards are in the ranks' own parts."""

    number: int
    dtype: str
    shape: tuple[int, ...]


def encode(state: object, stage: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Body:
    """Encode nested dicts, sequences, tensors, numbers, strings, bytes and None.

    `stage` returns the dense tensor in CPU memory that the body refers to: `dense` by default. The
    tensors must not change before the body is written. Raises TypeError for another type; the
    message has its path in the state.
    """
    encoder = _Encoder(stage or dense)
    try:
        with _without_collections():
            described = encoder.described(state, "state")
            head = json.dumps(described, separators=(",", ":")).encode()
    except RecursionError:
        raise TypeError(
            "the state contains itself, or is nested too deeply for a snapshot"
        ) from None
    except ValueError as error:  # a number with thousands of digits
        raise TypeError(f"the state has a number that a snapshot cannot hold: {error}") from error
    head = head.ljust(_aligned(len(head)))
    return Body(len(head), [memoryview(head), *encoder.views])


def decode(body: Body) -> Any:
    """Decode a body that `read` returned; the tensors share its memory, in CPU memory."""
    content = body.views[0]
    try:
        with _without_collections():
            described = json.loads(bytes(content[: body.head_bytes]))
            return _decoded(described, content[body.head_bytes :])
    except _INVALID as error:
        raise CorruptSnapshot(
            "the description of the snapshot is invalid, or of a newer version of the elasticjob "
            f"library or of torch: {error!r}"
        ) from error


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's garbage collection while objects are created: they have no cycles.

    A collection visits all objects of torch; with many tensors it took most of the time.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor in CPU memory: the same one, if it is that already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return False if the storage of a tensor is smaller than the tensor.

    FSDP, for example, frees the storage of a parameter that a rank does not need. To read such a
    tensor would end the process.
    """
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= needed)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Encoder:
    def __init__(self, stage: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stage = stage
        self.views: list[memoryview] = []
        self._size = self._depth = 0
        self._known: dict[Any, Any] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the same memory

    def described(self, value: Any, path: str) -> Any:
        """Return the description of a value: itself if JSON has its type, else [type, content]."""
        import torch

        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is Sharded:
            return ["sharded", [value.number, value.dtype, list(value.shape)]]
        if kind is torch.Size:
            return ["Size", list(value)]
        if kind in _SEQUENCES or kind in _MAPPINGS:
            return self._container(value, path)
        if kind in (bytes, bytearray):
            return [kind.__name__, base64.b64encode(value).decode()]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        if kind in (torch.dtype, torch.device):
            return [kind.__name__, str(value).rpartition("torch.")[2]]
        if kind.__module__.partition(".")[0] == "numpy":
            return self._of_numpy(value, path)
        if isinstance(value, float):  # such as numpy.float64 in a learning rate
            return float(value)
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a snapshot cannot hold: "
            f"{_advice(kind)}"
        )

    def _container(self, value: Any, path: str) -> Any:
        """Return the description of a sequence or a mapping."""
        kind = type(value)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        if kind in _SEQUENCES:
            items = [self.described(item, f"{path}[{at}]") for at, item in enumerate(value)]
            described = [_SEQUENCES[kind], items]
        else:
            items = [
                [self.described(key, f"{path} key"), self.described(item, f"{path}[{key!r}]")]
                for key, item in value.items()
            ]
            described = [_MAPPINGS[kind], [*_described_metadata(value, items), *items]]
        self._depth -= 1
        return described

    def _of_numpy(self, value: Any, path: str) -> Any:
        """Return the description of an array of numbers, or of one number."""
        import torch

        numpy: Any = sys.modules["numpy"]  # the value is one of its own
        is_numeric = isinstance(value, (numpy.generic, numpy.ndarray)) and (
            value.dtype.kind in "biufc"
        )
        if is_numeric and isinstance(value, numpy.generic):
            if value.dtype.name in _AS_PYTHONS:
                return self.described(value.item(), path)
            if value.dtype.itemsize <= 8:  # not a longdouble
                return ["number", [value.dtype.str, base64.b64encode(value.tobytes()).decode()]]
        if is_numeric and type(value) is numpy.ndarray:
            flat = value.copy(order="C").reshape(-1).view("u1")
            content = self._tensor(torch.from_numpy(flat), path)
            return ["ndarray", [value.dtype.str, list(value.shape), content]]
        kind = type(value)
        raise TypeError(
            f"{path} is a numpy {kind.__name__}, which a snapshot cannot hold unless it is a "
            f"number or an array of numbers: {_advice(kind)}"
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        import torch

        is_dense = tensor.layout == torch.strided and not tensor.is_nested
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not is_dense:
            if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
                raise TypeError(
                    f"{path} is an uninitialized parameter or buffer of a lazy module, which a "
                    "snapshot cannot hold: call the module once before the first save()"
                )
            if hasattr(tensor, "full_tensor"):
                raise TypeError(
                    f"{path} is a distributed tensor, which only a sharded snapshot can hold: "
                    "create Snapshots with sharded=True, and save it in the shared state"
                )
            raise TypeError(
                f"{path} is a {'nested ' * tensor.is_nested}{type(tensor).__qualname__} of layout "
                f"{tensor.layout}, which a snapshot cannot hold: convert it to a whole, dense "
                "tensor"
            )
        if tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"{path} is a quantized or meta tensor, which a snapshot cannot hold")
        if not has_memory(tensor):
            raise TypeError(
                f"{path} is a tensor of {tensor.numel() * tensor.element_size()} bytes whose "
                f"storage of {tensor.untyped_storage().nbytes()} bytes is smaller: its memory was "
                "freed, as FSDP does; gather it before, or leave it out of the state"
            )
        # Tied weights, and other names of the same memory, are written once.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        plain = tensor.numel() and not (tensor.is_conj() or tensor.is_neg())
        if plain and key in self._known:
            return self._known[key]
        described = self._written(tensor)
        if plain:
            self._known[key] = described
            self._alive.append(tensor)
        return described

    def _written(self, tensor: torch.Tensor) -> Any:
        order = _order_in_memory(tensor)
        if order is None:
            return ["tensor", self._content(tensor)]
        content = self._content(tensor.permute(order))
        content[1] = list(tensor.shape)
        return ["strided", [*content, list(tensor.stride())]]

    def _content(self, tensor: torch.Tensor) -> list[Any]:
        """Write a tensor in the order of its dimensions; return its type, shape and place."""
        staged = self._stage(tensor)
        offset, size = self._size, staged.numel() * staged.element_size()
        if size:
            self.views.append(_memory(staged, size))
            padding = _aligned(size) - size
            if padding:
                self.views.append(memoryview(bytes(padding)))
            self._size += size + padding
        return [str(staged.dtype).partition(".")[2], list(staged.shape), offset, size]


def with_metadata(made: Any, value: Any) -> Any:
    """Return a copy of a mapping with the versions of the modules that `state_dict` adds."""
    if hasattr(value, _METADATA):
        setattr(made, _METADATA, getattr(value, _METADATA))
    return made


def _described_metadata(value: Any, items: Sequence[Any]) -> list[Any]:
    """Return the versions of the modules in a `state_dict`, as an item before all others.

    It has the key of the first item, so that older libraries overwrite it. A text for each prefix
    is restored as it was, or left out. A `state_dict` without items needs no versions.
    """
    metadata = getattr(value, _METADATA, None)
    if not isinstance(metadata, dict) or not items or type(items[0][0]) is not str:
        return []
    text = _exact_json(metadata)
    if text is None:
        exact = {key: each for key, each in metadata.items() if _exact_json({key: each})}
        text = json.dumps(exact)
    return [[items[0][0], text]]


def _exact_json(value: dict[Any, Any]) -> str | None:
    """Return a dict as JSON; None if its values would have other types after a restore."""
    try:
        text = json.dumps(value)
        return text if json.loads(text) == value else None
    except (TypeError, ValueError, RecursionError):
        return None


def _mapping_of(mapping: type[Any], content: Any, data: memoryview) -> Any:
    made = mapping({_decoded(key, data): _decoded(item, data) for key, item in content})
    if mapping is collections.OrderedDict and len(content) > 1 and _is_metadata(*content[:2]):
        setattr(made, _METADATA, collections.OrderedDict(json.loads(content[0][1])))
    return made


def _is_metadata(first: Any, second: Any) -> bool:
    """Return True if the first of two items of a mapping has the key of the second one."""
    return type(first[0]) is str and first[0] == second[0]


def _advice(kind: type) -> str:
    """Return the remedy for a value of a type that is not encoded."""
    for method in ("state_dict", "get_state"):
        if callable(getattr(kind, method, None)):
            return f"save its {method}()"
    if hasattr(kind, "bit_generator"):
        return "save the state of its bit_generator"
    if issubclass(kind, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return "call it, as only the whole state and rank_state may be functions, or leave it out"
    return "convert it to tensors, numbers, strings, lists and dicts"


def _order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions of a tensor from the largest stride to the smallest.

    None if it has the strides of a new tensor, or does not fill its memory. With `channels_last`,
    for example, an optimizer's state has the strides of its parameter, and fused optimizers read
    both in the order of their memory.
    """
    strides, expected = tensor.stride(), 1
    if not tensor.numel():
        return None
    for size, stride in zip(reversed(tensor.shape), reversed(strides)):
        if stride != expected:
            break
        expected *= size
    else:
        return None
    order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
    return order if tensor.permute(order).is_contiguous() else None


def _memory(tensor: torch.Tensor, size: int) -> memoryview:
    """Return the memory of a dense tensor; the view keeps the tensor alive."""
    array = (ctypes.c_char * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _decoded(described: Any, data: memoryview) -> Any:
    import torch

    if not isinstance(described, list):
        return described
    kind, content = described
    if kind == "tensor":
        return _tensor_of(content, data)
    if kind == "strided":
        *content, strides = content
        return _tensor_of(content, data).as_strided(content[1], strides)
    if kind in ("bytes", "bytearray"):
        found = base64.b64decode(content)
        return found if kind == "bytes" else bytearray(found)
    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    if kind == "dtype":
        return _dtype(content)
    if kind == "ndarray":
        return _array_of(content, data)
    if kind == "number":
        return _number_of(*content)
    if kind == "sharded":
        number, dtype, shape = content
        _dtype(dtype)
        return Sharded(int(number), dtype, tuple(shape))
    if kind == "Size":
        return torch.Size(content)
    for sequence, name in _SEQUENCES.items():
        if kind == name:
            return sequence(_decoded(item, data) for item in content)
    for mapping, name in _MAPPINGS.items():
        if kind == name:
            return _mapping_of(mapping, content, data)
    raise ValueError(f"unknown type {kind!r}")


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _array_of(content: Any, data: memoryview) -> Any:
    name, shape, described = content
    if not _NUMBERS.fullmatch(name):
        raise ValueError(f"unknown dtype {name!r}")
    return _decoded(described, data).numpy().view(name).reshape(shape)


def _number_of(name: str, text: str) -> Any:
    import torch

    if not _NUMBERS.fullmatch(name):
        raise ValueError(f"unknown dtype {name!r}")
    content = bytearray(base64.b64decode(text))
    return torch.frombuffer(content, dtype=torch.uint8).numpy().view(name)[0]


def _tensor_of(content: Any, data: memoryview) -> torch.Tensor:
    import torch

    name, shape, offset, size = content
    dtype = _dtype(name)
    empty = torch.empty(shape, dtype=dtype, device="meta")
    if empty.numel() * empty.element_size() != size or not 0 <= offset <= len(data) - size:
        raise ValueError(f"a tensor of {size} bytes at {offset} does not fit its shape or the data")
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data[offset : offset + size], dtype=dtype).reshape(shape)
