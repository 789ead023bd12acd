"""Preparation of a pod before its first round: the setup command, and the part of a shell line
before the workers' command.

The preparing shell ends by running `REPORT`, which hands the workers' command, with its words
expanded by the shell, the environment, the working directory, the umask and the resource limits to
the launcher. Nothing here outlives the preparation but the processes it left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from elasticjob_launcher.loop import Loop
from elasticjob_launcher.processes.output import Output, write_termination_message
from elasticjob_launcher.processes.process_info import follow_process, kill_group, reap_children
from elasticjob_launcher.processes.spawn import LaunchError, Pipes, become_subreaper, spawn
from elasticjob_launcher.processes.stuck_processes import kill_descendants
from elasticjob_launcher.processes.worker_stream import WorkerStream
from elasticjob_launcher.settings import Settings, worker_environment

PYTHON = "ELASTICJOB_PREPARE_PYTHON"
CODE = "ELASTICJOB_PREPARE_REPORT"
DESCRIPTOR = "ELASTICJOB_PREPARE_FD"
REPORT = """
import json, os, resource, sys
mask = os.umask(0)
names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
report = {
    "argv": [os.fsencode(word).decode("latin-1") for word in sys.argv[1:]],
    "env": {k.decode("latin-1"): v.decode("latin-1") for k, v in os.environb.items()},
    "cwd": os.getcwdb().decode("latin-1"),
    "umask": mask,
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
}
with open(int(os.environ["ELASTICJOB_PREPARE_FD"]), "wb") as file:
    file.write(json.dumps(report).encode())
"""
EXIT_NOT_REPORTED = 1
FLUSH_SECONDS = 2.0
SWEEP_SECONDS = 5.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWN = (PYTHON, CODE, DESCRIPTOR)


class PreparationFailed(Exception):
    """Failed preparation; the launcher exits with this code and message."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message


class Prepared(NamedTuple):
    """Result: the workers' command and their environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


def prepare(settings: Settings, environ: Mapping[str, str], init_fd: int | None) -> Prepared:
    """Run the setup command and the preparation; adopt the state that the preparation left.

    Working directory, umask and limits become those of this process, so that workers inherit them.

    Raises:
        PreparationFailed: a command failed, or the launcher was asked to end.
    """
    if settings.setup:
        _Runner(settings, init_fd, "the setup").run(settings.setup, worker_environment(environ))
    if not settings.prepare:
        return Prepared(settings.argv, environ)
    runner = _Runner(settings, init_fd, "the preparation")
    report = runner.report(settings.argv, worker_environment(environ))
    return _adopt(report, environ)


def _adopt(report: Mapping[str, Any], before: Mapping[str, str]) -> Prepared:
    for name, limits in report["limits"].items():
        number = getattr(resource, name)
        if tuple(limits) != resource.getrlimit(number):
            # The shell had the same rights; a limit that cannot be set was not changed by it.
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, tuple(limits))
    os.chdir(_text(report["cwd"]))
    os.umask(report["umask"])
    found = {_text(name): _text(value) for name, value in report["env"].items()}
    environ = {name: value for name, value in found.items() if name not in (*_OWN, "_")}
    if "_" in before:  # the shell's path of the reporting program
        environ["_"] = before["_"]
    return Prepared(tuple(map(_text, report["argv"])), environ)


def _text(latin: str) -> str:
    """Return bytes that were reported one letter a byte, in this process's encoding."""
    return os.fsdecode(latin.encode("latin-1"))


