"""Watchdog of the workers: liveness of the attached agent, and the self-fencing deadline.

An agent sends a heartbeat every second from the loop that follows the rendezvous. An attached
but silent agent (stopped or stuck) cannot stop workers, so other nodes and the launcher treat
it as lost. An agent that never sent a heartbeat is an older version and counts as present.

Reports to other nodes that an agent was absent must stay true if it resumes: its knowledge is
then outdated, and it may order workers of a round that ended in its absence.

The deadline is the time up to which workers may live without a new permission. Each heartbeat
carries one, based on evidence that no newer round runs. Without a responsive agent, only a
coordinator's signed permission extends it, at most to `orphan_seconds` after the last
heartbeat. Nothing moves it back.

Only differences of this machine's monotonic clock count. A message that waited while this
process was suspended must not count from the time of its read: the agent sends the time by its
own clock, and the smallest offset ever seen between the two clocks maps it to the launcher's
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elasticjob_launcher.loop import Loop, Timer

SILENT_SECONDS = 3.0


class AgentLiveness:
    """Liveness of the agent attached last."""

    def __init__(self) -> None:
        self._attached = False
        self._heard: float | None = None
        self._session = ""
        self._given_up = 0

    def attached(self, session: str) -> None:
        self._attached = True
        self._heard = None
        if session != self._session:  # a new agent process reads the current state first
            self._session, self._given_up = session, 0

    def heard(self) -> None:
        """Record a heartbeat."""
        self._heard = time.monotonic()

    def left(self) -> None:
        self._attached = False

    def told_absent(self, newest: int, runs: bool) -> None:
        """Record a report to a node that knows round `newest`: no agent, and if workers run.

        If none run, that node assumes that none of that round will start, and starts the next.
        """
        self._given_up = max(self._given_up, newest - 1 if runs else newest)

    def may_start(self, round: int) -> bool:
        """Return True unless another node relies on this round having no workers here."""
        return round > self._given_up

    @property
    def present(self) -> bool:
        if not self._attached or self._heard is None:
            return self._attached
        return time.monotonic() - self._heard < SILENT_SECONDS


class Deadline:
    """Deadline that calls `expired` once it has passed; `at` is None if none was given."""

    def __init__(self, loop: Loop, expired: Callable[[], object]) -> None:
        self._loop = loop
        self._expired = expired
        self._timer: Timer | None = None
        self._offset: float | None = None
        self._heard = time.monotonic()
        self.told = False
        """True once the agent attached last has sent evidence of its own."""
        self.at: float | None = None

    @property
    def live_seconds(self) -> float | None:
        """Remaining seconds; 0 after the deadline, None without one."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def attached(self, tells: bool) -> None:
        """Handle an attached agent; one that sends no deadlines clears the deadline."""
        self._offset = None
        self.told = False
        self._heard = time.monotonic()
        if not tells:
            self.at = None

    def heard(self, at: float | None, live_seconds: float | None) -> None:
        """Handle a heartbeat that permits `live_seconds` from `at`, by the agent's clock."""
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
        """Handle a coordinator's permission for `live_seconds` after `asked_at`."""
        if self.at is not None:
            self._move(min(asked_at + live_seconds, self._heard + orphan_seconds))

    def _move(self, at: float) -> None:
        if self.at is None or at > self.at:
            self.at = at
        self.watch()

    def watch(self) -> None:
        """Watch the deadline until it has passed."""
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
