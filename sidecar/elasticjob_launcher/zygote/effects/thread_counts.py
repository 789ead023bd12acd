"""Calls during an import that set the number of threads of a library in C.

The calls are observed instead of the numbers: reading a number may itself set it, as in torch, or
start threads, as in numba, and the standby's OpenBLAS has one thread in any case.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from elasticjob_launcher.zygote.effects.identifiers import calling_module
from elasticjob_launcher.zygote.effects.watched_functions import WatchedFunctions, names_of

_SETTERS = {
    "torch": ("set_num_threads", "set_num_interop_threads", "set_flush_denormal"),
    "cv2": ("setNumThreads",),
    "numexpr": ("set_num_threads",),
    "numexpr.utils": ("set_num_threads",),
    "mkl": ("set_num_threads", "set_num_threads_local", "domain_set_num_threads"),
    "faiss": ("omp_set_num_threads",),
    "pyarrow": ("set_cpu_count", "set_io_thread_count"),
    "pyarrow.lib": ("set_cpu_count", "set_io_thread_count"),
}
"""Functions, by module, that set the number of threads of its library in C, or a mode of the
processor."""
_LIMITERS = {"threadpoolctl": "set_num_threads"}
"""Methods of the classes of a module that set the number of threads of other libraries."""
_SYMBOLS = re.compile("(omp|kmp|mkl)_set_|set_num_threads|set_threading_layer", re.IGNORECASE)
"""Names of functions in C that set numbers of threads, for calls through `ctypes`."""


class ThreadCounts:
    """Observer of the calls that set the number of threads of a library in C."""

    def __init__(self, watched: WatchedFunctions) -> None:
        self._watched = watched
        self._noted: dict[str, str] = {}

    def start(self) -> None:
        for name in {*_SETTERS, *_LIMITERS}:
            self.loaded(name)

    def loaded(self, name: str) -> None:
        """Report calls of that module's functions from now on, except those of its own package."""
        for holder, function in _functions(name):
            package = name.partition(".")[0]

            def report(*args: Any, _called: str = f"{package}.{function}", **options: Any) -> None:
                self._note(_called, calling_module(beyond=_called.partition(".")[0]))

            self._watched.report(holder, function, report)

    def symbol(self, library: Any, name: Any) -> None:
        """Report the function in C that Python code is about to call, if it sets such a number."""
        if isinstance(name, str) and _SYMBOLS.search(name):
            caller = calling_module()
            if caller.partition(".")[0] not in _LIMITERS:  # whose methods are observed
                self._note(name, caller)

    def begin(self) -> None:
        self._noted = {}

    def found(self) -> list[tuple[str, str]]:
        """Return the calls, each with the module that made it."""
        return [
            (f"sets a number of threads or a mode in C ({called}) when it is imported", module)
            for module, called in self._noted.items()
        ]

    def _note(self, called: str, caller: str) -> None:
        if caller:
            self._noted.setdefault(caller, called)


def _functions(module: str) -> Iterator[tuple[Any, str]]:
    """Yield the functions to observe of a module, each with the module or class that has it."""
    loaded: Any = sys.modules.get(module)
    if loaded is None:
        return
    for name in _SETTERS.get(module, ()):
        yield loaded, name
    method = _LIMITERS.get(module)
    for kind in list(names_of(loaded).values()) if method else ():
        if issubclass(type(kind), type) and method in names_of(kind):
            yield kind, str(method)
