"""Files of snapshots: crashes at each write, damage, sizes, full file systems."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob.train.snapshots.core import agreement
from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version
from elasticjob.train.snapshots.memory import buffers, part_files
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers, NoRoom, ReplicaBuffers
from elasticjob.train.snapshots.memory.part_files import (
    RECORD_BYTES,
    Body,
    CorruptSnapshot,
    held,
    read,
)
from elasticjob.train.snapshots.storage import calls
from elasticjob.train.snapshots.storage.calls import StorageWrite
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder
from tests.paths import ROOT
from tests.unit.train.waiting import PATIENCE_SECONDS, until


def part(step: int, rank: int = SHARED, ranks: int = 0) -> Part:
    return Part(Version(step, 7), rank, ranks, step - 1)


def body(step: int, size: int = 5000) -> Body:
    """Return a body of several views, each byte of which depends on the step."""
    return Body(3, [memoryview(bytes([step]) * size), memoryview(b""), memoryview(b"end")])


def content(path: Path, of: Part) -> bytes:
    found = read(path, of)
    assert found.head_bytes == 3
    return bytes(found.views[0])


WRITER = """
import os, signal, sys
from pathlib import Path
from elasticjob.train.snapshots.memory import buffers, part_files
from elasticjob.train.snapshots.storage import storage_folder
from tests.unit.train.test_snapshot_files import body, part

kind, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
calls = 0

