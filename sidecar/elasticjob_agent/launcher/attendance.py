"""Whether the attached agent still speaks: one that hangs is none.

An agent says every second that it lives, from the loop that obeys the rendezvous. One that is
attached and has fallen silent (stopped, or stuck) can end no workers, so for other nodes, and for
what becomes of the workers, it counts as lost. An agent that never said so is an older one.

What other nodes were told of an agent that hangs must stay true when it goes on: it then still
knows only what it knew, and may order workers of a round that was ended for want of it.
"""

from __future__ import annotations

import time

SILENT_SECONDS = 3.0


class Attendance:
    """Of the agent that attached last."""

    def __init__(self) -> None:
        self._attached = False
        self._heard: float | None = None
        self._session = ""
        self._given_up = 0

    def attached(self, session: str) -> None:
        self._attached = True
        self._heard = None
        if session != self._session:  # who comes anew looks first how things stand
            self._session, self._given_up = session, 0

    def heard(self) -> None:
        """It said that it lives."""
        self._heard = time.monotonic()

    def left(self) -> None:
        self._attached = False

    def told_absent(self, newest: int, runs: bool) -> None:
        """A node that knows of round `newest` heard that there is no agent, and if workers run.

        Where none do it takes it that none of that round will, and begins the next.
        """
        self._given_up = max(self._given_up, newest - 1 if runs else newest)

    def may_start(self, round: int) -> bool:
        """Whether nobody counts on it that this round has no workers here."""
        return round > self._given_up

    @property
    def present(self) -> bool:
        if not self._attached or self._heard is None:
            return self._attached
        return time.monotonic() - self._heard < SILENT_SECONDS
