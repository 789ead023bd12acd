"""Wait of a member for changes of the feed, with a deadline and cancellation."""

from __future__ import annotations

import threading
import time

from elasticjob_rendezvous.api import RendezvousGracefulExitError, RendezvousTimeoutError
from elasticjob_rendezvous.etcd_v2.feed import Feed, Seen


class Waiting:
    """Wait for at most `timeout_seconds` after `begin`, or after the first use without it."""

    def __init__(self, feed: Feed, timeout_seconds: float) -> None:
        self._feed = feed
        self._timeout_seconds = timeout_seconds
        self._deadline: float | None = None
        self._ended = threading.Event()
        self.active = False
        """True while a barrier is in progress."""

    def begin(self) -> None:
        self._deadline = time.monotonic() + self._timeout_seconds
        self.active = True

    def finish(self) -> None:
        self._deadline = None
        self.active = False

    def end(self) -> None:
        """Make all present and future waits raise RendezvousGracefulExitError."""
        self._ended.set()
        self._feed.wake()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def left_seconds(self) -> float:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_seconds
        return self._deadline - time.monotonic()

    def check(self) -> None:
        """Check deadline and cancellation.

        Raises RendezvousTimeoutError, RendezvousGracefulExitError.
        """
        self.check_going()
        if self.left_seconds <= 0:
            cause = self._feed.failure
            why = f"; etcd does not answer: {cause}" if cause else ""
            raise RendezvousTimeoutError(
                f"no rendezvous within {self._timeout_seconds:g} s{why}"
            ) from cause

    def check_going(self) -> None:
        """Check cancellation. Raises RendezvousGracefulExitError."""
        if self._ended.is_set():
            raise RendezvousGracefulExitError("this member left the rendezvous")

    def look(self) -> Seen:
        """Return the present state; wait for the first reading if necessary."""
        self._feed.open()
        seen = self._feed.seen
        while seen.index < 0:
            self.check()
            seen = self._feed.wait(seen.revision, self.left_seconds)
        return seen

    def next(self, seen: Seen, seconds: float | None = None) -> Seen:
        """Wait for a change or `seconds`, and return the state. Raises like `check`."""
        self.check()
        left = self.left_seconds
        self._feed.open()
        seen = self._feed.wait(seen.revision, left if seconds is None else min(seconds, left))
        self.check()
        return seen if seen.index >= 0 else self.look()

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`. Raises like `check`."""
        self._ended.wait(min(seconds, max(0.0, self.left_seconds)))
        self.check()
