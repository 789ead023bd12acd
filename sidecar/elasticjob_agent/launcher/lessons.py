"""Schedule on which the zygote reads the modules that its workers have imported by themselves."""

from __future__ import annotations

from collections.abc import Callable

from .loop import Loop, Timer

# Seconds after a start: workers have made their first imports, or later ones.
AFTER_SECONDS = (3.0, 10.0, 60.0)


class Lessons:
    """Timer that calls `learn` a few times after each `begin`, until `end`."""

    def __init__(self, loop: Loop, learn: Callable[[], object]) -> None:
        self._loop = loop
        self._learn = learn
        self._timer: Timer | None = None

    def begin(self) -> None:
        self._later(0)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _later(self, turn: int) -> None:
        self.end()
        if turn < len(AFTER_SECONDS):
            self._timer = self._loop.call_later(AFTER_SECONDS[turn], lambda: self._now(turn))

    def _now(self, turn: int) -> None:
        self._learn()
        self._later(turn + 1)
