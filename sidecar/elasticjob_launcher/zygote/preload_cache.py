"""Record of the modules that workers imported, to preload them, and the schedule of its updates.

It is kept beside the logs for a restarted launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from elasticjob_launcher.loop import Loop, Timer

MOST_NAMES = 4000  # fits in one packet to the zygote


class PreloadCache:
    """Modules that workers imported, in order, and modules that must not be preloaded."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._key = ""
        self.learned: list[str] = []
        self.excluded: set[str] = set()

    def read(self, key: str) -> None:
        """Load the record for this command; an unreadable file counts as empty."""
        self._key = key
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(self._path.read_text())
            if kept["program"] == key:
                self.learned = [str(name) for name in kept["learned"]][:MOST_NAMES]
                self.excluded = {str(name) for name in kept["excluded"]}

    def learn(self, names: Iterable[str]) -> None:
        known = set(self.learned)
        fresh = [name for name in names if name not in known]
        if fresh:
            self.learned = [*self.learned, *fresh][:MOST_NAMES]
            self._write()

    def exclude(self, names: Iterable[str]) -> None:
        self.excluded.update(names)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        kept = {
            "program": self._key,
            "learned": self.learned,
            "excluded": sorted(self.excluded),
        }
        # A full or read-only disk only costs the next launcher some time.
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(kept))
            os.replace(draft, self._path)  # noqa: PTH105
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()


# Seconds after a start: workers have made their first imports, or later ones.
AFTER_SECONDS = (3.0, 10.0, 60.0)


class LearnSchedule:
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
