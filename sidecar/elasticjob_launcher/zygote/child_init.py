"""Initialisation of a worker forked from the zygote.

On return from `become_worker` the process matches a cold start as far as is observable:
session, streams, environment, seeds and thread counts.

Of the numeric libraries only OpenBLAS starts its threads when it is loaded: one while
preloading, in a worker as many as in a cold start. The others start them at the first parallel
work, so they are preloaded with the workers' variables and need no handling here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from elasticjob_launcher.zygote.effects.watched_functions import names_of
from elasticjob_launcher.zygote.fork_safety import bad_fork, memory_maps
from elasticjob_launcher.zygote.worker_environment import set_variables, with_changes

# Set for the zygote while it preloads. numexpr also starts its threads when it is imported.
WHILE_PRELOADING = {
    "OPENBLAS_NUM_THREADS": "1",
    "GOTO_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
# In OpenBLAS' reading order.
_COUNTS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_WHOLE = re.compile(r"[0-9]{1,9}")
# Plain builds, builds with 64-bit integers, and those bundled with numpy and scipy.
_NAMES = [
    f"{prefix}openblas_{{}}{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
]


def without_preloading(here: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return `here`, the environment of a preloading process, with the thread counts of `env`."""
    own = {name for name, value in WHILE_PRELOADING.items() if here.get(name) == value}
    given = {name: env[name] for name in own if name in env}
    return {**{name: value for name, value in here.items() if name not in own}, **given}


def restore_thread_counts(
    env: Mapping[str, str],
    applied: Mapping[str, str | None],
    counted: Mapping[str, Mapping[str, str | None]],
    unbound: Collection[str],
    launcher: int,
) -> None:
    """Give numexpr and each loaded OpenBLAS the thread count of a cold start.

    Args:
        env: the worker's environment.
        applied: changes that its program will make to it.
        counted: changes made before a library is loaded, by the library's path.
        unbound: libraries whose threads may use all processors of the launcher.
    """
    numexpr: Any = getattr(sys.modules.get("numexpr"), "utils", None)
    if hasattr(numexpr, "_init_num_threads"):
        set_variables(os.environ, applied)
        numexpr._init_num_threads()
        set_variables(os.environ, {name: env.get(name) for name in applied})
    for path in loaded_openblas():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in _NAMES:
            threads = getattr(library, name.format("set_num_threads"), None)
            processors = getattr(library, name.format("get_num_procs"), None)
            if threads is not None and processors is not None:
                wanted = _requested_threads({**env, **counted.get(path, {})})
                with _processors_of(launcher if path in unbound else 0):
                    most = processors()
                    threads(min(wanted or most, most))
                break


@contextlib.contextmanager
def _processors_of(pid: int) -> Iterator[None]:
    """Let this thread, and those that it starts, use the processors of that process."""
    own = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # the processors are changed at the same time
        os.sched_setaffinity(0, os.sched_getaffinity(pid))
    yield
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, own)


def _requested_threads(env: Mapping[str, str | None]) -> int:
    for name in _COUNTS:
        text = (env.get(name) or "").partition(",")[0].strip()
        if _WHOLE.fullmatch(text) and int(text) > 0:
            return int(text)
    return 0


def loaded_openblas() -> Iterator[str]:
    """Yield the paths of the loaded OpenBLAS libraries."""
    paths = (line.split(None, 5)[5].strip() for line in memory_maps() if "openblas" in line)
    yield from dict.fromkeys(path for path in paths if "openblas" in os.path.basename(path))  # noqa: PTH119


GROUP_KEEPER = "torch.distributed.nn.functional"
"""Module that keeps the default process group of the time of its import, in default arguments."""
PR_SET_PDEATHSIG = 1
_ADOPTION_SECONDS = 5.0
_ADOPTION_POLL_SECONDS = 0.0002
_CLAIM_BYTES = 128


class ForkStreams:
    """Descriptors from the request; the worker reports its pid to the launcher on `report`."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.out, self.err, self.report = fds

    def close(self) -> None:
        for fd in (self.out, self.err, self.report):
            os.close(fd)


def become_worker(
    streams: ForkStreams,
    env: Mapping[str, str],
    launcher: int,
    here: Mapping[str, str],
    applied: Mapping[str, str | None],
    counted: Mapping[str, Mapping[str, str | None]],
    unbound: Collection[str],
) -> None:
    """Become the worker or exit; after an exit the launcher starts the worker cold.

    Args:
        here: environment after preloading.
        applied: changes that the program was predicted to make to it.
        counted: changes made before a library is loaded, by the library's path.
        unbound: libraries whose threads may use all processors of the launcher.
    """
    os.setsid()
    await_adoption(launcher)
    trouble = bad_fork()
    os.dup2(streams.out, 1)
    os.dup2(streams.err, 2)
    try:
        os.write(streams.report, f"{os.getpid()} {trouble}".encode()[:_CLAIM_BYTES])
    except OSError:
        os._exit(1)  # the launcher no longer waits for this worker
    streams.close()
    if trouble:
        os._exit(1)
    env = with_changes(env, without_preloading(here, env))
    os.environ.clear()
    os.environ.update(env)
    _reseed_generators()
    _reset_start_time()
    _reset_native_id()
    restore_thread_counts(env, applied, counted, unbound, launcher)
    _unfreeze(sys.modules["__main__"].__dict__)


def await_adoption(launcher: int) -> None:
    """Wait until the launcher is the parent process, then arrange to die with it."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(_ADOPTION_POLL_SECONDS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _unfreeze(frozen: dict[str, Any]) -> None:
    """Return a dict to garbage collection, so that cycles through it are finalised at exit.

    Everything else stays frozen: traversing it takes a second at the end of a program.
    """
    for move in (ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track):
        move(ctypes.py_object(frozen))


def finish_program() -> None:
    """Return everything to garbage collection if a library reports what is left as leaked."""
    if any(_reports_leaks(module) for module in list(sys.modules.values())):
        gc.unfreeze()


def _reports_leaks(module: Any) -> bool:
    """Return True for an extension module that nanobind made, such as duckdb's."""
    names = names_of(module)
    if type(names.get("__loader__")).__name__ != "ExtensionFileLoader":
        return False
    return any(type(value).__module__ == "nanobind" for value in list(names.values()))


def keep_first_process_group() -> None:
    """Keep torch's first default process group until the process ends.

    Cold, `GROUP_KEEPER` does so if it is imported with the first optimizer, after the group is
    made. Without that reference the program destroys the group in a thread that holds the GIL and
    joins the group's own thread, which may wait for it.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    update = getattr(distributed, "_update_default_pg", None)
    if update is None:
        return
    kept = False

    def updated(group: Any) -> None:
        nonlocal kept
        update(group)
        if group is None or kept:
            return
        kept = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if distributed._update_default_pg is updated:  # not the program's own function
            distributed._update_default_pg = update

    distributed._update_default_pg = updated


def _reset_native_id() -> None:
    """Reset the main thread's `native_id`: before Python 3.13 a fork keeps its parent's."""
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()


def _reset_start_time() -> None:
    """Reset the process start time from which `logging` counts."""
    logging: Any = sys.modules.get("logging")
    if isinstance(getattr(logging, "_startTime", None), float):
        logging._startTime = time.time()
    elif logging is not None:  # from Python 3.13 on
        logging._startTime = time.time_ns()


def _reseed_generators() -> None:
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
