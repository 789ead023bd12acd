"""Initialisation of a worker forked from the zygote.

On return from `born` the process matches a cold start as far as is observable: session, streams,
environment, seeds and thread counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .fitness import bad_fork
from .ranks import with_changes
from .threadcounts import restore_thread_counts, without_preloading

PR_SET_PDEATHSIG = 1
_ADOPTION_SECONDS = 5.0
_ADOPTION_POLL_SECONDS = 0.0002
_CLAIM_BYTES = 128


class Streams:
    """Descriptors from the request; the worker reports its pid to the launcher on `tell`."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.out, self.err, self.tell = fds

    def close(self) -> None:
        for fd in (self.out, self.err, self.tell):
            os.close(fd)


def born(
    streams: Streams,
    env: Mapping[str, str],
    launcher: int,
    here: Mapping[str, str],
    applied: Mapping[str, str | None],
    counted: Mapping[str, Mapping[str, str]],
) -> None:
    """Become the worker or exit; after an exit the launcher starts the worker cold.

    `here` is the environment after preloading. `applied` are the changes that the program was
    predicted to make to it; `counted` are, by library path, those made before the library is
    loaded.
    """
    os.setsid()
    adopted(launcher)
    trouble = bad_fork()
    os.dup2(streams.out, 1)
    os.dup2(streams.err, 2)
    try:
        os.write(streams.tell, f"{os.getpid()} {trouble}".encode()[:_CLAIM_BYTES])
    except OSError:
        os._exit(1)  # the launcher no longer waits for this worker
    streams.close()
    if trouble:
        os._exit(1)
    env = with_changes(env, without_preloading(here, env))
    os.environ.clear()
    os.environ.update(env)
    _fresh_seeds()
    _fresh_times()
    _own_number()
    restore_thread_counts(env, applied, counted)
    _thaw(sys.modules["__main__"].__dict__)
    gc.enable()


def adopted(launcher: int) -> None:
    """Wait until the launcher is the parent process, then arrange to die with it."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(_ADOPTION_POLL_SECONDS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _thaw(frozen: dict[str, Any]) -> None:
    """Return a dict to garbage collection, so that cycles through it are finalised at exit.

    Everything else stays frozen: traversing it takes a second at the end of a program.
    """
    for move in (ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track):
        move(ctypes.py_object(frozen))


def _own_number() -> None:
    """Reset the main thread's `native_id`: before Python 3.13 a fork keeps its parent's."""
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()


def _fresh_times() -> None:
    """Reset the process start time from which `logging` counts."""
    logging: Any = sys.modules.get("logging")
    if isinstance(getattr(logging, "_startTime", None), float):
        logging._startTime = time.time()
    elif logging is not None:  # from Python 3.13 on
        logging._startTime = time.time_ns()


def _fresh_seeds() -> None:
    """Reseed the generators that a fork does not reseed; Python's own is reseeded by the fork."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    generator: Any = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        current = process.current_process()
        with contextlib.suppress(AttributeError):
            current.authkey = os.urandom(32)
