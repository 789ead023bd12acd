"""Zygote process from the launcher's side: start, messages over a socket, end.

Messages are JSON, one per packet. The launcher forwards the process's output with a prefix.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import standbyboot
from .children import end_if_still, family
from .loop import Loop
from .output import Output
from .shown import ROOM, ROOM_VALUE
from .spawn import LaunchError, spawn
from .stream import WorkerStream
from .temporary import remove

if TYPE_CHECKING:
    from .command import Program

PACKET_BYTES = 1 << 20
PASS_SECONDS = 5.0
PREFIX = b"[standby] "
# Time for helper processes, such as multiprocessing's resource tracker, to clean up.
HELPER_SECONDS = 1.0


class StandbyProcess:
    """Zygote process, started on construction, which may raise LaunchError.

    `env` is the workers' environment. `on_message` receives its messages; `on_lost` is called once
    with the reason if it ends without `end`.
    """

    def __init__(
        self,
        loop: Loop,
        output: Output,
        wanted: Program,
        env: Mapping[str, str],
        keep_fds: Sequence[int],
        on_message: Callable[[dict[str, Any]], object],
        on_lost: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._output = output
        self._on_message = on_message
        self._on_lost = on_lost
        self._over = False
        self._temporary: list[str] = []
        ours, theirs, read_fd, write_fd = _channels()
        argv = standbyboot.command(wanted, theirs.fileno())
        fds = (theirs.fileno(), *keep_fds)
        try:
            self._process = spawn(argv, {**env, ROOM: ROOM_VALUE}, write_fd, write_fd, fds)
        except BaseException:
            os.close(read_fd)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(write_fd)
        self.pid: int = self._process.pid
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        self._sock: socket.socket | None = ours
        self._stream = WorkerStream(loop, output, read_fd, 2, PREFIX, None, 0)
        loop.watch(ours.fileno(), self._hear)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; log a failure. SIGCHLD reports the end of the process."""
        if self._sock is not None:
            try:
                self._sock.send(json.dumps(message).encode())
            except OSError as error:
                self._output.say(f"cannot send {message['do']!r} to the standby: {error}")

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
        if self._over or pid != self.pid:
            return
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self._process.returncode = -signum if signum else os.WEXITSTATUS(status)
        self._hear()  # a last message may be pending
        if not self._over:
            how = f"signal {signum}" if signum else f"exit code {os.WEXITSTATUS(status)}"
            tail = self._stream.tail.strip().rpartition("\n")[2]
            self._on_lost(f"the standby ended with {how}{': ' + tail if tail else ''}")

    def end(self) -> None:
        """Kill the process, its helpers and temporary files; the launcher reaps the process."""
        self._hear()  # reads the paths of its temporary files
        self._over = True
        helpers = family(self.pid)
        self._hang_up()
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.returncode = -signal.SIGKILL  # reaped together with all other children
        self._stream.drain()
        self._stream.close()
        self._remove_temporary()
        if helpers:
            self._loop.call_later(HELPER_SECONDS, lambda: self._end_helpers(helpers))

    def _end_helpers(self, helpers: Mapping[int, str]) -> None:
        for pid, began in helpers.items():
            end_if_still(pid, began)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        for path in self._temporary:
            remove(path)

    def _hear(self) -> None:
        while self._sock is not None:
            try:
                data = self._sock.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return  # SIGCHLD reports the end
            message = json.loads(data)
            if message["is"] == "made":
                self._temporary.append(message["path"])
            elif not self._over:
                self._on_message(message)

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
