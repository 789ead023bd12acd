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
        self._heartbeat_at: float | None = None
        self._session = ""
        self._given_up = 0

    def attached(self, session: str) -> None:
        self._attached = True
        self._heartbeat_at = None
        if session != self._session:  # a new agent process reads the current state first
            self._session, self._given_up = session, 0

    def record_heartbeat(self) -> None:
        """Record a heartbeat."""
        self._heartbeat_at = time.monotonic()

    def left(self) -> None:
        self._attached = False

    def reported_absent(self, newest: int, runs: bool) -> None:
        """Record a report to a node that knows round `newest`: no agent, and if workers run.

        If none run, that node assumes that none of that round will start, and starts the next.
        """
        self._given_up = max(self._given_up, newest - 1 if runs else newest)

    def may_start(self, round: int) -> bool:
        """Return True unless another node relies on this round having no workers here."""
        return round > self._given_up

    @property
    def present(self) -> bool:
        if not self._attached or self._heartbeat_at is None:
            return self._attached
        return time.monotonic() - self._heartbeat_at < SILENT_SECONDS


class Deadline:
    """Deadline that calls `expired` once it has passed; `at` is None if none was given."""

    def __init__(self, loop: Loop, expired: Callable[[], object]) -> None:
        self._loop = loop
        self._expired = expired
        self._timer: Timer | None = None
        self._offset: float | None = None
        self._heartbeat_at = time.monotonic()
        self.has_evidence = False
        """True once the agent attached last has sent evidence of its own."""
        self.at: float | None = None

    @property
    def live_seconds(self) -> float | None:
        """Remaining seconds; 0 after the deadline, None without one."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def attached(self, sends_deadlines: bool) -> None:
        """Handle an attached agent; one that sends no deadlines clears the deadline."""
        self._offset = None
        self.has_evidence = False
        self._heartbeat_at = time.monotonic()
        if not sends_deadlines:
            self.at = None

    def record_heartbeat(self, at: float | None, live_seconds: float | None) -> None:
        """Handle a heartbeat that permits `live_seconds` from `at`, by the agent's clock."""
        now = self._heartbeat_at = time.monotonic()
        if live_seconds is None:
            return
        self.has_evidence = self.has_evidence or live_seconds > 0
        if at is None:
            self._move(now + live_seconds)
            return
        offset = now - at
        self._offset = offset if self._offset is None else min(offset, self._offset)
        self._move(at + self._offset + live_seconds)

    def permitted(self, answered_at: float, live_seconds: float, orphan_seconds: float) -> None:
        """Handle a coordinator's permission for `live_seconds` after `answered_at`."""
        if self.at is not None:
            self._move(min(answered_at + live_seconds, self._heartbeat_at + orphan_seconds))

    def _move(self, at: float) -> None:
        if self.at is None or at > self.at:
            self.at = at
        self.watch()

    def watch(self) -> None:
        """Watch the deadline until it has passed."""
        if self._timer is None and self.at is not None:
            seconds = max(0.0, self.at - time.monotonic())
            self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        if self.at is None:
            return
        if time.monotonic() < self.at:
            self.watch()
        else:
            self._expired()
