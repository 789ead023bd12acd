"""Persistent record of learned modules, kept beside the logs for a restarted launcher."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

MOST_NAMES = 4000  # fits in one packet to the zygote


class Learned:
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
