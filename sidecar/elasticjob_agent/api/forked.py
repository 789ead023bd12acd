"""Hands whose workers are forked: they have all that the agent's process had when it began.

The launcher is a fork of this process too, so that workers are started, reaped and heard as
ever, and die with the agent. Other threads do not come along: fork before there are any.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from elasticjob_agent.api.calling import in_thread
from elasticjob_agent.call import Call, CallFolder, run
from elasticjob_agent.launcher import settings
from elasticjob_agent.launcher.app import Launcher
from elasticjob_agent.launcher.init import fork_launcher
from elasticjob_agent.launcher.spawn import LaunchError, die_with_parent
from elasticjob_agent.local import Launched, LocalHands
from elasticjob_agent.settings import inherited_environment

_RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


class ForkedHands(LocalHands):
    """See `LocalHands`. Forks when it is made."""

    def __init__(self, call: Call, folder: CallFolder) -> None:
        super().__init__()
        self._ours, theirs = socket.socketpair()
        agent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _launch(self._ours, theirs, agent, partial(_forked, call, folder))
        theirs.close()
        self._child = ForkedChild(pid)

    async def _begun(self) -> tuple[Launched, socket.socket]:
        return self._child, self._ours

    async def aclose(self) -> None:
        if self._process is None:  # nobody ever listened
            self._ours.close()
            self._process = self._child
        await super().aclose()


class ForkedChild:
    """A process of ours, as much of it as a launcher needs; also reaped by who started it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end: asyncio.Task[tuple[int, int]] | None = None

    async def wait(self) -> int:
        """A signal is negative."""
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
    """The launcher's process."""
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


def _forked(
    call: Call,
    folder: CallFolder,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout_fd: int,
    stderr_fd: int,
) -> ForkedChild:
    """Start one worker; `argv` is its round and its local rank."""
    number, local_rank = (int(part) for part in argv)
    launcher = os.getpid()
    ready, tell = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(ready)
        os.close(tell)
        raise LaunchError(126, f"the worker could not be forked: {error}") from error
    if pid == 0:
        code = 1
        try:
            _own_session()
            die_with_parent(launcher)()
            os.write(tell, b"\0")
            _streams(stdout_fd, stderr_fd)
            os.environ.clear()
            os.environ.update(env)
            code = run(call, folder.returned(number, local_rank), local_rank, env)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    os.close(tell)
    os.read(ready, 1)  # until it leads a process group, there is none to signal
    os.close(ready)
    return ForkedChild(pid)


def _own_session() -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in _RESET:
        signal.signal(signum, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)


def _streams(stdout_fd: int, stderr_fd: int) -> None:
    """Python's streams too may have been led elsewhere before the fork."""
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
