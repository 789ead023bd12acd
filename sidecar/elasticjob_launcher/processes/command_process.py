"""Process of the node's command with `launch: PerNode`: its variables, start, output and end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticjob_launcher.command_line.launchers import may_ask_for_no_workers
from elasticjob_launcher.devices import CountError, device_files
from elasticjob_launcher.loop import Loop
from elasticjob_launcher.node_variables import node_variables, notice
from elasticjob_launcher.processes.output import Output
from elasticjob_launcher.processes.spawn import LaunchError, Pipes
from elasticjob_launcher.processes.worker_stream import WorkerStream
from elasticjob_launcher.worker_count import expected_workers

if TYPE_CHECKING:
    from elasticjob_launcher.processes.spawn import Spawn, Spawned

TORCHRUN_WORKERS = "PET_NPROC_PER_NODE"
"""Variable with the number of workers that torchrun starts without its option, or a word."""
FRAMEWORK_WORKERS = "NPROC_PER_NODE"
"""Variable with the number of workers that frameworks pass to torchrun."""
OWN_DEFAULTS = (
    *(TORCHRUN_WORKERS, FRAMEWORK_WORKERS, "NNODES", "FORCE_TORCHRUN"),
    "PET_NODE_RANK",
)
"""Variables whose value in the container takes precedence."""


def own_defaults(base_env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the container that take precedence over those of the command."""
    return {name: base_env[name] for name in OWN_DEFAULTS if name in base_env}


class Ended(NamedTuple):
    """End of the command."""

    pid: int
    code: int | None
    signum: int | None
    message: str = ""
    tail: str = ""
    out_of_memory: bool = False


class CommandProcess:
    """Process of the command, which can be started again after its end.

    Args:
        argv: the command.
        base_env: variables of the container.
        env: variables of the command, which take precedence except for `OWN_DEFAULTS`.
        log_dir: folder of the files for its output; empty for none.
    """

    def __init__(
        self,
        loop: Loop,
        output: Output,
        spawn: Spawn,
        argv: tuple[str, ...],
        base_env: Mapping[str, str],
        env: Mapping[str, str],
        log_dir: str,
        max_log_bytes: int,
    ) -> None:
        self._loop = loop
        self._output = output
        self._spawn = spawn
        self._argv = argv
        self._env = {**base_env, **_framework_variables(argv, base_env, env), **env}
        self._env.update(own_defaults(base_env))
        added = node_variables(argv, self._env)
        self._env.update(added)
        if added:
            output.write_line(notice(added))
        self._log_dir = log_dir
        self._max_log_bytes = max_log_bytes
        self._process: Spawned | None = None
        self._streams: list[WorkerStream] = []

    @property
    def pid(self) -> int | None:
        """Pid of the running command; None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> Ended | None:
        """Start the command; return its end if it cannot be started."""
        self.drain()
        self._streams = []
        try:
            pipes = Pipes()
        except LaunchError as error:
            return Ended(0, error.exit_code, None, error.message)
        try:
            self._process = self._spawn(self._argv, self._env, *pipes.write_fds)
        except LaunchError as error:
            pipes.close_read()
            self._output.write_line(error.message)
            return Ended(0, error.exit_code, None, error.message)
        finally:
            pipes.close_write()
        folder, size = self._log_dir, self._max_log_bytes
        for number, (fd, name) in enumerate(zip(pipes.read_fds, ("stdout.log", "stderr.log")), 1):
            path = Path(folder, name) if folder and size > 0 else None
            self._streams.append(
                WorkerStream(self._loop, self._output, fd, number, b"", path, size)
            )
        return None

    def ended(self, status: int) -> Ended:
        """Return the end of the running command, which was reaped with this status."""
        process, self._process = self._process, None
        assert process is not None
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if signum is None else None
        process.returncode = code if code is not None else -(signum or 0)
        return Ended(process.pid, code, signum, "", self.tail())

    def tail(self) -> str:
        """Return the end of its standard error so far."""
        for stream in self._streams:
            stream.drain()
        return self._streams[1].tail if self._streams else ""

    def drain(self) -> None:
        """Forward the output written so far, and close the streams."""
        for stream in self._streams:
            stream.drain()
            stream.close()


def _framework_variables(
    argv: tuple[str, ...], base_env: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    """Return the number of workers for frameworks that pass it to torchrun, or use torchrun only if
    it is set; torchrun itself counts where it is absent."""
    try:
        word = base_env.get(TORCHRUN_WORKERS, env.get(TORCHRUN_WORKERS, ""))
        number = _framework_workers(argv, word, base_env)
    except CountError:  # torchrun itself reports it
        number = 0
    return {FRAMEWORK_WORKERS: str(number)} if number else {}


def _framework_workers(argv: tuple[str, ...], word: str, env: Mapping[str, str]) -> int:
    """Return the number for a word of torchrun's option, empty if it is absent; 0 if the framework
    or torchrun counts."""
    if word:
        is_number = word.isascii() and word.isdigit()
        return int(word) if is_number else expected_workers(word, env)
    return 1 if may_ask_for_no_workers(argv) and not device_files(env) else 0