class Os:
    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in ("open", "pwrite", "pwritev", "ftruncate", "posix_fallocate", "fsync",
                        "replace", "close"):
            return real
        def call(*arguments):
            global calls
            if armed:
                calls += 1
                if calls == last:
                    if name == "pwritev":  # half of the content arrives
                        os.pwrite(arguments[0], bytes(arguments[1][0][:2500]), arguments[2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        return call

armed = False
buffers.os = storage_folder.os = part_files.os = Os()
stores = kind == "storage"
store = storage_folder.StorageFolder(folder) if stores else buffers.MemoryBuffers(folder, 0)
write = store.store if kind == "storage" else store.commit
if kind == "stop":
    part_files._PARALLEL_BYTES = 0
    def write(one, content):
        assert store.commit_at_stop(one, content, part(one.version.step - 1).version, 60.0)
for step in (1, 2, 3, 4):
    armed = step == 4
    write(part(step), body(step, 5000 if step < 4 else 6000))
"""


def test_parts_of_other_ranks_stay_until_the_next_commit(tmp_path: Path) -> None:
    """After a restore by fewer ranks another rank may still need the part in this buffer."""
    before = MemoryBuffers(tmp_path, 0)
    for step in (1, 2):
        before.commit(Part(Version(step, 7), 3, 4, step - 1, True), body(step))
    after = MemoryBuffers(tmp_path, 0)
    after.keep(Version(2, 7))
    after.commit(Part(Version(3, 8), 1, 2, 2, True), body(3))
    assert {(part.version.step, part.rank) for part in after.parts()} == {(2, 3), (3, 1)}


def test_former_workers_count_once_and_their_parts_go(tmp_path: Path) -> None:
    """A node with four workers continues with two, whose parts are twice as large."""
    for rank in range(4):
        worker = MemoryBuffers(tmp_path, rank, local_ranks=4)
        for step in (1, 2):
            worker.commit(Part(Version(step, 7), rank, 4, step - 1, True), body(step, 10_000))
        (tmp_path / f"reached-{rank}").write_bytes(b"x")
    (tmp_path / "rank-3.0").write_bytes(b"torn")
    workers = [MemoryBuffers(tmp_path, rank, 90_000, local_ranks=2) for rank in (0, 1)]
    workers[0].remove_former(Version(2, 7))
    left = {(part.rank, part.version.step) for part in workers[0].parts()}
    assert left == {(0, 1), (0, 2), (1, 1), (1, 2), (2, 2), (3, 2)}
    assert not (tmp_path / "rank-3.0").exists()
    assert (tmp_path / "reached-3").exists()
    for step in (3, 4):
        for rank, worker in enumerate(workers):
            worker.keep(Version(step - 1, 7))
            worker.commit(Part(Version(step, 8), rank, 2, step - 1, True), body(step, 20_000))
            if step == 3:
                assert (3, 2) in {(part.rank, part.version.step) for part in worker.parts()}
        workers[0].remove_former()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank-0.0", "rank-0.1", "rank-1.0", "rank-1.1", "reached-0", "reached-1",
    ]  # fmt: skip
    with pytest.raises(NoRoom) as refused:
        workers[1].commit(Part(Version(5, 8), 1, 2, 4, True), body(5, 30_000))
    assert 2 * 50_000 < refused.value.needed < 2 * 51_000


def test_former_workers_are_unknown_without_their_number(tmp_path: Path) -> None:
    for rank in (0, 3):
        worker = MemoryBuffers(tmp_path, rank)
        worker.commit(Part(Version(1, 7), rank, 4, 0, True), body(1))
    worker.remove_former()
    assert {part.rank for part in worker.parts()} == {0, 3}


def test_buffer_of_a_former_worker_reserves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: sizes)
    MemoryBuffers(tmp_path, 3).commit(Part(Version(1, 7), 3, 4, 0, True), body(1))
    free = [ReplicaBuffers(tmp_path, local_ranks).free_bytes() for local_ranks in (4, 2)]
    assert free[1] - free[0] == RECORD_BYTES + body(1).size


@pytest.mark.parametrize("kind", ["memory", "storage", "stop"])
def test_writer_killed_at_any_call_leaves_the_snapshot_before(tmp_path: Path, kind: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sdk")))}
    for last in range(1, 60):
        folder = tmp_path / str(last)
        folder.mkdir()
        command = [sys.executable, "-c", WRITER, kind, str(folder), str(last)]
        ended = subprocess.run(command, env=env, check=False)
        store = StorageFolder(folder) if kind == "storage" else MemoryBuffers(folder, 0)
        found = store.parts()
        assert part(3) in found
        for each, path in found.items():
            step = each.version.step
            size = 5000 if step < 4 else 6000
            assert content(path, each) == bytes([step]) * size + b"end"
        if ended.returncode == 0:
            assert part(4) in found
            assert last > 6
            return
    raise AssertionError("the writer never came to its end")


@pytest.mark.parametrize("at", [0, 9, 20, 40, 60, 64, 3000, -1])
def test_changed_byte_is_detected(tmp_path: Path, at: int) -> None:
    path = tmp_path / "shared.0"
    part_files.overwrite(path, part(1), body(1))
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptSnapshot, match=str(path)):
        read(path, part(1))


def test_content_that_changed_after_its_read_is_detected_in_the_copy(tmp_path: Path) -> None:
    part_files.overwrite(tmp_path / "shared.0", part(1), body(1))
    found = read(tmp_path / "shared.0", part(1))
    part_files.overwrite(tmp_path / "good", part(1), found)
    assert content(tmp_path / "good", part(1)) == bytes(found.views[0])
    found.views[0][4000] ^= 1
    part_files.overwrite(tmp_path / "bad", part(1), found)
    with pytest.raises(CorruptSnapshot, match="checksum mismatch"):
        read(tmp_path / "bad", part(1))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:64],
        lambda content: content[:10],
        lambda content: b"",
        lambda content: bytes(len(content)),
    ],
)
def test_wrong_size_or_missing_record_is_no_snapshot(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "shared.0"
    part_files.overwrite(path, part(1), body(1))
    path.write_bytes(change(path.read_bytes()))
    assert held(path) is None
    with pytest.raises(CorruptSnapshot):
        read(path, part(1))


def test_snapshot_of_another_version_or_rank_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "shared.0"
    part_files.overwrite(path, part(1), body(1))
    for other in (part(2), part(1, rank=0), part(1)._replace(version=Version(1, 8))):
        with pytest.raises(CorruptSnapshot, match="holds no complete snapshot"):
            read(path, other)


def test_link_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "shared.0").symlink_to(target)
    assert held(tmp_path / "shared.0") is None
    with pytest.raises(OSError, match="symbolic links"):
        part_files.overwrite(tmp_path / "shared.0", part(1), body(1))
    assert target.read_bytes() == b"precious"


def received(
    memory: MemoryBuffers,
    number: int,
    whole: bytes,
    end: int | None = None,
    keep: Version | None = None,
) -> Body:
    """Write a part ahead in slices of 2000 bytes up to `end`; return its body."""
    view = memoryview(bytearray(whole))
    for first in range(0, len(whole) if end is None else end, 2000):
        memory.write_ahead(keep, part(number), len(whole), first, view[first : first + 2000])
    return Body(3, [view], zlib.crc32(whole))


@pytest.mark.parametrize("end", [None, 4000])
def test_part_written_ahead_is_a_snapshot_once_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    filled: list[int] = []
    real = part_files._fill

    def fill(*arguments: Any) -> None:
        filled.append(1)
        real(*arguments)

    monkeypatch.setattr(part_files, "_fill", fill)
    memory, whole = MemoryBuffers(tmp_path, 0), bytes(range(250)) * 20
    found = received(memory, 4, whole, end)
    assert (tmp_path / "shared.0").stat().st_size == RECORD_BYTES + len(whole)
    assert MemoryBuffers(tmp_path, 0).parts() == {}
    memory.commit(part(4), found)
    assert len(filled) == (end is not None)  # an incomplete part is written as a whole
    assert content(tmp_path / "shared.0", part(4)) == whole
    memory.commit(part(5), body(5))
    assert set(memory.parts()) == {part(4), part(5)}


def test_own_part_seeded_first_leaves_the_shared_part_that_was_written_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, whole = MemoryBuffers(tmp_path, 0), bytes(range(250)) * 20
    found = received(memory, 4, whole)
    memory.seed(part(4, rank=0, ranks=1), body(4))
    monkeypatch.setattr(part_files, "_fill", None)  # the content is there
    memory.seed(part(4), found)
    assert content(tmp_path / "shared.0", part(4)) == whole


def test_part_written_ahead_in_an_earlier_read_is_written_again(tmp_path: Path) -> None:
    """Its reader may have found it damaged, and the same part may come from storage then."""
    memory, whole = MemoryBuffers(tmp_path, 0), bytes(range(250)) * 20
    received(memory, 4, bytes(len(whole)))
    memory.forget_ahead()
    memory.seed(part(4), Body(3, [memoryview(whole)], zlib.crc32(whole)))
    assert content(tmp_path / "shared.0", part(4)) == whole


def test_changed_part_written_ahead_is_never_read(tmp_path: Path) -> None:
    memory, whole = MemoryBuffers(tmp_path, 0), bytes(range(250)) * 20
    found = received(memory, 4, whole)
    with (tmp_path / "shared.0").open("r+b") as file:
        file.seek(RECORD_BYTES + 3000)
        file.write(b"x")
    memory.commit(part(4), found)
    with pytest.raises(CorruptSnapshot, match="checksum mismatch"):
        read(tmp_path / "shared.0", part(4))


def test_part_is_written_ahead_by_its_writer_alone_and_within_the_limit(tmp_path: Path) -> None:
    whole = bytes(5000)
    received(MemoryBuffers(tmp_path, 1), 4, whole)  # local rank 0 writes the shared part
    received(MemoryBuffers(tmp_path, 0, limit=9000), 4, whole)  # two of them exceed the limit
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ((1,), None, [1]),
        ((1, 2), 2, [2]),
        ((2, 1), 2, [2]),
        ((1, 2), 1, [1]),
        ((1, 2), None, [2]),
        ((2, 1), None, [2]),
        ((2, 1), 3, [2]),
    ],
)
def test_part_written_ahead_leaves_the_version_that_is_restored_without_it(
    tmp_path: Path, steps: tuple[int, ...], keep: int | None, left: list[int]
) -> None:
    """The received one may turn out to be damaged, also after the next process has begun."""
    memory, whole = MemoryBuffers(tmp_path, 0), bytes(range(250)) * 20
    for step in steps:
        memory.commit(part(step), body(step))
    memory = MemoryBuffers(tmp_path, 0)
    version = None if keep is None else part(keep).version
    found = received(memory, 4, whole, keep=version)
    assert [each.version.step for each in memory.parts()] == left
    assert [each.version.step for each in MemoryBuffers(tmp_path, 0).parts()] == left
    memory.seed(part(4), found)
    assert sorted(each.version.step for each in memory.parts()) == [*left, 4]
    assert content(memory.parts()[part(4)], part(4)) == whole


def test_another_part_than_that_written_ahead_is_committed_whole(tmp_path: Path) -> None:
    memory = MemoryBuffers(tmp_path, 0)
    received(memory, 4, bytes(5003))
    memory.commit(part(3), body(3))
    assert content(tmp_path / "shared.0", part(3)) == b"".join(body(3).views)


def test_full_memory_keeps_the_snapshot_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryBuffers(tmp_path, 0)
    memory.commit(part(1), body(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        memory.commit(part(2), body(2))
    assert list(memory.parts()) == [part(1)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 64 + 5003


def test_buffers_alternate_and_change_their_size(tmp_path: Path) -> None:
    memory = MemoryBuffers(tmp_path, 0)
    for step in range(1, 6):
        memory.commit(part(step), body(step, 1000 * (6 - step)))
    assert sorted(each.version.step for each in memory.parts()) == [4, 5]
    assert sorted(path.name for path in tmp_path.glob("shared.*")) == ["shared.0", "shared.1"]


def test_damaged_part_is_overwritten_before_a_good_one(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        MemoryBuffers(folder, 0).commit(part(1), body(1))
        memory = MemoryBuffers(folder, 0)
        assert memory.restored(part(1))
        memory.commit(part(2), body(2))
        after = MemoryBuffers(folder, 0)
        after.damaged(after.parts()[part(number)], part(number))
        assert not after.restored(part(number))
        after.commit(part(3), body(3))
        assert {each.version.step for each in after.parts()} == {3, 3 - number}


def test_many_views_are_written_in_order(tmp_path: Path) -> None:
    views = [memoryview(number.to_bytes(4, "big")) for number in range(1000)]
    part_files.overwrite(tmp_path / "a", part(1), Body(0, views))
    assert bytes(read(tmp_path / "a", part(1)).views[0]) == b"".join(views)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "_PARALLEL_BYTES", 1)
    monkeypatch.setattr(part_files, "_SLICE_BYTES", 64)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(
    "sizes", [(1,), (2, 3), (0, 5, 0), (63,), (64,), (65,), (1000,), (100, 0, 3, 600), (300, 40)]
)
def test_threads_write_and_read_the_same_content(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    contents = [os.urandom(size) for size in sizes]
    one = Body(0, [memoryview(each) for each in contents])
    part_files.overwrite(tmp_path / "a", part(1), one)
    part_files.overwrite(tmp_path / "b", part(1), one, threads=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = part_files.read(tmp_path / "b", part(1), threads=True)
    assert found == read(tmp_path / "a", part(1))
    assert bytes(found.views[0]) == b"".join(contents)


@pytest.mark.usefixtures("small_slices")
def test_small_views_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [400, 48] * 500 + [1 << 13] + [400, 48] * 500
    one = Body(0, [memoryview(os.urandom(size)) for size in sizes])
    calls, pwritev = [], os.pwritev

    def counted(*arguments: Any) -> int:
        calls.append(arguments)
        return pwritev(*arguments)

    monkeypatch.setattr(os, "pwritev", counted)
    part_files.overwrite(tmp_path / "a", part(1), one, threads=True)
    assert len(calls) <= 4
    assert bytes(read(tmp_path / "a", part(1)).views[0]) == b"".join(one.views)


@pytest.mark.usefixtures("small_slices")
def test_threads_share_the_work_of_a_large_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other ones, which one thread alone could not."""
    together(monkeypatch, "_checked", threading.Barrier(2))
    part_files.overwrite(tmp_path / "a", part(1), body(1, 100), threads=True)
    monkeypatch.undo()
    monkeypatch.setattr(part_files, "_PARALLEL_BYTES", 1)
    together(monkeypatch, "_read_at", threading.Barrier(2))
    assert (
        bytes(part_files.read(tmp_path / "a", part(1), threads=True).views[0])
        == b"\1" * 100 + b"end"
    )


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1000, 1 << 20])
def test_joined_checksum_is_that_of_the_whole_content(size: int) -> None:
    first, second = os.urandom(777), os.urandom(size)
    joined = part_files.joined_checksum(zlib.crc32(first), zlib.crc32(second), size)
    assert joined == zlib.crc32(first + second)


