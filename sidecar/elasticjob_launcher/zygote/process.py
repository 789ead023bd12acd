"""Zygote process from the launcher's side: start, limits, messages over a socket, end.

Messages are JSON, one per packet. The launcher forwards the process's output with a prefix.
The zygote runs the import code of arbitrary packages, whose duration and memory use are
unbounded: the launcher checks it from outside, a few times a second, only while it imports.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.output import Output
from elasticjob_launcher.processes.process_info import (
    PROC,
    descendants,
    kill_unless_reused,
    stat_fields,
)
from elasticjob_launcher.processes.spawn import LaunchError, spawn
from elasticjob_launcher.processes.stuck_processes import MAX_INTERVAL_SECONDS
from elasticjob_launcher.processes.worker_stream import WorkerStream
from elasticjob_launcher.settings import Limits
from elasticjob_launcher.zygote.temporary_files import remove_path
from elasticjob_launcher.zygote.worker_environment import RESERVED_SPACE, RESERVED_SPACE_VALUE

if TYPE_CHECKING:
    from elasticjob_launcher.zygote.command import Program

# Runs this package from its location, then removes it from `sys.modules`: a program may have
# modules of these names. The working directory is not searched in the meantime, so that no module
# of the user's is imported.
BOOT = """
import sys
def begin():
    before = set(sys.modules)
    own = [sys.path.pop(0)] if sys.path[:1] == [""] else []
    import importlib.machinery, importlib.util
    folder, package, fd = sys.argv[1:4]
    spec = importlib.machinery.PathFinder.find_spec(package, [folder])
    if hasattr(spec.loader, "exec_module"):
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:  # of a zip file, before Python 3.10
        spec.loader.load_module(package)
    main = importlib.import_module(package + ".zygote.main")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == package:
            del sys.modules[name]
    sys.path[:0] = own
    loaded = set(sys.modules) - before
    ends = main.run_module.end_with_error, main.child_init.finish_program
    return main.run_zygote(int(fd), loaded), *ends
program, failed, finish = begin()
try:
    program()()
except BaseException as error:
    failed(error, finish)
    raise
else:
    finish()
"""
BOOT_LINE = f"exec(compile({BOOT!r}, '<string>', 'exec'), {{'__name__': 'elasticjob'}})"
CHECK_SECONDS = 0.25
WALL_FACTOR = 10
"""Maximum duration of all imports, in multiples of their processor time."""
PACKET_BYTES = 1 << 20
PASS_SECONDS = 5.0
PREFIX = b"[standby] "
# Time for helper processes, such as multiprocessing's resource tracker, to clean up.
HELPER_SECONDS = 1.0


def boot_command(wanted: Program, fd: int) -> list[str]:
    """Return the command for the program's interpreter; `fd` is its end of the launcher socket."""
    folder, package = _own_location()
    start = [wanted.interpreter, *wanted.options, "-c", BOOT_LINE]
    return [*start, folder, package, str(fd)]


def _own_location() -> tuple[str, str]:
    """Return the folder or zip file that contains this package, and the package's name."""
    package = Path(__file__).parents[1]
    return str(package.parent), package.name


class ImportLimits:
    """Limits of one process from `begin` to `end`: processor time, time without any, memory.

    The duration has only the bound `WALL_FACTOR`: on a machine whose processors are all in use, the
    same imports take many times as long, and another attempt would begin from nothing.
    """

    def __init__(self, loop: Loop, limits: Limits) -> None:
        self._loop = loop
        self._limits = limits
        self._timer: Timer | None = None
        self._pid = 0
        self.module = ""

    def begin(self, pid: int, doing: str, exceeded: Callable[[str, bool], None]) -> None:
        """Call `exceeded` once if a limit is exceeded while the process is `doing` something.

        The arguments are the reason, and True if only a time limit was exceeded: another attempt
        may take less time.
        """
        self.end()
        self._pid, self.module = pid, ""
        work = Work(pid)

        def look() -> None:
            work.update()
            large = self.too_large()
            slow = work.excess(self._limits.seconds)
            if large:
                exceeded(large, False)
            elif slow:
                exceeded(f"{doing} {slow}{self._where()}", True)
            else:
                self._timer = self._loop.call_later(CHECK_SECONDS, look)

        look()

    def imports(self, module: str) -> None:
        """Record the module being imported, to name it if a limit is exceeded."""
        self.module = module

    def too_large(self) -> str:
        """Return the reason if the memory limit is exceeded; empty otherwise."""
        if _resident_bytes(self._pid) <= self._limits.most_bytes:
            return ""
        return f"the standby grew over {self._limits.most_bytes >> 20} MiB{self._where()}"

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _where(self) -> str:
        return f", importing {self.module}" if self.module else ""


