"""Liveness of the attached agent, from its heartbeats.

An agent sends a heartbeat every second from the loop that follows the rendezvous. An attached but
silent agent (stopped or stuck) cannot stop workers, so other nodes and the launcher treat it as
lost. An agent that never sent a heartbeat is an older version and counts as present.

Reports to other nodes that an agent was absent must stay true if it resumes: its knowledge is then
outdated, and it may order workers of a round that ended in its absence.
"""

from __future__ import annotations

import time

SILENT_SECONDS = 3.0


class Attendance:
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