class _Runner:
    """One command, run to its end in an event loop that follows signals and the lifeline."""

    def __init__(self, settings: Settings, init_fd: int | None, name: str) -> None:
        self._settings = settings
        self._init_fd = init_fd
        self._name = name
        self._loop = Loop()
        self._output = Output(lambda text: self._output.write_line(text))
        self._pid = 0
        self._status: int | None = None
        self._signalled: int | None = None

    def report(self, argv: Sequence[str], env: Mapping[str, str]) -> Mapping[str, Any]:
        """Run the command and return its report."""
        read_fd, write_fd = os.pipe()
        own = {PYTHON: sys.executable, CODE: REPORT, DESCRIPTOR: str(write_fd)}
        chunks: list[bytes] = []
        os.set_blocking(read_fd, False)

        def readable() -> None:
            chunks.append(_read(read_fd))
            if not chunks[-1]:
                self._loop.unwatch(read_fd)

        self._loop.watch(read_fd, readable)
        try:
            self.run(argv, {**env, **own}, write_fd)
            while chunk := _read(read_fd):
                chunks.append(chunk)
        finally:
            self._loop.unwatch(read_fd)
            os.close(read_fd)
        text = b"".join(chunks)
        if not text:
            raise self._failed(
                EXIT_NOT_REPORTED,
                f"{self._name} ended with exit code 0 before the command of the workers: "
                "set spec.launch to PerNode if this is intended",
                "",
            )
        found: Mapping[str, Any] = json.loads(text)
        return found

    def run(self, argv: Sequence[str], env: Mapping[str, str], report_fd: int = -1) -> None:
        """Run the command to its end; `report_fd` is open in it alone."""
        become_subreaper()
        self._loop.on_signal(signal.SIGCHLD, self._reap)
        before = {signum: signal.getsignal(signum) for signum in _ENDING}
        for signum in _ENDING:
            self._loop.on_signal(signum, partial(self._end_at_signal, signum))
        stop = partial(self._end_at_signal, signal.SIGTERM)
        follow_process(self._loop, self._settings.lifeline_pid, stop)
        if self._init_fd is not None:
            self._loop.watch(self._init_fd, stop)
        streams: list[WorkerStream] = []
        try:
            pipes = Pipes()
            fds = (*self._settings.keep_fds, *((report_fd,) if report_fd >= 0 else ()))
            try:
                out, errors = pipes.write_fds
                process = spawn(argv, env, out, errors, fds)
            except LaunchError:
                pipes.close_read()
                raise
            finally:
                pipes.close_write()
        except LaunchError as error:
            message = f"{self._name} cannot be started: {error.message}"
            raise self._failed(error.exit_code, message, "") from error
        finally:
            if report_fd >= 0:
                os.close(report_fd)
        self._pid = process.pid
        streams = [
            WorkerStream(self._loop, self._output, fd, number, b"", None, 0)
            for number, fd in enumerate(pipes.read_fds, 1)
        ]
        if self._signalled is None and self._status is None:
            self._loop.run()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        self._finish(streams)
        process.returncode = 0  # reaped here: Popen must not wait for the pid again

    def _finish(self, streams: Sequence[WorkerStream]) -> None:
        if self._init_fd is not None:
            self._loop.unwatch(self._init_fd)
        if self._signalled is not None:
            kill_group(self._pid, self._signalled)
            kill_descendants(SWEEP_SECONDS)
        for stream in streams:
            stream.drain()
            stream.close()
        if self._signalled is not None:
            name = signal.Signals(self._signalled).name
            message = f"{self._name} was stopped by {name}"
            raise self._failed(128 + self._signalled, message, "")
        status = self._status or 0
        if os.WIFSIGNALED(status):
            signum = os.WTERMSIG(status)
            text = f"{self._name} was killed by {signal.Signals(signum).name}"
            raise self._failed(128 + signum, text, streams[1].tail)
        if os.WEXITSTATUS(status):
            code = os.WEXITSTATUS(status)
            text = f"{self._name} failed with exit code {code}"
            raise self._failed(code, text, streams[1].tail)
        self._output.flush(FLUSH_SECONDS)

    def _failed(self, exit_code: int, message: str, errors: str) -> PreparationFailed:
        """Return the error, after writing it where the kubelet and the user look for it."""
        errors = errors.strip()
        last = errors.rpartition("\n")[2]
        self._output.write_line(f"{message}: {last}" if last else message)
        self._output.flush(FLUSH_SECONDS)
        write_termination_message(self._settings.termination_log, message, errors)
        return PreparationFailed(exit_code, message)

    def _reap(self) -> None:
        for pid, status in reap_children():
            if pid == self._pid:
                self._status = status
                self._loop.stop()

    def _end_at_signal(self, signum: int) -> None:
        self._signalled = signum
        self._loop.stop()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""
