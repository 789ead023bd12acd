"""Record of the modules that workers imported, to preload them, and the schedule of its updates.

It is kept beside the logs for a restarted launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from elasticjob_launcher.loop import Loop, Timer

MOST_NAMES = 4000  # fits in one packet to the zygote
# A network disk may stop answering. Peers count a launcher that is silent for seconds as lost.
DISK_SECONDS = 0.5
# Seconds after a start: workers have made their first imports, or later ones.
AFTER_SECONDS = (3.0, 10.0, 60.0)


class BoundedDisk:
    """Runner of disk accesses that waits for each at most `DISK_SECONDS`.

    Until one has ended, further ones are left out. A late one has no effect on the caller.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def run(self, access: Callable[[], Any]) -> Any:
        """Return the result of the access; None if it did not end in time or did not begin."""
        if self._thread is not None and self._thread.is_alive():
            return None
        results: list[Any] = []
        self._thread = threading.Thread(target=lambda: results.append(access()), daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the workers may have used up the processes of the pod
            return None
        self._thread.join(DISK_SECONDS)
        return results[0] if results else None


class PreloadCache:
    """Modules that workers imported, in order, and modules that must not be preloaded."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._disk = BoundedDisk()
        self._key = ""
        self.modules: list[str] = []
        self.excluded: set[str] = set()

    def read(self, key: str) -> None:
        """Load the record for this command; an unreadable file counts as empty."""
        self._key = key
        path = self._path
        if path is None:
            return
        content = self._disk.run(lambda: _content(path))
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(content or "")
            if kept["program"] == key:
                self.modules = [str(name) for name in kept["learned"]][:MOST_NAMES]
                self.excluded = {str(name) for name in kept["excluded"]}

    def extend(self, names: Iterable[str]) -> None:
        known = set(self.modules)
        fresh = [name for name in names if name not in known]
        if fresh:
            self.modules = [*self.modules, *fresh][:MOST_NAMES]
            self._write()

    def exclude(self, names: Iterable[str]) -> None:
        self.excluded.update(names)
        self._write()

    def _write(self) -> None:
        path = self._path
        if path is None:
            return
        kept = {
            "program": self._key,
            "learned": self.modules,
            "excluded": sorted(self.excluded),
        }
        # A full, read-only or hanging disk only costs the next launcher some time.
        self._disk.run(lambda: _replace(path, json.dumps(kept)))


def _content(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, if possible."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, "utf-8")
        os.replace(draft, path)  # noqa: PTH105
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


class ExtensionSchedule:
    """Timer that calls `extend` a few times after each `begin`, until `end`."""

    def __init__(self, loop: Loop, extend: Callable[[], object]) -> None:
        self._loop = loop
        self._extend = extend
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
        self._extend()
        self._later(turn + 1)
