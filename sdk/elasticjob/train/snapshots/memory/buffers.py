"""Buffers of snapshots in memory, which are overwritten in place.

Each buffer holds one part, in the format of `part_files`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Part,
    Version,
    buffer_ahead,
    buffer_at_stop,
    buffer_to_overwrite,
    has_own_parts,
)
from elasticjob.train.snapshots.core.replicas import replica_to_overwrite, step_to_overwrite
from elasticjob.train.snapshots.memory.part_files import (
    RECORD_BYTES,
    Body,
    StateChanged,
    held,
    overwrite,
    write_ahead,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUFFERS = 2
_REPLICA = "replica-"
_OWN = "own-"
"""Prefix of the buffers with the own state of a local rank after each step."""
_STEP = "step-"
"""Prefix of the buffers with copies of the own states of ranks on other nodes."""
OWN_BYTES = 1 << 20
"""Maximum size of a rank's own state, of which each call of `save` commits a copy."""
LOCK = "writer-"
"""Prefix of the lock file of a local rank. Closing the file would release the lock."""
_SHARED_LOCK = f"{LOCK}shared"
_LOCK_SECONDS = 10.0
"""Maximum wait of a regular snapshot for the stop copy of another local rank."""
_OWN_SECONDS = 0.5
"""Maximum wait of a stop copy for the own parts of local ranks that are a step behind."""
_POLL_SECONDS = 0.01
_locks: set[int] = set()
"""Descriptors of the locks of shared parts that this process holds: a fork must not keep one."""
_MODE = 0o600
_OF_WORKER = re.compile(r"(?:rank-(?=\d+\.)|own-(?=\d+\.)|reached-)(\d{1,6})(?:\.[01])?")


class NoRoom(OSError):
    """Error of a snapshot that would exceed the job's memory limit.

    Args:
        needed: bytes of two snapshots of this node and of its current replicas of other nodes.
    """

    def __init__(self, needed: int, limit: int) -> None:
        text = (
            f"two snapshots of this node, and its copies for other nodes, take {needed} bytes, the "
            f"job's memoryLimit is {limit}"
        )
        super().__init__(errno.ENOSPC, text)
        self.needed = needed


class LockRefused(OSError):
    """Error of a write while another worker of this node holds the lock of the shared part."""

    def __init__(self) -> None:
        super().__init__(errno.EBUSY, "another worker of this node does not end its copy")


