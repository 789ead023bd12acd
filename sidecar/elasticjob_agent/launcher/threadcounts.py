"""Thread counts of numeric libraries: one while preloading, those of a cold start in a worker.

Only OpenBLAS starts its threads when it is loaded. The others start them at the first parallel
work, so they are preloaded with the workers' variables and need no handling here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .ranks import put

# Set for the zygote while it preloads. numexpr also starts its threads when it is imported.
WHILE_PRELOADING = {
    "OPENBLAS_NUM_THREADS": "1",
    "GOTO_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
# In OpenBLAS' reading order.
_COUNTS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
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
    counted: Mapping[str, Mapping[str, str]],
) -> None:
    """Give numexpr and each loaded OpenBLAS the thread count of a cold start.

    `env` is the worker's environment. `applied` are the changes that its program will make to it.
    `counted` are, by library path, those made before that library is loaded.
    """
    numexpr: Any = getattr(sys.modules.get("numexpr"), "utils", None)
    if hasattr(numexpr, "_init_num_threads"):
        put(os.environ, applied)
        numexpr._init_num_threads()
        put(os.environ, {name: env.get(name) for name in applied})
    for path in loaded_openblas():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in _NAMES:
            threads = getattr(library, name.format("set_num_threads"), None)
            processors = getattr(library, name.format("get_num_procs"), None)
            if threads is not None and processors is not None:
                most = processors()
                threads(min(_asked({**env, **counted.get(path, {})}) or most, most))
                break


def _asked(env: Mapping[str, str]) -> int:
    for name in _COUNTS:
        text = env.get(name, "").partition(",")[0].strip()
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 0


def loaded_openblas() -> Iterator[str]:
    """Yield the paths of the loaded OpenBLAS libraries."""
    try:
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            lines = maps.readlines()
    except OSError:
        return
    paths = (line.split(None, 5)[5].strip() for line in lines if "openblas" in line)
    yield from dict.fromkeys(path for path in paths if "openblas" in os.path.basename(path))  # noqa: PTH119
