"""Storage of snapshots with damaged files, and with files of a newer version of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elasticjob import layout
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version
from elasticjob.train.snapshots.memory.part_files import (
    Body,
    CorruptSnapshot,
    NewerFormat,
    committed,
    overwrite,
    read,
)
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder


@pytest.fixture(autouse=True)
def _without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(layout.SNAPSHOT_FOLDER, raising=False)


def stored(folder: Path, steps: range, keep: int = 2) -> None:
    snapshots = Snapshots(folder, keep=keep)
    snapshots.restore()
    for step in steps:
        assert snapshots.save(step, {"x": step}, {"own": step}, store=True)
    snapshots.close()


def restored(folder: Path) -> int | None:
    found = Snapshots(folder).restore()
    return None if found is None else found.step


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*/*"))


def shared_parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*/shared"))


def flipped(at: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[at] ^= 1
        return bytes(changed)

    return change


def of_newer_format(content: bytes) -> bytes:
    return b"EJSNAP02" + content[8:]


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGE = [
    *(flipped(at) for at in (0, 9, 40, 60, -1)),
    *(lambda content, size=size: content[:size] for size in (0, 10, 63, 64, 100)),
    lambda content: content + b"\0",
    lambda content: bytes(len(content)),
    of_newer_format,
]


@pytest.mark.parametrize("change", DAMAGE)
def test_damaged_newest_snapshot_is_passed_over_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[bytes], bytes]
) -> None:
    stored(tmp_path, range(1, 3))
    newest = shared_parts(tmp_path)[-1]
    damage(newest, change)
    assert restored(tmp_path) == 1
    assert caplog.text.count(str(newest)) == 1


@pytest.mark.parametrize("change", DAMAGE)
def test_storage_with_damaged_snapshots_alone_is_an_error(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """Training does not begin at step 0, which would remove the files in time."""
    stored(tmp_path, range(1, 3))
    for path in files(tmp_path):
        damage(path, change)
    with pytest.raises(SnapshotError, match=rf"are damaged.*\({tmp_path}.*to begin at step 0"):
        restored(tmp_path)


def test_newer_format_is_named_with_its_remedy(tmp_path: Path) -> None:
    stored(tmp_path, range(1, 2))
    for path in files(tmp_path):
        damage(path, of_newer_format)
    with pytest.raises(SnapshotError, match=r"format 02 .* reads format 01: install the version"):
        restored(tmp_path)
    with pytest.raises(NewerFormat):
        committed(files(tmp_path)[0])


def test_snapshot_that_was_never_complete_is_no_error(tmp_path: Path) -> None:
    """The job ended during its first write: drafts, and parts of some ranks, are left."""
    part = Part(Version(1, 7), SHARED, 2, 0)
    StorageFolder(tmp_path).store(part._replace(rank=1), Body(0, [memoryview(b"x")]))
    [path] = files(tmp_path)
    path.with_name(".shared.0123abcd").write_bytes(bytes(100))
    (tmp_path / "step-000000000002-0000000000000007").mkdir()
    assert restored(tmp_path) is None
    stored(tmp_path, range(1, 2))
    assert restored(tmp_path) == 1


def test_other_files_in_the_folder_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, range(1, 2))
    shared_parts(tmp_path)[0].with_name("notes.txt").write_text("by hand")
    (tmp_path / "README").write_text("the snapshots")
    assert restored(tmp_path) == 1
    assert caplog.text == ""


def test_part_in_the_folder_of_another_version_is_damaged(tmp_path: Path) -> None:
    stored(tmp_path, range(1, 2))
    [folder] = tmp_path.iterdir()
    folder.rename(tmp_path / "step-000000000009-0000000100000000")
    with pytest.raises(SnapshotError, match="holds a part of step 1"):
        restored(tmp_path)


def test_newer_format_is_never_removed(tmp_path: Path) -> None:
    """A rollback of the image, and the return to the newer one."""
    stored(tmp_path, range(1, 4), keep=3)
    kept = [path.parent for path in shared_parts(tmp_path)[1:]]
    for path in files(tmp_path):
        if path.parent in kept:
            damage(path, of_newer_format)
    stored(tmp_path, range(4, 9))
    assert [path.exists() for path in kept] == [True, True]
    assert sorted(each.version.step for each in StorageFolder(tmp_path).parts()) == [7, 7, 8, 8]


def test_damaged_snapshot_is_removed_once_newer_ones_are_complete(tmp_path: Path) -> None:
    """Two damaged ones are not taken for snapshots that were given up."""
    stored(tmp_path, range(1, 4), keep=3)
    for path in shared_parts(tmp_path)[1:]:
        damage(path, flipped(9))
    steps = []
    for step in (4, 5):
        stored(tmp_path, range(step, step + 1))
        steps.append(sorted(int(path.parent.name[5:17]) for path in shared_parts(tmp_path)))
    assert steps == [[1, 2, 3, 4], [4, 5]]


def test_file_without_a_record_is_not_committed(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(100))
    with pytest.raises(CorruptSnapshot, match=rf"{path} has no valid record"):
        committed(path)


def of_newer_library(path: Path, known: bytes, unknown: bytes) -> None:
    """Write a part again with a description that this version does not know."""
    part = committed(path)
    found = read(path, part)
    content = bytes(found.views[0])
    assert known in content
    overwrite(path, part, Body(found.head_bytes, [memoryview(content.replace(known, unknown))]))


NEWER = pytest.mark.parametrize(
    ("known", "unknown"),
    [
        (b'"tuple"', b'"tuplX"'),
        (b'"float32"', b'"float3X"'),
        (b'"float32",[3]', b'"float32",[-]'),
        (b'"float32",[3]', b'"float32",-3 '),
        (b'"cpu"', b'"cpX"'),
    ],
)


def saved_tensors(snapshots: Snapshots, steps: range) -> None:
    for step in steps:
        state = {"x": (step, torch.ones(3)), "device": torch.device("cpu")}
        assert snapshots.save(step, state, store=snapshots._store.folder is not None or None)
    snapshots.close()


@NEWER
def test_snapshot_that_cannot_be_decoded_is_passed_over_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, known: bytes, unknown: bytes
) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.restore()
    saved_tensors(snapshots, range(1, 3))
    newest = shared_parts(tmp_path)[-1]
    of_newer_library(newest, known, unknown)
    assert restored(tmp_path) == 1
    assert f"passing over a snapshot: {newest}: the description" in caplog.text


@NEWER
@pytest.mark.parametrize("place", ["memory", "storage"])
def test_snapshot_that_cannot_be_decoded_is_an_error_if_there_is_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, known: bytes, unknown: bytes
) -> None:
    """Training that began at step 0 would overwrite it."""
    if place == "memory":
        monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))
    storage = tmp_path if place == "storage" else None
    snapshots = Snapshots(storage)
    snapshots.restore()
    saved_tensors(snapshots, range(1, 3))
    for path in [*shared_parts(tmp_path), *tmp_path.glob("shared.[01]")]:
        of_newer_library(path, known, unknown)
    with pytest.raises(SnapshotError, match=rf"{tmp_path}/.*install the version that wrote them"):
        Snapshots(storage).restore()
