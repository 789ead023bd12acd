"""Command line and environment of a forked worker as shown by the kernel and `ps`.

Both date from the start of the zygote and are overwritten in each worker.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

from .ranks import shared

ROOM = "ELASTICJOB_ROOM"
"""Variable set at the zygote's start to reserve space for the variables that differ in a worker.

The other variables stay in place: a library may keep a pointer to one.
"""
ROOM_VALUE = "-" * 4096


def show_as(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Overwrite the visible command line, and the ranks in the environment, cut to the space."""
    try:
        with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    if 0 < arg_start < arg_end:
        _write(arg_start, arg_end - arg_start, [os.fsencode(word) for word in words])
    if 0 < env_start < env_end:
        room = f"{ROOM}={ROOM_VALUE}".encode()
        at = ctypes.string_at(env_start, env_end - env_start).find(room)
        common = shared(env)
        own = [f"{name}={value}" for name, value in env.items() if name not in common]
        if at >= 0:
            _write(env_start + at, len(room), [os.fsencode(word) for word in own])


def _write(start: int, size: int, words: Sequence[bytes]) -> None:
    text = b"\0".join(words)[: size - 1]
    ctypes.memmove(start, text.ljust(size, b"\0"), size)
