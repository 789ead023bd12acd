"""Worker runtime that forks its workers, which inherit the memory of the agent's process.

The launcher is a fork of this process too. It starts and reaps workers and forwards their output as
usual, and they die with the agent. Other threads do not exist in a fork: fork before any starts.

A fork never frees what this process created: an object of C++ whose thread runs here alone, such
as torch's TCPStore, would abort it. A worker begins and ends as one of multiprocessing does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from elasticjob_agent.runtimes.function_entrypoint import CallFolder, FunctionCall, run_call
from elasticjob_agent.runtimes.local import LauncherProcess, LocalRuntime
from elasticjob_agent.settings import inherited_environment
from elasticjob_agent.threads import in_thread
from elasticjob_launcher import settings
from elasticjob_launcher.app import Launcher
from elasticjob_launcher.processes.spawn import LaunchError, die_with_parent, fork_launcher

_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


class ForkedRuntime(LocalRuntime):
    """`LocalRuntime` with forked workers. The constructor forks the launcher."""

    def __init__(self, call: FunctionCall, folder: CallFolder) -> None:
        super().__init__()
        self._ours, theirs = socket.socketpair()
        agent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork()
        if pid == 0:
            _launch(self._ours, theirs, agent, partial(_fork_worker, call, folder))
        theirs.close()
        self._child = ForkedChild(pid)

    async def _begun(self) -> tuple[LauncherProcess, socket.socket]:
        return self._child, self._ours

    async def aclose(self) -> None:
        if self._process is None:  # `events` was never iterated
            self._ours.close()
            self._process = self._child
        await super().aclose()


class ForkedChild:
    """Forked child process, with the interface that a launcher needs; its starter reaps it too."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end: asyncio.Task[tuple[int, int]] | None = None

    async def wait(self) -> int:
        """Wait for the process; return its exit code, or the negative signal number."""
        if self._end is None:
            self._end = asyncio.create_task(in_thread(partial(os.waitpid, self.pid, 0)))
        _, status = await asyncio.shield(self._end)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _launch(
    ours: socket.socket, theirs: socket.socket, agent: int, start: partial[ForkedChild]
) -> NoReturn:
    """Run the launcher in the forked process."""
    code = 1
    try:
        _own_session()
        ours.close()
        environ = {
            **inherited_environment(),
            settings.AGENT_FD: str(theirs.detach()),
            settings.LIFELINE_PID: str(agent),
            settings.PROBE_PORT: "off",
        }
        own = settings.read_settings((), environ)
        code = Launcher(own, environ, start, init_fd=fork_launcher()).run()
    finally:
        os._exit(code)


def _fork_worker(
    call: FunctionCall,
    folder: CallFolder,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout_fd: int,
    stderr_fd: int,
) -> ForkedChild:
    """Fork one worker; `argv` holds its round and its local rank."""
    number, local_rank = (int(part) for part in argv)
    launcher = os.getpid()
    ready, started = os.pipe()
    try:
        pid = _fork()
    except OSError as error:
        os.close(ready)
        os.close(started)
        raise LaunchError(126, f"the worker could not be forked: {error}") from error
    if pid == 0:
        code = 1
        try:
            _own_session()
            die_with_parent(launcher)()
            os.write(started, b"\0")
            _redirect_streams(stdout_fd, stderr_fd)
            os.environ.clear()
            os.environ.update(env)
            code = _run(
                partial(run_call, call, folder.returned(number, local_rank), local_rank, env)
            )
        finally:
            os._exit(code)
    os.close(started)
    os.read(ready, 1)  # wait until the worker leads a process group that can be signalled
    os.close(ready)
    return ForkedChild(pid)


def _fork() -> int:
    """Fork; in the child no garbage collection frees an object of the parent."""
    collects = gc.isenabled()
    gc.disable()  # else the child could collect before it calls `freeze`
    try:
        pid = os.fork()
        if pid == 0:
            gc.freeze()
        return pid
    finally:
        if collects:
            gc.enable()


def _run(call: Callable[[], int]) -> int:
    """Make a call as the process of multiprocessing that this fork is; return the exit code.

    At its end it waits for its threads and for the data of its queues, and not for the processes
    that this process's parent started.
    """
    process: Any = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(call()))
    process._parent_pid, parent = os.getppid(), None
    with contextlib.suppress(OSError):
        parent = os.pidfd_open(process._parent_pid)  # readable once that process has ended
    return int(process._bootstrap(parent_sentinel=parent))


def _own_session() -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in _RESET:
        signal.signal(signum, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)


def _redirect_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Redirect both output streams, also Python's, which may have been replaced before the fork."""
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