def together(monkeypatch: pytest.MonkeyPatch, name: str, meeting: threading.Barrier) -> None:
    real = getattr(part_files, name)

    def call(*arguments: Any) -> Any:
        meeting.wait(60.0)
        return real(*arguments)

    monkeypatch.setattr(part_files, name, call)


@pytest.mark.usefixtures("small_slices")
def test_error_of_one_thread_leaves_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def fail_behind(fd: int, views: list[memoryview], offset: int) -> int:
        if offset > RECORD_BYTES:
            raise OSError(errno.EIO, "no")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", fail_behind)
    with pytest.raises(OSError, match="no"):
        part_files.overwrite(tmp_path / "a", part(1), body(1), threads=True)
    assert held(tmp_path / "a") is None


class Populations:
    """Calls of the kernel that populate memory, each before a read, as offsets from the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: int | None = None) -> None:
        self.calls: list[tuple[str, int, int]] = []
        madvise, preadv = part_files._madvise, os.preadv
        self._first: int | None = None

        def populate(address: int, size: int, advice: int) -> int:
            if self._first is None:
                self._first = address
            self.calls.append(("populate", address - self._first, size))
            return madvise(address, size, advice) if result is None else result

        def read_at(fd: int, views: list[memoryview], offset: int) -> int:
            count = preadv(fd, views, offset)
            self.calls.append(("read", offset - RECORD_BYTES, count))
            return count

        monkeypatch.setattr(part_files, "_madvise", populate)
        monkeypatch.setattr(os, "preadv", read_at)


@pytest.mark.parametrize("result", [None, -1])
def test_new_memory_is_populated_before_each_read_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: int | None
) -> None:
    """Also by an older kernel, which refuses that."""
    mega, size = 1 << 20, (5 << 20) + 1000
    part_files.overwrite(tmp_path / "a", part(1), Body(0, [memoryview(os.urandom(size))]))
    made = Populations(monkeypatch, result)
    monkeypatch.setattr(part_files, "_PARALLEL_BYTES", 1)
    monkeypatch.setattr(part_files, "_SLICE_BYTES", 4 * mega)
    monkeypatch.setattr(part_files, "side_by_side", lambda *calls: [call() for call in calls])
    part_files.read(tmp_path / "a", part(1), threads=True)
    # The slice after these is smaller.
    assert [(kind, at) for kind, at, _ in made.calls if at < 4 * mega] == [
        (kind, at * mega) for at in range(4) for kind in ("populate", "read")
    ]
    assert [count for kind, at, count in made.calls if kind == "populate"][:4] == [mega] * 4


def test_population_includes_both_ends_of_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def madvise(address: int, size: int, _: int) -> int:
        calls.append((address, size))
        return 0

    monkeypatch.setattr(part_files, "_madvise", madvise)
    view = part_files.allocated(8 << 20)
    part_files.populate(view[:0])
    part_files.populate(view[: 1 << 19])
    assert not calls, "small memory costs few page faults"
    part_files.populate(view)
    part_files.populate(view[5000 : (4 << 20) + 1])
    [(first, _), (page, size)] = calls
    assert page == first + mmap.PAGESIZE
    assert page + size == first + (4 << 20) + 1


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("at", [RECORD_BYTES, RECORD_BYTES + 40, RECORD_BYTES + 70, -1])
def test_threads_detect_a_changed_byte(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a"
    part_files.overwrite(path, part(1), body(1, 200))
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptSnapshot, match="checksum mismatch"):
        part_files.read(path, part(1), threads=True)


@pytest.mark.usefixtures("small_slices")
def test_file_that_becomes_shorter_during_a_read_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a"
    part_files.overwrite(path, part(1), body(1, 200))
    steps = part_files.reading(path, part(1), threads=True)
    next(steps)
    os.truncate(path, RECORD_BYTES + 100)
    with pytest.raises(CorruptSnapshot, match="ends after 64 of 203 bytes"):
        list(steps)


@pytest.mark.usefixtures("small_slices")
def test_process_that_can_start_no_thread_copies_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that ends: the copy after an exception is made then."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    part_files.overwrite(tmp_path / "a", part(1), body(1), threads=True)
    assert bytes(part_files.read(tmp_path / "a", part(1), threads=True).views[0][-3:]) == b"end"


def test_expired_versions_are_removed_from_storage(tmp_path: Path) -> None:
    storage = StorageFolder(tmp_path)
    for step in (1, 2, 3):
        storage.store(part(step, SHARED, 1), body(step))
        storage.store(part(step, 0, 1), body(step))
    storage.store(part(4, SHARED, 1), body(4))  # the part of rank 0 is not written yet
    storage.remove_expired(2, Version(4, 7))
    assert {each.version.step for each in storage.parts()} == {2, 3, 4}


def written(storage: StorageFolder, parts: list[Part], keep: int = 2) -> tuple[list[int], str]:
    """Write parts; return the steps that were reported, and the trouble."""
    told: list[int] = []
    write = StorageWrite(storage, [(each, body(9)) for each in parts], keep, told.append)
    write.start()
    write.end()
    return told, write.trouble


def test_complete_versions_alone_are_reported_as_stored(tmp_path: Path) -> None:
    storage = StorageFolder(tmp_path)
    assert written(storage, [part(1, SHARED, 2), part(1, 0, 2)]) == ([], "")
    assert written(storage, [part(1, 1, 2)], keep=0) == ([], "")
    assert written(storage, [part(2, SHARED, 2), part(2, 0, 2)]) == ([1], "")
    told: list[int] = []
    write = StorageWrite(storage, [(part(3, SHARED, 1), body(3))], 2, told.append)
    write.start()
    storage.store(part(3, 0, 1), body(3))  # by another rank, meanwhile
    write.join()
    assert told == [3]


def test_damaged_later_version_is_neither_reported_nor_kept_in_place_of_the_written_one(
    tmp_path: Path,
) -> None:
    """The ranks passed over version 8, whose record is valid, and began before it."""
    storage = StorageFolder(tmp_path)
    storage.store(part(8), body(8))
    for step in (4, 5):
        assert written(storage, [part(step)], keep=1) == ([step], "")
    assert {each.version.step for each in storage.parts()} == {5, 8}
    assert written(storage, [part(9)], keep=1) == ([9], "")
    assert {each.version.step for each in storage.parts()} == {9}


def test_names_of_stored_files_are_on_disk_before_the_end_of_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to("volume")
    StorageFolder(tmp_path / "link").store(part(1), body(1))
    [version] = (tmp_path / "volume").iterdir()
    assert len(synced) == 3
    assert synced[1:] == [version, tmp_path / "volume"]


def test_expired_versions_are_removed_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that is full with abandoned parts holds the next snapshot."""
    storage = StorageFolder(tmp_path)
    storage.store(part(1), body(1))
    for step in (2, 3, 4):
        storage.store(part(step, 0, 2), body(step))
    fallocate = os.posix_fallocate

    def limited(fd: int, offset: int, size: int) -> None:
        if sum(1 for _ in tmp_path.glob("step-*/*")) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    assert written(storage, [part(5)]) == ([5], "")
    assert {each.version.step for each in storage.parts()} == {1, 4, 5}


