"""Zygote process: preloads modules, then forks a worker on each request of the launcher.

Runs in the workers' interpreter, started with the options of their command. Requests and
answers are JSON, one per packet, on a socket to the launcher. The process never starts a
thread. On request it also forks a process that serves torch's TCPStore, or a successor of itself
that imports more modules.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from json import dumps, loads  # packages may replace those of the module
from typing import Any, NoReturn

from elasticjob_launcher.zygote import child_init, run_module
from elasticjob_launcher.zygote.analysis.changes import EnvironmentChange
from elasticjob_launcher.zygote.analysis.program_imports import (
    ImportAnalysis,
    Source,
    WantedImport,
    analyse_imports,
    may_choose_address,
    module_files,
)
from elasticjob_launcher.zygote.child_init import (
    GROUP_KEEPER,
    WHILE_PRELOADING,
    ForkStreams,
    become_worker,
    loaded_openblas,
)
from elasticjob_launcher.zygote.effects.process_settings import pause_collection
from elasticjob_launcher.zygote.fork_safety import hidden_module, unfit_for_fork
from elasticjob_launcher.zygote.import_recorder import ImportPage, ImportRecorder
from elasticjob_launcher.zygote.preload import ImportGuard, is_excluded
from elasticjob_launcher.zygote.run_module import Target
from elasticjob_launcher.zygote.search_path import is_python_module, searching
from elasticjob_launcher.zygote.startup_code import startup_refusal
from elasticjob_launcher.zygote.worker_environment import (
    RESERVED_SPACE,
    differs_by_worker,
    own_arguments,
    set_variables,
    show_process_as,
)

PACKET_BYTES = 1 << 20
FDS = 3
MOST_NAMES = 4000
_MANY_FILES = 20
"""Number of files of a program whose trees take more memory than is worth a collection."""
_MAX_SECONDS_AT_FORK = 2.0
"""Processor time for the analysis of a changed program while its workers wait."""


def serve_store(report: int, launcher: int) -> NoReturn:
    """Write the pid and port to `report`, then serve; write nothing if the store cannot start."""
    try:
        os.setsid()
        child_init.await_adoption(launcher)
        store = _start_store()
        os.write(report, f"{os.getpid()} {store.port}".encode())
        os.close(report)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _start_store() -> Any:
    distributed = sys.modules["torch"].distributed
    return distributed.TCPStore("localhost", 0, None, True, wait_for_workers=False)


class Zygote:
    """Zygote that serves the launcher on `sock` until it closes; `serve` returns only in a worker.

    `own` are the modules imported for the zygote itself, which a fresh interpreter lacks; `given`
    is the environment at its start.
    """

    def __init__(self, sock: socket.socket, own: Collection[str], given: Mapping[str, str]) -> None:
        self._sock = sock
        self._given = given
        self._applied: dict[str, str | None] = {}
        self._direct: set[str] = set()
        self._native: dict[str, str | None] = {}  # the changes that C code sees
        self._counted: dict[str, dict[str, str | None]] = {}
        self._own = own
        self._launcher = os.getppid()
        self._pages: list[ImportPage] = []
        self._recorded_names: dict[str, None] = {}
        self._tried: set[str] = set()
        self._guard: ImportGuard | None = None
        self._excluded: frozenset[str] = frozenset()
        self._configured: frozenset[WantedImport] = frozenset()
        self._target: Target | None = None
        self._first: Sequence[str] = ()
        self._last: Sequence[str] = ()
        self._analysis = ImportAnalysis((), frozenset())
        self._stamps: Sequence[object] = ()
        self._refused: tuple[Sequence[object], str] = (), ""
        self._keeps_group = False
        self._resume_collection: Callable[[], None] = gc.enable
        self._launcher_processors = os.sched_getaffinity(self._launcher)
        self._own_processors = os.sched_getaffinity(0)

    def serve(self) -> Callable[[], Callable[[], object]]:
        """Handle requests; return, in each worker, a function that gives its program."""
        while True:
            message, fds = self._received()
            kind = message["do"]
            if kind == "preload":
                self._preload(message)
            elif kind == "learn":
                self._fork_successor(message, fds)
            elif kind == "serve":
                self._fork_store(fds)
            elif kind == "fork":
                streams = ForkStreams(fds)
                if self._fork_worker(message, streams):
                    return self._program
                streams.close()

    # --- preloading

    def _preload(self, request: dict[str, Any]) -> None:
        began = time.monotonic()
        # A script of pyenv starts another interpreter than the one that the command names.
        words = request["command"]
        command = [*(own_arguments()[:1] or words[:1]), *words[1:]]
        target = Target(request["module"], request["target"], request["arguments"], command)
        self._target = target
        run_module.set_argv_and_path(target)
        self._end_if_unfit(hidden_module(self._own, sys.path[0]))
        self._end_if_unfit(startup_refusal(self._own))
        self._end_if_unfit(run_module.unreadable_source(target))
        self._excluded = frozenset(request["excluded"])
        guard = ImportGuard((), request["modules"])
        analysis = self._analysis = self._analyse(guard)
        run_module.set_main_file(target, self._entry(guard))
        self._stamps = _file_stamps(analysis.files)
        self._end_if_unfit(analysis.unread)
        for folder in analysis.first:
            self._end_if_unfit(hidden_module(self._own, folder))
        self._first, self._last = analysis.first, analysis.last
        self._end_if_unknown(analysis.steps)
        chosen = self._chosen(analysis, request["modules"])
        # The program may not import the others, whose effects it would notice.
        certain = [step for step in analysis.steps if step not in analysis.possible]
        self._configured = frozenset(map(WantedImport, chosen)).difference(certain)
        steps = [*certain, *(WantedImport(name) for name in chosen)]
        wanted: list[WantedImport | EnvironmentChange] = [
            each
            for each in steps
            if isinstance(each, EnvironmentChange) or not is_excluded(each.module, self._excluded)
        ]
        wanted += self._known(request["learned"], guard)
        # `_apply_change` leaves the values of the others to the workers.
        applied = [name for name in analysis.known if not _left_to_workers(name)]
        self._guard = ImportGuard(
            analysis.sets, request["modules"], self._excluded, self._report_temporary, applied
        )
        # Imports allocate much and free little: collections would gain nothing.
        self._resume_collection = pause_collection()
        self._import(wanted)
        self._answer("ready", seconds=time.monotonic() - began)

    def _end_if_unknown(self, steps: Sequence[WantedImport | EnvironmentChange]) -> None:
        """End if an installed package is imported after a change to an unknown value."""
        unknown: EnvironmentChange | None = None
        for step in steps:
            if isinstance(step, EnvironmentChange):
                if not (step.known or differs_by_worker(step.name)):
                    unknown = unknown or step
            elif unknown is not None and not is_python_module(step.module):
                sets = "may set" if unknown.doubtful else "sets"
                self._end_if_unfit(
                    f"{unknown.where}: it {sets} {unknown.name or 'variables'} to what cannot be "
                    f"read, before it imports {step.module}"
                )

    def _chosen(self, analysis: ImportAnalysis, modules: Sequence[str]) -> Sequence[str]:
        """Return the configured modules; none if the program may change variables before them."""
        changed = {step.name for step in analysis.steps if isinstance(step, EnvironmentChange)}
        found = [n for n in sorted({*changed, *analysis.later}) if not differs_by_worker(n)]
        unknown = any(
            isinstance(step, EnvironmentChange) and not step.known for step in analysis.steps
        )
        if not modules or not found or not (unknown or analysis.later):
            return modules
        print(  # noqa: T201
            f"not preloaded: {', '.join(modules)}: your program may change "
            f"{found[0] or 'variables'} before it imports them",
            flush=True,
        )
        return ()

    def _analyse(self, guard: ImportGuard, seconds: float | None = None) -> ImportAnalysis:
        entry = self._entry(guard)
        found = analyse_imports(entry, sys.path, guard.installed, self._given, seconds)
        if len(found.files) > _MANY_FILES:
            gc.collect()  # imports then reuse the memory of the trees
        return found

    def _changed_program(self) -> str:
        """Return the reason if preloaded modules no longer match the program; empty otherwise."""
        stamps = _file_stamps(self._analysis.files)
        if stamps == self._stamps:
            return ""
        if stamps == self._refused[0]:
            return self._refused[1]
        assert self._guard is not None
        assert self._target is not None
        if trouble := run_module.unreadable_source(self._target):
            return trouble
        now = self._analyse(self._guard, _MAX_SECONDS_AT_FORK)
        trouble = now.unread
        if not trouble and now.import_context != self._analysis.import_context:
            trouble = "the program has changed, in what it sets before its imports"
        if trouble:
            self._refused = stamps, trouble  # further workers do not read it again
            return trouble
        self._analysis, self._stamps = now, _file_stamps(now.files)
        return ""

    def _moved_processors(self) -> str:
        """Return the reason if libgomp has bound its threads to former processors of the launcher;
        empty otherwise."""
        before = self._launcher_processors
        if self._own_processors == before or os.sched_getaffinity(self._launcher) == before:
            return ""
        return "the processors of the launcher have changed since threads were bound to them"

    def _entry(self, guard: ImportGuard) -> list[Source]:
        target = self._target
        assert target is not None
        if target.module:
            return module_files(target.name, sys.path)
        if target.is_folder:
            return [Source(os.path.join(target.name, "__main__.py"))]  # noqa: PTH118
        return [Source(target.name)]

    def _fork_successor(self, request: dict[str, Any], fds: list[int]) -> None:
        """Fork a successor that imports the modules that workers have imported since.

        It answers on the descriptor, which is closed if there is nothing to import. This process
        serves on meanwhile. Only the last `request["workers"]` workers can still write.
        """
        assert self._guard is not None
        for page in self._pages:
            self._recorded_names.update(dict.fromkeys(page.names()))
        self._pages = self._pages[-request["workers"] :]
        self._excluded = frozenset(request["excluded"])
        fresh = [name for name in self._recorded_names if name not in self._tried][:MOST_NAMES]
        # Sent before the import: if one of them is refused, the next zygote preloads the others.
        self._send({"is": "recorded", "names": fresh})
        wanted = self._known(fresh, self._guard)
        self._tried.update(set(fresh) - {each.module for each in wanted})
        (fd,) = fds
        try:
            between = os.fork() if wanted else None
        except OSError:  # too many processes
            between = None
        if between == 0:
            self._leave_parent()
            self._become_successor(fd, wanted)
            return
        if between is not None:
            os.waitpid(between, 0)
        os.close(fd)

    def _become_successor(self, fd: int, wanted: Sequence[WantedImport]) -> None:
        """Answer on `fd` from now on, as the successor, and import these modules."""
        assert self._guard is not None
        os.setsid()
        child_init.await_adoption(self._launcher)
        self._sock.close()
        self._sock = _open_socket(fd)
        self._send({"is": "forked", "pid": os.getpid()})
        self._guard.exclude(self._excluded)
        self._import(wanted)
        self._answer("learned")

    def _known(self, names: Sequence[str], guard: ImportGuard) -> list[WantedImport]:
        """Return those of a worker's modules that may be imported here."""
        with searching(self._first, self._last):
            return [
                WantedImport(name)
                for name in names
                if not is_excluded(name, self._excluded) and guard.admits(name)
            ]

    def _import(self, wanted: Sequence[WantedImport | EnvironmentChange]) -> None:
        """Import modules and apply changes; report and end if the process can no longer fork."""
        guard = self._guard
        assert guard is not None
        with searching(self._first, self._last), guard.watching():
            for each in wanted:
                if isinstance(each, EnvironmentChange):
                    self._apply_change(each)
                    continue
                self._tried.add(each.module)
                if each.module not in sys.modules or each.names:
                    self._send({"is": "importing", "module": each.module})
                    loaded = GROUP_KEEPER in sys.modules
                    line = self._analysis.lines.get(each, 0)
                    guard.load(each, each not in self._configured, line)
                    if not loaded and GROUP_KEEPER in sys.modules:
                        self._keeps_group = each.module not in self._analysis.imported
                    if self._native and not is_python_module(each.module):
                        self._record_openblas()
        sys.stdout.flush()
        sys.stderr.flush()
        if guard.refusals:
            guard.effects.clean_up()
            self._end_unfit(guard.refusals, "")
        self._end_if_unfit(unfit_for_fork())
        self._own_processors = os.sched_getaffinity(0)
        gc.collect()
        gc.freeze()  # keeps these pages shared during the workers' collections

    def _apply_change(self, change: EnvironmentChange) -> None:
        """Apply a change that the program would have made to the environment by now."""
        if differs_by_worker(change.name) or not change.known:
            return  # not read by any preloaded module
        if not self._native:
            self._record_openblas()  # those that are loaded before any change
        self._native[change.name] = change.value
        if change.direct:
            self._direct.add(change.name)
            if change.value is None:
                os.unsetenv(change.name)
            elif change.name not in WHILE_PRELOADING:
                os.putenv(change.name, change.value)
        else:
            self._applied[change.name] = change.value
            if change.name not in WHILE_PRELOADING:
                set_variables(os.environ, {change.name: change.value})

    def _record_openblas(self) -> None:
        """Record the variables that the program has changed by the time an OpenBLAS is loaded."""
        for path in loaded_openblas():
            self._counted.setdefault(path, dict(self._native))

    def _environment(self) -> dict[str, str]:
        """Return the environment with the changes of Python and packages, without the program's."""
        found = dict(os.environ)
        for name, value in self._applied.items():
            if name not in WHILE_PRELOADING and found.get(name) == value:
                set_variables(found, {name: self._given.get(name)})
        return found

    def _report_temporary(self, path: str) -> None:
        """Report a temporary file, which the launcher removes after the end of this process."""
        self._send({"is": "made", "path": path})

    def _end_if_unfit(self, reason: str) -> None:
        if reason:
            self._end_unfit({}, reason)

    def _end_unfit(self, refused: dict[str, str], reason: str) -> None:
        """Report the reason, then wait until the launcher has listed this process's descendants."""
        self._send({"is": "unfit", "refused": refused, "reason": reason})
        while self._sock.recv(PACKET_BYTES):
            pass
        os._exit(0)

    def _answer(self, kind: str, **more: Any) -> None:
        self._send({"is": kind, "modules": len(sys.modules), **more})

    # --- forking

    def _fork_worker(self, request: dict[str, Any], streams: ForkStreams) -> bool:
        """Fork a worker; return True in the worker.

        The intermediate process ends at once, so that the launcher adopts the worker.
        """
        page = ImportPage()
        self._pages.append(page)
        trouble = unfit_for_fork() or self._changed_program() or self._moved_processors()
        if trouble:
            os.write(streams.report, f"0 {trouble}".encode())
            return False
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return False
        self._leave_parent()
        self._sock.close()
        self._pages = [page]
        listener = ImportRecorder(page, [*self._first, *sys.path, *self._last])
        sys.meta_path.insert(0, listener)
        assert self._guard is not None
        here = self._environment()
        for name in self._direct:
            os.unsetenv(name)
        become_worker(
            streams,
            request["env"],
            self._launcher,
            here,
            self._applied,
            self._counted,
            self._guard.effects.settings.unbound,
        )
        if self._keeps_group:
            child_init.keep_first_process_group()
        self._resume_collection()
        self._guard.effects.identifiers.set_new_values()
        listener.expect(self._applied)
        assert self._target is not None
        show_process_as(self._target.command, request["env"], request["process"])
        return True

    def _fork_store(self, fds: list[int]) -> None:
        """Fork a process that serves a store, unless the program may meet at another address."""
        assert self._target is not None
        elsewhere = may_choose_address(self._target.arguments, self._analysis)
        if "torch" in sys.modules and not elsewhere and not unfit_for_fork():
            between = os.fork()
            if not between:
                self._leave_parent()
                self._sock.close()
                serve_store(fds[0], self._launcher)
            os.waitpid(between, 0)
        os.close(fds[0])

    def _leave_parent(self) -> None:
        """Continue in a fork; this process ends at once, so that the launcher adopts the fork."""
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)

    def _program(self) -> Callable[[], object]:
        assert self._target is not None
        return run_module.program_runner(self._target)

    # --- the socket

    def _received(self) -> tuple[dict[str, Any], list[int]]:
        fds = array("i")
        room = socket.CMSG_SPACE(FDS * fds.itemsize)
        data, controls, _, _ = self._sock.recvmsg(PACKET_BYTES, room)
        if not data:
            os._exit(0)  # the launcher is gone
        for level, kind, content in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return loads(data), list(fds)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._sock.send(dumps(message).encode())
        except OSError:
            os._exit(0)


def _left_to_workers(name: str) -> bool:
    """Return True if the zygote does not give this variable the program's value."""
    return differs_by_worker(name) or name in WHILE_PRELOADING


def _file_stamps(paths: Sequence[str]) -> list[object]:
    """Return a stamp of these files, which changes when one of them is written."""
    found: list[object] = []
    for path in paths:
        try:
            known = os.stat(path)  # noqa: PTH116
            found.append((known.st_mtime_ns, known.st_size, known.st_ino))
        except OSError:
            found.append(None)
    return found


def run_zygote(fd: int, own: Collection[str]) -> Callable[[], Callable[[], object]]:
    """Run the zygote on socket `fd`; return, in each worker, a function that gives its program."""
    os.environ.pop(RESERVED_SPACE, None)
    given = dict(os.environ)
    os.environ.update(WHILE_PRELOADING)
    return Zygote(_open_socket(fd), own, given).serve()


def _open_socket(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    return sock
