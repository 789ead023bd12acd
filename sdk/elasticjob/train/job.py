"""Interface between `Snapshots` and the job: settings, reports, and records for the next round.

`ELASTICJOB_SNAPSHOTS` has the fields of `recovery.snapshots` as a JSON object. The file `reached-N`
in the node's memory has the last step of local rank N, its next regular snapshot, the reason for
which that step would be lost, the newest snapshot in storage, and the rate of the faults. It
outlives the worker, so that the next round knows the lost steps, and whether the snapshots in
memory are older than those in storage. The launcher's request for a copy at a stop comes over a
socket.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import math
import mmap
import os
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from elasticjob import layout, train
from elasticjob.train.interval import Losses
from elasticjob.train.part_files import opened

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_REACHED = struct.Struct("<qQqQqq")
_CHECK = struct.Struct("<I")
_BYTES = _REACHED.size + _CHECK.size
_LAST = struct.Struct("<qB")
"""Fields after the checksum, absent in files of earlier versions. A partial write is harmless."""
_LOSS_AT = _BYTES + _LAST.size - 1
_LOSSES = struct.Struct("<ddd?")
"""Last fields, absent in files of earlier versions: `Losses`, and True once a restore has counted
the steps that the previous round lost."""
_LOSSES_AT = _BYTES + _LAST.size
_FILE_BYTES = _LOSSES_AT + _LOSSES.size
_MOST = 1e12
"""Maximum plausible value of these fields: a partially written record may have any."""
SOCKET = "asked-"
"""Prefix of the socket's name; the local rank follows."""
ANSWER = struct.Struct("<4sI")
"""Answer to the launcher: `MAGIC`, and the maximum duration of the copy in milliseconds."""
MAGIC = b"EJSC"
REQUEST = struct.Struct("<4sBI")
"""Request of the launcher: `MAGIC`, the kind, and the time in milliseconds after which the launcher
stops this worker in any case."""
AT_ONCE, COPY_AFTER_STEP, END_STEP = range(3)
"""Kinds of requests: copy now; copy after the next `save`; only wait for the next `save`."""
REQUEST_SECONDS = 1.0
"""Maximum wait for the request after a connection; without one, copy at once. Older launchers send
none, and wait twice as long for the answer. A newer one may get no processor time in between."""
_NEVER = layout.NO_STEP
_MODE = 0o600


class JobSettings(NamedTuple):
    """Settings of the job, the defaults of arguments that the script omits; None if absent.

    Args:
        name: namespace and name of the job; empty if it is unknown, as under torchrun.
        memory_bytes: memory of a node for snapshots; 0 without a limit.
        storage: folder of this job.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    replicas: int | None = None
    memory_bytes: int = 0
    storage: str | None = None
    store_seconds: float | None = None
    keep: int | None = None
    name: str = ""


def job_settings(environ: Mapping[str, str]) -> JobSettings:
    """Return the settings in the environment; raise ValueError if they are malformed."""
    text, name = environ.get(layout.SNAPSHOTS, ""), environ.get(layout.JOB, "")
    if not text:
        return JobSettings(name=name)
    try:
        found = json.loads(text)
        storage = found.get("storage") or {}
        return JobSettings(
            found.get("everySteps"),
            found.get("intervalSeconds"),
            found.get("replicas"),
            int(found.get("memoryBytes", 0)),
            storage.get("folder"),
            storage.get("everySeconds"),
            storage.get("keep"),
            name,
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{layout.SNAPSHOTS} must be a JSON object, got {text!r}") from error


def local_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process on its node.

    With `virtual_local_rank` of torch's agent each worker sees one device, and has LOCAL_RANK=0.
    The rank on the node then follows from RANK, if all nodes have the same number of workers.
    """
    given, workers = whole_number(environ, "LOCAL_RANK"), whole_number(environ, "LOCAL_WORLD_SIZE")
    nodes = whole_number(environ, "GROUP_WORLD_SIZE")
    is_uniform = whole_number(environ, "WORLD_SIZE") == workers * nodes
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    if given or workers < 2 or not is_uniform or not devices or "," in devices:
        return given
    place = whole_number(environ, "RANK") - workers * whole_number(environ, "GROUP_RANK")
    return place if place in range(workers) else given


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable; 0 if it is absent or has none."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def refused_memory(environ: Mapping[str, str]) -> OSError | None:
    """Return the error with which the launcher failed to create its folder; None without one."""
    number, _, parent = environ.get(layout.SNAPSHOT_TROUBLE, "").partition(" ")
    if not (number.isascii() and number.isdigit()):
        return None
    return OSError(int(number), os.strerror(int(number)), parent)


