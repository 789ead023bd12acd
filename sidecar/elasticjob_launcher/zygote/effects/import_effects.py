"""Detection of lasting effects of an import beyond the modules that it loads.

Such effects would be shared by forks or must happen in each process: files, open descriptors,
locks, shared memory, processes, signal handlers, exit functions, settings. A module with such an
effect must be imported by each worker itself.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import getpid
from typing import Any, NamedTuple

from elasticjob_launcher.zygote.effects.child_files import ChildFiles
from elasticjob_launcher.zygote.effects.identifiers import (
    TRUSTED,
    Identifiers,
    calling_module,
    is_of_zygote,
)
from elasticjob_launcher.zygote.effects.kept_values import is_unknown_rank
from elasticjob_launcher.zygote.effects.process_settings import Replacements, Settings
from elasticjob_launcher.zygote.effects.process_state import (
    IPC,
    PROCESS_LINES,
    SIGNAL_LINES,
    has_children,
    is_channel,
    left_running,
    process_state,
    process_status,
)
from elasticjob_launcher.zygote.effects.thread_counts import ThreadCounts
from elasticjob_launcher.zygote.effects.watched_functions import WatchedFunctions
from elasticjob_launcher.zygote.fork_safety import thread_count
from elasticjob_launcher.zygote.search_path import is_python_module
from elasticjob_launcher.zygote.temporary_files import remove_path

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FORKS = frozenset({"os.fork", "os.forkpty"})
_REAPS = ("system", "wait", "waitpid", "wait3", "wait4")
_CHANGES = frozenset({"os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr"})
MOST_REASONS = 4
_C_NUMBERS = frozenset({"getpid", "gettid", "getpgid", "getpgrp", "getsid", "syscall"})
_WITH_NUMBER = re.compile(r"/proc/(self|thread-self|\d+)/(task/\d+/)?(stat|status|sched)$")
"""Files that have the process number; others in /proc are read by packages that do not keep it."""
_TRUSTED_FILE = ("", "")
"""Reason and module of a file that a trusted package created: its creator may change it."""


class Effect(NamedTuple):
    """Lasting effect of an import, and the module that has it; empty if unknown."""

    reason: str
    module: str


class Effects:
    """Observer of successive imports, each from `begin` to `found`, between `start` and `stop`.

    `on_temporary` is called with the path of each temporary file or folder when it is created.
    With `startup`, the imports are those of each start of Python, before the program: forks inherit
    their settings, signal handlers and exit functions, which therefore do not count.
    """

    def __init__(self, on_temporary: Callable[[str], object], startup: bool = False) -> None:
        self._on_temporary = on_temporary
        self._startup = startup
        self._active = self._hooked = False
        self._pid = 0
        self._before: dict[str, Any] = {}
        self._watched = WatchedFunctions()
        self.identifiers = Identifiers(exit_functions=not startup)
        self.settings, self.replacements = Settings(), Replacements()
        self.thread_counts = ThreadCounts(self._watched)
        self._status: dict[str, str] = {}
        self._threads = 1
        self._modules: frozenset[str] = frozenset()
        self.temporary: list[str] = []
        self._numbered: list[str] = []
        self._child_files = ChildFiles(calling_module)
        self._clear()

    def _clear(self) -> None:
        self._made: dict[str, tuple[str, str]] = {}
        self._made_by_number: list[str] = []
        self._noted: dict[str, tuple[str, str]] = {}
        self._locked: dict[int, str] = {}
        self._spawned = False
        self._starters: list[str] = []
        self._signal_changers: list[str] = []
        self._process_changers: list[str] = []
        self._child_files.clear()

    def start(self) -> None:
        if not self._hooked:
            sys.addaudithook(self._hook())  # remains in all forks, but inactive
            self._hooked = True
        self._pid = getpid()  # another one in a successor
        self.identifiers.start()
        for name in ("mkfifo", "mknod"):  # without an audit event
            self._watched.report(os, name, self._makes_node)
        self._watch_logging()
        for name in _REAPS:
            self._watched.report(os, name, keep=self._reaps)
        self.thread_counts.start()
        self.replacements.start()
        self._before = process_state()
        self._status, self._threads = process_status(), thread_count()

    def _watch_logging(self) -> None:
        """Report configurations, which may disable loggers that a program has made before."""
        for name in ("dictConfig", "fileConfig"):
            self._watched.report(sys.modules.get("logging.config"), name, self._configures)

    def _configures(self, *args: Any, **options: Any) -> None:
        self._notice("configures logging")

    def stop(self) -> None:
        self._active = False
        self._watched.restore()
        self.identifiers.stop()

    def begin(self) -> None:
        self._clear()
        self.identifiers.begin()
        self.settings.begin()
        self.thread_counts.begin()
        self._modules = frozenset(sys.modules)
        self._active = True

    def module_loaded(self, name: str) -> None:
        """Attribute new threads and changes to this module; modules below it came first."""
        if getpid() != self._pid:
            return  # a worker loads what the standby has looked for
        self.settings.module_loaded(name)
        if self._active:
            self.thread_counts.loaded(name)
            if name == "logging.config":
                self._watch_logging()
        self.replacements.loaded(name)
        now, before = process_status(), self._status
        self._status = now
        if now == before:
            return
        if not is_python_module(name):  # else a thread of an earlier module has only now begun
            threads, self._threads = self._threads, thread_count()
            if self._threads > threads:
                self._starters.append(name)
        if any(now.get(line) != before.get(line) for line in SIGNAL_LINES):
            self._signal_changers.append(name)
        if any(now.get(line) != before.get(line) for line in PROCESS_LINES):
            self._process_changers.append(name)

    def found(self) -> list[Effect]:
        """Return the import's lasting effects; empty when it only loaded modules."""
        self._active = False
        before, now = self._before, process_state()
        effects = self._differences(before, now)
        if effects:  # some of these objects may be garbage
            gc.collect()
            now = process_state()
            effects = self._differences(before, now)
        self._before = now
        effects += self._files(now)
        if self._spawned:
            self._child_files.ended({*self._made, *self._noted})
            effects += [
                Effect(f"starts a process that makes, changes or removes {path}", module)
                for path, module in self._child_files.found()
                if not _is_cache(path)
            ]
            effects += [Effect(reason, "") for reason in left_running()]
        effects += [Effect(*each) for each in self.identifiers.found()]
        if not self._startup:
            loaded = {name.partition(".")[0] for name in set(sys.modules) - self._modules}
            packages = {name for name in loaded if not is_python_module(name)}
            replaced = self.replacements.found(packages) if packages - TRUSTED else []
            changes = self.settings.found(packages) + replaced
            effects += [Effect(*each) for each in changes + self.thread_counts.found()]
        return list(dict.fromkeys(effects))

    def clean_up(self) -> None:
        """Stop this process's helpers and remove its temporary files, before it ends."""
        tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
        with suppress(Exception):
            tracker._resource_tracker._stop()  # removes shared memory
        for path in self.temporary:
            remove_path(path)
        for path in self._numbered:
            with suppress(OSError):  # such as a folder: its name may have the number by chance
                os.unlink(path)  # noqa: PTH108

    # --- actions during an import, from Python's audit events

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        kinds: dict[str, Callable[..., None]] = {
            "open": self._opens,
            "os.mkdir": self._makes_folder,
            "os.rename": self._renames,
            "os.remove": self._removes,
            "os.rmdir": self._removes,
            "os.link": self._links,
            "os.symlink": self._links,
            "tempfile.mkdtemp": self._makes_temporary,
            "tempfile.mkstemp": self._makes_temporary,
            "fcntl.flock": self._locks,
            "fcntl.lockf": self._locks,
            "sqlite3.connect": self._connects,
            "socket.bind": self._binds,
            "ctypes.dlsym": self._calls_c,
            "sys.addaudithook": lambda: self._notice("adds an audit hook"),
            "subprocess.Popen": lambda program, *details: self._spawns(*details),
            "os.posix_spawn": lambda program, words, env: self._spawns(words, None, env),
            "os.system": self._spawns,
            **dict.fromkeys(_FORKS, self._spawns),
            **dict.fromkeys(_CHANGES, self._changes),
        }
        find = kinds.get

        def hook(event: str, details: tuple[Any, ...]) -> None:
            if not self._active:
                return
            does = find(event)
            if does is not None and getpid() == self._pid:
                self._active = False
                try:
                    does(*details)
                except Exception:  # the audited call itself raises the error
                    pass
                finally:
                    self._active = True

        return hook

    def _calls_c(self, library: Any, name: Any) -> None:
        """Record a function of a C library that Python code is about to call."""
        self.thread_counts.symbol(library, name)
        if name in _C_NUMBERS:
            self.identifiers.numbered()

    def _opens(self, path: Any, mode: Any, flags: int) -> None:
        if isinstance(path, int) or is_of_zygote(sys._getframe(2)):  # as `process_status`
            return
        if not flags & _WRITES:
            text = os.fsdecode(path)
            if text in (f"/proc/{self._pid}/environ", "/proc/self/environ"):
                self._notice(f"reads {text}")
            elif _WITH_NUMBER.match(text):
                self.identifiers.numbered()
            return
        name = _absolute(path)
        if os.path.lexists(name):
            if os.path.isfile(name) and name not in self._made:  # noqa: PTH113
                self._note(name, f"writes to the file {name}")
        else:
            self._make(name, "file")

    def _makes_folder(self, path: Any, mode: Any, dir_fd: int) -> None:
        name = _absolute(path, dir_fd)
        if not os.path.lexists(name):
            self._make(name, "folder")

    def _makes_temporary(self, path: Any) -> None:
        name = _absolute(path)
        if not os.path.lexists(name):
            self._make(name, "temporary file or folder", drawn=True)

    def _renames(self, old: Any, new: Any, old_fd: int, new_fd: int) -> None:
        source, target = _absolute(old, old_fd), _absolute(new, new_fd)
        if self._made.pop(source, None) is None:
            self._note(source, f"renames {source}")
        elif os.path.lexists(target) and target not in self._made:
            self._note(target, f"writes to the file {target}")
        else:
            self._make(target, "file")

    def _removes(self, path: Any, dir_fd: int) -> None:
        name = _absolute(path, dir_fd)
        if name not in self._made and os.path.lexists(name):
            self._note(name, f"removes {name}")

    def _links(self, source: Any, path: Any, *fds: int) -> None:
        name = _absolute(path, fds[-1] if fds else -1)
        if not os.path.lexists(name):
            self._make(name, "link")

    def _changes(self, path: Any, *details: Any) -> None:
        if not isinstance(path, int):
            name = _absolute(path)
            if name not in self._made and os.path.lexists(name):
                self._note(name, f"changes {name}")

    def _locks(self, fd: Any, operation: int, *details: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        with suppress(OSError):
            self._locked[number] = os.readlink(f"/proc/self/fd/{number}")

    def _connects(self, database: Any, *details: Any) -> None:
        self._note("sqlite3", f"opens a database connection ({os.fsdecode(database)})")

    def _binds(self, socket: Any, address: Any) -> None:
        if isinstance(address, (str, bytes)) and not os.fsdecode(address).startswith("\0"):
            name = _absolute(address)
            if not os.path.lexists(name):
                self._make(name, "socket")

    def _makes_node(self, path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> None:
        if self._active and getpid() == self._pid:
            name = _absolute(path, dir_fd)
            if not os.path.lexists(name):
                self._make(name, "special file")

    def _spawns(self, command: Any = None, folder: Any = None, env: Any = None) -> None:
        self._spawned = True
        if isinstance(env, dict):  # perhaps a copy of the environment: the process has no rank
            for name in [name for name, value in env.items() if is_unknown_rank(value)]:
                del env[name]
        self._child_files.started(command, folder)

    def _reaps(self, result: Any) -> None:
        """Look for a process's files once it has ended: others make files of their own later."""
        ended = not isinstance(result, tuple) or result[0] != 0
        if ended and self._active and self._spawned and getpid() == self._pid:
            self._child_files.ended({*self._made, *self._noted}, not has_children())

    def _make(self, name: str, kind: str, drawn: bool = False) -> None:
        """Record a creation; caches of trusted packages have the same names in every process.

        `drawn`: True if the name has an identifier that each process draws. Such a path is removed
        at the end. A file with the process number is removed only by this process, which knows that
        it has made it.
        """
        maker = calling_module()
        drawn = drawn or self.identifiers.names_draw(name)
        if name not in self._made and not _is_cache(name):
            if drawn:
                self.temporary.append(name)
                self._on_temporary(name)
            elif self.identifiers.names_process(name, maker):
                self._made_by_number.append(name)
        if maker or drawn:
            reason = f"makes the {kind} {name} when it is imported"
            self._made.setdefault(name, (reason, maker))
        else:
            self._made.setdefault(name, _TRUSTED_FILE)

    def _notice(self, reason: str) -> None:
        """Record an action that counts unless it is one of Python or a trusted package."""
        if calling_module():
            self._note(reason, reason)

    def _note(self, key: str, reason: str) -> None:
        if not _is_cache(key):
            self._noted.setdefault(key, (f"{reason} when it is imported", calling_module()))

    def _files(self, now: dict[str, Any]) -> list[Effect]:
        """Return created files that still exist, other file changes and held locks."""
        self._numbered += filter(os.path.lexists, self._made_by_number)
        made = [
            each
            for name, each in self._made.items()
            if each != _TRUSTED_FILE and not _is_cache(name) and os.path.lexists(name)
        ]
        effects = [Effect(reason, module) for reason, module in [*made, *self._noted.values()]]
        for number, name in self._locked.items():
            if (number, name) in now["fds"]:
                effects.append(Effect(f"keeps the file {name} locked", ""))
        return effects

    # --- state left by an import, from the kernel and Python

    def _differences(self, before: dict[str, Any], now: dict[str, Any]) -> list[Effect]:
        effects: list[Effect] = []

        def add(reason: str, modules: Sequence[str] = ()) -> None:
            effects.extend(Effect(reason, module) for module in modules or ("",))

        if now["threads"] > before["threads"]:
            add("starts threads", self._starters)
        new = now["fds"] - before["fds"]
        links = sorted(link for _, link in new)
        if any(is_channel(link) for link in links):
            add("opens a socket or an event loop, which workers must not share")
        for link in links:
            if not is_channel(link):
                add(f"keeps {link} open")
        for name in sorted(now["shared"] - before["shared"]):
            what = "a semaphore or shared memory" if name.startswith("/dev/") else "shared memory"
            add(f"makes {what}, which workers must not share ({name})")
        for kind, ident in sorted(now["ipc"] - before["ipc"]):
            add(f"makes a System V {IPC[kind]} ({ident})")
        if now["children"] and not before["children"]:
            add("starts a process, which stays its child")
        if now["timers"] != before["timers"]:
            add("sets a timer")
        if now["mp"] - before["mp"]:
            add("registers a finalizer of multiprocessing")
        if self._startup:
            return effects
        if now["signals"] != before["signals"]:
            add("changes signal handlers or masks", self._signal_changers)
        for what, value in now["process"].items():
            if value != before["process"].get(what):
                add(f"changes {what} of the process", self._process_changers)
        if now["folder"] != before["folder"]:
            add("changes the working directory")
        if now["finalizers"] - before["finalizers"]:
            add("registers a finalizer (weakref.finalize) for the end of the program")
        return effects


def described(effects: Sequence[Effect]) -> str:
    """Return the effects in words, at most the first few."""
    reasons = list(dict.fromkeys(each.reason for each in effects))
    return ", and it ".join(reasons[:MOST_REASONS])


def _absolute(path: Any, dir_fd: Any = -1) -> str:
    name = os.fsdecode(path)
    if isinstance(dir_fd, int) and dir_fd >= 0 and not os.path.isabs(name):  # noqa: PTH117
        name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)  # noqa: PTH118
    return os.path.abspath(name)  # noqa: PTH100


def _is_cache(name: str) -> bool:
    """Return True for compiled Python modules and for files that do not persist."""
    if name.startswith(("/dev/", "/proc/")):
        return not name.startswith("/dev/shm/")
    return name.endswith((".pyc", "/__pycache__")) or ".pyc." in os.path.basename(name)  # noqa: PTH119
