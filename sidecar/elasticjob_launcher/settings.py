"""Launcher settings. The only module of the package that reads environment and command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SOCKET = "ELASTICJOB_SOCKET"
PROBE_ADDRESS = "ELASTICJOB_PROBE_ADDRESS"
PROBE_PORT = "ELASTICJOB_PROBE_PORT"
ORPHAN_SECONDS = "ELASTICJOB_ORPHAN_SECONDS"
STOP_GRACE_SECONDS = "ELASTICJOB_STOP_GRACE_SECONDS"
AGENT_FD = "ELASTICJOB_AGENT_FD"
LIFELINE_PID = "ELASTICJOB_LIFELINE_PID"
KEEP_FDS = "ELASTICJOB_KEEP_FDS"
INIT = "ELASTICJOB_INIT"
TERMINATION_LOG = "ELASTICJOB_TERMINATION_LOG"
SAVE_SIGNAL = "ELASTICJOB_SAVE_SIGNAL"
STANDBY_SECONDS = "ELASTICJOB_STANDBY_SECONDS"
STANDBY_MIB = "ELASTICJOB_STANDBY_MIB"
NPROC = "ELASTICJOB_NPROC"
COUNT_SECONDS = "ELASTICJOB_COUNT_SECONDS"
SNAPSHOT_VOLUME = "ELASTICJOB_SNAPSHOT_VOLUME"
SEVERAL_NODES = "ELASTICJOB_SEVERAL_NODES"
NESTED = "ELASTICJOB_NESTED_LAUNCH"
"""Variable of the workers: `refuse` or `allow` a torchrun inside of a worker; empty as absent."""
REFUSE, ALLOW = "refuse", "allow"

OWN_VARIABLES = (
    SOCKET,
    PROBE_ADDRESS,
    PROBE_PORT,
    ORPHAN_SECONDS,
    STOP_GRACE_SECONDS,
    AGENT_FD,
    LIFELINE_PID,
    KEEP_FDS,
    INIT,
    TERMINATION_LOG,
    STANDBY_SECONDS,
    STANDBY_MIB,
    NPROC,
    COUNT_SECONDS,
    SNAPSHOT_VOLUME,
    SEVERAL_NODES,
)
STANDBY_LIMITS = (STANDBY_SECONDS, STANDBY_MIB)
# Signals without another meaning for a program.
SAVE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGWINCH)
LIBRARY = "python"
DEFAULT_SOCKET = "/elasticjob/launcher.sock"
# sun_path holds 108 bytes, one of them the closing zero.
MAX_SOCKET_PATH_BYTES = 107
SETUP_OPTION = "--setup"
PREPARE_OPTION = "--prepare"
CHECK_OPTION = "--check"
PROGRAM_OPTION = "--program"
# Time to import torch and count, also from a slow network disk.
DEFAULT_COUNT_SECONDS = 120.0
DEFAULT_SNAPSHOT_VOLUME = "/dev/shm"
USAGE = (
    "usage: python3 launcher.pyz [--setup COUNT WORD ...] [--prepare] [--check] [--program FILE] "
    "-- COMMAND [ARGUMENT ...]"
)


class SettingsError(Exception):
    """Invalid settings; the message names the fix."""


class Limits(NamedTuple):
    """Limits of the zygote: processor time of all imports, which is also the maximum time without
    any, and resident memory."""

    seconds: float = 60.0
    most_bytes: int = 4 << 30


class Settings(NamedTuple):
    """Launcher settings.

    `agent_fd` replaces the socket: one connected agent, whose disconnect ends the launcher.
    `probe_port` 0 selects a free port, None opens none. `lifeline_pid` 0 means none. Workers
    inherit the descriptors `keep_fds`. `library` is the folder with `elasticjob.train` for them.
    `save_signal` requests a checkpoint from them; 0 means none. `init`: run below an init process,
    for launchers outside a container. `setup` is a command that runs once before the first round.
    `prepare`: the command prepares, and then reports the command of the workers. `check`: the
    command is to run once for each worker, unless its program starts a launcher; `program` is a
    file that may be one, too, or empty. `several_nodes`: the job may have more than one node, which
    the launcher must reach. `nproc` is the number of workers to report to the agent, or the word by
    which it is counted within `count_seconds`; empty if the agent knows the number.
    `snapshot_volume` is the folder in memory for snapshots, or "off" for none.
    """

    argv: tuple[str, ...]
    socket_path: str
    agent_fd: int | None
    probe_address: str
    probe_port: int | None
    orphan_seconds: float
    stop_grace_seconds: float
    lifeline_pid: int
    termination_log: str
    keep_fds: tuple[int, ...] = ()
    library: str = ""
    zygote: Limits = Limits()
    save_signal: int = 0
    init: bool = False
    setup: tuple[str, ...] = ()
    prepare: bool = False
    check: bool = False
    several_nodes: bool = True
    program: str = ""
    nproc: str = ""
    count_seconds: float = DEFAULT_COUNT_SECONDS
    snapshot_volume: str = DEFAULT_SNAPSHOT_VOLUME


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Parse and check the settings; raise SettingsError that names the variable and the fix."""
    agent_fd = _whole(environ, AGENT_FD, -1)
    probe_port = environ.get(PROBE_PORT, "0")
    setup, rest = _setup(arguments)
    prepare = rest[:1] == [PREPARE_OPTION]
    rest = rest[1:] if prepare else rest
    check = rest[:1] == [CHECK_OPTION]
    rest = rest[1:] if check else rest
    program, rest = _program(rest)
    settings = Settings(
        argv=_command(rest, required=agent_fd < 0 or prepare),
        socket_path=environ.get(SOCKET) or DEFAULT_SOCKET,
        agent_fd=agent_fd if agent_fd >= 0 else None,
        probe_address=environ.get(PROBE_ADDRESS, ""),
        probe_port=None if probe_port == "off" else _whole(environ, PROBE_PORT, 0, most=65535),
        orphan_seconds=_seconds(environ, ORPHAN_SECONDS, 30.0),
        stop_grace_seconds=_seconds(environ, STOP_GRACE_SECONDS, 10.0),
        lifeline_pid=_whole(environ, LIFELINE_PID, 0),
        termination_log=environ.get(TERMINATION_LOG, "/dev/termination-log"),
        keep_fds=_descriptors(environ, KEEP_FDS),
        zygote=Limits(
            _seconds(environ, STANDBY_SECONDS, Limits().seconds),
            _whole(environ, STANDBY_MIB, Limits().most_bytes >> 20) << 20,
        ),
        save_signal=_signal(environ, SAVE_SIGNAL),
        init=_whole(environ, INIT, 0, most=1) == 1,
        setup=setup,
        prepare=prepare,
        check=check,
        several_nodes=_whole(environ, SEVERAL_NODES, 1, most=1) == 1,
        program=program,
        nproc=environ.get(NPROC, ""),
        count_seconds=_seconds(environ, COUNT_SECONDS, DEFAULT_COUNT_SECONDS),
        snapshot_volume=environ.get(SNAPSHOT_VOLUME) or DEFAULT_SNAPSHOT_VOLUME,
    )
    if settings.agent_fd is None:  # in a pod
        _check_nested(environ)
        check_socket_path(settings.socket_path)
    return settings


