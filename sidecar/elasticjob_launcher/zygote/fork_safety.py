"""Fork-safety checks of this process: one thread, no CUDA, no module that shadows a user's."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from typing import Any

_CUDA = "libcuda.so"
_CUDA_NOT_INITIALIZED = 3
_BUILT_FOR = ("_cuda_isInBadFork", "_xpu_isInBadFork")
_BAD_FORK = (*_BUILT_FOR, "_mtia_isInBadFork")


_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads whose library handles forks: jemalloc, bundled with pyarrow, holds its locks
during a fork and disables its background thread in the child (pthread_atfork)."""


def thread_count() -> int:
    """Return the number of threads of this process, without those whose library handles forks."""
    tasks = os.listdir("/proc/self/task")  # noqa: PTH208
    if len(tasks) == 1:
        return 1
    return sum(_thread_name(task) not in _FORK_SAFE_THREADS for task in tasks)


def _thread_name(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm", "rb") as name:  # noqa: PTH123
            return os.fsdecode(name.read().strip())
    except OSError:  # it has ended
        return ""


def unfit_for_fork() -> str:
    """Return the reason that this process must not be forked; empty if it may be."""
    count = thread_count()
    if count > 1:
        return f"it runs {count} threads"
    if _cuda_initialized():
        return "it initialised CUDA, which does not work in a fork"
    return ""


def hidden_module(names: Iterable[str], folder: str) -> str:
    """Return the reason if a loaded module would be another one in a fresh interpreter, or "".

    This happens if the program's own folder, which is searched first, has a module of that name.
    """
    for name in sorted(names):
        if "." in name or BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
            continue
        spec = PathFinder.find_spec(name, [folder])
        here: Any = getattr(sys.modules[name], "__spec__", None)
        if spec is not None and spec.loader is not None and here and here.origin != spec.origin:
            return f"{spec.origin} takes the place of a module of Python's that it needs"
    return ""


def bad_fork() -> str:
    """Return, in a fork, torch's reason against the use of its accelerator; empty without one."""
    for name in _BAD_FORK:
        asked = _of_torch(name)
        if asked is not None and asked():
            return f"torch reports that its accelerator cannot be used in a fork of it ({name})"
    return ""


def bad_fork_in_worker() -> str:
    """Return the result of `bad_fork` in a worker, for a torch built for CUDA or XPU.

    With such a build, counting devices is enough to break forks, even without a device. Only a fork
    can check this, so a short-lived one is made.
    """
    if not any(_of_torch(name) for name in _BUILT_FOR):
        return ""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, bad_fork().encode())
        os._exit(0)
    os.close(writer)
    try:
        return os.read(reader, 512).decode()
    finally:
        os.close(reader)
        os.waitpid(pid, 0)


def _of_torch(name: str) -> Any:
    """Return a function of `torch._C`, or None if torch is not imported or lacks it."""
    return getattr(getattr(sys.modules.get("torch"), "_C", None), name, None)


def _cuda_initialized() -> bool:
    """Return True if CUDA is initialised, from a driver call that does not initialise it."""
    library = _library_path(_CUDA)
    if not library:
        return False
    try:
        driver = ctypes.CDLL(library)
        count = ctypes.c_int()
        return int(driver.cuDeviceGetCount(ctypes.byref(count))) != _CUDA_NOT_INITIALIZED
    except (OSError, AttributeError):
        return True


def _library_path(name: str) -> str:
    """Return the path of a loaded library, or an empty string."""
    for line in memory_maps():
        if name in line:
            return line.split(None, 5)[5].strip()
    return ""


def memory_maps() -> list[str]:
    """Return the lines of this process's memory map; none if it cannot be read."""
    try:
        with open("/proc/self/maps", "rb") as maps:  # noqa: PTH123
            return os.fsdecode(maps.read()).split("\n")  # a path may have any other letter
    except OSError:
        return []
