"""Recorder of a corpus worker's process state; it also makes the worker wait.

Copied beside the script as `corpus_probe`, so it is the program's own module in both runs. It
writes `records/<round>-<rank>-<stage>.json` and talks to the runner through files alone.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 450.0
SETTLED_SECONDS, INTERVAL_SECONDS = 10.0, 0.1
"""Maximum wait for threads to be named, and the interval between two looks at them."""
FAILS = 1
"""Rank that fails in the first round."""

_RECORDS = Path(os.environ["CORPUS_RECORDS"])
_ROUND, _RANK = int(os.environ["ELASTICJOB_ROUND"]), int(os.environ["RANK"])
_WORLD, _LOCAL_RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
_SLOTS = int(os.environ["LOCAL_WORLD_SIZE"])


def imported() -> None:
    """Record the state after the package's imports. The script calls it right after them."""
    held = _globals()  # before random numbers are drawn from the generators among them
    _write("imported", {**_drawn(), **_process(), "globals": held})


def run(
    use: Callable[[Path], None],
    again: Callable[[Path], None] | None = None,
    killed: bool = False,
) -> None:
    """Use the package; fail in the first round; in later rounds end in order and use it again.

    Args:
        again: the second use, by default the first one; it must not wait for other ranks.
        killed: the rank that fails is killed; by default it raises an error.
    """
    _use(use, "output")
    _write("used", _process())
    _until(lambda: (_RECORDS / f"go-{_ROUND}").exists())
    if _ROUND == 1:
        if _RANK == FAILS and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if _RANK == FAILS:
            raise RuntimeError("this run's one failure")
        time.sleep(PATIENCE_SECONDS)  # until the agent stops it
        sys.exit("the agent has not ended this worker")
    if _LOCAL_RANK:
        # The end of each node's first worker must not take away resources of this one.
        firsts = [int(_read(_ROUND, rank, "used")["pid"]) for rank in range(0, _WORLD, _SLOTS)]
        _until(lambda: all(_has_ended(first) for first in firsts))
        _use(again or use, "again")
        _write("used again", _process())


