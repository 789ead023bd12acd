"""Progress reports to ElasticJob, and coordinated checkpoints before a planned stop.

    from elasticjob import train

    train.on_leave(lambda: save(step))          # or should_checkpoint() in the loop
    for step in range(first, steps):
        ...
        train.progress(step, loss=loss)

All calls are optional, and have no effect unless an ElasticJob agent started the script. All ranks
must call `progress` and `should_checkpoint` equally often, at the same points of their loops: this
is how they agree on one step. See docs/training.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import math
import mmap
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from elasticjob import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticjob.train.initialization import skip_initialization
    from elasticjob.train.snapshots import Restored, SnapshotError, Snapshots
    from elasticjob.train.snapshots.core.agreement import RankEndedError

__all__ = [
    "RankEndedError",
    "Restored",
    "SnapshotError",
    "Snapshots",
    "accumulation",
    "checkpointed",
    "on_leave",
    "progress",
    "should_checkpoint",
    "skip_initialization",
]

_MODULES = {
    "RankEndedError": "snapshots.core.agreement",
    "Restored": "snapshots",
    "SnapshotError": "snapshots",
    "Snapshots": "snapshots",
    "skip_initialization": "initialization",
}
"""Modules of this package with the names that need torch or are seldom used."""
_HOLD_SECONDS = 0.002
_MODE = 0o644


def __getattr__(name: str) -> object:
    """Import the modules for training with torch when they are first named."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def progress(step: int, **metrics: float) -> None:
    """Report that `step` is done; costs microseconds. Metrics are numbers, also NaN or infinity.

    Only the first 8 metrics are reported. This call also runs the callbacks of `on_leave`.

    Raises:
        ValueError: `step` is not a whole number from 0 to 2**63 - 1, or a metric is not a number.
    """
    link().progress(step, metrics)


def checkpointed(step: int) -> None:
    """Report that a checkpoint including `step` is complete, so that training can resume from it.

    One rank may report for all. After a requested checkpoint the call waits for the stop, since
    further steps would be lost. Raises ValueError as `progress` does.
    """
    link().checkpointed(step)


def should_checkpoint() -> bool:
    """Return True if the script should save a checkpoint now, before this round's workers stop.

    True at most once per round, on all ranks in the same call: saving may use collectives. The
    call blocks while the ranks agree, and between the checkpoint and the stop.
    """
    return link().should_checkpoint()


def on_leave(callback: Callable[[], object]) -> None:
    """Register `callback`, to be called once before a planned stop of this round's workers.

    `progress` calls it, in its own thread, on all ranks at the same step. It should save a
    checkpoint. Raises ValueError if it is not callable, such as the result of a function.
    """
    link().on_leave(callback)


