"""The warden: parent of every process of a local job, which none of them outlives.

A program of its own on the standard library alone, started by the runner as
`python -I -S warden.py SOCKET_FD RUN_DIR` and told what to do in JSON lines over that socket. It is
what makes "nothing is left running" true, also after kill -9 of the runner:

* the socket ends when the runner dies, however it died: the warden then kills all and exits;
* it is a subreaper, so a process that lost its parent becomes its child and is found;
* each child asks for SIGKILL at the warden's own death (PDEATHSIG). The kernel ties that to the
  *thread* that forked; the warden has only one, which lives as long as the process.

It also keeps what a kubelet keeps: each container's output, bounded, whatever the disk does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHUNKS = 16
"""Reads of 64 KiB, a full pipe each, before it is another container's turn."""

LOG_BYTES = 16 << 20
"""A container log that grows past this is moved to `.1`, as a kubelet rotates it."""

END_SECONDS = 20.0
"""How long the last kill is repeated; only a process that the kernel holds can outlast it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> dict[int, int]:
    """The parent of every process that /proc shows, zombies left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_bytes()
                state, parent = stat[stat.rindex(b")") + 2 :].split(b" ", 2)[:2]
                if state not in (b"Z", b"X"):
                    found[int(entry.name)] = int(parent)
    return found


def descendants(roots: set[int]) -> set[int]:
    """Every living process below `roots`, without the roots."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


def marked(pids: set[int], marker: bytes) -> set[int]:
    """Those of `pids` that were started with the environment entry `marker`."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if marker in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def freeze(pids: set[int]) -> None:
    """Let them do nothing more, until they are killed."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class ContainerLog:
    """The output of one container: a pipe to read, a bounded file to write."""

    def __init__(self, path: str, pipe: int) -> None:
        self.path = Path(path)
        self.pipe = pipe
        self.trouble = ""
        self.closed = False
        self._file: int | None = None
        self._size = 0

    def pump(self) -> bool:
        """Move what the pipe holds now to the file; false when the pipe has ended."""
        for _ in range(CHUNKS):
            if self.closed:
                return False
            try:
                content = os.read(self.pipe, 65536)
            except BlockingIOError:
                return True
            except OSError:
                content = b""
            if not content:
                return False
            self._write(content)
        return True

    def close(self) -> None:
        self.closed = True
        os.close(self.pipe)
        if self._file is not None:
            os.close(self._file)

    def _write(self, content: bytes) -> None:
        """Output that the disk refuses is dropped: training must not wait for its log."""
        try:
            if self._file is not None and self._size + len(content) > LOG_BYTES:
                os.close(self._file)
                self._file = None
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o644)
                self._size = os.fstat(self._file).st_size
            while content:
                written = os.write(self._file, content)
                self._size += written
                content = content[written:]
        except OSError as error:
            self.trouble = self.trouble or f"{self.path}: {error.strerror}"


class Warden:
    """Starts, signals and reaps on the runner's word; reports each start and exit."""

    def __init__(self, runner: socket.socket, run_dir: Path) -> None:
        self.runner = runner
        self.run_dir = run_dir
        self.pid = os.getpid()
        self.pids: dict[str, int] = {}
        self.children: dict[int, tuple[str, subprocess.Popen[bytes], ContainerLog]] = {}
        self.reported: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.received = b""

    def serve(self) -> None:
        """Until the runner is gone."""
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.runner, selectors.EVENT_READ)
        self.selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if isinstance(key.data, ContainerLog):
                    self.pump(key.data)
                elif key.fileobj is self.runner:
                    if not self.listen():
                        return
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                    self.reap()

    def listen(self) -> bool:
        """Obey what has arrived; false when the runner is gone."""
        try:
            content = self.runner.recv(1 << 20)
        except OSError:
            return False
        if not content:
            return False
        *lines, self.received = (self.received + content).split(b"\n")
        for line in lines:
            self.obey(json.loads(line))
        return True

    def obey(self, command: dict[str, Any]) -> None:
        match command["op"]:
            case "start":
                self.start(command)
            case "signal":
                if (pid := self.pids.get(command["id"])) is not None:
                    os.kill(pid, command["signal"])
            case "kill":
                # The trees first: what a dead parent leaves behind is found by the marker alone.
                roots = {self.pids[name] for name in command["ids"] if name in self.pids}
                freeze(roots)  # or an agent tells of its workers' death before its own
                kill(roots | descendants(roots))
                kill(marked(descendants({self.pid}), command["marker"].encode()))

    def start(self, command: dict[str, Any]) -> None:
        name = command["id"]
        try:
            process = subprocess.Popen(
                command["argv"],
                env=command["env"],
                cwd=command["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self.bind_to_us,  # safe: this program has one thread
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.say(event="refused", id=name, message=str(error))
            return
        self.pids[name] = process.pid
        assert process.stdout is not None
        log = ContainerLog(command["log"], os.dup(process.stdout.fileno()))
        process.stdout.close()
        os.set_blocking(log.pipe, False)
        self.children[process.pid] = (name, process, log)
        self.selector.register(log.pipe, selectors.EVENT_READ, log)
        self.say(event="started", id=name, pid=process.pid)

    def bind_to_us(self) -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.pid:
            os._exit(137)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:  # else an orphan that we inherited
                name, process, log = self.children.pop(pid)
                log.pump()  # an end is told after the last words
                process.returncode = os.waitstatus_to_exitcode(status)
                self.pids.pop(name, None)
                code = process.returncode
                self.say(event="exited", id=name, pid=pid, code=code, at_ms=time.time_ns() // 10**6)

    def pump(self, log: ContainerLog) -> None:
        more = log.pump()
        if log.trouble and log.trouble not in self.reported:
            self.reported.add(log.trouble)
            self.say(event="log-trouble", message=log.trouble)
        if not more:
            self.selector.unregister(log.pipe)
            log.close()

    def say(self, **event: object) -> None:
        # A runner that is gone shows as the end of the socket in `listen`.
        with contextlib.suppress(OSError):
            self.runner.sendall(json.dumps(event).encode() + b"\n")

    def end(self) -> None:
        """Kill every descendant until none is left, then remove the run's folder."""
        kill_all_descendants(END_SECONDS)
        shutil.rmtree(self.run_dir, ignore_errors=True)


def kill_all_descendants(seconds: float) -> bool:
    """Kill and reap all below this process; false if some outlast `seconds`.

    Repeated, because a process may fork between the look and the kill.
    """
    deadline = time.monotonic() + seconds
    while pids := descendants({os.getpid()}):
        kill(pids)
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
    return True


def main() -> None:
    fd, run_dir = int(sys.argv[1]), Path(sys.argv[2])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    become_subreaper()
    warden = Warden(socket.socket(fileno=fd), run_dir)
    try:
        warden.serve()
    finally:
        warden.end()


if __name__ == "__main__":
    main()
