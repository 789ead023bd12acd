"""`elasticjob.train.Snapshots` of one rank, with torch: types, places, intervals, faults."""

from __future__ import annotations

import collections
import errno
import functools
import gc
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from elasticjob import layout, train
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots import api as snapshots_module
from elasticjob.train.snapshots.core.agreement import Version, complete_versions
from elasticjob.train.snapshots.core.exchange import Exchange
from elasticjob.train.snapshots.core.replicas import Generations
from elasticjob.train.snapshots.memory.part_files import Body, CorruptSnapshot, held, read
from elasticjob.train.snapshots.ranks.gang import Gang
from elasticjob.train.snapshots.state.codec import decode, encode
from elasticjob.train.snapshots.state.overlap import Optimizers, Overlap
from elasticjob.train.snapshots.storage.calls import StorageWrite
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(folder))
    return folder


def restored(*arguments: Any, **settings: Any) -> tuple[int, str] | None:
    found = Snapshots(*arguments, **settings).restore()
    return None if found is None else (found.step, found.place)


def started(*arguments: Any, **settings: Any) -> Snapshots:
    snapshots = Snapshots(*arguments, **settings)
    snapshots.restore()
    return snapshots


def same(first: Any, second: Any) -> bool:
    """Return True if types, values and the bits of tensors are equal."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        pairs = zip(first.items(), second.items(), strict=True)
        return type(first) is type(second) and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(first, list | tuple):
        pairs = zip(first, second, strict=True)
        return type(first) is type(second) and all(same(a, b) for a, b in pairs)
    return type(first) is type(second) and bool(first == second)


def trained() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


@pytest.mark.parametrize(
    "state",
    [
        trained,
        {"rng": torch.get_rng_state(), 3: (1, 2.5, None, True), (1, "a"): b"\0\xff"},
        [
            torch.ones(3, dtype=torch.bfloat16),
            torch.empty(0, 3),
            torch.tensor(2.5),
            torch.Size([1]),
        ],
        [torch.arange(12).reshape(3, 4).T, torch.tensor([1j]).conj(), torch.tensor([True])],
        {"big": 2**100, "small": -0.0, "text": "\u00e9\n", "set": {1, 2}, "inf": float("inf")},
        collections.Counter("aab"),
        [torch.bfloat16, torch.device("cuda", 1), 2 + 3j, frozenset({1}), bytearray(b"\0x")],
        [torch.zeros(2, 3, dtype=torch.float8_e5m2), torch.zeros((), dtype=torch.complex64)],
        [torch.tensor([1, 2], dtype=torch.uint8), torch.zeros(0, dtype=torch.bool)],
        torch.nn.Linear(2, 2, dtype=torch.bfloat16).state_dict(),
        {"large": torch.arange(400_000)},
        [["tensor", []], ["bytes", "x"]],
    ],
)
def test_state_is_restored_bitwise(memory: Path, state: Any) -> None:
    if state is trained:  # not at the collection: optimizers import torch._dynamo
        state = trained()
    started().save(3, state)
    found = Snapshots().restore()
    assert found is not None
    assert (found.step, found.place, found.rank_state) == (3, "memory", None)
    assert same(state, found.state)


class Pickled:
    pass


def contains_itself() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["state"] = state
    return state


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_cycles_are_searched_while_a_state_is_encoded_or_decoded(is_enabled: bool) -> None:
    phases: list[str] = []

    def collected(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    state = [[torch.zeros(1)] for _ in range(3000)]
    gc.collect()
    if not is_enabled:
        gc.disable()
    try:
        gc.callbacks.append(collected)
        made = encode(state)
        decode(Body(made.head_bytes, [memoryview(bytearray().join(made.views))]))
        gc.callbacks.remove(collected)
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert len(phases) <= 4, "one after each call at most"


def nested(kind: type, depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"x": found} if kind is dict else [found]
    return found


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": [1, Pickled()]}, r"state\['a'\]\[1\] is a .*Pickled"),
        (
            {"g": torch.Generator()},
            r"state\['g'\] is a torch._C.Generator.*: save its get_state\(\)",
        ),
        ({"m": torch.nn.Linear(1, 1)}, r"state\['m'\] is a .*Linear, .*: save its state_dict\(\)"),
        ({"a": numpy.array(["x"])}, r"state\['a'\] is a numpy ndarray"),
        (
            {"a": numpy.random.default_rng(1)},
            r"state\['a'\] is a numpy Generator.* of its bit_generator",
        ),
        (
            {"a": numpy.random.RandomState(1)},
            r"state\['a'\] is a numpy RandomState.* its get_state\(\)",
        ),
        (
            {"a": numpy.ma.masked_array([1, 2], [False, True])},
            r"state\['a'\] is a numpy MaskedArray",
        ),
        ({"a": numpy.ma.masked_array(1)}, r"state\['a'\] is a numpy MaskedArray"),
        ({"a": numpy.datetime64(1, "ns")}, r"state\['a'\] is a numpy datetime64"),
        ({"a": numpy.timedelta64(1, "ns")}, r"state\['a'\] is a numpy timedelta64"),
        ({"a": numpy.longdouble(1)}, r"state\['a'\] is a numpy longdouble"),
        ({"f": print}, r"state\['f'\] is a builtins.builtin_function"),
        ({"m": torch.nn.Linear(1, 1).state_dict}, r"state\['m'\] is a .*method.*: call it, as"),
        ({"r": torch.get_rng_state}, r"state\['r'\] is a .*function.*: call it, as"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\] is a Tensor of layout"),
        ({"m": torch.empty(2, device="meta")}, r"state\['m'\] is a quantized or meta tensor"),
        (contains_itself(), "the state contains itself"),
        (nested(dict, 300), "the state .* is nested too deeply"),
        (nested(list, 300), "the state .* is nested too deeply"),
        ({"i": 10**5000}, "a number that a snapshot cannot hold: Exceeds the limit"),
    ],
)
def test_type_without_an_encoding_is_named_with_its_path(state: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        encode(state)


@pytest.mark.parametrize("kind", [dict, list])
def test_state_of_the_maximum_depth_is_restored(memory: Path, kind: type) -> None:
    state = nested(kind, 200)
    started().save(3, state)
    found = Snapshots().restore()
    assert found is not None
    assert found.state == state


def test_module_in_place_of_its_state_is_refused_and_not_called(memory: Path) -> None:
    model = torch.nn.Identity()
    for snapshots in (started(), started(optimizers=torch.optim.SGD([torch.ones(1)]))):
        with pytest.raises(TypeError, match=r"state is a .*Identity, .*: save its state_dict\(\)"):
            snapshots.save(1, model)
        snapshots.close()


@pytest.mark.parametrize("kind", [torch.nn.LazyLinear, torch.nn.LazyConv1d])
def test_lazy_parameter_without_a_value_is_named_with_its_path(memory: Path, kind: Any) -> None:
    model = kind(3, kernel_size=1) if kind is torch.nn.LazyConv1d else kind(3)
    snapshots = started(optimizers=torch.optim.SGD(model.parameters()), every_steps=1)
    assert snapshots.save(1, {"x": 1})
    with pytest.raises(TypeError, match=r"\['weight'\] is an uninitialized .*: call the module"):
        snapshots.save(2, {"model": model.state_dict()})
    model(torch.ones(2, 2, 4))
    assert snapshots.save(3, {"model": model.state_dict()})
    snapshots.close()
    assert restored() == (3, "memory")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_is_named_with_its_path() -> None:
    with pytest.raises(TypeError, match=r"state\['n'\] is a nested Tensor of layout"):
        encode({"n": torch.nested.nested_tensor([torch.ones(1)])})


@pytest.mark.parametrize("left", [0, 36])
@pytest.mark.parametrize(
    "view",
    [lambda whole: whole, lambda whole: whole[5:10], lambda whole: whole.view(2, 5).T[3:]],
)
def test_tensor_without_its_memory_is_named_with_its_path(
    left: int, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    whole = torch.ones(10)
    tensor = view(whole)
    encode({"w": [tensor]})
    whole.untyped_storage().resize_(left)
    with pytest.raises(TypeError, match=rf"state\['w'\]\[0\] is a .* storage of {left} bytes"):
        encode({"w": [tensor]})
    encode({"w": [tensor[:0], torch.ones(3).expand(2, 3)]})


@pytest.mark.parametrize(
    "head",
    [
        b"{",
        b'["os.system",["id"]]',
        b'["tensor",["float32",[4],0,99]]',
        b'["tensor",["float32",[4],-16,16]]',
        b'["tensor",["load",[4],0,16]]',
        b'["dict",[[["list",[]],1]]]',
        b'["OrderedDict",[["a","{"],["a",1]]]',
        b'["OrderedDict",[["a",1],["a",1]]]',
    ],
)
def test_malformed_description_is_corrupt(head: bytes) -> None:
    body = encode({"x": torch.ones(4)})
    data = b"".join(body.views)[body.head_bytes :]
    with pytest.raises(CorruptSnapshot, match="invalid"):
        decode(body._replace(head_bytes=len(head), views=[memoryview(bytearray(head + data))]))


def test_numpy_numbers_and_arrays_are_restored(memory: Path) -> None:
    numpy.random.seed(4)
    arrays = [numpy.arange(6, dtype=">i4").reshape(2, 3).T, numpy.array(2.5), numpy.zeros((0, 2))]
    state = {"rng": numpy.random.get_state(), "arrays": arrays, "lr": numpy.float32(0.5)}
    state["complex"] = numpy.complex64(1 + 2j)
    started().save(1, state)
    expected = numpy.random.random()
    found = Snapshots().restore()
    assert found is not None
    numpy.random.set_state(found.state["rng"])
    assert numpy.random.random() == expected
    assert (found.state["lr"], found.state["complex"]) == (0.5, 1 + 2j)
    for before, after in zip(arrays, found.state["arrays"], strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert numpy.array_equal(after, before)


@pytest.mark.parametrize("number", [numpy.float32(0.1), numpy.float16(0.1), numpy.uint8(250)])
def test_numpy_number_of_few_bits_computes_as_before(number: Any) -> None:
    body = encode({"number": number})
    found = decode(Body(body.head_bytes, [memoryview(bytearray(b"".join(body.views)))]))["number"]
    assert (type(found), found, found / 3) == (type(number), number, number / 3)


@pytest.mark.parametrize("number", [numpy.float64(0.1), numpy.int64(3), numpy.bool_(True)])
def test_numpy_number_that_computes_as_pythons_is_readable_by_older_libraries(number: Any) -> None:
    assert json.loads(bytes(encode(number).views[0])) == number.item()


def test_tensors_are_restored_in_cpu_memory_with_another_default_device(memory: Path) -> None:
    state = {"w": torch.ones(2), "empty": torch.zeros(0, 3), "array": numpy.zeros((0, 2))}
    started().save(3, state)
    with torch.device("meta"):
        found = Snapshots().restore()
        assert started().save(4, state)
    assert found is not None
    assert same([state["w"], state["empty"]], [found.state["w"], found.state["empty"]])
    assert found.state["empty"].device.type == "cpu"
    assert found.state["array"].shape == (0, 2)


class Converted(torch.nn.Module):
    """Module of version 2 that converts a state of version 1, or of none."""

    _version = 2

    def __init__(self, scale: float = 3.0) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([scale]))

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: dict[str, Any], *others: Any
    ) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] ** 2
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_versions_of_modules_are_restored(memory: Path) -> None:
    model = torch.nn.Sequential(Converted(), torch.nn.BatchNorm1d(2))
    started().save(3, {"models": [model.state_dict()], "x": 1})
    found = Snapshots().restore()
    assert found is not None
    (state,) = found.state["models"]
    assert state._metadata == model.state_dict()._metadata
    assert type(state._metadata) is collections.OrderedDict
    other = torch.nn.Sequential(Converted(1.0), torch.nn.BatchNorm1d(2))
    other.load_state_dict(state)
    assert same(model.state_dict(), other.state_dict())


def decoded(body: Body) -> Any:
    return decode(body._replace(views=[memoryview(bytearray().join(body.views))]))


def test_versions_of_other_types_are_left_out_one_by_one() -> None:
    state = collections.OrderedDict(w=1)
    contains: dict[str, Any] = {}
    contains["itself"] = contains
    others = [{"version": each} for each in ((1, 2), float("nan"), {3: 4}, {1}, torch.ones(1))]
    exact = {"": {"version": 2}, "a": {"version": None, "more": [1, "x", {"y": 2.5}]}}
    state._metadata = {  # type: ignore[attr-defined]
        **exact,
        **{f"other{at}": each for at, each in enumerate([*others, contains, object()])},
        5: {"version": 1},
    }
    found = decoded(encode([state, {"late": 2}]))
    assert (dict(found[0]), found[0]._metadata) == ({"w": 1}, exact)
    assert decoded(encode(found))[0]._metadata == exact


@pytest.mark.parametrize("keys", [("w",), ("b", "a", "c"), (1, "a"), ()])
def test_older_library_reads_a_state_with_versions(keys: tuple[Any, ...]) -> None:
    """It makes a mapping of the items in their order: the last one of the same key remains."""
    state = collections.OrderedDict((key, at) for at, key in enumerate(keys))
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    body = encode(state)
    kind, items = json.loads(bytes(body.views[0]))
    assert kind == "OrderedDict"
    assert list(collections.OrderedDict(map(tuple, items)).items()) == list(state.items())
    assert list(decoded(body).items()) == list(state.items())


def test_state_of_an_older_library_has_no_versions() -> None:
    head = b'["OrderedDict",[["a",1],["b",["OrderedDict",[]]]]]'
    found = decode(Body(len(head), [memoryview(bytearray(head))]))
    assert found == {"a": 1, "b": {}}
    assert not hasattr(found, "_metadata")


def test_tied_weights_are_written_once_and_stay_tied(memory: Path) -> None:
    weight = torch.randn(500, 20)
    tied = {"in": weight, "out": torch.nn.Parameter(weight), "rows": weight[100:200]}
    alone = encode({"in": weight}).size
    assert encode(tied).size < alone + 100 * 20 * 4 + 1000
    started().save(1, {**tied, "other": weight.t()})
    found = Snapshots().restore()
    assert found is not None
    assert all(torch.equal(found.state[name], tied[name]) for name in tied)
    assert found.state["in"].data_ptr() == found.state["out"].data_ptr()
    assert torch.equal(found.state["other"], weight.t())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(120).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(72.0).as_strided((8, 1, 3, 3), (9, 1, 3, 1)),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(6).to(torch.complex64).reshape(2, 3).t().conj(),
    ],
)
def test_strides_of_a_tensor_that_fills_its_memory_are_restored(tensor: torch.Tensor) -> None:
    body = encode({"x": tensor, "y": torch.ones(3)})
    whole = memoryview(bytearray(b"".join(body.views)))
    found = decode(Body(body.head_bytes, [whole]))
    assert torch.equal(found["x"], tensor)
    assert found["x"].stride() == tensor.stride()
    assert torch.equal(found["y"], torch.ones(3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4)[:, ::2],
        torch.arange(3).expand(4, 3),
        torch.empty(0, 3).t(),
        torch.arange(16).as_strided((2, 3), (2, 1)),
        torch.ones(2, 3),
        torch.tensor(4.0),
    ],
)
def test_tensor_with_other_memory_or_usual_strides_is_readable_by_older_libraries(
    tensor: torch.Tensor,
) -> None:
    body = encode(tensor)
    assert json.loads(bytes(body.views[0]))[0] == "tensor"
    found = decode(Body(body.head_bytes, [memoryview(bytearray(b"".join(body.views)))]))
    assert torch.equal(found, tensor)


def test_training_of_a_fused_optimizer_with_channels_last_continues_bitwise(memory: Path) -> None:
    def trained(model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            torch.manual_seed(step)
            values = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            loss = model(values).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def made() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True)

    model, optimizer = made()
    trained(model, optimizer, range(3))
    started().save(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = trained(model, optimizer, range(3, 8))

    model, optimizer = made()
    found = Snapshots().restore()
    assert found is not None
    model.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    assert trained(model, optimizer, range(3, 8)) == expected


def test_newest_snapshot_of_a_killed_worker_is_restored(memory: Path) -> None:
    snapshots = started(every_steps=1)
    assert [snapshots.save(step, {"x": step}, step * 10) for step in (1, 2, 3)] == [True] * 3
    found = Snapshots().restore()
    assert found is not None
    assert (found.step, found.state, found.rank_state) == (3, {"x": 3}, 30)


def test_damaged_snapshot_is_passed_over(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = started()
    for step in (1, 2):
        snapshots.save(step, {"x": torch.full((100,), step)})
    newest = max(memory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[-8] ^= 4
    newest.write_bytes(content)
    assert restored() == (1, "memory")
    assert "checksum mismatch" in caplog.text


def test_storage_is_restored_without_memory(memory: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    snapshots = started(storage, every_steps=1, store_every=2)
    for step in range(1, 6):
        snapshots.save(step, {"x": step}, step)
    snapshots.close()
    assert restored(storage) == (5, "memory")
    for path in memory.iterdir():
        path.unlink()
    found = Snapshots(storage).restore()
    assert found is not None
    assert (found.step, found.state, found.rank_state, found.place) == (4, {"x": 4}, 4, "storage")
    assert restored() == (4, "memory")  # a second fault before the first save
    assert len(list(storage.iterdir())) == 2


def test_sharded_snapshot_of_a_state_without_shards_is_restored(
    memory: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    snapshots = started(storage, sharded=True)
    assert snapshots.save(3, {"x": torch.ones(3)}, store=True)
    snapshots.close()
    assert restored(storage, sharded=True) == (3, "memory")
    for each in memory.iterdir():
        each.unlink()
    assert restored(storage, sharded=True) == (3, "storage")


def test_interval_to_the_last_snapshot_in_storage_continues_after_a_fault(
    memory: Path, tmp_path: Path
) -> None:
    for step in range(1, 8):
        snapshots = started(tmp_path / "storage", store_every=3)
        snapshots.save(step, {"x": step})
        snapshots.close()
    names = sorted(path.name[:17] for path in (tmp_path / "storage").iterdir())
    assert names == ["step-000000000003", "step-000000000006"]


def test_stored_snapshot_is_in_storage_on_return(tmp_path: Path) -> None:
    snapshots = started(tmp_path, every_steps=100)
    assert snapshots.save(7, {"x": 7}) is False
    assert snapshots.save(8, {"x": 8}, store=True)
    assert restored(tmp_path) == (8, "storage")


class LatePeer(Gang):
    """Gang of two ranks, seen from rank 0: rank 1 stores its parts before it answers."""

    def __init__(self, storage: StorageFolder) -> None:
        super().__init__()
        self.size = 2
        self._storage = storage

    def gather(self, exchange: Exchange, content: bytes) -> list[memoryview]:
        parts = self._storage.parts()
        for part, path in parts.items():
            if part.rank == 0 and (late := part._replace(rank=1)) not in parts:
                self._storage.store(late, read(path, part))
        return [memoryview(content)] * 2


def test_older_snapshots_expire_after_a_demanded_one_that_a_peer_completes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's own expiry finds the demanded snapshot incomplete, and keeps the one before."""
    storage = StorageFolder(tmp_path)
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", lambda _: LatePeer(storage))
    snapshots = started(tmp_path, every_steps=100, keep=1)
    for step in (1, 2, 3):
        assert snapshots.save(step, {"x": step}, step, store=True)
        complete = complete_versions(storage.parts())
        assert [version.step for version in complete] == [step]
    assert len(list(tmp_path.iterdir())) == 1


