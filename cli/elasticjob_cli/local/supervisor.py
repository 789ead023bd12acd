"""Supervisor: parent of every process of a local job; none of them outlives it.

A separate program that uses only the standard library. The runner starts it as
`python -I -S supervisor.py SOCKET_FD RUN_DIR UMASK` and sends it commands as JSON lines over that
socket. It guarantees that no process is left running, even after kill -9 of the runner:

* the socket closes when the runner dies, for any reason: the supervisor then kills all and exits;
* it is a subreaper, so a process that lost its parent becomes its child and is found;
* each child requests SIGKILL at the supervisor's own death (PDEATHSIG). The kernel ties that to the
  *thread* that forked; the supervisor has only one, which lives as long as the process.

Like a kubelet, it also stores each container's output, bounded, and tolerates disk errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
"""Maximum number of 64 KiB reads, each a full pipe, before the next container's turn."""

LOG_BYTES = 16 << 20
"""Size at which a container log is rotated to `.1`, as a kubelet does."""

END_SECONDS = 20.0
"""Duration of the final kill loop; only a process stuck in the kernel can outlast it."""

SHARED_MEMORY = Path("/dev/shm")
SNAPSHOTS = "elasticjob-snapshots-*"
"""Pattern of the folders in memory that launchers create for snapshots."""

PRIVATE_UMASK = 0o077
"""No other user reads the files of a run; only the trainer has the user's own umask."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Let this process adopt orphaned descendants instead of init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> dict[int, int]:
    """Return the parent of every process in /proc except zombies."""
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
    """Return every living descendant of `roots`, without the roots."""
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
    """Return those of `pids` that were started with the environment entry `marker`."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if marker in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def freeze(pids: set[int]) -> None:
    """Send SIGSTOP, so that they do nothing until they are killed."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class ContainerLog:
    """Output of one container: a pipe to read, a bounded file to write.

    If `timed`, each line in the file begins with the time at which it was read and a space.
    """

    def __init__(self, path: str, pipe: int, timed: bool = False) -> None:
        self._timed = timed
        self._inside = False  # of a line
        self.path = Path(path)
        self.pipe = pipe
        self.trouble = ""
        self.closed = False
        self._file: int | None = None
        self._size = 0

    def pump(self) -> bool:
        """Move the pipe's current content to the file; return False at the end of the pipe."""
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
            self._write(self._with_times(content) if self._timed else content)
        return True

    def close(self) -> None:
        self.closed = True
        os.close(self.pipe)
        if self._file is not None:
            os.close(self._file)

    def _with_times(self, content: bytes) -> bytes:
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        now = f"{moment}.{nanoseconds:09}Z ".encode()
        timed = (b"" if self._inside else now) + content.replace(b"\n", b"\n" + now)
        self._inside = not content.endswith(b"\n")
        return timed if self._inside else timed[: -len(now)]

    def _write(self, content: bytes) -> None:
        """Write to the file; drop output the disk refuses, since training must not wait for it."""
        try:
            if self._file is not None and self._size + len(content) > LOG_BYTES:
                os.close(self._file)
                self._file = None
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o600)
                self._size = os.fstat(self._file).st_size
            while content:
                written = os.write(self._file, content)
                self._size += written
                content = content[written:]
        except OSError as error:
            self.trouble = self.trouble or f"{self.path}: {error.strerror}"


class Supervisor:
    """Supervisor that starts, signals and reaps processes for the runner and reports each event."""

    def __init__(self, runner: socket.socket, run_dir: Path, user_umask: int) -> None:
        self.runner = runner
        self.user_umask = user_umask
        self.run_dir = run_dir
        self.pid = os.getpid()
        self.pids: dict[str, int] = {}
        self.children: dict[int, tuple[str, subprocess.Popen[bytes], ContainerLog]] = {}
        self.reported: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.received = b""

    def serve(self) -> None:
        """Serve until the runner is gone."""
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
        """Execute the received commands; return False if the runner is gone."""
        try:
            content = self.runner.recv(1 << 20)
        except OSError:
            return False
        if not content:
            return False
        *lines, self.received = (self.received + content).split(b"\n")
        for line in lines:
            self.execute(json.loads(line))
        return True

    def execute(self, command: dict[str, Any]) -> None:
        match command["op"]:
            case "start":
                self.start(command)
            case "signal":
                if (pid := self.pids.get(command["id"])) is not None:
                    os.kill(pid, command["signal"])
            case "kill":
                # The trees first: orphans of a dead parent are found by the marker only.
                roots = {self.pids[name] for name in command["ids"] if name in self.pids}
                freeze(roots)  # else an agent reports its workers' death before its own
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
                umask=self.user_umask if command["is_trainer"] else PRIVATE_UMASK,
                preexec_fn=self.die_with_supervisor,  # safe: this program has one thread
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.report(event="refused", id=name, message=str(error))
            return
        self.pids[name] = process.pid
        assert process.stdout is not None
        pipe = os.dup(process.stdout.fileno())
        log = ContainerLog(command["log"], pipe, timed=command["is_trainer"])
        process.stdout.close()
        os.set_blocking(log.pipe, False)
        self.children[process.pid] = (name, process, log)
        self.selector.register(log.pipe, selectors.EVENT_READ, log)
        self.report(event="started", id=name, pid=process.pid)

    def die_with_supervisor(self) -> None:
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
            if pid in self.children:  # else it is an adopted orphan
                name, process, log = self.children.pop(pid)
                log.pump()  # the last output before the exit report
                process.returncode = os.waitstatus_to_exitcode(status)
                self.pids.pop(name, None)
                code = process.returncode
                self.report(
                    event="exited", id=name, pid=pid, code=code, at_ms=time.time_ns() // 10**6
                )

    def pump(self, log: ContainerLog) -> None:
        more = log.pump()
        if log.trouble and log.trouble not in self.reported:
            self.reported.add(log.trouble)
            self.report(event="log-trouble", message=log.trouble)
        if not more:
            self.selector.unregister(log.pipe)
            log.close()

    def report(self, **event: object) -> None:
        # `listen` notices a runner that is gone.
        with contextlib.suppress(OSError):
            self.runner.sendall(json.dumps(event).encode() + b"\n")

    def end(self) -> None:
        """Kill every descendant until none is left, then remove the run's folder."""
        kill_all_descendants(END_SECONDS)
        remove_snapshots(SHARED_MEMORY)
        shutil.rmtree(self.run_dir, ignore_errors=True)


def kill_all_descendants(seconds: float) -> bool:
    """Kill and reap all descendants of this process; return False if some outlast `seconds`.

    Repeats, because a process may fork between the listing and the kill.
    """
    deadline, pause = time.monotonic() + seconds, 0.005
    while pids := descendants({os.getpid()}):
        kill(pids)
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(pause)
        pause = min(2 * pause, 0.1)  # a process in an uninterruptible wait outlasts all of them
    return True


def remove_snapshots(parent: Path) -> None:
    """Remove the folders of killed launchers in memory, which no process has locked.

    See `elasticjob_launcher.snapshot_folder`, which this program cannot import.
    """
    for path in parent.glob(SNAPSHOTS):
        with contextlib.suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(held).st_uid == os.geteuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def main() -> None:
    fd, run_dir, user_umask = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    os.umask(PRIVATE_UMASK)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    become_subreaper()
    supervisor = Supervisor(socket.socket(fileno=fd), run_dir, user_umask)
    try:
        supervisor.serve()
    finally:
        supervisor.end()


if __name__ == "__main__":
    main()
