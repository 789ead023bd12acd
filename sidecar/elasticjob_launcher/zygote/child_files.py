"""Files made or changed by processes that an import starts and that end during it.

The calls of another process are unknown. Compared are, from the start of a process until one is
reaped, the entries of its working directory, of the folders for temporary and for personal files,
and the files and folders that its command line names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from stat import S_ISDIR, S_ISREG
from typing import Any

MOST_ENTRIES = 10_000
"""Entries of a folder; the new ones of a larger folder are not looked for."""
MOST_WORDS = 200
MOST_LETTERS = 4000
_PARTS = re.compile(r"[^\s;|&<>()'\"=]+")
"""Words of a shell's command, also those after `--option=`."""


class ChildFiles:
    """Observer of the processes that one import starts.

    `starter` returns the module that starts a process, empty for one whose files do not count.
    """

    def __init__(self, starter: Callable[[], str]) -> None:
        self._starter = starter
        self._module = ""
        self._folders: dict[str, frozenset[str]] = {}
        self._files: dict[str, object] = {}
        self._changed: dict[str, tuple[str, object]] = {}

    def clear(self) -> None:
        self._folders, self._files, self._changed = {}, {}, {}

    def started(self, command: Any, folder: Any = None) -> None:
        """Record the files before the start of a process."""
        module = self._starter()
        if not module:
            return
        self._module = module
        here = os.path.abspath(os.fsdecode(folder or "."))  # noqa: PTH100
        places = [here, os.environ.get("TMPDIR") or "/tmp", os.path.expanduser("~")]  # noqa: PTH111
        for path in {os.path.join(here, word) for word in _words(command)}:  # noqa: PTH118
            mode, stamp = _stamp(path)
            if S_ISDIR(mode):
                places.append(path)
            else:
                self._files.setdefault(os.path.abspath(path), stamp)  # noqa: PTH100
        for place in map(os.path.abspath, places):
            entries = _entries(place)
            if entries is not None:
                self._folders.setdefault(place, entries)

    def ended(self, own: Collection[str], all_ended: bool = True) -> None:
        """Find the files that differ from those before; `own` are those of this process."""
        found = list(self._files.items())
        for place, entries in self._folders.items():
            new = (_entries(place) or frozenset()) - entries
            found += [(os.path.join(place, name), None) for name in new]  # noqa: PTH118
        for path, before in found:
            if path not in own and _stamp(path)[1] != before:
                self._changed.setdefault(path, (self._module, before))
        if all_ended:
            self._folders, self._files = {}, {}

    def found(self) -> list[tuple[str, str]]:
        """Return the paths that still differ, each with the module that started the process."""
        changed = self._changed.items()
        return [(path, module) for path, (module, before) in changed if _stamp(path)[1] != before]


def _words(command: Any) -> Iterator[str]:
    """Yield the arguments of a command, and the words within them: they may name files."""
    parts = [command] if isinstance(command, (str, bytes, os.PathLike)) else command or ()
    found: list[str] = []
    for part in islice(parts, MOST_WORDS):
        with suppress(TypeError, ValueError):
            text = os.fsdecode(part)
            if 0 < len(text) <= MOST_LETTERS and "\0" not in text:
                found += [text, *_PARTS.findall(text)]
    yield from islice(dict.fromkeys(found), MOST_WORDS)


def _stamp(path: str) -> tuple[int, object]:
    """Return a path's mode, 0 without one, and a stamp that a change of its content changes."""
    try:
        known = os.lstat(path)
    except OSError:
        return 0, None
    if S_ISREG(known.st_mode):
        return known.st_mode, (known.st_ino, known.st_size, known.st_mtime_ns)
    return known.st_mode, known.st_ino


def _entries(folder: str) -> frozenset[str] | None:
    """Return the names in a folder; None if it cannot be read or has too many."""
    try:
        with os.scandir(folder) as entries:
            names = frozenset(entry.name for entry in islice(entries, MOST_ENTRIES + 1))
    except OSError:
        return None
    return names if len(names) <= MOST_ENTRIES else None