def test_write_of_a_version_that_is_given_up_waits_for_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_OTHERS_SECONDS", (10 * calls.SILENT_SECONDS,))
    told: list[int] = []
    folder = StorageFolder(tmp_path / "storage")
    writer = calls.StorageWriter(folder, 2, told.append, told.append)
    writer.start([(part(5, SHARED, 2), body(5))])
    writer.give_up()
    assert writer._write is not None
    assert writer._write.has_ended()


def test_part_of_another_node_is_awaited_until_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may have cached that there is none."""
    waits: list[float] = []
    folder = StorageFolder(tmp_path / "storage")

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            folder.store(part(5, ranks=2), body(5))

    monkeypatch.setattr(time, "sleep", wait)
    writer = calls.StorageWriter(folder, 2, print, print)
    assert writer.unseen(Version(5, 7)) == ""
    assert len(waits) == 3
    assert "needs a folder that all nodes share" in writer.unseen(Version(6, 7))
    assert len(waits) == 3 + len(calls._CACHE_SECONDS)


def functions_of_the_main_thread() -> list[str]:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    names = []
    at: Any = frame
    while at is not None:
        names.append(at.f_code.co_name)
        at = at.f_back
    return names


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """Let SIGUSR1 raise KeyboardInterrupt; return a list with an entry for each."""
    found: list[int] = []

    def interrupt(signum: int, _: object) -> None:
        found.append(signum)
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGUSR1, interrupt)
    yield found
    signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupted_caller_returns_only_once_no_thread_writes(
    interrupts: list[int], number: int
) -> None:
    """Such as by a handler of SIGTERM that raises; also again, during the wait for the end."""
    written: list[int] = []

    def write() -> None:
        for at, function in enumerate(("result", "end")[:number], 1):
            until(lambda name=function: {name, "wait"} <= set(functions_of_the_main_thread()))  # type: ignore[misc]
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda at=at: len(interrupts) == at)  # type: ignore[misc]
        until(lambda: {"end", "wait"} <= set(functions_of_the_main_thread()))
        written.append(1)

    with pytest.raises(KeyboardInterrupt):
        part_files.side_by_side(lambda: None, write)
    assert (written, len(interrupts)) == ([1], number)


def test_interrupted_caller_waits_for_no_thread_that_did_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        part_files.side_by_side(lambda: called.append(0), lambda: called.append(1))
    assert called == []


def test_thread_that_begins_after_the_caller_was_interrupted_calls_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []
    late: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        late.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        part_files.side_by_side(lambda: called.append(0), lambda: called.append(1))
    start(late[0])
    late[0].join(PATIENCE_SECONDS)
    assert called == []


def own(step: int, rank: int = 0, ranks: int = 1) -> Part:
    return Part(Version(step, 7), rank, ranks, step - 1)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_buffer_costs_no_other_one_with_the_same_part(tmp_path: Path) -> None:
    """The own part of a regular snapshot is in a buffer of its step, too."""
    memory = MemoryBuffers(tmp_path, 0)
    memory.commit_own(own(1), body(1))
    memory.commit(own(1), body(1))
    path = memory.parts()[own(1)]
    damage(path)
    memory.damaged(path, own(1))
    other = memory.parts()[own(1)]
    assert other != path
    assert content(other, own(1)) == content(other, own(1))
    memory.damaged(other, own(1))
    assert memory.parts() == {}
    memory.commit(own(2), body(2))
    memory.commit_own(own(2), body(2))
    assert list(memory.parts()) == [own(2)]


def steps_in(folder: Path, name: str) -> set[int]:
    """Return the steps of the parts in the buffers of a name."""
    return {each.version.step for path in folder.glob(f"{name}.[01]") if (each := held(path))}


@pytest.mark.parametrize("regular", [2, 3])
@pytest.mark.parametrize(("name", "rank"), [("shared", SHARED), ("rank-0", 0)])
def test_restored_part_of_a_copy_at_a_stop_leaves_the_snapshot_before_it(
    tmp_path: Path, name: str, rank: int, regular: int
) -> None:
    """In either of two buffers; one of another node's copy, or of the own parts of each step."""
    former = MemoryBuffers(tmp_path, 0)
    for step in range(1, regular + 1):
        former.commit(part(step, rank), body(step))
    memory = MemoryBuffers(tmp_path, 0)
    memory.keep(Version(9, 7))
    assert not memory.restored(part(9, rank))
    memory.seed(part(9, rank), body(9))
    assert steps_in(tmp_path, name) == {regular, 9}


