"""State of this process that an import may leave: the kernel's records, registries of Python.

Forks would share it, or inherit it without the import.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from contextlib import suppress
from os import getpid
from typing import Any

from elasticjob_launcher.zygote.effects.identifiers import TRUSTED
from elasticjob_launcher.zygote.fork_safety import memory_maps, thread_count

_SHARED = re.compile(r" .w.s \S+ \S+ (\d+) *(.*)")
_NO_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SIGNAL_LINES = ("SigBlk", "SigIgn", "SigCgt", "Umask")
_THREADS = "Threads"
_OF_THREADS = 0b11 << 31
"""Signals 32 and 33, whose handlers the C library installs with the first thread of any library."""
IPC = {"shm": "shared memory", "sem": "semaphore", "msg": "message queue"}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
PROCESS_LINES = {
    "Name": "the name",
    "NoNewPrivs": "the privileges",
    "CapEff": "the privileges",
    "Seccomp": "the permitted system calls",
    "THP_enabled": "the size of pages",
    "VmLck": "the locked memory",
}
"""Lines of /proc/self/status, with their subjects in words."""
_FILES = {
    "oom_score_adj": "the score for a lack of memory",
    "coredump_filter": "the content of core files",
    "timerslack_ns": "the accuracy of timers",
}
"""Files in /proc/self, with their subjects in words."""
_PRCTL = {2: "the signal at the end of its parent", 37: "the adoption of orphans"}
"""Requests of `prctl` that return a number (PR_GET_PDEATHSIG, PR_GET_CHILD_SUBREAPER)."""


def process_state() -> dict[str, Any]:
    return {
        "threads": thread_count(),
        "fds": _descriptors(),
        "shared": _shared_maps(),
        "ipc": {(kind, ident) for kind in IPC for ident in _system_v(kind)},
        "children": has_children(),
        "signals": _signals(),
        "timers": [signal.getitimer(which)[0] > 0 for which in _TIMERS],
        "process": _settings(),
        "folder": _folder(),
        "finalizers": _finalizers(),
        "mp": _registry("multiprocessing.util", "_finalizer_registry"),
    }


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # the listing's own descriptor, already closed
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return {(fd, link) for fd, link in found if link not in _NO_FILES}


def is_channel(link: str) -> bool:
    return link.startswith(("socket:", "anon_inode:[eventpoll]"))


def _shared_maps() -> set[str]:
    """Return the writable mappings that forks would share, by file and inode."""
    # 00400000-0040b000 rw-s 00000000 00:01 1234   /dev/zero (deleted)
    found = (_SHARED.search(line) for line in memory_maps() if "s " in line)
    return {f"{each[2]} {each[1]}".strip() for each in found if each}


def _system_v(kind: str) -> set[str]:
    """Return this user's System V identifiers; for shared memory, only those of this process."""
    try:
        with open(f"/proc/sysvipc/{kind}", encoding="ascii") as listed:  # noqa: PTH123
            rows = [line.split() for line in listed]
    except OSError:
        return set()
    names, pid, user = rows[0], str(getpid()), str(os.geteuid())
    column, own = ("cpid", pid) if "cpid" in names else ("cuid", user)
    return {row[1] for row in rows[1:] if row[names.index(column)] == own}


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def left_running() -> list[str]:
    """Return a reason for a process of this session that is still running."""
    own = getpid()
    for name in os.listdir("/proc"):  # noqa: PTH208
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as stat:  # noqa: PTH123
                fields = stat.read().rpartition(b")")[2].split()
            if int(fields[3]) == own and int(name) != own and fields[0] != b"Z":
                return [f"starts a process that runs on ({name})"]
    return []


def _signals() -> list[Any]:
    status = process_status()
    handlers: list[Any] = [signal.getsignal(each) for each in signal.valid_signals()]
    return [*handlers, *(status.get(line) for line in SIGNAL_LINES)]


def process_status() -> dict[str, str]:
    """Return the kernel's record of this process's threads and signals."""
    found = {}
    with suppress(OSError), open("/proc/self/status", "rb") as status:  # noqa: PTH123
        for line in status.read().decode("ascii", "replace").splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                found[name] = f"{int(value, 16) & ~_harmless_handlers():x}"
            elif name == _THREADS or name in SIGNAL_LINES or name in PROCESS_LINES:
                found[name] = value.strip()
    return found


def _settings() -> dict[str, str]:
    """Return the settings that a process makes by `prctl` or in /proc, by their subjects."""
    status, found = process_status(), dict.fromkeys(PROCESS_LINES.values(), "")
    for line, subject in PROCESS_LINES.items():
        found[subject] += status.get(line, "")
    for name, subject in _FILES.items():
        with suppress(OSError), open(f"/proc/self/{name}", "rb") as file:  # noqa: PTH123
            found[subject] = file.read().decode("ascii", "replace")
    number = ctypes.c_int()
    for request, subject in _PRCTL.items():
        ctypes.CDLL(None).prctl(request, ctypes.byref(number), 0, 0, 0)
        found[subject] = str(number.value)
    return found


def _harmless_handlers() -> int:
    """Return the mask of the signals whose handlers forks may inherit.

    readline's handler of changes of the window's size records the change, for its own prompt.
    """
    known = signal.getsignal(signal.SIGWINCH)
    of_readline = "readline" in sys.modules and known in (signal.SIG_DFL, None)
    return _OF_THREADS | (1 << (signal.SIGWINCH - 1) if of_readline else 0)


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""


def _finalizers() -> set[int]:
    """Return the `weakref.finalize` objects that run at exit, without those of trusted packages."""
    kind: Any = getattr(sys.modules.get("weakref"), "finalize", None)
    entries = dict(getattr(kind, "_registry", ()))
    return {
        id(each)
        for each, info in entries.items()
        if info.atexit and _package(info.func) not in TRUSTED
    }


def _package(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _registry(module: str, name: str) -> set[Any]:
    return set(getattr(sys.modules.get(module), name, ()))
