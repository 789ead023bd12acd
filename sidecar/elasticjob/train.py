"""Tell ElasticJob how training goes, and save together before a planned stop.

    from elasticjob import train

    train.on_leave(lambda: save(step))          # or should_checkpoint() in the loop
    for step in range(first, steps):
        ...
        train.progress(step, loss=loss)

Everything is optional, and does nothing where no agent of ElasticJob started the script. All
ranks must call `progress` and `should_checkpoint` equally often, at the same places of their
loops: that is how they agree on one step. See docs/training.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import signal
import time
from typing import TYPE_CHECKING

from elasticjob import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["accumulation", "checkpointed", "on_leave", "progress", "should_checkpoint"]

_HOLD_SECONDS = 0.002
_MODE = 0o644


def progress(step: int, **metrics: float) -> None:
    """Say that `step` is done; costs microseconds. Metrics are plain numbers, NaN and infinity too.

    The first 8 of them are told. With `on_leave`, this is where its callbacks are called.

    Raises:
        ValueError: `step` is no whole number from 0 to 2**63 - 1, or a metric no number.
    """
    _link().progress(step, metrics)


def checkpointed(step: int) -> None:
    """Say that a checkpoint which contains `step` is complete: training could go on from it.

    One rank may say so for all. After a checkpoint that was asked for, the call waits for the
    stop: a further step would be lost. Raises ValueError as `progress` does.
    """
    _link().checkpointed(step)


def should_checkpoint() -> bool:
    """Whether to save a checkpoint now, for this round of workers is about to be stopped.

    True at most once a round, on all ranks in the same call: saving may use collectives. While
    the ranks agree, and after the checkpoint until the stop, the call waits.
    """
    return _link().should_checkpoint()


def on_leave(callback: Callable[[], object]) -> None:
    """Have `callback` called once before this round of workers is stopped in good order.

    It is called by `progress`, in its thread, on all ranks at the same step. It should save.
    Raises ValueError for what cannot be called, such as the result of a function.
    """
    _link().on_leave(callback)


def accumulation(global_batch: int, micro_batch: int) -> int:
    """How many micro-batches each rank takes in a step, so that all take `global_batch` samples.

    Rounded up where they do not divide evenly: the last ones are then smaller, or missing.
    """
    if global_batch < 1 or micro_batch < 1:
        raise ValueError(
            f"global_batch and micro_batch must be at least 1, got {global_batch} and {micro_batch}"
        )
    samples = micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
    return -(-global_batch // samples)


class Link:
    """A worker's ends of the two files of `layout`; without them nothing has an effect."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._flags = self._points = self._at_ms = self._first_step_ms = self._checkpoints = 0
        self._step = self._checkpoint_step = layout.NO_STEP
        self._metrics: tuple[str, ...] = ()
        self._values = [0.0] * layout.MAX_METRICS
        self._names = layout.pack_names(())
        self._callbacks: list[Callable[[], object]] = []
        self._asks = False
        self._seconds = 0.0
        self._deadline: float | None = None
        self._told = _written(environ.get(layout.PROGRESS_FILE, ""), self._content())
        self._asked = _read(environ.get(layout.REQUEST_FILE, ""))

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        # Judged also where nobody listens: a script that is wrong should not fail in the pod first.
        step = _whole(step)
        if metrics:
            self._measure(metrics)
        if self._told is None:
            return
        self._step = step
        self._at_ms = int(time.time() * 1000)
        if not self._first_step_ms:
            self._first_step_ms = self._at_ms
        # One way to save is enough: with both, `should_checkpoint` decides.
        if not self._callbacks or self._asks:
            self._say()
        elif self._point():
            for callback in self._callbacks:
                callback()
            self._wait_for_the_stop()

    def checkpointed(self, step: int) -> None:
        self._checkpoint_step = _whole(step)
        self._checkpoints += 1
        self._say()
        request = self._request()
        if request is not None and 0 < request.point <= self._points:
            self._wait_for_the_stop()

    def should_checkpoint(self) -> bool:
        self._asks = True
        return self._told is not None and self._point()

    def on_leave(self, callback: Callable[[], object]) -> None:
        if not callable(callback):
            raise ValueError(
                f"on_leave must be given a function to call, got {callback!r}: write "
                "on_leave(save), or on_leave(lambda: save(step))"
            )
        self._callbacks.append(callback)
        self._flags = layout.SAVES
        self._say()

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

    def _say(self) -> None:
        if self._told is not None:
            self._told[:] = self._content()

    def _content(self) -> bytes:
        return layout.pack(
            self._flags,
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

    def _point(self) -> bool:
        """Pass one place at which all ranks can save; whether they do here.

        The order matters: say which place this is, then look for a request. The agent writes a
        request, then looks which place was passed last. So either we see the request, or it
        chooses a later place.
        """
        self._points += 1
        self._flags = layout.SAVES
        self._say()
        if self._asked is None or self._asked[0] == layout.BLANK:
            return False
        return self._held(self._points)

    def _held(self, point: int) -> bool:
        """Wait for the ranks to agree, and, past the place that they agreed on, for the stop.

        Only for so long: when nobody comes to stop us, training goes on. A request is withdrawn
        when the stop is under way: it may not have reached us yet.
        """
        while True:
            request = self._request()
            if request is not None:
                self._seconds = request.seconds
                if point <= request.point:
                    return point == request.point
            elif not _ends_at_sigterm():
                return False
            if self._deadline is None:
                self._deadline = time.monotonic() + self._seconds
            if time.monotonic() >= self._deadline:
                return False
            time.sleep(_HOLD_SECONDS)

    def _wait_for_the_stop(self) -> None:
        """After the checkpoint every further step would be lost: pass the place, and wait."""
        self._points += 1
        self._say()
        self._held(self._points)

    def _request(self) -> layout.Request | None:
        if self._asked is None or self._asked[0] == layout.BLANK:
            return None
        return layout.unpack_request(self._asked[: layout.REQUEST_BYTES])


def _ends_at_sigterm() -> bool:
    """Whether the script leaves SIGTERM alone, and does not go on to an end of its own."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _whole(step: int) -> int:
    """A step as a plain int; a fraction is cut off."""
    try:
        whole = int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        whole = layout.NO_STEP
    if not 0 <= whole <= layout.MAX_STEP:
        raise ValueError(f"step must be a whole number from 0 to 2**63 - 1, got {step!r}")
    return whole


def _number(name: str, value: float) -> float:
    """A metric; an int that no float can hold is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metric {name} must be a number, got {value!r}") from error


def _written(path: str, content: bytes) -> mmap.mmap | None:
    """A new file with this content, in memory; None if it cannot be, or is another process's.

    The content is written out first: a store into a page for which the disk has no room would
    kill the process.
    """
    if not path or _is_kept(path):
        return None
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, _MODE)
        try:
            os.fchmod(descriptor, _MODE)  # the agent may be another user, whatever the umask
            os.write(descriptor, content)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return mmap.mmap(descriptor, len(content))
        except BaseException:
            os.close(descriptor)
            raise
        # Else it stays open, and with it the lock: until this process ends or becomes another.
    except (OSError, ValueError):
        return None


def _is_kept(path: str) -> bool:
    """Whether a process that lives tells by this file: this one is then a child of it, such as a
    loader of data that imports the script anew, or runs beside it.
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
    """The agent's file, in memory; None if it cannot be."""
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


def _link() -> Link:
    """This process's link, made at its first use: a worker may be forked with us imported."""
    global _shared
    if _shared is None:
        _shared = Link(os.environ)
    return _shared