def test_part_newer_than_the_restored_one_is_overwritten_first(tmp_path: Path) -> None:
    """The ranks have passed over it."""
    for order in ((4, 6), (6, 4)):
        former = MemoryBuffers(tmp_path, 0)
        for step in order:
            former.commit(part(step, 0), body(step))
        memory = MemoryBuffers(tmp_path, 0)
        memory.keep(Version(5, 7))
        memory.seed(part(5, 0), body(5))
        assert steps_in(tmp_path, "rank-0") == {4, 5}


def test_own_part_of_the_last_step_stays_if_a_snapshot_is_given_up(tmp_path: Path) -> None:
    memory = MemoryBuffers(tmp_path, 0)
    for step in (1, 8):
        memory.commit_own(own(step), body(step))
    memory.keep(Version(6, 7))
    memory.commit_own(own(9), body(9))
    assert steps_in(tmp_path, "own-0") == {8, 9}


def test_copies_of_other_ranks_steps_are_no_own_parts_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_OWN_SECONDS", 0.0)
    memory = MemoryBuffers(tmp_path, 0, local_ranks=1)
    shared = part(9, SHARED, 2)
    ReplicaBuffers(tmp_path).commit_step(shared._replace(rank=1), body(9))
    assert not memory.commit_at_stop(shared, body(9), Version(1, 7), 1.0)
    memory.commit_own(shared._replace(rank=0), body(9))
    assert memory.commit_at_stop(shared, body(9), Version(1, 7), 1.0)
    assert set(memory.parts()) == {shared, *(shared._replace(rank=rank) for rank in (0, 1))}


