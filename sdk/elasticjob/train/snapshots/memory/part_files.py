"""File with one part of a snapshot: a record of 64 bytes and a body.

The record names the part and has the sizes and checksums; it is written last, in one call, so a
file with a valid record is complete. Before a file is overwritten its record is erased.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import operator
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.train.snapshots.core.agreement import Part, fields_of, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

RECORD_BYTES = 64
MAGIC = b"EJSNAP01"
"""Name and number of the format. A later format has another number, in the same place."""
_NUMBER_AT = 6
_RECORD = struct.Struct("<8sQQiIqQQI")
_CHECK = struct.Struct("<I")
_MAX_VIEWS = 256
"""Number of memory ranges in one call; POSIX guarantees 16, Linux 1024."""
_MODE = 0o600
_SMALL_BYTES = 1 << 12
"""Maximum size of a memory range that is cheaper to copy than to write in a call of its own."""
_SLICE_BYTES = 1 << 26
"""Maximum number of bytes in one call to storage: a long call is then not due to its size."""
_LARGE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
"""Memory that is populated, or written, before its next use: it is then still in the processor's
cache."""
_MADV_POPULATE_WRITE = 23
_PARALLEL_BYTES = 1 << 24
"""Minimum size of a content in memory that several threads read or write."""


class CorruptSnapshot(Exception):
    """Snapshot that is incomplete or damaged, or whose file cannot be read."""


class NewerFormat(CorruptSnapshot):
    """Snapshot of a newer version of the library."""


class StateChanged(Exception):
    """State that was changed while it was copied."""


class Body(NamedTuple):
    """Content of a part: a description of `head_bytes` bytes and the data, in consecutive views.

    `checksum` is that of the record with which the content was read and verified; otherwise None.
    A copy with it as its own is damaged, not valid, if the content has changed in between.
    `has_changed` returns True once the views no longer hold the values to write.
    """

    head_bytes: int
    views: Sequence[memoryview]
    checksum: int | None = None
    has_changed: Callable[[], bool] = bool

    @property
    def size(self) -> int:
        return sum(view.nbytes for view in self.views)

    def contiguous(self) -> memoryview:
        """Return the content in one writable view: its own if it has no other."""
        if len(self.views) == 1 and not self.views[0].readonly:
            return self.views[0]
        return memoryview(bytearray().join(self.views))


def allocated(size: int) -> memoryview:
    """Return writable memory. To zero a large `bytearray` would stop the other threads.

    Page faults of shared memory would take half as long again. Huge pages are not asked for: on a
    machine with fragmented memory the kernel took two seconds to find 800 MB of them.
    """
    if size < _LARGE_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def populate(view: memoryview) -> None:
    """Let the kernel, from Linux 5.14 on, provide new memory in one call, not by page faults."""
    if view.nbytes < _LARGE_BYTES:
        return
    first = ctypes.addressof(ctypes.c_char.from_buffer(view))
    page = first // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(page, first + view.nbytes - page, _MADV_POPULATE_WRITE)


def _libc_madvise() -> Callable[[int, int, int], int]:
    """Return the function of the C library: that of an `mmap` keeps Python's lock meanwhile."""
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


_madvise = _libc_madvise()


def pack_record(part: Part, body: Body) -> bytes:
    """Encode the record of a part."""
    checksum = body.checksum
    if checksum is None:
        checksum = functools.reduce(lambda found, view: zlib.crc32(view, found), body.views, 0)
    record = _RECORD.pack(MAGIC, *fields_of(part), body.head_bytes, body.size, checksum)
    return (record + _CHECK.pack(zlib.crc32(record))).ljust(RECORD_BYTES, b"\0")