class Report:
    """Report of this worker on its snapshots, which the agent reads. Threads may change it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report = layout.SnapshotReport()
        self._storage = 0

    def storage(self, number: int) -> None:
        """Report the errno of a failed write to storage; 0 after a successful one."""
        with self._lock:
            self._storage = number
        self.change()

    def change(self, **fields: int) -> None:
        """Replace fields of the report."""
        with self._lock:
            trouble = fields.pop("trouble", self._report.trouble)
            trouble = layout.with_storage(trouble, self._storage)
            changed = self._report._replace(**fields, trouble=trouble)
            if changed != self._report:
                self._report = changed
                train.link().snapshots(changed)


class Reached(NamedTuple):
    """Last step of a worker, and the mean duration of its steps in nanoseconds."""

    step: int = _NEVER
    step_ns: int = 0


class Answers(Protocol):
    """Object that answers the launcher's requests."""

    def answer(self, link: socket.socket) -> None: ...


class Ended(NamedTuple):
    """Record that a worker of an earlier round left in its `ReachedFile`.

    Args:
        reached: its last step.
        stored: newest snapshots in storage that it knew of.
        due: step of its next regular snapshot; `NO_STEP` if it is unknown.
        loss: `layout.Loss` of its last step.
        losses: faults up to its end.
        is_counted: True if a restore has counted the loss of its last steps.
    """

    reached: Reached
    stored: InStorage
    due: int = _NEVER
    loss: int = layout.Loss.UNKNOWN
    losses: Losses = Losses()
    is_counted: bool = False


class InStorage(NamedTuple):
    """Newest snapshot in storage that a worker knows of.

    Args:
        begun: step of the newest one that the ranks began to store.
        complete: step of the newest one that all ranks have stored.
    """

    begun: int = _NEVER
    complete: int = _NEVER


class ReachedFile:
    """File `reached-N` of this worker; without effect if it cannot be written.

    `begun` and `complete` (see `InStorage`), `due` (step of the next regular snapshot) and `cost`
    (cost of a snapshot in seconds) are written with each step. Threads may set them.
    """

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._path = folder / f"reached-{local_rank}"
        self._memory: mmap.mmap | None = None
        self._first: tuple[int, int] | None = None
        self.begun, self.complete = InStorage()
        self.due = _NEVER
        self._loss: int = layout.Loss.UNKNOWN
        self._losses, self._restored_ns = Losses(), time.monotonic_ns()
        self.cost = 0.0

    def restored(self, losses: Losses) -> None:
        """Record the losses with which a round begins, and measure its time from now on.

        The file has them before the first step, so that a restart up to then does not count the
        same fault again.
        """
        self._losses, self._restored_ns, self.cost = losses, time.monotonic_ns(), losses.cost
        packed = _LOSSES.pack(*losses, True)
        if self._memory is not None:
            self._memory[_LOSSES_AT:] = packed
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size >= _LOSSES_AT:  # not that of an earlier version
                    os.pwrite(fd, packed, _LOSSES_AT)
            finally:
                os.close(fd)

    def write(self, step: int) -> None:
        """Record that `step` is complete."""
        now = time.monotonic_ns()
        if self._first is None:
            self._first = (step, now)
            with contextlib.suppress(OSError, ValueError):
                self._memory = self._mapped()
        if self._memory is not None:
            fields = _REACHED.pack(step, now, *self._first, self.begun, self.complete)
            last = _LAST.pack(min(self.due, layout.MAX_STEP), self._loss)
            seconds = self._losses.seconds + (now - self._restored_ns) / 1e9
            losses = _LOSSES.pack(self._losses.faults, seconds, self.cost, False)
            self._memory[:] = fields + _CHECK.pack(binascii.crc32(fields)) + last + losses

    def would_lose(self, loss: int) -> None:
        """Record the reason for which the last step would be lost if this worker ended now.

        `loss` is a `layout.Loss`. Threads may call this.
        """
        self._loss = loss
        if self._memory is not None:
            self._memory[_LOSS_AT] = loss

    def _mapped(self) -> mmap.mmap:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, _MODE)
        try:
            os.pwrite(fd, bytes(_FILE_BYTES), 0)
            return mmap.mmap(fd, _FILE_BYTES)
        finally:
            os.close(fd)