def test_own_parts_of_each_step_make_room_for_a_snapshot(tmp_path: Path) -> None:
    size = RECORD_BYTES + 3 + 10_000
    limit = 4 * size + 100  # two snapshots of the shared part, and of the own one
    memory = MemoryBuffers(tmp_path, 0, limit)
    other = MemoryBuffers(tmp_path, 1, limit)
    small = RECORD_BYTES + 3 + 10
    other.commit_own(own(1, 1, 2), body(1, 10))
    memory.commit_own(own(1, 0, 2), body(1, 10))
    ReplicaBuffers(tmp_path).commit_step(own(1, 1, 2), body(1, 10))
    for step in (1, 2):
        memory.commit(own(step, 0, 2), body(step, 10_000))
        memory.commit(part(step, SHARED, 2), body(step, 10_000))
    assert 4 * size + 2 * small > limit
    assert {path.name for path in tmp_path.glob("*.[01]")} == {
        f"{name}.{index}" for name in ("rank-0", "shared") for index in (0, 1)
    }
    with pytest.raises(NoRoom):
        memory.commit_own(own(3, 0, 2), body(3, 10))
    memory.commit(own(3, 0, 2), body(3, 10_000))
    with pytest.raises(NoRoom):
        memory.commit(part(3, SHARED, 2), body(3, 20_000))


