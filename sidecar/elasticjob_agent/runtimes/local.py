"""Worker runtime without a pod: workers run below the agent's own process and die with it.

A launcher runs as the agent's child, starts the workers, and communicates over a socket pair. As a
thread of the agent it would have three drawbacks: the agent would fork with grpc's threads in it,
forwarding much output would delay the loop that keeps the lease, and a worker's orphans could not
be distinguished from other children. As a child it is the same code as in a pod, for a start of
about 30 ms, once, before the agent waits for a round.

The launcher kills everything below it and ends when the agent's end of the pair closes, and when
the agent's process ends (a forked child of the agent may hold the pair open). It runs below init
processes, which do the same when the launcher itself is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

from elasticjob_agent.runtimes.launcher_channel import Attach, Channel, ChannelRuntime
from elasticjob_agent.worker_runtime import (
    WorkerRuntimeError,
    WorkerRuntimeEvent,
    WorkerRuntimeLost,
)
from elasticjob_launcher import settings
from elasticjob_launcher.wire import MAX_MESSAGE_BYTES

# Isolated and without site-packages: starts fast and imports no user code. The launcher's folder
# comes last on the path, so that its modules do not shadow the standard library.
PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "import elasticjob_launcher.__main__ as m; m.main()"
)
END_TIMEOUT_SECONDS = 10.0


def inherited_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that the launcher below it gets."""
    limits = {name: environ[name] for name in settings.STANDBY_LIMITS if name in environ}
    return {**settings.worker_environment(environ), **limits}


def check_inherited(environ: Mapping[str, str]) -> None:
    """Raise the launcher's `SettingsError` if it would refuse one of these variables."""
    settings.read_settings((), {**inherited_variables(environ), settings.AGENT_FD: "0"})


class LauncherProcess(Protocol):
    """Process of the launcher."""

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class LocalRuntime(ChannelRuntime):
    """Worker runtime over a launcher that is the agent's child.

    Args:
        command: the workers' command, returned as `Hello.argv`.
        stdout: descriptor for the output; None is the agent's own.
        stderr: descriptor for the error output; None is the agent's own.
        keep_fds: descriptors that the workers inherit.
        hung_agent_seconds: hang of the agent after which its workers are killed.
    """

    def __init__(
        self,
        command: tuple[str, ...] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        keep_fds: tuple[int, ...] = (),
        hung_agent_seconds: float = 30.0,
    ) -> None:
        super().__init__("the launcher below this agent does not run")
        self._command = command
        self._identity = Attach("", "", b"", hung_agent_seconds)
        self._keep_fds = keep_fds
        self._stdout = stdout
        self._stderr = stderr
        self._process: LauncherProcess | None = None

    async def node_workers(self) -> int | None:
        return None

    async def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        channel = self._channel = await self._launched()
        async for event in channel.events():
            yield event
            if isinstance(event, WorkerRuntimeLost):
                return
        self._channel = None
        if not self._released:
            yield WorkerRuntimeLost(f"the launcher below this agent ended: {await self._ending()}")

    async def release(self, exit_code: int, message: str) -> None:
        """End all processes and the launcher. The agent itself exits with the outcome."""
        await super().release(exit_code, message)
        await self._ending()

    async def aclose(self) -> None:
        await super().aclose()
        await self._ending()

    async def _launched(self) -> Channel:
        self._process, ours = await self._begun()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        return await self._attach(reader, writer, self._identity)

    async def _begun(self) -> tuple[LauncherProcess, socket.socket]:
        """Start the launcher; return its process and the agent's end of the connection."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return await self._launcher(theirs), ours
            except OSError as error:
                ours.close()
                raise WorkerRuntimeError(f"cannot start {sys.executable}: {error}") from error

    async def _launcher(self, theirs: socket.socket) -> LauncherProcess:
        environ = {
            **inherited_variables(os.environ),
            settings.AGENT_FD: str(theirs.fileno()),
            settings.LIFELINE_PID: str(os.getpid()),
            settings.PROBE_PORT: "off",
            settings.INIT: "1",
            settings.KEEP_FDS: ",".join(str(fd) for fd in self._keep_fds),
        }
        command = ("--", *self._command) if self._command else ()
        return await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-I",
                "-S",
                "-c",
                PROGRAM,
                str(Path(settings.__file__).parents[1]),
                *command,
            ),
            env=environ,
            stdin=DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            pass_fds=(theirs.fileno(), *self._keep_fds),
            start_new_session=True,  # Ctrl-C in a terminal reaches the agent alone, which decides
        )

    async def _ending(self) -> str:
        """Wait for the launcher to end, kill it after a timeout, and describe its exit."""
        if self._process is None:
            return "never started"
        try:
            async with asyncio.timeout(END_TIMEOUT_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"