class MemoryBuffers:
    """Buffers of a node in a folder in memory, two for each kind of part (`N` is 0 or 1).

    | name | part | writer |
    |---|---|---|
    | `shared.N` | shared part | local rank 0; at a stop any local rank, under a lock |
    | `rank-LOCAL.N` | own part of a regular snapshot | that local rank |
    | `own-LOCAL.N` | own part of each step, for a stop copy | that local rank |
    | `step-RANK.N` | own part of each step, of a rank on another node | `ReplicaBuffers` |

    Args:
        limit: maximum bytes of two snapshots of the node and its replicas of other nodes; 0 for no
            limit.
        local_ranks: current number of workers on the node; 0 if it is unknown.
    """

    def __init__(self, folder: Path, local_rank: int, limit: int = 0, local_ranks: int = 0) -> None:
        self.folder = folder
        self._local_rank = local_rank
        self._limit = limit
        self._local_ranks = local_ranks
        self._last: dict[str, Part] = {}
        self._held: dict[str, list[Part | None]] = {}
        self._ahead: tuple[Part, int, int] | None = None  # buffer, and number of bytes there
        self._damaged: dict[Path, Part] = {}
        self.is_refused = False
        """True if another worker did not release the lock: the next snapshot does not wait."""

    def parts(self) -> dict[Part, Path]:
        """Return all committed parts on this node, without replicas of regular snapshots."""
        return self._parts(_REPLICA)

    def _parts(self, *others: str) -> dict[Part, Path]:
        """Return the committed parts, without files whose names begin with one of `others`."""
        found: dict[Part, Path] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("*.[01]")):
                part = None if path.name.startswith(others) else held(path)
                if part is not None and self._damaged.get(path) != part:
                    found[part] = path
        return found

    def commit(self, part: Part, body: Body) -> None:
        """Write a part to the buffer that does not have the last one. Raises OSError.

        A shared part is not written if another local rank has made a stop copy of that step or a
        newer one. Raises LockRefused while that rank is writing: two writers would damage a part.
        """
        if part.rank != SHARED:
            self.seed(part, body)
            return
        with self._locked(0.0 if self.is_refused else _LOCK_SECONDS) as is_locked:
            self.is_refused = is_locked is False
            if self.is_refused:  # without any locks there are no copies at a stop
                raise LockRefused
            if buffer_at_stop(self._shared(), part, part.version) is not None:
                self.seed(part, body)

    def seed(self, part: Part, body: Body) -> None:
        """Write a part without the checks of `commit`: a restored one may replace a newer one."""
        ahead = None
        if self._ahead is not None and self._ahead[0] == part:
            ahead, self._ahead = self._ahead, None
        self._replace(self._name(part), part, body, ahead)

    def commit_own(self, part: Part, body: Body) -> None:
        """Write the own part of this rank for a step, and keep that of the previous step.

        Ranks may be a step apart, so a stop copy may need either of the two. A second part of the
        same step replaces the first one. Raises OSError.
        """
        self._replace(f"{_OWN}{self._local_rank}", part, body, in_place=True)

    def _replace(
        self,
        name: str,
        part: Part,
        body: Body,
        ahead: tuple[Part, int, int] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        holds = self._buffers(name)
        index = buffer_to_overwrite(holds, self._last.get(name))
        if in_place and part in holds:
            index = holds.index(part)
        self._make_room(name, index, RECORD_BYTES + body.size)
        holds[index] = None
        self._damaged.pop(self._path(name, index), None)
        is_ahead = ahead == (part, index, body.size)
        overwrite(self._path(name, index), part, body, is_ahead=is_ahead)
        self._last[name] = holds[index] = part

    def write_ahead(
        self, keep: Version | None, part: Part, size: int, offset: int, view: memoryview
    ) -> None:
        """Write a slice of a part that is being received to a buffer of this rank.

        The part is valid only after `seed`. If there is no room, this has no effect, and `seed`
        writes the whole part.

        Args:
            keep: version that the ranks restore if this one turns out to be damaged; None for none.
        """
        if not offset and (part.rank != SHARED or self._local_rank == 0):
            self._ahead = self._begun_ahead(keep, part, size)
        if self._ahead is None or self._ahead[::2] != (part, offset):
            return
        index = self._ahead[1]
        try:
            write_ahead(self._path(self._name(part), index), size, offset, view)
        except OSError:
            self._ahead = None
        else:
            if not offset:
                self._damaged.pop(self._path(self._name(part), index), None)
            self._ahead = part, index, offset + view.nbytes

    def forget_ahead(self) -> None:
        """Discard a part that was written ahead, before the ranks read again."""
        self._ahead = None

    def _begun_ahead(
        self, keep: Version | None, part: Part, size: int
    ) -> tuple[Part, int, int] | None:
        """Free a buffer for a part that is being received; return None if there is no room."""
        name = self._name(part)
        holds = self._buffers(name)
        index = buffer_ahead(holds, keep)
        try:
            self._check_room(name, index, RECORD_BYTES + size)
        except NoRoom:
            return None
        holds[index] = None
        return part, index, 0

    def _shared(self) -> list[Part | None]:
        """Return the parts in the shared buffers, also those that another local rank wrote."""
        return [held(self._path("shared", index)) for index in range(BUFFERS)]

    def commit_at_stop(self, part: Part, body: Body, keep: Version, seconds: float) -> bool:
        """Write a shared part as a stop copy, unless the node has that step or a newer one.

        Any local rank may call it; the others wait up to `seconds`. Returns True if the node then
        has the step. Returns False if the lock is not released in time, or if the snapshot has own
        parts and that of a local rank is missing after `_OWN_SECONDS`. Raises OSError, or
        StateChanged.

        Args:
            keep: version that is not overwritten: the newest one of all ranks.
        """
        deadline = time.monotonic() + seconds

        def has_own() -> bool:
            return has_own_parts(part, self._parts(_REPLICA, _STEP), self._local_ranks)

        # No rank overwrites them: it would be two steps ahead of this one.
        if part.ranks and not true_within(min(seconds, _OWN_SECONDS), has_own):
            return False
        with self._locked(max(0.0, deadline - time.monotonic())) as is_locked:
            if not is_locked:
                return False
            index = buffer_at_stop(self._shared(), part, keep)
            if index is not None:
                self._check_room("shared", index, RECORD_BYTES + body.size)
                if body.has_changed():
                    raise StateChanged
                overwrite(self._path("shared", index), part, body, threads=True)
        return True

    @contextlib.contextmanager
    def _locked(self, seconds: float) -> Iterator[bool | None]:
        """Hold the lock of the shared part; False after `seconds`, None without file locks.

        A forked process releases its copy, so that the lock ends with the worker.
        """
        descriptor, is_locked, pid = -1, None, os.getpid()
        try:  # a signal handler may raise an error at any point
            with contextlib.suppress(OSError):  # the write to the folder reports the error
                descriptor = open_lock(self.folder / _SHARED_LOCK)
                _locks.add(descriptor)
                is_locked = true_within(seconds, functools.partial(_is_taken, descriptor))
            yield is_locked
        finally:
            if descriptor >= 0 and pid == os.getpid():  # a fork has closed it
                _unlock(descriptor)

    def _make_room(self, name: str, index: int, size: int) -> None:
        """Raise NoRoom if a buffer of another size would exceed the limit.

        If necessary, the own parts of each step are removed first; there is no stop copy then.
        """
        try:
            self._check_room(name, index, size)
        except NoRoom:
            # An own part replaces copies of other nodes alone.
            prefixes = (_STEP,) if name.startswith(_OWN) else (_OWN, _STEP)
            found = [path for each in prefixes for path in self.folder.glob(f"{each}*.[01]")]
            if not found:
                raise
            for path in found:
                _remove(path)
            if _OWN in prefixes:
                self._held.pop(f"{_OWN}{self._local_rank}", None)
            self._check_room(name, index, size)

    def _check_room(self, name: str, index: int, size: int) -> None:
        """Raise NoRoom if a buffer of another size would exceed the limit.

        Buffers of former workers are removed before the second snapshot of a round.
        """
        before = _size_of(self._path(name, index))
        if not self._limit or before == size:
            return
        sizes, present, copies = {name: size}, size - before, 0
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.[01]"):
                held_bytes = _size_of(path)
                if path.name.startswith(_REPLICA):
                    copies += held_bytes
                    continue
                present += held_bytes
                if not is_former(path, self._local_ranks):
                    sizes[path.stem] = max(sizes.get(path.stem, 0), held_bytes)
        needed = max(BUFFERS * sum(sizes.values()), present) + copies
        if needed > self._limit:
            raise NoRoom(needed, self._limit)

    def remove_former(self, keep: Version | None = None) -> None:
        """Remove the parts of local ranks that no longer exist, except those of version `keep`."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*-*"):
                if is_former(path, self._local_ranks):
                    part = held(path)
                    is_kept = part is not None and part.version == keep
                    if keep is None or (path.suffix and not is_kept):
                        _remove(path)

    def restored(self, part: Part) -> bool:
        """Keep a part until the next one is committed; return False if no buffer here holds it."""
        name = self._name(part)
        if part not in self._buffers(name):
            return False
        self._last[name] = part
        return True

    def keep(self, version: Version) -> None:
        """Keep the parts of a version that all ranks have until the next ones are committed.

        If the regular buffers lack its part, as for a stop copy, keep that of the snapshot before.
        """
        for name in ("shared", f"rank-{self._local_rank}", f"{_OWN}{self._local_rank}"):
            parts = [part for part in self._buffers(name) if part is not None]
            newest = max((part for part in parts if part.version <= version), default=None)
            # Of the own parts of each step the last one, which a stop may need, is newer.
            is_regular = not name.startswith(_OWN)
            if newest is not None and (is_regular or newest.version == version):
                self._last[name] = newest

    def damaged(self, path: Path, part: Part) -> None:
        """Overwrite this buffer next, which failed its check; another one may have its part too."""
        self._damaged[path] = part
        self._buffers(path.stem)[int(path.suffix[1:])] = None

    def _name(self, part: Part) -> str:
        return "shared" if part.rank == SHARED else f"rank-{self._local_rank}"

    def _path(self, name: str, index: int) -> Path:
        return self.folder / f"{name}.{index}"

    def _buffers(self, name: str) -> list[Part | None]:
        """Return the parts in the buffers of a name, which no other process writes."""
        if name not in self._held:
            self._held[name] = [held(self._path(name, index)) for index in range(BUFFERS)]
        return self._held[name]


class ReplicaBuffers:
    """Copies of ranks' parts in the folder of a node: buffers named `replica-RANK.N`, and those of
    the own parts of each step, `step-RANK.N`, which `MemoryBuffers` lists.

    Those of one rank are written by one process. `local_ranks` is as for `MemoryBuffers`.
    """

    def __init__(self, folder: Path, local_ranks: int = 0) -> None:
        self.folder = folder
        self._local_ranks = local_ranks

    def parts(self) -> dict[Part, Path]:
        """Return all committed copies on this node."""
        paths = sorted(self.folder.glob(f"{_REPLICA}*"))
        return {part: path for path in paths if (part := held(path)) is not None}

    def commit(self, part: Part, body: Body, keep: Version | None) -> None:
        """Write a copy beside the one of version `keep`. Raises OSError."""
        overwrite(self.target(part, keep), part, body)

    def commit_step(self, part: Part, body: Body) -> None:
        """Write a copy of a rank's own part of a step, beside that of the step before.

        Without room, or where a newer one is, it has no effect.
        """
        paths = [self.folder / f"{_STEP}{part.rank}.{index}" for index in range(BUFFERS)]
        index = step_to_overwrite([held(path) for path in paths], part)
        if index is None:
            return
        is_new = _size_of(paths[index]) != RECORD_BYTES + body.size
        if not is_new or RECORD_BYTES + body.size <= self.free_bytes():
            with contextlib.suppress(OSError):
                overwrite(paths[index], part, body)

    def remove_steps(self, keep: Version | None) -> None:
        """Remove the copies of steps that are not of version `keep`."""
        for path in self.folder.glob(f"{_STEP}*"):
            part = held(path)
            if part is None or part.version != keep:
                _remove(path)

    def remove(self, path: Path) -> None:
        _remove(path)

    def room_for(self, part: Part, keep: Version | None) -> int:
        """Return the largest size of a copy: the free memory and that of the overwritten buffer."""
        return self.free_bytes() + _size_of(self.target(part, keep))

    def free_bytes(self) -> int:
        """Return the memory that is free for a copy; the second buffers of snapshots come first."""
        found = os.statvfs(self.folder)
        sizes: dict[str, list[int]] = {}
        for path in self.folder.glob("*.[01]"):
            with contextlib.suppress(OSError):
                if path.name.startswith(_REPLICA) or is_former(path, self._local_ranks):
                    continue
                if size := path.stat().st_size:  # else there was no room for it
                    sizes.setdefault(path.stem, []).append(size)
        reserved = sum(each[0] for each in sizes.values() if len(each) == 1)
        return found.f_bavail * found.f_frsize - reserved

    def target(self, part: Part, keep: Version | None) -> Path:
        """Return the buffer that the next copy of this rank's part overwrites."""
        rank = "shared" if part.rank == SHARED else str(part.rank)
        paths = [self.folder / f"{_REPLICA}{rank}.{index}" for index in range(BUFFERS)]
        return paths[replica_to_overwrite([held(path) for path in paths], keep)]


def is_former(path: Path, local_ranks: int) -> bool:
    """Return True for a file of a worker that its node had more than `local_ranks`."""
    match = _OF_WORKER.fullmatch(path.name)
    return match is not None and 0 < local_ranks <= int(match[1])


def open_lock(path: str | Path) -> int:
    """Open the file of a lock, created if it is missing; return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)


def true_within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Call a function, such as one that takes a lock, until it returns True; return False after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_taken(descriptor: int) -> bool:
    """Take the lock; return False if another process or thread has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Free the lock, also one that is not held, and close its descriptor."""
    with contextlib.suppress(OSError):  # a file system without locks
        # A fork by native code runs no fork handler, so it has the descriptor too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _locks.discard(descriptor)
    os.close(descriptor)


def _leave_locks() -> None:
    """Give up the locks in a fork, where their holder does not run."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_leave_locks)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108


def _size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