def _use(use: Callable[[Path], None], name: str) -> None:
    folder = Path(f"{name}-{_ROUND}-{_RANK}")
    folder.mkdir()
    use(folder)
    gc.collect()  # when garbage is collected depends on the number of objects


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the probe has waited too long")
        time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    """Return True if no thread of a process is left, which would keep its descriptors open."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return True
    return len(threads) <= 1 and not Path(f"/proc/{pid}/cwd").exists()


def _path(number: int, rank: int, stage: str) -> Path:
    return _RECORDS / f"{number}-{rank}-{stage}.json"


def _read(number: int, rank: int, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_path(number, rank, stage).read_text())
    return found


def _write(stage: str, record: dict[str, Any]) -> None:
    path = _path(_ROUND, _RANK, stage)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), **record}))
    draft.replace(path)


# --- random values: the same in every worker, or different in each


def _drawn() -> dict[str, Any]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    makers: dict[str, Callable[[], Any]] = {
        "random": random.random,
        "uuid": lambda: str(uuid.uuid4()),
        "urandom": lambda: os.urandom(8).hex(),
    }
    seeds: list[Callable[[int], Any]] = [random.seed]
    # Only modules that are loaded already: a package that does not import them is not affected.
    if numpy is not None and hasattr(numpy, "random"):
        makers["numpy"] = lambda: float(numpy.random.rand())
        makers["numpy generator"] = lambda: float(numpy.random.default_rng().random())
        seeds.append(numpy.random.seed)
    if torch is not None and hasattr(torch, "rand"):
        makers["torch"] = lambda: float(torch.rand(()))
        seeds.append(torch.manual_seed)
    free = {name: make() for name, make in makers.items()}
    for seed in seeds:
        seed(20)
    seeded = {name: makers[name]() for name in ("random", "numpy", "torch") if name in makers}
    free["hash of a text"] = hash("text")
    return {"unseeded": free, "seeded": seeded}


# --- process state


def _process() -> dict[str, Any]:
    threads = _settled_threads()  # first: those of a closed queue close its descriptors
    return {
        "descriptors": _descriptors(),
        "shared maps": _shared_maps(),
        "threads": threads,
        "Python threads": sorted(
            f"{thread.name} {thread.daemon}" for thread in threading.enumerate()
        ),
        "children": sorted(_children()),
        "thread pools": _pools(),
        "environment": dict(os.environ),
        "environment in C": _c_environment(),
        "signal handlers": {
            each.name: str(signal.getsignal(each)) for each in sorted(signal.Signals)
        },
        "signal mask": sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "sys.path": sys.path,
        "sys.meta_path": [_name(one) for one in sys.meta_path],
        "sys.path_hooks": [_name(one) for one in sys.path_hooks],
        "warning filters": [str(one) for one in warnings.filters],
        "logging": [
            str(logging.getLogger().level), *(_name(one) for one in logging.getLogger().handlers)
        ],
        "settings": _settings(),
        "at exit": atexit._ncallbacks(),
        "finalizers": sum(
            info.atexit
            for info in weakref.finalize._registry.values()  # type: ignore[attr-defined]
        ),
    }  # fmt: skip


def _settings() -> dict[str, Any]:
    context = sys.modules.get("multiprocessing.context")
    default = getattr(context, "_default_context", None)
    method = getattr(getattr(default, "_actual_context", None), "_name", None)
    mask = os.umask(0)
    os.umask(mask)
    return {
        "umask": mask,
        "folder": str(Path.cwd()),
        "group": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "hooks": [
            _name(sys.excepthook), _name(sys.displayhook), _name(threading.excepthook),
            _name(sys.unraisablehook), _name(sys.breakpointhook), _name(sys.stdout),
        ],
        "trace": [str(sys.gettrace()), str(sys.getprofile())],
        "faulthandler": faulthandler.is_enabled(),
        "start method": method,
        "affinity": len(os.sched_getaffinity(0)),
        "builtins": hashlib.sha256(" ".join(sorted(dir(builtins))).encode()).hexdigest(),
        "print is Python's": type(print).__name__,
    }  # fmt: skip


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) or callable(value) else type(value)
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(kind))}"


def _descriptors() -> list[str]:
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = entry.name
        try:
            target = str(entry.readlink())
            flags = Path(f"/proc/self/fdinfo/{number}").read_text().split("flags:")[1].split()[0]
        except OSError:  # descriptor of this listing
            continue
        access = {0: "read", 1: "write", 2: "both"}.get(int(flags, 8) & 3, "other")
        if int(number) > 2 and not target.endswith("/fd"):
            found.append(f"{target} {access}")
    return sorted(found)


def _shared_maps() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    parts = (line.split(None, 5) for line in lines)
    return sorted(
        words[5] if len(words) > 5 else "anonymous" for words in parts if words[1] == "rw-s"
    )


def _settled_threads() -> list[str]:
    """Return the names of the threads once all others sleep and the names stay the same.

    A thread names itself late; on a busy machine a new one may not have run at all.
    """
    deadline = time.monotonic() + SETTLED_SECONDS
    before, now, sleep = None, *_threads()
    while not (sleep and now == before) and time.monotonic() < deadline:
        time.sleep(INTERVAL_SECONDS)
        before, (now, sleep) = now, _threads()
    return now


def _threads() -> tuple[list[str], bool]:
    """Return the names of the threads, and True if all but this one sleep."""
    names, sleep = [], True
    for task in list(Path("/proc/self/task").iterdir()):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        sleep = sleep and (state == "S" or int(task.name) == threading.get_native_id())
        names.append("main" if int(task.name) == os.getpid() else name)
    return sorted(names), sleep


def _children() -> Iterator[str]:
    for task in list(Path("/proc/self/task").iterdir()):
        try:
            pids = (task / "children").read_text().split()
            for pid in pids:
                yield Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue


def _pools() -> list[str]:
    import threadpoolctl

    found = [
        " ".join(str(pool.get(key)) for key in ("internal_api", "prefix", "num_threads"))
        for pool in threadpoolctl.threadpool_info()
    ]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_interop_threads"):
        found.append(f"torch {torch.get_num_threads()} {torch.get_num_interop_threads()}")
    return sorted(found)


def _c_environment() -> dict[str, str]:
    """Return the environment that `getenv` sees, including variables set in C alone."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_char_p
    names = set(os.environ)
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(library, "environ")
    for index in range(100_000):
        entry = variables[index]
        if entry is None:
            break
        names.add(entry.partition(b"=")[0].decode(errors="replace"))
    found = {name: library.getenv(os.fsencode(name)) for name in names}
    return {name: value.decode(errors="replace") for name, value in found.items() if value}


# --- identifiers: values that installed modules keep, and generators


def _globals() -> dict[str, str]:
    """Return values of modules and, one level deep, of their objects that may be random."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__dict__", {}).get("__file__", ""))
        if "-packages/" not in path:
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__") or isinstance(value, type) or callable(value):
                continue
            _note(found, f"{name}.{key}", value)
            if "-packages/" in _home(value):
                inside = getattr(value, "__dict__", None)
                for inner, held in list(inside.items()) if type(inside) is dict else ():
                    _note(found, f"{name}.{key}.{inner}", held)
    return found


def _home(value: Any) -> str:
    module = sys.modules.get(type(value).__module__)
    return str(getattr(module, "__dict__", {}).get("__file__", ""))


def _note(found: dict[str, str], name: str, value: Any) -> None:
    kind = type(value)
    if kind is str:
        telling = 6 <= len(value) <= 200 and any(letter.isdigit() for letter in value)
    elif kind is bytes:
        telling = 6 <= len(value) <= 200
    elif kind is int:
        telling = value > 1000
    elif kind is float:
        telling = len(repr(value)) > 8
    elif kind is uuid.UUID:
        telling = True
    else:
        state = _generator(value)
        if state:
            found[name] = f"generator {state}"
        return
    if telling:
        found[name] = repr(value)[:100]


def _generator(value: Any) -> str:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        state: Any = value.getstate()
    elif type(value).__module__.startswith("numpy.random"):
        state = getattr(value, "bit_generator", getattr(value, "_bit_generator", value)).state
    else:
        return ""
    return hashlib.sha256(str(state).encode()).hexdigest()[:16]