def accumulation(global_batch: int, micro_batch: int) -> int:
    """Return the number of micro-batches per rank and step for a total of `global_batch` samples.

    Rounded up if they do not divide evenly: the last micro-batches are then smaller or missing.
    """
    if global_batch < 1 or micro_batch < 1:
        raise ValueError(
            f"global_batch and micro_batch must be at least 1, got {global_batch} and {micro_batch}"
        )
    samples = micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
    return -(-global_batch // samples)


class Link:
    """Worker side of the two files of `layout`; has no effect without them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._flags = self._points = self._at_ms = self._first_step_ms = self._checkpoints = 0
        self._step = self._checkpoint_step = self._first_step = layout.NO_STEP
        self._snapshots: layout.SnapshotReport | None = None
        self._reporting = threading.Lock()
        self._metrics: tuple[str, ...] = ()
        self._values = [0.0] * layout.MAX_METRICS
        self._names = layout.pack_names(())
        self._callbacks: list[Callable[[], object]] = []
        self._script_polls = self._has_resumed = False
        self._seconds = 0.0
        self._deadline: float | None = None
        self._asked_at: float | None = None
        self._is_waiting = False  # for an agreement, or a stop
        self._answer = layout.Answer()
        blank = bytes(layout.REPORT_BYTES)
        content = self._content() + blank + layout.pack_answer(self._answer)
        content += bytes(layout.LOSS_BYTES)
        self._progress = _written(environ.get(layout.PROGRESS_FILE, ""), content)
        self._checkpoint_request = _read(environ.get(layout.REQUEST_FILE, ""))

    @property
    def has_agent(self) -> bool:
        """True if an agent reads the reports of this process."""
        return self._progress is not None

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        # Validate without an agent too: an invalid script should fail before it runs in a pod.
        step = whole_step(step)
        if metrics:
            self._measure(metrics)
        if self._progress is None:
            return
        self._step = step
        self._at_ms = int(time.time() * 1000)
        if not self._first_step_ms:
            self.begins(step)
            self._first_step_ms = self._at_ms
            with self._reporting:
                self._write_snapshots()
        # If a script uses both ways to save, `should_checkpoint` takes precedence.
        if not self._callbacks or self._script_polls:
            self._write_progress()
        elif self._point():
            for callback in self._callbacks:
                callback()
            self._wait_for_the_stop()

    def begins(self, step: int) -> None:
        """Record the first completed step: a script may report only each tenth one."""
        if self._first_step < 0:
            self._first_step = step

    def checkpointed(self, step: int) -> None:
        self._checkpoint_step = whole_step(step)
        self._checkpoints += 1
        self._write_progress()
        # Last: with the answer a reader finds the step of the checkpoint, too.
        self._write_answer(self._answer._replace(saved=self._points))
        request = self._request()
        if request is not None and 0 < request.point <= self._points:
            self._wait_for_the_stop()

    def stored(self, step: int) -> bool:
        """Report a checkpoint that was not requested; return True unless there is a request.

        It must not count as the answer.
        """
        if self._progress is None:
            return True
        if self._request() is not None:
            return False
        self._checkpoint_step = max(self._checkpoint_step, step)
        self._write_progress()
        return True

    def should_checkpoint(self) -> bool:
        self._script_polls = True
        return self._progress is not None and self._point()

    def stops_unasked(self, *, in_memory: bool = False) -> bool:
        """Return True before a planned stop if the script itself does not ask for it.

        Args:
            in_memory: the answer is `kept`, for which no end of the whole job waits.
        """
        if self._progress is None or self._script_polls or self._callbacks:
            return False
        return self._point(layout.KEEPS if in_memory else layout.SAVES | layout.REPORTS)

    @property
    def stop_seconds(self) -> float:
        """Time in seconds that is left to save before a planned stop; 0 without one."""
        request = self._request()
        if request is None or self._asked_at is None:
            return 0.0
        return max(0.0, request.seconds - (time.monotonic() - self._asked_at))

    def resumed(self) -> None:
        """Report that the state of a step since the restore is safe from a planned stop."""
        if not self._has_resumed:
            self._has_resumed = True
            self._write_progress()

    def keeps_no_more(self) -> None:
        """Offer no longer to keep the state: this worker passes no further point."""
        if self._flags == layout.KEEPS:
            self._flags = 0
            self._write_progress()

    def kept(self) -> None:
        """Answer the request: the state is complete in memory. Wait for the stop."""
        self._write_answer(self._answer._replace(saved=self._points))
        self._wait_for_the_stop()

    @property
    def awaits_stop(self) -> bool:
        """True once this worker has passed the point of a requested save: it makes no further step.

        Also while it waits for the agreement on that point. Not after a save that has failed, and
        not once the time for the stop is over: training then continues.
        """
        request = self._request()
        if self._is_waiting or request is None:
            return self._is_waiting
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        has_failed = self._answer.failed == request.point
        return 0 < request.point <= self._points and not is_over and not has_failed

    def snapshots(self, report: layout.SnapshotReport) -> None:
        """Report on the snapshots of this worker."""
        with self._reporting:
            self._snapshots = report
            self._write_snapshots()

    def on_leave(self, callback: Callable[[], object]) -> None:
        if not callable(callback):
            raise ValueError(
                f"on_leave must be given a function to call, got {callback!r}: write "
                "on_leave(save), or on_leave(lambda: save(step))"
            )
        self._callbacks.append(callback)
        self._flags = layout.SAVES
        self._write_progress()

    def _measure(self, metrics: Mapping[str, float]) -> None:
        try:
            values = [float(value) for value in metrics.values()]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            values = [_number(name, value) for name, value in metrics.items()]
        names = tuple(metrics)
        if names != self._metrics:
            self._metrics = names
            self._names = layout.pack_names(names[: layout.MAX_METRICS])
        self._values = (values + [0.0] * layout.MAX_METRICS)[: layout.MAX_METRICS]

    def _write_snapshots(self) -> None:
        if self._progress is not None and self._snapshots is not None:
            report = _without_skipped(self._snapshots, self._first_step)
            self._progress[layout.LOSS_START :] = layout.pack_loss(report.loss)
            self._progress[layout.RECORD_BYTES : layout.ANSWER_START] = layout.pack_report(report)

    def _write_progress(self) -> None:
        if self._progress is not None:
            self._progress[: layout.RECORD_BYTES] = self._content()

    def _write_answer(self, answer: layout.Answer) -> None:
        self._answer = answer
        if self._progress is not None:
            place = slice(layout.ANSWER_START, layout.LOSS_START)
            self._progress[place] = layout.pack_answer(answer)

    def _content(self) -> bytes:
        return layout.pack(
            self._flags | (layout.RESUMED if self._has_resumed else 0),
            self._points,
            self._step,
            self._at_ms,
            self._first_step_ms,
            self._checkpoint_step,
            self._checkpoints,
            min(len(self._metrics), layout.MAX_METRICS),
            self._values,
            self._names,
        )

    def _point(self, flags: int = layout.SAVES) -> bool:
        """Pass a point at which all ranks can save; return True if they save here.

        The order matters: write the number of the point, then read the request. The agent writes
        its request, then reads the last point passed. So either this worker sees the request, or
        the agent chooses a later point.
        """
        self._points += 1
        self._flags = flags
        self._write_progress()
        if self._checkpoint_request is None or self._checkpoint_request[0] == layout.BLANK:
            self._asked_at = None
            return False
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        return self._held(self._points)

    def save_failed(self, error: str) -> None:
        """Report that the save at the last point failed on all ranks: none waits for the stop."""
        self._write_answer(self._answer._replace(failed=self._points, error=error))

    def _held(self, point: int) -> bool:
        """Wait for the ranks' agreement and, after the agreed point, for the stop.

        Returns True at the agreed point. The wait is limited: without a stop, training continues.
        A request is withdrawn once the stop is in progress, possibly before SIGTERM arrives here.
        """
        try:
            return self._held_until_stop(point)
        finally:
            self._is_waiting = False

    def _held_until_stop(self, point: int) -> bool:
        while True:
            request = self._request()
            if request is not None:
                self._seconds = request.seconds
                if point <= request.point:
                    return point == request.point
                if self._answer.failed == request.point > 0:
                    return False  # training continues until the stop: nothing was saved to keep
            elif not _ends_at_sigterm():
                return False
            if self._deadline is None:
                self._deadline = time.monotonic() + self._seconds
            if time.monotonic() >= self._deadline:
                return False
            self._is_waiting = True
            time.sleep(_HOLD_SECONDS)

    def _wait_for_the_stop(self) -> None:
        """Pass a point and wait for the stop: steps after the checkpoint would be lost."""
        self._points += 1
        self._write_progress()
        self._held(self._points)

    def _request(self) -> layout.Request | None:
        if self._checkpoint_request is None or self._checkpoint_request[0] == layout.BLANK:
            return None
        return layout.unpack_request(self._checkpoint_request[: layout.REQUEST_BYTES])


def _ends_at_sigterm() -> bool:
    """Return True if SIGTERM ends the script at once, as it has no handler."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def whole_step(step: int) -> int:
    """Convert a step to an int, truncating a fraction."""
    try:
        whole = int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError comes from torch
        whole = layout.NO_STEP
    if not 0 <= whole <= layout.MAX_STEP:
        raise ValueError(f"step must be a whole number from 0 to 2**63 - 1, got {step!r}")
    return whole


def _without_skipped(report: layout.SnapshotReport, first_step: int) -> layout.SnapshotReport:
    """Return the report without lost steps that are not repeated.

    A script may begin at a checkpoint of its own that is newer than the restored snapshot. If the
    lost steps are unknown, so is then the step with which the round began; otherwise the round
    began with that checkpoint.
    """
    if report.lost < 0 <= report.restored < first_step - 1:
        return report._replace(restored=layout.NO_STEP)
    began = first_step - 1
    if report.lost < 0 or report.restored < 0 or began <= report.restored:
        return report
    left = max(0, report.lost - (began - report.restored))
    lost_ms = report.lost_ms * left // max(1, report.lost)
    loss = report.loss if left else layout.Loss.UNKNOWN
    return report._replace(lost=left, lost_ms=lost_ms, restored=began, loss=loss)


def _number(name: str, value: float) -> float:
    """Convert a metric to a float; an int beyond its range becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metric {name} must be a number, got {value!r}") from error


def _written(path: str, content: bytes) -> mmap.mmap | None:
    """Create a file with this content and map it; None on failure or if another process owns it.

    The content is written to disk first: a store into a mapped page without disk space would kill
    the process.
    """
    if not path or _is_kept(path):
        return None
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, _MODE)
        try:
            os.fchmod(descriptor, _MODE)  # regardless of the umask: the agent may be another user
            os.write(descriptor, content)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return mmap.mmap(descriptor, len(content))
        except BaseException:
            os.close(descriptor)
            raise
        # On success the file stays open and locked until this process ends or calls exec.
    except (OSError, ValueError):
        return None


def _is_kept(path: str) -> bool:
    """Return True if a living process reports through this file.

    This process is then its child, such as a data loader that imports the script again, or runs
    alongside it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(descriptor)
    return False


def _read(path: str) -> mmap.mmap | None:
    """Map the agent's file into memory; return None on failure."""
    if not path:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, layout.REQUEST_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None


_shared: Link | None = None


def link() -> Link:
    """Return this process's link; created on first use, as a worker may fork after the import."""
    global _shared
    if _shared is None:
        _shared = Link(os.environ)
    return _shared