def joined_checksum(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two contents in a row, the second of `size` bytes, from theirs.

    A zero bit behind a content is a linear map of its checksum, here by its columns. Its powers
    follow by squaring.
    """
    zeros = [0xEDB88320, *(1 << bit for bit in range(31))]  # the polynomial, and shifts

    def mapped(value: int) -> int:
        return functools.reduce(
            operator.xor, (column for bit, column in enumerate(zeros) if value >> bit & 1), 0
        )

    bits = size * 8
    while bits:
        first = mapped(first) if bits & 1 else first
        zeros, bits = [mapped(column) for column in zeros], bits >> 1
    return first ^ second


def _unpack_record(record: bytes) -> tuple[Part, int, int, int] | None:
    """Return part, size of the description, size of the body and checksum; None if invalid."""
    if len(record) < RECORD_BYTES:
        return None
    if _CHECK.unpack_from(record, _RECORD.size)[0] != zlib.crc32(record[: _RECORD.size]):
        return None
    magic, step, gang, rank, ranks, before, head, size, checksum = _RECORD.unpack_from(record)
    if magic != MAGIC or head > size:
        return None
    return part_of(step, gang, rank, ranks, before), head, size, checksum


def held(path: Path) -> Part | None:
    """Return the part that is committed in a file; None if there is none."""
    try:
        return committed(path)
    except (OSError, CorruptSnapshot):
        return None


def committed(path: Path) -> Part:
    """Return the part that is committed in a file. Raises OSError, or CorruptSnapshot for none."""
    with opened(path, os.O_RDONLY) as fd:
        return read_record(fd, path)[0]


def read_record(fd: int, path: Path) -> tuple[Part, int, int, int]:
    """Return the fields of a record as `_unpack_record` does. Raises CorruptSnapshot."""
    record = os.pread(fd, RECORD_BYTES, 0)
    number = record[_NUMBER_AT : len(MAGIC)]
    is_ours = record[:_NUMBER_AT] == MAGIC[:_NUMBER_AT] and number.isdigit()
    if is_ours and number > MAGIC[_NUMBER_AT:]:
        raise NewerFormat(
            f"{path} has format {number.decode()} of snapshots, and this version of the elasticjob "
            f"library reads format {MAGIC[_NUMBER_AT:].decode()}: install the version that wrote it"
        )
    found = _unpack_record(record)
    if found is None:
        raise CorruptSnapshot(f"{path} has no valid record")
    size, total = os.fstat(fd).st_size, RECORD_BYTES + found[2]
    if size != total:
        raise CorruptSnapshot(f"{path} must have {total} bytes, and has {size}")
    return found


def no_report() -> None:
    """Report no progress."""


def read(
    path: Path, part: Part, moved: Callable[[], None] = no_report, *, threads: bool = False
) -> Body:
    """Read a committed part; raise CorruptSnapshot if the file does not hold exactly that.

    `moved` is called after each slice is read and added to the checksum.
    """
    steps = reading(path, part, threads=threads)
    body, _ = next(steps)
    for _ in steps:
        moved()
    return body


def reading(path: Path, part: Part, *, threads: bool = False) -> Iterator[tuple[Body, int]]:
    """Yield the body of a committed part, and how many of its bytes are read so far.

    It is verified once the iteration has ended. Raises CorruptSnapshot as `read` does.

    Args:
        threads: read each slice of a large part with several threads.
    """
    try:
        with opened(path, os.O_RDONLY) as fd:
            found, head, size, checksum = read_record(fd, path)
            if found != part:
                raise CorruptSnapshot(f"{path} holds no complete snapshot of step {part[0].step}")
            view = allocated(size)
            body = Body(head, [view], checksum)
            yield body, 0
            done = found_checksum = 0
            slices = _slices_in_parallel if threads and size >= _PARALLEL_BYTES else _slices
            for done, found_checksum in slices(fd, view):  # noqa: B007
                yield body, done
            if done < size:
                raise CorruptSnapshot(f"{path} ends after {done} of {size} bytes")
    except OSError as error:
        raise CorruptSnapshot(f"{path} cannot be read: {error.strerror}") from error
    if found_checksum != checksum:
        raise CorruptSnapshot(f"{path}: checksum mismatch")


def _slices(fd: int, view: memoryview) -> Iterator[tuple[int, int]]:
    """Read the content of a file; yield the number of bytes so far and their checksum."""
    done = checksum = 0
    while done < view.nbytes:
        count = os.preadv(fd, [view[done : done + _SLICE_BYTES]], RECORD_BYTES + done)
        if not count:
            return
        checksum = zlib.crc32(view[done : done + count], checksum)
        done += count
        yield done, checksum


def _slices_in_parallel(fd: int, view: memoryview) -> Iterator[tuple[int, int]]:
    """Read as `_slices` does; the checksum of each slice is calculated during the next read."""
    done = checksum = 0
    before = view[:0]
    while done < view.nbytes:
        first = view[done : done + _SLICE_BYTES // 2]
        second = view[done + first.nbytes : done + _SLICE_BYTES]
        *counts, checksum = side_by_side(
            functools.partial(_read_at, fd, first, RECORD_BYTES + done),
            functools.partial(_read_at, fd, second, RECORD_BYTES + done + first.nbytes),
            functools.partial(zlib.crc32, before, checksum),
        )
        if counts != [first.nbytes, second.nbytes]:
            return
        before = view[done : done + sum(counts)]
        done += before.nbytes
        if done < view.nbytes:
            yield done, checksum
    yield done, zlib.crc32(before, checksum)


def _read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read up to the end of new memory or of the file; return the number of bytes."""
    done = 0
    while done < view.nbytes:
        part = view[done : done + _PIECE_BYTES]
        populate(part)
        count = os.preadv(fd, [part], offset + done)
        if not count:
            break
        done += count
    return done


class _Beside:
    """Call of a function in a thread beside a caller that a signal handler may interrupt.

    Each attribute is set once, by one thread: an interrupted caller can end its wait again.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._has_begun = self._is_given_up = False
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self) -> bool:
        """Start the thread; return False if none can start, as at the end of the process."""
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        self._has_begun = True
        try:
            if not self._is_given_up:
                self._result = self._function()
        except BaseException as error:  # raised by `result`
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Any:
        """Wait for the end of the started function; return its result or raise its error."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def end(self) -> None:
        """Wait until the function has ended; it does not begin any more."""
        self._is_given_up = True
        if self._has_begun:
            self._ended.wait()


def side_by_side(first: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
    """Call functions, all but the first in threads; return their results once all have ended.

    Raises the first error, also that of a signal handler, once none of them runs. Where no thread
    can start the functions are called one after another.
    """
    beside = [_Beside(function) for function in others]
    try:
        has_thread = [each.start() for each in beside]
        results = [first()]
        for each, function, is_started in zip(beside, others, has_thread):
            results.append(each.result() if is_started else function())
        return results
    finally:
        _end_all(beside)


def _end_all(beside: Sequence[_Beside]) -> None:
    try:
        for each in beside:
            each.end()
    except BaseException:  # of a signal handler
        _end_all(beside)
        raise


def overwrite(
    path: Path,
    part: Part,
    body: Body,
    *,
    is_ahead: bool = False,
    threads: bool = False,
) -> None:
    """Replace the content of a buffer. If it fails, the buffer holds nothing.

    Raises OSError, and StateChanged if the content of the body has changed meanwhile.

    `is_ahead`: the content is there already, by `write_ahead`; a verified checksum of the body then
    detects any difference at the next read. `threads`: write a large content with several threads,
    as nothing else runs.
    """
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        if is_ahead and body.checksum is not None:
            os.pwrite(fd, pack_record(part, body), 0)
            return
        erase(fd)
        try:
            _fill(fd, part, body, threads)
        except (OSError, StateChanged):
            os.ftruncate(fd, 0)
            raise


def write_ahead(path: Path, size: int, offset: int, view: memoryview) -> None:
    """Write a slice of a body of `size` bytes to a buffer; the first one erases the record.

    If it fails, the buffer holds nothing.
    """
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        try:
            if not offset:
                erase(fd)
                allocate(fd, RECORD_BYTES + size)
            written(fd, [view], RECORD_BYTES + offset)
        except OSError:
            os.ftruncate(fd, 0)
            raise


def erase(fd: int) -> None:
    """Erase the record of a buffer, before its content is replaced."""
    if os.fstat(fd).st_size >= RECORD_BYTES:
        os.pwrite(fd, bytes(RECORD_BYTES), 0)


def allocate(fd: int, total: int) -> None:
    """Allocate all of a file: OSError for a full file system, instead of a signal later."""
    if os.fstat(fd).st_size != total:
        os.ftruncate(fd, total)
        os.posix_fallocate(fd, 0, total)


def _fill(fd: int, part: Part, body: Body, threads: bool) -> None:
    allocate(fd, RECORD_BYTES + body.size)
    if threads and body.size >= _PARALLEL_BYTES:
        first, second = _halves(body.views)
        size = sum(view.nbytes for view in second)
        one, other = side_by_side(
            functools.partial(_checked, fd, first, RECORD_BYTES),
            functools.partial(_checked, fd, second, RECORD_BYTES + body.size - size),
        )
        if body.checksum is None:
            body = body._replace(checksum=joined_checksum(one, other, size))
    else:
        offset = RECORD_BYTES
        for at in range(0, len(body.views), _MAX_VIEWS):
            offset = written(fd, list(body.views[at : at + _MAX_VIEWS]), offset)
        if body.has_changed():
            raise StateChanged
    packed = pack_record(part, body)
    if body.has_changed():
        raise StateChanged
    os.pwrite(fd, packed, 0)


def _halves(views: Sequence[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """Split views into two lists of nearly the same number of bytes."""
    first: list[memoryview] = []
    left = sum(view.nbytes for view in views) // 2
    for index, view in enumerate(views):
        if view.nbytes > left:
            return [*first, view[:left]], [view[left:], *views[index + 1 :]]
        first.append(view)
        left -= view.nbytes
    return first, []


def _checked(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Write views, in pieces that stay in the processor's cache; return their checksum."""
    checksum = 0
    for view in _joined(views):
        for first in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[first : first + _PIECE_BYTES]
            offset = written(fd, [piece], offset)
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _joined(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the views, small ones in a row in copies of at most 16 MiB."""
    for is_small, group in itertools.groupby(views, lambda view: view.nbytes <= _SMALL_BYTES):
        while some := list(itertools.islice(group, 16 * _MAX_VIEWS if is_small else 1)):
            yield memoryview(b"".join(some)) if is_small else some[0]


def fill_in_slices(fd: int, part: Part, body: Body, moved: Callable[[], None]) -> None:
    """Write a part to an empty file; its content reaches the disk before the next slice begins."""
    os.ftruncate(fd, RECORD_BYTES + body.size)
    offset = RECORD_BYTES
    checksum = 0
    for view in body.views:
        for first in range(0, view.nbytes, _SLICE_BYTES):
            one = view[first : first + _SLICE_BYTES]
            if offset > RECORD_BYTES:
                os.fdatasync(fd)
                moved()
            os.posix_fallocate(fd, offset, one.nbytes)
            offset = written(fd, [one], offset)
            checksum = zlib.crc32(one, checksum)
            moved()
    os.pwrite(fd, pack_record(part, body._replace(checksum=checksum)), 0)


def written(fd: int, views: list[memoryview], offset: int) -> int:
    """Write all views from `offset` on; return the offset behind them."""
    while views:
        count = os.pwritev(fd, views, offset)
        offset += count
        while views and count >= views[0].nbytes:
            count -= views.pop(0).nbytes
        if views and count:
            views[0] = views[0][count:]
    return offset


@contextlib.contextmanager
def opened(path: Path, flags: int, mode: int = _MODE) -> Iterator[int]:
    """Open a path that must not be a link; close its descriptor at the end of the context."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        yield fd
    finally:
        os.close(fd)
