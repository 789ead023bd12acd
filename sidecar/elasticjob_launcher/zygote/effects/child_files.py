"""Files made or changed by processes that an import starts and that end during it.

The calls of another process are unknown. From the start of a process until one is reaped, the files
that its command line names are compared, and the entries of the folders that it names. Other
folders are not: other processes of the machine change them at the same time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from stat import S_ISDIR, S_ISREG
from typing import Any

MOST_ENTRIES = 1000
"""Entries of a folder; the new ones of a larger folder are not looked for."""
MOST_WORDS = 200
MOST_LETTERS = 4000
MOST_SECONDS = 0.2
"""Duration of all comparisons in an import: a network's file system may be slow."""
_CLOCK_SECONDS = 2.0
"""Difference between the clocks of this machine and of a file system."""
_PARTS = re.compile(r"[^\s;|&<>()'\"=]+")
"""Words of a shell's command, also those after `--option=`."""


class ChildFiles:
    """Observer of the processes that one import starts.

    `starter` returns the module that starts a process, empty for one whose files do not count.
    `clock` returns seconds, as `time.monotonic`.
    """

    def __init__(
        self, starter: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._starter = starter
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._module = ""
        self._began = 0.0
        self._seconds = 0.0
        self._folders: dict[str, frozenset[str]] = {}
        self._files: dict[str, object] = {}
        self._changed: dict[str, tuple[str, object]] = {}

    def started(self, command: Any, folder: Any = None) -> None:
        """Record the files before the start of a process."""
        module = self._starter()
        if not module:
            return
        self._module = module
        self._began = self._began or time.time() - _CLOCK_SECONDS
        here = os.fsdecode(folder or ".")
        for word in self._in_time(_words(command)):
            path = os.path.join(here, word)  # noqa: PTH118
            for each in {_place(path), os.path.realpath(path)}:
                if each in self._files:
                    continue
                mode, self._files[each] = _stamp(each)
                entries = _entries(each) if S_ISDIR(mode) else None
                if entries is not None:
                    self._folders[each] = entries

    def ended(self, own: Collection[str], all_ended: bool = True) -> None:
        """Find the files that differ from those before; `own` are those of this process."""
        found: list[tuple[str, object]] = []
        for path, before in self._in_time(list(self._files.items())):
            if _stamp(path)[1] != before:
                found.append((path, before))
        for place, entries in self._in_time(list(self._folders.items())):
            new = (_entries(place) or frozenset()) - entries
            paths = [os.path.join(place, name) for name in new]  # noqa: PTH118
            found += [(path, None) for path in paths if self._is_ours(path)]
        if found:
            known = {_place(path) for path in own if os.path.isabs(path)}  # noqa: PTH117
            for path, before in found:
                if path not in known:
                    self._changed.setdefault(path, (self._module, before))
        if all_ended:
            self._folders, self._files = {}, {}

    def found(self) -> list[tuple[str, str]]:
        """Return the paths that still differ, each with the module that started the process."""
        changed = self._changed.items()
        return [(path, module) for path, (module, before) in changed if _stamp(path)[1] != before]

    def _in_time(self, items: Any) -> Iterator[Any]:
        """Yield the items until all comparisons of this import have taken too long."""
        for item in items:
            if self._seconds >= MOST_SECONDS:
                return
            began = self._clock()
            yield item
            self._seconds += self._clock() - began

    def _is_ours(self, path: str) -> bool:
        """Return True for a file that this user has made or changed since the first start."""
        try:
            known = os.lstat(path)
        except OSError:
            return False
        return known.st_uid == os.geteuid() and known.st_ctime >= self._began


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


def _place(path: str) -> str:
    """Return the path with the links of its folders resolved, not one that it names itself."""
    folder, name = os.path.split(os.path.abspath(path))  # noqa: PTH100
    return os.path.join(os.path.realpath(folder), name)  # noqa: PTH118


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
