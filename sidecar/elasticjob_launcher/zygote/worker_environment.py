"""Environment of workers: variables that differ between them, and what `ps` shows of a fork.

The kernel shows a process's first command line and environment. Those of a forked worker date
from the start of the zygote and are overwritten.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence

RANKS = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip
# Device assignment per worker, if configured. Read only at the start of a driver.
_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES",
    }
)  # fmt: skip
_PREFIXES = ("TORCHELASTIC_", "ELASTICJOB_")


def is_rank(name: str) -> bool:
    """Return True if the variable identifies a worker or its round."""
    return name in RANKS or name.startswith(_PREFIXES)


def differs_by_worker(name: str) -> bool:
    """Return True if the variable's value may differ by worker or by round."""
    return is_rank(name) or name in _DEVICES


def shared_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that is the same for all workers in all rounds."""
    return {n: value for n, value in env.items() if not differs_by_worker(n)}


def with_changes(env: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the changes that Python's start and imports made to it in `here`.

    Variables that differ by worker keep their value: the worker may import these modules later or
    not at all.
    """
    own = env.keys() - shared_variables(env).keys()
    kept = {name: value for name, value in env.items() if name in own or name in here}
    return {**kept, **{name: value for name, value in here.items() if name not in own}}


def set_variables(env: MutableMapping[str, str], values: Mapping[str, str | None]) -> None:
    """Set these variables; remove those with value None."""
    for name, value in values.items():
        if value is not None:
            env[name] = value
        elif name in env:
            del env[name]


RESERVED_SPACE = "ELASTICJOB_ROOM"
"""Variable set at the zygote's start to reserve space for the variables that differ in a worker.

The other variables stay in place: a library may keep a pointer to one.
"""
RESERVED_SPACE_VALUE = "-" * 4096
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_SAME_PROGRAM = (1 << 32) - 1
_MAP_FIELDS = {
    "start_code": 23, "end_code": 24, "start_data": 42, "end_data": 43, "start_brk": 44, "brk": 0,
    "start_stack": 25, "arg_start": 45, "arg_end": 46, "env_start": 47, "env_end": 48,
}  # fmt: skip
"""Fields of Linux's `struct prctl_mm_map`, each with its index in /proc/self/stat after the name; 0
for the end of the heap, which is not there."""


def show_process_as(words: Sequence[str], env: Mapping[str, str], name: str = "") -> None:
    """Overwrite the visible command line, and the ranks in the environment, cut to the space.

    `name` replaces the name of the process, which a console script has from its file.
    """
    if name:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(name), 0, 0, 0)
    try:
        with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    if 0 < arg_start < arg_end:
        shown = _write(arg_start, arg_end - arg_start, [os.fsencode(word) for word in words])
        _set_end_of_arguments(fields, arg_start + shown)
    if 0 < env_start < env_end:
        room = f"{RESERVED_SPACE}={RESERVED_SPACE_VALUE}".encode()
        at = ctypes.string_at(env_start, env_end - env_start).find(room)
        common = shared_variables(env)
        own = [f"{name}={value}" for name, value in env.items() if name not in common]
        if at >= 0:
            _write(env_start + at, len(room), [os.fsencode(word) for word in own])


def own_arguments() -> list[str]:
    """Return the command line of this process, as it was started; empty if it cannot be read."""
    if hasattr(sys, "orig_argv"):
        return list(sys.orig_argv)
    try:
        with open("/proc/self/cmdline", "rb") as line:  # noqa: PTH123
            return [os.fsdecode(word) for word in line.read().split(b"\0")[:-1]]
    except OSError:
        return []


def _write(start: int, size: int, words: Sequence[bytes]) -> int:
    """Write the words, padded to the size; return their length, with the last one's end."""
    text = b"\0".join(words)[: size - 1]
    ctypes.memmove(start, text.ljust(size, b"\0"), size)
    return len(text) + 1


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of Linux."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (*_MAP_FIELDS, "auxv")),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    ]


def _set_end_of_arguments(fields: Sequence[bytes], end: int) -> None:
    """End the visible command line there; else readers find empty arguments in the padding.

    A kernel that refuses (built without CHECKPOINT_RESTORE) shows the padding. `fields` are those
    of /proc/self/stat after the program's name.
    """
    values = {name: int(fields[index]) for name, index in _MAP_FIELDS.items() if index}
    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    values["arg_end"] = end
    layout = _MemoryMap(**values, exe_fd=_SAME_PROGRAM)
    pointer, size = ctypes.c_void_p(ctypes.addressof(layout)), ctypes.c_ulong(ctypes.sizeof(layout))
    prctl = library.prctl
    request = _PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), pointer, size, ctypes.c_ulong(0)
    # Read last: with an end from before an allocation, each later extension of the heap fails.
    layout.brk = library.sbrk(0)
    prctl(*request)