def test_small_views_are_joined_in_bounded_pieces() -> None:
    views = [memoryview(bytes([n % 251]) * 4096) for n in range(5000)]
    views.insert(4500, memoryview(bytes(1 << 20)))
    joined = list(part_files._joined(views))
    assert b"".join(joined) == b"".join(views)
    assert [view.nbytes for view in joined] == [16 << 20, 404 * 4096, 1 << 20, 500 * 4096]


def test_copies_of_other_ranks_steps_make_room_for_the_own_parts(tmp_path: Path) -> None:
    size = RECORD_BYTES + 3 + 10_000
    memory = MemoryBuffers(tmp_path, 0, 2 * size + 100)
    ReplicaBuffers(tmp_path).commit_step(own(1, 1, 2), body(1, 10_000))
    for step in (1, 2):
        memory.commit_own(own(step, 0, 2), body(step, 10_000))
    assert {path.name for path in tmp_path.glob("*.[01]")} == {"own-0.0", "own-0.1"}


def test_copy_at_a_stop_waits_for_own_parts_of_ranks_that_are_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_OWN_SECONDS", PATIENCE_SECONDS)
    node, behind = MemoryBuffers(tmp_path, 0, 0, 2), MemoryBuffers(tmp_path, 1, 0, 2)
    node.commit_own(own(2, 0, 2), body(2))
    looks: list[int] = []

    def has_own_parts(*arguments: Any) -> bool:
        looks.append(1)
        if len(looks) == 3:
            behind.commit_own(own(2, 1, 2), body(2))
        return agreement.has_own_parts(*arguments)

    monkeypatch.setattr(buffers, "has_own_parts", has_own_parts)
    shared = part(2, SHARED, 2)
    assert node.commit_at_stop(shared, body(2), Version(1, 7), PATIENCE_SECONDS)
    assert shared in node.parts()