def ended_on(folder: Path) -> list[Ended]:
    """Return the records of the workers of a node's earlier rounds."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob("reached-*"):
            with contextlib.suppress(OSError):
                ended = _decoded(path.read_bytes())
                if ended is not None:
                    found.append(ended)
    return found


def in_storage_of(folder: Path) -> InStorage:
    """Return the newest snapshot in storage that the workers of a node's earlier rounds knew."""
    found = [InStorage(), *(each.stored for each in ended_on(folder))]
    return InStorage(max(each.begun for each in found), max(each.complete for each in found))


def _decoded(content: bytes) -> Ended | None:
    fields, check = content[: _REACHED.size], content[_REACHED.size : _BYTES]
    if _CHECK.pack(binascii.crc32(fields)) != check:
        return None
    step, at_ns, first, first_ns, *stored = _REACHED.unpack(fields)
    mean_ns = (at_ns - first_ns) // (step - first) if step > first else 0
    found = Ended(Reached(step, mean_ns), InStorage(*stored))
    if len(content) < _BYTES + _LAST.size:
        return found
    due, loss = _LAST.unpack_from(content, _BYTES)
    found = found._replace(due=due, loss=layout.loss_of(loss))
    if len(content) < _FILE_BYTES:
        return found
    *numbers, is_counted = _LOSSES.unpack_from(content, _LOSSES_AT)
    if not all(math.isfinite(each) and 0 <= each < _MOST for each in numbers):
        return found
    return found._replace(losses=Losses(*numbers), is_counted=is_counted)


def lost_since(step: int, reached: Iterable[Reached]) -> dict[str, Any]:
    """Return the fields of a report after a restore of `step`: the steps that are repeated."""
    last = max(reached, default=Reached())
    if last.step < 0:
        return {"restored": step}
    lost = max(0, last.step - step)
    return {"restored": step, "lost": lost, "lost_ms": round(lost * last.step_ns / 1e6)}


def ended_with_error() -> bool:
    """Return True if the program is known to end with an exception.

    The interpreter does not record that of `sys.exit`.
    """
    kind, value, _ = sys.exc_info()  # in the end of a process of multiprocessing
    if kind is None:
        kind = getattr(sys, "last_type", None)
        value = getattr(sys, "last_value", None)
    if kind is None:
        return False
    return not (issubclass(kind, SystemExit) and not getattr(value, "code", 1))


def request_listener(folder: Path, local_rank: int) -> socket.socket:
    """Return a socket in the folder of snapshots for the launcher's requests. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # By its descriptor: the length of a socket's path is limited.
        with opened(folder, os.O_PATH | os.O_DIRECTORY) as held:
            path = f"/proc/self/fd/{held}/{SOCKET}{local_rank}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            listener.bind(path)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def requested(link: socket.socket) -> tuple[int, float]:
    """Return the kind of the request, and the time in seconds until the worker is stopped."""
    link.settimeout(REQUEST_SECONDS)
    data = b""
    with contextlib.suppress(OSError):
        data = link.recv(REQUEST.size)
    link.settimeout(None)
    if len(data) == REQUEST.size:
        magic, kind, milliseconds = REQUEST.unpack(data)
        if magic == MAGIC and kind in (COPY_AFTER_STEP, END_STEP):
            return kind, milliseconds / 1000
    return AT_ONCE, 0.0


def answer_requests(listener: socket.socket, owner: weakref.ReferenceType[Answers]) -> None:
    """Copy the state of `owner` for each connection, until the socket is closed."""
    while True:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        with link, contextlib.suppress(OSError):
            found = owner()
            if found is not None:
                found.answer(link)
            del found


def end_requests(listener: socket.socket, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
    listener.close()