class Work:
    """Processor time of a process from its construction on, and its time without any."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = self._looked = time.monotonic()
        self._before = processor_seconds(pid)
        self._used = self._idle = 0.0

    def update(self) -> None:
        """Add the time since the last update: all of it if the processor time cannot be read."""
        now, current = time.monotonic(), processor_seconds(self._pid)
        passed = used = now - self._looked
        if current is not None and self._before is not None:
            used = min(current - self._before, passed)  # threads side by side count once
        self._idle = 0.0 if used > 0 else self._idle + min(passed, MAX_INTERVAL_SECONDS)
        self._used += used
        self._looked, self._before = now, current

    def excess(self, limit: float) -> str:
        """Return the limit that is exceeded, as the end of a sentence; empty if none is."""
        if self._used >= limit:
            return f"took longer than {limit:g} s of processor time"
        if self._idle >= limit:
            return f"used no processor for {limit:g} s"
        if self._looked - self._began >= WALL_FACTOR * limit:
            return f"took longer than {WALL_FACTOR * limit:g} s"
        return ""


def processor_seconds(pid: int) -> float | None:
    """Return the processor time of all threads of a process; None if it cannot be read."""
    try:
        return sum(map(int, stat_fields(PROC / str(pid))[11:13])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def activity(pid: int) -> int | None:
    """Return a number that grows while a process computes, reads, or loads pages of files; None if
    it cannot be read."""
    try:
        fields = stat_fields(PROC / str(pid))
        faults, ticks = fields[7:10:2], fields[11:13]
        total = sum(map(int, (*faults, *ticks)))
    except (OSError, ValueError):
        return None
    try:
        return total + int(Path(f"/proc/{pid}/io").read_text("utf-8", "replace").split()[1])
    except (OSError, ValueError, IndexError):  # a process of another user
        return total


def _resident_bytes(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text("utf-8", "replace").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


class ZygoteEvents(NamedTuple):
    """Callbacks for a zygote process.

    `message` receives its messages; `lost` is called once with the reason if it ends without `end`.
    """

    message: Callable[[dict[str, Any]], object]
    lost: Callable[[str], object]


class ZygoteProcess:
    """Zygote process with its socket; `pid` is 0 for a successor that is not forked yet."""

    def __init__(self, loop: Loop, output: Output, sock: socket.socket, on: ZygoteEvents) -> None:
        self.pid = 0
        self._loop = loop
        self._output = output
        self._on = on
        self._over = False
        self._ended = False
        self._temporary: list[str] = []
        self._stream: WorkerStream | None = None
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        self._sock: socket.socket | None = sock
        loop.watch(sock.fileno(), self._receive)

    @classmethod
    def start(
        cls,
        loop: Loop,
        output: Output,
        wanted: Program,
        env: Mapping[str, str],
        keep_fds: Sequence[int],
        on: ZygoteEvents,
    ) -> ZygoteProcess:
        """Start a zygote with `env`, the workers' environment; raise LaunchError on failure."""
        ours, theirs, read_fd, write_fd = _channels()
        argv = boot_command(wanted, theirs.fileno())
        fds = (theirs.fileno(), *keep_fds)
        try:
            process = spawn(
                argv, {**env, RESERVED_SPACE: RESERVED_SPACE_VALUE}, write_fd, write_fd, fds
            )
        except BaseException:
            os.close(read_fd)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(write_fd)
        process.returncode = 0  # reaped together with all other children
        started = cls(loop, output, ours, on)
        started.pid = process.pid
        started._stream = WorkerStream(loop, output, read_fd, 2, PREFIX, None, 0)
        return started

    def request_successor(self, message: dict[str, Any], on: ZygoteEvents) -> ZygoteProcess:
        """Request a fork that imports more modules; raise OSError if the request cannot be sent.

        The successor is lost, with an empty reason, if there is nothing to import.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pass_on(message, [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ZygoteProcess(self._loop, self._output, ours, on)

    def replace(self, predecessor: ZygoteProcess, on: ZygoteEvents) -> None:
        """Take the place of the process that forked this one, which ends after its last request."""
        self._on = on
        self._stream, predecessor._stream = predecessor._stream, None
        self._temporary = [*predecessor._temporary, *self._temporary]
        predecessor._over = True
        predecessor._hang_up()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; log a failure. SIGCHLD reports the end of the process."""
        if self._sock is not None:
            try:
                self._sock.send(json.dumps(message).encode())
            except OSError as error:
                self._output.write_line(f"cannot send {message['do']!r} to the standby: {error}")

    def pass_on(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        """Send a message with descriptors; raise OSError on failure."""
        if self._sock is None:
            raise BrokenPipeError("it is not there")
        if not select.select([], [self._sock], [], PASS_SECONDS)[1]:
            raise BlockingIOError("it is stuck")
        passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
        self._sock.sendmsg([json.dumps(message).encode()], [passed])

    def reaped(self, pid: int, status: int) -> None:
        """Handle the end of a launcher child that is not a worker."""
        if self._over:
            return
        if not self.pid:
            self._receive()  # the message with the pid may be pending
        if pid != self.pid:
            return
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self._ended = True
        self._receive()  # a last message may be pending
        if not self._over:
            how = f"signal {signum}" if signum else f"exit code {os.WEXITSTATUS(status)}"
            text = self._stream.tail if self._stream is not None else ""
            tail = text.strip().rpartition("\n")[2]
            self._on.lost(f"the standby ended with {how}{': ' + tail if tail else ''}")

    def end(self) -> None:
        """Kill the process, its helpers and temporary files; the launcher reaps the process."""
        self._over = True  # messages that are pending have no effect any more
        self._receive()  # reads the paths of its temporary files
        helpers = descendants(self.pid) if self.pid else {}
        self._hang_up()
        if self.pid and not self._ended:
            os.kill(self.pid, signal.SIGKILL)
        if self._stream is not None:
            self._stream.drain()
            self._stream.close()
        self._remove_temporary()
        if helpers:
            self._loop.call_later(HELPER_SECONDS, lambda: self._end_helpers(helpers))

    def _end_helpers(self, helpers: Mapping[int, str]) -> None:
        for pid, began in helpers.items():
            kill_unless_reused(pid, began)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        for path in self._temporary:
            remove_path(path)

    def _receive(self) -> None:
        while self._sock is not None:
            try:
                data = self._sock.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                if not (self.pid or self._over):
                    self._on.lost("")
                return  # SIGCHLD reports the end
            message = json.loads(data)
            if message["is"] == "made":
                self._temporary.append(message["path"])
                continue
            if message["is"] == "forked":
                self.pid = message["pid"]
            if not self._over:
                self._on.message(message)

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None


def _channels() -> tuple[socket.socket, socket.socket, int, int]:
    """Return a socket pair for messages and a pipe for output; raise LaunchError on failure."""
    pair: tuple[socket.socket, ...] = ()
    try:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return (*pair, *os.pipe())
    except OSError as error:
        for end in pair:
            end.close()
        raise LaunchError(126, f"no channels to the standby: {error}") from error
