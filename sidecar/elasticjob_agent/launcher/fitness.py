"""Whether this process may still be forked: one thread, no CUDA, nothing that hides the user's."""

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


def threads() -> int:
    """Of this process, the interpreter's and those of libraries."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def unfit_for_fork() -> str:
    """Why a fork of this process would not work as a process of its own; empty when it would."""
    count = threads()
    if count > 1:
        return f"it runs {count} threads"
    if _cuda_initialized():
        return "it initialised CUDA, which does not work in a fork"
    return ""


def hidden(names: Iterable[str], folder: str) -> str:
    """Why modules that are loaded here would be others in a fresh interpreter; empty if they are
    not: those that the program's own folder, the first to be searched, has too.
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
    """In a fork: what torch says about the process that it came from."""
    for name in _BAD_FORK:
        asked = _of_torch(name)
        if asked is not None and asked():
            return f"torch says that its accelerator cannot be used in a fork of it ({name})"
    return ""


def poisoned() -> str:
    """What `bad_fork` would say in a worker, of a torch that was built for CUDA or XPU.

    There it is enough to have counted devices, even where there is none. Only a fork can ask,
    so one is made for a moment.
    """
    if not any(_of_torch(name) for name in _BUILT_FOR):
        return ""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, bad_fork().encode())
        os._exit(0)
    os.close(tell)
    try:
        return os.read(told, 512).decode()
    finally:
        os.close(told)
        os.waitpid(pid, 0)


def _of_torch(name: str) -> Any:
    """A function of torch's own, if it was imported and has it."""
    return getattr(getattr(sys.modules.get("torch"), "_C", None), name, None)


def _cuda_initialized() -> bool:
    """Asks the driver itself, if it was loaded: a call that answers without starting it."""
    library = _mapped(_CUDA)
    if not library:
        return False
    try:
        driver = ctypes.CDLL(library)
        count = ctypes.c_int()
        return int(driver.cuDeviceGetCount(ctypes.byref(count))) != _CUDA_NOT_INITIALIZED
    except (OSError, AttributeError):
        return True


def _mapped(name: str) -> str:
    """The path of a loaded library."""
    try:
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            for line in maps:
                if name in line:
                    return line.split(None, 5)[5].strip()
    except OSError:
        pass
    return ""