def test_storage_that_cannot_be_written_is_an_error_when_it_was_demanded(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    snapshots = started(storage)
    storage.write_text("a file")
    with pytest.raises(SnapshotError, match=r"rank 0: .*storage"):
        snapshots.save(1, {"x": 1}, store=True)
    with pytest.raises(SnapshotError, match="there is no storage"):
        started().save(1, {}, store=True)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_write_that_ends_with_any_error_is_not_in_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("no memory for the draft")

    monkeypatch.setattr(StorageFolder, "store", exhausted)
    with pytest.raises(SnapshotError, match="MemoryError: no memory for the draft"):
        started(tmp_path).save(1, {"x": 1}, store=True)


def test_stored_snapshot_counts_if_older_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = StorageFolder.remove_expired

    def stale(storage: StorageFolder, *arguments: Any) -> None:
        if not isinstance(threading.current_thread(), StorageWrite):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        real(storage, *arguments)

    monkeypatch.setattr(StorageFolder, "remove_expired", stale)
    assert started(tmp_path).save(1, {"x": 1}, store=True)
    assert "cannot remove older snapshots from storage" in caplog.text
    assert restored(tmp_path) == (1, "storage")


def test_snapshot_after_a_damaged_one_in_storage_is_restored(tmp_path: Path) -> None:
    snapshots = started(tmp_path)
    for step in (4, 20):
        snapshots.save(step, {"x": step}, store=True)
    snapshots.close()
    path = max(tmp_path.glob("step-*/shared"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    snapshots = started(tmp_path, keep=1)
    for step in (5, 6):
        assert snapshots.save(step, {"x": step}, store=True)
        assert restored(tmp_path) == (step, "storage")


@pytest.mark.parametrize(
    ("number", "named"), [(errno.ENOSPC, "enlarge /dev/shm"), (errno.EBUSY, "no more snapshots")]
)
def test_memory_that_cannot_be_written_leaves_storage(
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    named: str,
) -> None:
    real = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(memory):
            raise OSError(number, os.strerror(number))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    snapshots = started(tmp_path / "storage", store_every=1)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            snapshots.save(step, {"x": torch.ones(1000)})
    snapshots.close()
    (line,) = [each.getMessage() for each in caplog.records]
    assert str(memory) in line
    assert named in line
    assert restored(tmp_path / "storage") == (2, "storage")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the free memory, in bytes, which a test changes."""
    real, free = os.posix_fallocate, [0]

    def allocated(fd: int, offset: int, size: int) -> None:
        if offset + size > free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, size)

    class Found:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return free[0]

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    monkeypatch.setattr(os, "statvfs", lambda path: Found())
    return free


def test_memory_that_was_full_is_used_again_once_it_has_room(
    memory: Path, room: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = started(every_steps=1)
    state = {"x": torch.ones(1000)}
    kept = []
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            room[0] = 1000 if step == 4 else 100_000 * (step > 4)  # at first not enough for one
            snapshots.save(step, state)
            found = [held(path) for path in memory.glob("shared.[01]")]
            kept.append(max((part.version.step for part in found if part is not None), default=0))
    assert kept == [0, 0, 0, 0, 5]
    assert snapshots._report._report.trouble == layout.FITS
    assert [each.getMessage().partition(": ")[0] for each in caplog.records] == [
        "no more snapshots in the memory of this node",
        "snapshots in the memory of this node again",
    ]
    snapshots.close()
    assert restored() == (5, "memory")


def test_memory_with_room_for_a_part_of_a_snapshot_is_not_used_again(
    memory: Path, room: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = started(every_steps=1)
    for step in range(1, 20):
        room[0] = 3000 * (step > 1)
        snapshots.save(step, {"x": torch.ones(10_000)}, {"own": torch.ones(10)})
    assert snapshots._report._report.trouble == layout.NO_ROOM
    assert len(caplog.records) == 1
    assert snapshots._memory.folder == memory, "for copies on other nodes, once it has room"


def test_restore_reads_snapshots_in_memory_that_is_full(memory: Path, room: list[int]) -> None:
    snapshots = started(every_steps=1)
    state = {"x": torch.ones(1000)}
    for step in range(1, 5):
        room[0] = 100_000 * (step < 3)
        snapshots.save(step, state | {"y": torch.ones(2000 * (step > 2))})
    assert snapshots._memory.buffers is None
    found = snapshots.restore()
    assert found is not None
    assert found.step == 2
    room[0] = 100_000
    snapshots.save(3, state)
    assert restored() == (3, "memory")


def test_memory_that_is_full_each_time_is_tried_ever_more_rarely(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def full(fd: int, offset: int, size: int) -> None:
        tried.append(step)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    snapshots = started(every_steps=1)
    for step in range(1, 50):
        snapshots.save(step, {"x": torch.ones(1000)})
    assert tried == [1, 3, 7, 15, 31, 47]
    assert len(caplog.records) == 1


def test_snapshots_are_taken_at_their_interval(memory: Path) -> None:
    snapshots = started(every_steps=3)
    assert [step for step in range(1, 11) if snapshots.save(step, {"x": step})] == [3, 6, 9]
    assert restored() == (9, "memory")
    snapshots.close()
    slow = started(every_seconds=1000.0)
    # The time of a step is known at the second one: a script may begin at a step of another job.
    assert [step for step in range(5000, 5004) if slow.save(step, {"x": step})] == [5000, 5001]


def test_function_for_the_state_is_called_if_a_snapshot_is_due(memory: Path) -> None:
    called: list[int] = []

    def state_of(step: int) -> dict[str, int]:
        called.append(step)
        return {"x": step}

    snapshots = started(every_steps=2)
    for step in (1, 2, 3):
        snapshots.save(step, functools.partial(state_of, step), lambda: "own")
    assert called == [2]
    found = Snapshots().restore()
    assert found is not None
    assert (found.state, found.rank_state) == ({"x": 2}, "own")


def test_without_any_place_nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(layout.SNAPSHOT_FOLDER, raising=False)
    snapshots = started()
    snapshots.save(1, {"x": 1})
    assert restored() is None


def test_without_any_place_only_the_first_snapshot_costs_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(layout.SNAPSHOT_FOLDER, raising=False)
    called: list[str] = []

    def state() -> dict[str, int]:
        called.append("state")
        return {"x": 1}

    for settings in ({}, {"every_steps": 2}):
        called.clear()
        snapshots = started(**settings)
        taken = [step for step in range(1, 10) if snapshots.save(step, state)]
        assert len(taken) == len(called) == 1
    with pytest.raises(TypeError):
        started().save(1, {"x": object()})


@pytest.mark.parametrize(
    "create",
    [
        lambda: Snapshots(every_steps=0),
        lambda: Snapshots(every_steps=1, every_seconds=1.0),
        lambda: Snapshots(every_seconds=0),
        lambda: Snapshots(every_seconds=float("nan")),
        lambda: Snapshots(every_seconds=float("inf")),
        lambda: Snapshots(max_overhead=0),
        lambda: Snapshots(max_overhead=2.0),
        lambda: Snapshots(store_every=0),
        lambda: Snapshots(keep=0),
        lambda: Snapshots(""),
        lambda: Snapshots(keep=1.5),  # type: ignore[arg-type]
        lambda: Snapshots(replicas=-1),
        lambda: Snapshots(replicas=9),
        lambda: Snapshots(replicas=1.5),  # type: ignore[arg-type]
        lambda: Snapshots(replica_rate=0),
        lambda: Snapshots(replica_rate=float("nan")),
        lambda: started().save(-1, {}),
        lambda: started().save(2**63, {}),
    ],
)
def test_value_out_of_range_is_refused(create: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|not both"):
        create()


def test_script_that_ignores_the_restored_step_is_refused(memory: Path) -> None:
    started().save(5, {"x": 5})
    snapshots = started()
    with pytest.raises(
        ValueError,
        match=r"continue at the step that restore\(\) returned, and count over all epochs",
    ):
        snapshots.save(1, {"x": 1})
    assert restored() == (5, "memory")


def test_number_of_a_step_in_its_epoch_is_a_warning_before_a_snapshot_makes_it_an_error(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a long interval no further snapshot is due, and no error occurs before a restart."""
    snapshots = started(every_steps=1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for step in (1, 1, 2, 3):  # the same number again is another call in an accumulation
                snapshots.save(step, {"x": step})
        snapshots.save(1, {"x": 1})
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("save() was called with step 1 after step 3: the next snapshot is due")
    assert "at step 1000" in line
    assert "Count the steps over all epochs" in line
    caplog.clear()
    snapshots.restore()
    with caplog.at_level(logging.WARNING):
        snapshots.save(2, {"x": 2})
    assert not caplog.records


@pytest.mark.parametrize("place", ["memory", "storage"])
@pytest.mark.parametrize("interval", [1, 100])
def test_second_snapshots_of_the_same_folder_are_refused_before_they_write(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, interval: int
) -> None:
    """They would overwrite the state of the first ones with that of another model."""
    storage = None
    if place == "storage":
        monkeypatch.delenv(layout.SNAPSHOT_FOLDER)
        storage = tmp_path / "storage"
    first = Snapshots(storage, every_steps=1, store_every=1)
    second = Snapshots(storage, every_steps=interval, store_every=1)
    first.restore()
    second.restore()
    assert first.save(1, {"x": 1})
    assert first._store.end()
    with pytest.raises(RuntimeError, match="use one Snapshots, with one state for all models"):
        second.save(2, {"x": 2})
    first.close()
    found = Snapshots(storage).restore()
    assert found is not None
    assert (found.step, found.state) == (1, {"x": 1})


def test_snapshots_that_only_restore_are_no_second_writer(memory: Path) -> None:
    first, second = Snapshots(every_steps=1), Snapshots(every_steps=1)
    first.restore()
    second.restore()
    assert first.save(1, {"x": 1})
    with pytest.raises(ValueError, match="step must be"):
        second.save(-1, {"x": 2})
    assert first.save(2, {"x": 1})


@pytest.mark.parametrize("end", ["close", "restore", "unused"])
def test_place_of_snapshots_that_ended_is_free_for_others(memory: Path, end: str) -> None:
    first, second = Snapshots(every_steps=1), Snapshots(every_steps=1)
    first.restore()
    second.restore()
    assert first.save(1, {"x": 1})
    if end == "close":
        first.close()
    elif end == "restore":
        first.restore()
    else:
        first.itself = first  # type: ignore[attr-defined]
        del first
    assert second.save(2, {"x": 2})
    assert restored() == (2, "memory")


SECOND_WRITER = """
import sys
from elasticjob.train import Snapshots

snapshots = Snapshots(every_steps=1)
snapshots.restore()
try:
    snapshots.save(9, {"x": 9})
except RuntimeError as error:
    sys.exit(str(error))
"""


def test_second_process_of_a_local_rank_is_refused_before_it_writes(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticjob.train.snapshots.memory.exclusive.LOCK_SECONDS", 0.1)
    snapshots = Snapshots(every_steps=1)
    snapshots.restore()
    assert snapshots.save(1, {"x": 1})
    Snapshots().restore()  # reading the folder frees no lock
    before = {path.name: path.read_bytes() for path in memory.glob("shared.*")}
    command = [sys.executable, "-c", SECOND_WRITER]
    second = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert second.returncode == 1
    assert "another process saves snapshots as local rank 0 of this node" in second.stderr
    assert "Traceback" not in second.stderr
    assert {path.name: path.read_bytes() for path in memory.glob("shared.*")} == before
    other = subprocess.run(command, env={**os.environ, "LOCAL_RANK": "1"}, timeout=240)
    assert other.returncode == 0, "another local rank has its own files"
    snapshots.close()
    assert subprocess.run(command, timeout=240).returncode == 0
    assert restored() == (9, "memory")


FORKED_WRITER = """
import os, sys
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.memory import exclusive

exclusive.LOCK_SECONDS = 0.1
snapshots = Snapshots(every_steps=1)
snapshots.restore()
assert snapshots.save(1, {"x": 1})
for _ in range(2):  # the end of the first child must not free the lock of this process
    child = os.fork()
    if not child:
        try:
            snapshots.save(2, {"x": 2})
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
found = Snapshots().restore()
assert (found.step, found.state) == (1, {"x": 1})
assert snapshots.save(2, {"x": 2})
"""


def test_fork_of_the_writer_is_refused_and_frees_no_lock(memory: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED_WRITER]
    subprocess.run(command, check=True, timeout=240)
    assert restored() == (2, "memory")


def test_killed_writer_leaves_its_place_to_the_next_process(memory: Path) -> None:
    script = SECOND_WRITER + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", script], timeout=240)
        assert killed.returncode == -signal.SIGKILL
    assert restored() == (9, "memory")


def test_error_of_the_last_copy_is_no_error_of_the_next_restore(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other ranks, whose copies are complete, would wait for this one."""
    snapshots = Snapshots(every_steps=1)
    snapshots.restore()
    assert snapshots.save(1, {"x": 1})

    def fail() -> None:
        raise ValueError("no memory")

    snapshots._overlap = Overlap(Optimizers(()))
    snapshots._overlap.start(fail)
    found = snapshots.restore()
    assert found is not None
    assert found.state == {"x": 1}
    assert "no memory" in caplog.text


def test_snapshots_of_two_folders_without_memory_are_independent(tmp_path: Path) -> None:
    both = [Snapshots(tmp_path / name) for name in "ab"]
    for each in both:
        each.restore()
    for number, each in enumerate(both):
        assert each.save(1, {"x": number}, store=True)
    restored = [Snapshots(tmp_path / name).restore() for name in "ab"]
    assert [found and found.state["x"] for found in restored] == [0, 1]


def test_relative_storage_stays_where_it_is_after_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    snapshots = started("storage")
    for step, folder in enumerate(("other", "storage", "/"), 1):
        monkeypatch.chdir(tmp_path / folder)
        assert snapshots.save(step, {"x": step}, store=True)
    snapshots.close()
    monkeypatch.chdir(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "storage"]
    assert restored("storage") == (3, "storage")


def test_parent_of_a_link_in_the_path_of_storage_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "current").symlink_to("disk/run")
    started(f"{tmp_path}/current/../storage").save(1, {"x": 1}, store=True)
    assert restored(tmp_path / "disk" / "storage") == (1, "storage")


@pytest.mark.parametrize("form", ["link", "relative"])
def test_storage_by_another_path_is_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    first, second = (
        Snapshots(tmp_path / "folder"),
        Snapshots("link" if form == "link" else "folder"),
    )
    for each in (first, second):
        each.restore()
    first.save(1, {"x": 1}, store=True)
    with pytest.raises(RuntimeError, match=f"saves to {tmp_path / 'folder'}:"):
        second.save(1, {"x": 2})
    first.close()
    assert second.save(1, {"x": 2}, store=True)
    second.close()


def test_second_restore_has_the_newest_snapshot(memory: Path) -> None:
    snapshots = Snapshots(every_steps=1)
    snapshots.restore()
    for step in (1, 2):
        snapshots.save(step, {"x": step})
    found = snapshots.restore()
    assert found is not None
    assert (found.step, found.state) == (2, {"x": 2})
    assert snapshots.save(3, {"x": 3})


def test_save_before_restore_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call restore"):
        Snapshots().save(1, {})


@pytest.fixture
def group() -> Iterator[None]:
    """Process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", ["2", "16"])
def test_save_of_several_ranks_without_a_process_group_is_refused(
    memory: Path, monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    """Each of them would save as a gang of its own. One that only restores, such as the export
    of a model, may do so alone."""
    started().save(3, {"x": 3})
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert restored() == (3, "memory")
    snapshots = Snapshots()
    snapshots.restore()
    with pytest.raises(SnapshotError, match=f"WORLD_SIZE={ranks} .* init_process_group"):
        snapshots.save(4, {"x": 4})
    assert restored() == (3, "memory")


@pytest.mark.parametrize("ranks", ["1", "", "\u00b2"])
def test_one_rank_needs_no_process_group(
    memory: Path, monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    started().save(3, {"x": 3})
    assert restored() == (3, "memory")


def test_group_of_one_rank_saves_alone_among_several(
    memory: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    started().save(3, {"x": 3})
    assert restored() == (3, "memory")


def test_save_in_a_group_of_another_size_than_at_the_restore_is_refused(
    memory: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = started()
    assert snapshots.save(1, {"x": 1})
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(SnapshotError, match=r"save\(\) has 2 ranks, and .* with 1: call restore"):
        snapshots.save(2, {"x": 2})
    monkeypatch.undo()
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(memory))
    assert restored() == (1, "memory")


def test_settings_of_the_ranks_are_compared_before_they_exchange_anything_else(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that differ in one, such as `sharded`, decide differently, and wait for each other."""
    mine, theirs = Snapshots(every_steps=2, sharded=True), Snapshots(every_steps=2)
    exchanges: list[Exchange] = []

    def gather(_: Gang, exchange: Exchange, content: bytes) -> list[memoryview]:
        exchanges.append(exchange)
        other = theirs._settings
        if exchange is Exchange.SETTINGS:
            other = zlib.crc32(other).to_bytes(4, "little")
        return [memoryview(content), memoryview(other)]

    monkeypatch.setattr(Gang, "gather", gather)
    text = "Snapshots has sharded=True on rank 0, and sharded=False on rank 1: all ranks must"
    with pytest.raises(SnapshotError, match=text):
        mine.restore()
    assert exchanges == [Exchange.SETTINGS, Exchange.SETTINGS_TEXTS]


class Copies:
    """Replication that records its calls."""

    def __init__(self, confirmed: Version) -> None:
        self.generations = Generations(confirmed)
        self.calls: list[object] = []

    def close(self) -> None:
        self.calls.append("close")

    def restored(self, *_: object) -> None:
        self.calls.append("restored")

    def continued(self, confirmed: Version) -> None:
        self.calls.append(confirmed)


def test_replication_after_close_keeps_the_copies_that_were_confirmed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those from which the gang was restored may be older, and the others not stale."""
    first, second, third = (Copies(Version(step, 7)) for step in (5, 6, 7))
    snapshots = Snapshots(every_steps=1)
    snapshots.restore()
    gang = snapshots._gang
    assert gang is not None
    monkeypatch.setattr(gang, "size", 2)
    monkeypatch.setattr(gang, "gather", lambda *_, **__: [])
    made = [first, second, third]
    monkeypatch.setattr(snapshots_module, "connected", lambda *_: made.pop(0))
    snapshots._replicates(gang)
    snapshots.close()
    assert snapshots._replication is None
    snapshots._replicates(gang)
    assert (first.calls, second.calls) == (["restored", "close"], [Version(5, 7)])
    monkeypatch.undo()
    snapshots.restore()
    assert snapshots._replication is None
    monkeypatch.setattr(snapshots_module, "connected", lambda *_: third)
    new = snapshots._gang
    assert new is not None
    monkeypatch.setattr(new, "size", 2)
    monkeypatch.setattr(new, "gather", lambda *_, **__: [])
    snapshots._replicates(new)
    assert third.calls == ["restored"]


def test_errors_have_their_public_name_in_tracebacks_and_pickles() -> None:
    for error in (SnapshotError("lost"), train.RankEndedError("ended")):
        name = type(error).__name__
        assert traceback.format_exception_only(error)[-1].startswith(f"elasticjob.train.{name}: ")
        assert type(pickle.loads(pickle.dumps(error))) is type(error)