def test_copy_at_a_stop_waits_for_own_parts_half_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def taken(seconds: float, _: Callable[[], bool]) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setattr(buffers, "true_within", taken)
    node = MemoryBuffers(tmp_path, 0, 0, 2)
    for seconds in (9.0, 0.2):
        assert not node.commit_at_stop(part(2, SHARED, 2), body(2), Version(1, 7), seconds)
    assert waits == [0.5, 0.2]


def test_regular_copy_writes_nothing_while_another_worker_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers in one buffer would damage it."""
    monkeypatch.setattr(buffers, "_LOCK_SECONDS", 0.0)
    first, second = MemoryBuffers(tmp_path, 0), MemoryBuffers(tmp_path, 1)
    with second._locked(0.0):
        with pytest.raises(OSError, match="another worker of this node does not end its copy"):
            first.commit(part(1), body(1))
        assert first.parts() == {}
    first.commit(part(1), body(1))
    assert list(first.parts()) == [part(1)]


def test_regular_copies_wait_once_for_a_worker_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def taken(seconds: float, condition: Callable[[], bool]) -> bool:
        waits.append(seconds)
        return condition()

    monkeypatch.setattr(buffers, "true_within", taken)
    first, second = MemoryBuffers(tmp_path, 0), MemoryBuffers(tmp_path, 1)
    with second._locked(0.0):
        for step in (1, 2):
            with pytest.raises(OSError, match="does not end its copy"):
                first.commit(part(step), body(step))
    for step in (3, 4):
        first.commit(part(step), body(step))
    assert waits == [0.0, 10.0, 0.0, 0.0, 10.0]


@pytest.mark.parametrize("is_taken", [False, True])
def test_interrupted_wait_leaves_neither_lock_nor_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Such as by a handler of SIGTERM that raises, also once the lock is taken."""
    real, descriptors = buffers._is_taken, []

    def interrupted(descriptor: int) -> bool:
        descriptors.append(descriptor)
        assert not is_taken or real(descriptor)
        raise KeyboardInterrupt

    monkeypatch.setattr(buffers, "_is_taken", interrupted)
    with pytest.raises(KeyboardInterrupt), MemoryBuffers(tmp_path, 0)._locked(0.0):
        pass
    assert not buffers._locks & set(descriptors)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    monkeypatch.undo()
    with MemoryBuffers(tmp_path, 1)._locked(0.0) as is_locked:
        assert is_locked


def test_regular_copy_is_written_where_no_file_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    memory = MemoryBuffers(tmp_path, 0)
    memory.commit(part(1), body(1))
    assert list(memory.parts()) == [part(1)]
    assert not memory.commit_at_stop(part(2), body(2), Version(1, 7), 1.0)


LEAVES_A_FORK = """
import os, signal, sys
from pathlib import Path
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
with MemoryBuffers(Path(sys.argv[1]), 0)._locked(0.0) as is_locked:
    assert is_locked
    pid = os.fork()
    if pid == 0:
        os.close(1)
        signal.pause()
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_worker_leaves_no_lock_to_its_fork(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LEAVES_A_FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pid = int(run.stdout)
    try:
        with MemoryBuffers(tmp_path, 1)._locked(PATIENCE_SECONDS) as is_locked:
            assert is_locked
    finally:
        os.kill(pid, signal.SIGKILL)
