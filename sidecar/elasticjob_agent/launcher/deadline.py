"""Deadline of the workers: until when they may live without a new permission.

The agent hands it over with each beat, from evidence that no newer round runs. While there is no
agent that speaks, only a coordinator's signed permission moves it, and never further than
`orphan_seconds` after the agent was last heard. Nothing moves it back.

Only differences of this machine's monotonic clock count. What waited while this process stood still
must not count from when it is read: the agent says by its own clock when it spoke, and the
shortest way that a message of its ever took tells what that is on ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .loop import Loop, Timer


class Deadline:
    """Calls `expired` when the deadline has passed; it is None where nobody gave one."""

    def __init__(self, loop: Loop, expired: Callable[[], object]) -> None:
        self._loop = loop
        self._expired = expired
        self._timer: Timer | None = None
        self._offset: float | None = None
        self._heard = time.monotonic()
        self.told = False
        """Return whether the agent that attached last has had evidence of its own."""
        self.at: float | None = None

    @property
    def live_seconds(self) -> float | None:
        """Seconds that are left; 0 when the deadline has passed."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def attached(self, tells: bool) -> None:
        """An agent attached; one that does not tell deadlines leaves none."""
        self._offset = None
        self.told = False
        self._heard = time.monotonic()
        if not tells:
            self.at = None

    def heard(self, at: float | None, live_seconds: float | None) -> None:
        """The agent spoke, `at` on its clock, and let the workers live for `live_seconds`."""
        now = self._heard = time.monotonic()
        if live_seconds is None:
            return
        self.told = self.told or live_seconds > 0
        if at is None:
            self._move(now + live_seconds)
            return
        offset = now - at
        self._offset = offset if self._offset is None else min(offset, self._offset)
        self._move(at + self._offset + live_seconds)

    def permitted(self, asked_at: float, live_seconds: float, orphan_seconds: float) -> None:
        """A coordinator let the workers live for `live_seconds` after `asked_at`."""
        if self.at is not None:
            self._move(min(asked_at + live_seconds, self._heard + orphan_seconds))

    def _move(self, at: float) -> None:
        if self.at is None or at > self.at:
            self.at = at
        self.watch()

    def watch(self) -> None:
        """Look after it from now on, until it has passed."""
        if self._timer is None and self.at is not None:
            seconds = max(0.0, self.at - time.monotonic())
            self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.at is None:
            return
        if time.monotonic() < self.at:
            self.watch()
        else:
            self._expired()