def torchrun_socket(path: str) -> str:
    """Return the path of the socket for torchrun's plug-in beside the agent's."""
    return f"{path}.node"


def check_socket_path(path: str) -> None:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"{SOCKET} is {length} bytes long, a unix socket's path must have at most "
            f"{MAX_SOCKET_PATH_BYTES}: set a shorter one (now {path!r})"
        )


def worker_environment(environ: Mapping[str, str], library: str = "") -> dict[str, str]:
    """Return the environment that workers inherit, without the launcher's own variables.

    `library` goes last on PYTHONPATH: a user's package of the same name takes precedence.
    """
    found = {name: value for name, value in environ.items() if name not in OWN_VARIABLES}
    if library:
        before = found.get("PYTHONPATH")
        found["PYTHONPATH"] = before + os.pathsep + library if before else library
    return found


def from_process() -> Settings:
    settings = read_settings(sys.argv[1:], os.environ)
    return settings._replace(library=library_beside(sys.argv[0]))


def library_beside(program: str) -> str:
    """Return the folder with ElasticJob's modules for workers, if installed beside the launcher."""
    folder = Path(program).absolute().parent / LIBRARY
    return str(folder) if (folder / "elasticjob").is_dir() else ""


def _setup(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split the arguments into the setup command and the rest."""
    if list(arguments[:1]) != [SETUP_OPTION]:
        return (), list(arguments)
    count = arguments[1] if len(arguments) > 1 else ""
    if not (count.isascii() and count.isdigit() and 0 < int(count) <= len(arguments) - 2):
        raise SettingsError(
            f"{SETUP_OPTION} must be followed by a number of words, and by the words; {USAGE}"
        )
    end = 2 + int(count)
    return tuple(arguments[2:end]), list(arguments[end:])


def _program(arguments: list[str]) -> tuple[str, list[str]]:
    """Split the arguments into the program to check and the rest."""
    if arguments[:1] != [PROGRAM_OPTION]:
        return "", arguments
    if len(arguments) < 2 or not arguments[1]:
        raise SettingsError(f"{PROGRAM_OPTION} must be followed by a file; {USAGE}")
    return arguments[1], arguments[2:]


def _command(arguments: Sequence[str], required: bool) -> tuple[str, ...]:
    if not arguments and not required:
        return ()
    if not arguments or arguments[0] != "--":
        raise SettingsError(f"the command must follow `--`; {USAGE}")
    if len(arguments) < 2 and required:
        raise SettingsError(
            f"no command after `--`: set `command` of the trainer container; {USAGE}"
        )
    return tuple(arguments[1:])


def _whole(environ: Mapping[str, str], name: str, default: int, most: int = 2**31 - 1) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) > most:
        raise SettingsError(f"{name} must be a whole number from 0 to {most}, got {text!r}")
    return int(text)


def _signal(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text:
        return 0
    known = {each.name: int(each) for each in SAVE_SIGNALS}
    found = known.get(text if text.startswith("SIG") else f"SIG{text}")
    if found is None:
        raise SettingsError(f"{name} must be one of {', '.join(known)}, got {text!r}")
    return found


def _check_nested(environ: Mapping[str, str]) -> None:
    text = environ.get(NESTED, "")
    if text not in ("", REFUSE, ALLOW):
        raise SettingsError(f"{NESTED} must be {REFUSE} or {ALLOW}, got {text!r}")


def _descriptors(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    parts = [part for part in environ.get(name, "").split(",") if part]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingsError(f"{name} must be numbers separated by commas, got {environ[name]!r}")
    return tuple(int(part) for part in parts)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise SettingsError(f"{name} must be seconds from 0 to 86400, got {text!r}")
    return seconds
