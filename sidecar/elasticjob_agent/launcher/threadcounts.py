"""Thread counts of numeric libraries: one while preloading, then what a cold start would have had.

Only OpenBLAS starts its threads when it is loaded; the others wait for the first parallel work, so
they are preloaded with the very variables of the workers and need nothing here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .ranks import put

# Set for the standby while it preloads. numexpr too starts its threads when it is imported.
WHILE_PRELOADING = {
    "OPENBLAS_NUM_THREADS": "1",
    "GOTO_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
# In the order in which OpenBLAS reads them.
_COUNTS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Plain, with 64-bit integers, and as built into numpy and scipy.
_NAMES = [
    f"{prefix}openblas_{{}}{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
]


def without_preloading(here: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """`here`, of a process that preloads, with those variables that it is given as in `env`."""
    own = {name for name, value in WHILE_PRELOADING.items() if here.get(name) == value}
    given = {name: env[name] for name in own if name in env}
    return {**{name: value for name, value in here.items() if name not in own}, **given}


def restore_thread_counts(
    env: Mapping[str, str],
    applied: Mapping[str, str | None],
    counted: Mapping[str, Mapping[str, str]],
) -> None:
    """Give numexpr and each loaded OpenBLAS the threads that a cold start would have.

    `env` is the worker's environment; `applied` is what its program will change in it, and
    `counted` what of that it has changed when the library at that path is loaded.
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
    """The paths of the libraries."""
    try:
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            lines = maps.readlines()
    except OSError:
        return
    paths = (line.split(None, 5)[5].strip() for line in lines if "openblas" in line)
    yield from dict.fromkeys(path for path in paths if "openblas" in os.path.basename(path))  # noqa: PTH119
