"""Recorder of modules that workers import beyond the preloaded ones, to preload them next time.

A worker may be killed at any moment, so it writes each name at once into memory shared with the
zygote: without files or system calls. The program sees only one more finder in `sys.meta_path`.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any

from elasticjob_launcher.zygote.worker_environment import set_variables, shared_variables

PAGE_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")


class ImportPage:
    """Shared page of names written by one worker, one per line, after their length in bytes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)

    def names(self) -> list[str]:
        (length,) = _LENGTH.unpack_from(self._memory, 0)
        # The worker may be writing a line.
        text = self._memory[_LENGTH.size : _LENGTH.size + min(length, PAGE_BYTES)]
        return text.rpartition(b"\n")[0].decode("utf-8", "replace").split("\n") if text else []

    def write(self, name: str) -> None:
        line = name.encode("utf-8", "replace") + b"\n"
        (length,) = _LENGTH.unpack_from(self._memory, 0)
        end = _LENGTH.size + length + len(line)
        if end <= PAGE_BYTES:
            self._memory[_LENGTH.size + length : end] = line
            _LENGTH.pack_into(self._memory, 0, length + len(line))

    def close(self) -> None:
        self._memory.close()


class ImportRecorder:
    """Finder that finds nothing and only records the imports of this process.

    Skips modules that would differ in the next zygote: those from a folder that the program put on
    `sys.path` if `search`, the zygote's path, has another module of that name; and imports after a
    change of the environment that the zygote will not make.
    """

    def __init__(self, page: ImportPage, search: Sequence[str]) -> None:
        self._page = page
        self._search = list(search)
        self._born = list(sys.path)
        self._passed_over: set[str] = set()
        self._pid = os.getpid()
        self._environ: dict[str, str] = {}

    def expect(self, changes: Mapping[str, str | None]) -> None:
        """Start recording, while the environment is the current one with these changes."""
        self._environ = dict(os.environ)
        set_variables(self._environ, changes)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if os.getpid() != self._pid or not _is_import(sys._getframe(1)):
            return
        if path is None and sys.path != self._born and self._is_another(name):
            self._passed_over.add(name)
        if name.partition(".")[0] not in self._passed_over and self._is_as_expected():
            self._page.write(name)

    def _is_as_expected(self) -> bool:
        environ = dict(os.environ)
        return environ == self._environ or shared_variables(environ) == shared_variables(
            self._environ
        )

    def _is_another(self, name: str) -> bool:
        here, there = PathFinder.find_spec(name), PathFinder.find_spec(name, self._search)
        return here is not None and there is not None and here.origin != there.origin


def _is_import(caller: Any) -> bool:
    """Return True for a search by an import, False for one by `importlib.util.find_spec`.

    Packages search for others that they can use and do not import, such as torch._dynamo for
    onnxruntime.
    """
    while caller is not None and caller.f_code.co_name == "_find_spec":
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"
