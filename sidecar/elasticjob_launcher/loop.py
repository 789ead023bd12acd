"""Single-threaded event loop for file descriptors, timers and signals.

Uses plain selectors rather than asyncio: the launcher starts in a fraction of the time, and on
every Python from 3.8 on it forks from the same, only loop thread.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable


class Timer:
    """Pending timer; `cancel` is safe at any time."""

    __slots__ = ("_action", "due")

    def __init__(self, due: float, action: Callable[[], object]) -> None:
        self.due = due
        self._action: Callable[[], object] | None = action

    def cancel(self) -> None:
        self._action = None

    def fire(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class Loop:
    """Event loop that runs until `stop`. Only `from_thread` may be called from other threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signals: dict[int, Callable[[], object]] = {}
        self._pending_signals: deque[int] = deque()
        self._from_threads: deque[Callable[[], object]] = deque()
        self._stopped = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.watch(self._wake_read, self._woken)

    def watch(
        self,
        fd: int,
        on_readable: Callable[[], object] | None,
        on_writable: Callable[[], object] | None = None,
    ) -> None:
        """Call back while `fd` is readable or writable; replaces earlier callbacks for `fd`."""
        mask = (selectors.EVENT_READ if on_readable else 0) | (
            selectors.EVENT_WRITE if on_writable else 0
        )
        if fd in self._selector.get_map():
            self._selector.modify(fd, mask, (on_readable, on_writable))
        else:
            self._selector.register(fd, mask, (on_readable, on_writable))

    def unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def call_later(self, seconds: float, action: Callable[[], object]) -> Timer:
        timer = Timer(time.monotonic() + seconds, action)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def on_signal(self, signum: int, action: Callable[[], object]) -> None:
        """Run `action` in the loop instead of the signal handler, so that any call is safe."""
        self._signals[signum] = action
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signum, lambda number, _frame: self._pending_signals.append(number))

    def from_thread(self, action: Callable[[], object]) -> None:
        self._from_threads.append(action)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            ready = self._selector.select(self._until_next_timer())
            for key, mask in ready:
                on_readable, on_writable = key.data
                # An earlier callback of this iteration may have closed and unwatched `fd`.
                if mask & selectors.EVENT_READ and self._still(key):
                    on_readable()
                if mask & selectors.EVENT_WRITE and self._still(key):
                    on_writable()
            self._fire_timers()

    def _still(self, key: selectors.SelectorKey) -> bool:
        current = self._selector.get_map().get(key.fd)
        return current is not None and current.data == key.data

    def _until_next_timer(self) -> float | None:
        if self._pending_signals or self._from_threads:
            return 0
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _fire_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].fire()

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 65536)
        while self._pending_signals:
            self._signals[self._pending_signals.popleft()]()
        while self._from_threads:
            self._from_threads.popleft()()
