"""Number of workers of a node: `nprocPerNode`, counted in the container that runs the workers.

Accelerators are counted by torch, in a process of its own with the interpreter and environment of
the workers: a driver that hangs or crashes there is an error with a text. Without torch the device
files are counted. Everything else needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from elasticjob_launcher.devices import (
    ACCELERATORS,
    AUTO,
    CPU,
    GPU,
    POSITIVE,
    WHOLE,
    CountError,
    Devices,
    device_files,
    text_of,
)
from elasticjob_launcher.processes.spawn import die_with_parent
from elasticjob_launcher.settings import DEFAULT_COUNT_SECONDS
from elasticjob_launcher.zygote.command import ColdStart, parse_command

MAX_WORKERS = 1024
KILLED_SECONDS = 2.0
OUTPUT_CHARACTERS = 1500

_NUMBER = "set nprocPerNode to a number"
_NOT_REPLACED = "in a pod, the container has no such variable; outside of one, set a number"
_SHARE = re.compile(r"([0-9]+)/([0-9]+)")
_DEVICE_TYPE = re.compile(r"[a-z_][a-z0-9_]*")
_RUN = (
    "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]; "
    "sys.path.append(sys.argv.pop(1)); import elasticjob_launcher.visible_devices as m; m.main()"
)


class Count(NamedTuple):
    """Number of workers, and a text for the log; empty if there is none."""

    workers: int
    note: str = ""


def count_workers(
    word: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    seconds: float = DEFAULT_COUNT_SECONDS,
) -> Count:
    """Return the number of workers for a number, `all/machines`, or a word of torchrun's option.

    Args:
        argv, env: command and environment of the workers.
        seconds: time limit for the import of torch and the count.

    Raises:
        CountError: the word is invalid, a requested device does not exist, or the count fails.
    """
    share = _SHARE.fullmatch(word)
    if share is not None:
        return Count(_checked(_share(int(share.group(1)), int(share.group(2)))))
    if word.isascii() and word.isdigit():
        return Count(_checked(int(word)))
    if word == CPU:
        return Count(usable_cpus())
    if not _DEVICE_TYPE.fullmatch(word):
        raise CountError(
            f"nprocPerNode must be auto, gpu, cpu or a number, got {word!r}"
            + (f": {_NOT_REPLACED}" if "$(" in word else "")
        )
    devices = count_devices(word, argv, env, seconds)
    if devices.trouble:
        raise CountError(f"{devices.trouble}; correct the driver, or {_NUMBER}")
    note = devices.note
    if not devices.torch:
        note = f"torch is not installed: counted {devices.number} device files"
    if devices.number:
        return Count(_checked(devices.number), note)
    if word == ACCELERATORS:
        return Count(1, note)
    if word == AUTO:
        return Count(usable_cpus(), note)
    raise CountError(_missing(word, devices))


def torchrun_word(word: str) -> str:
    """Return the value of torchrun's option for a word; `all/machines` becomes a number."""
    share = _SHARE.fullmatch(word)
    return word if share is None else str(_share(int(share[1]), int(share[2])))


def _missing(word: str, devices: Devices) -> str:
    what = "accelerator" if word == GPU else f"{word} device"
    where = f"torch {devices.torch} finds none"
    if not devices.torch:
        where = "torch is not installed, and there are no device files"
    note = f"; {devices.note}" if devices.note else ""
    return (
        f"nprocPerNode is {word}, but there is no {what}: {where}{note}. Set it to auto, cpu or a "
        f"number, or, in a pod, request the {what} in the container's resources"
    )


def _share(processes: int, machines: int) -> int:
    if machines < 1 or processes % machines:
        raise CountError(
            f"{processes} processes cannot be divided evenly among {machines} machines: {_NUMBER}"
        )
    return processes // machines


def _checked(workers: int) -> int:
    if not 1 <= workers <= MAX_WORKERS:
        raise CountError(
            f"the number of workers of a node must be from 1 to {MAX_WORKERS}, got {workers}"
        )
    return workers


def expected_workers(word: str, environ: Mapping[str, str]) -> int:
    """Return the number of workers that torchrun would start for a word of its option, by device
    files alone; 0 is an unknown number."""
    devices = device_files(environ)
    if word == CPU or (word == AUTO and not devices):
        return usable_cpus()
    return devices


# -- CPUs


CGROUP_MOUNT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cpus(mount: Path = CGROUP_MOUNT, own: Path = OWN_CGROUP) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    torchrun counts those of the cpuset. A container's CPU limit is a quota, which torchrun does not
    read: on a large machine it would start many workers that share a few CPUs.
    """
    cpuset = len(os.sched_getaffinity(0))
    return max(1, min([cpuset, *(int(quota) for quota in _quotas(mount, own))]))


def _quotas(mount: Path, own: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroup and of its ancestors, in CPUs."""
    for line in text_of(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # In a container the mount's root is the container's own cgroup.
        places = [Path(*parts[:depth]) for depth in range(len(parts) + 1)]
        for place in places:
            if not controllers:
                quota, _, period = text_of(mount / place / "cpu.max").partition(" ")
            elif "cpu" in controllers.split(","):
                quota = text_of(mount / "cpu" / place / "cpu.cfs_quota_us")
                period = text_of(mount / "cpu" / place / "cpu.cfs_period_us")
            else:
                continue
            if WHOLE.fullmatch(quota.strip()) and POSITIVE.fullmatch(period.strip()):
                yield int(quota) / int(period)


# -- devices, counted in another process


def count_devices(
    word: str, argv: Sequence[str], env: Mapping[str, str], seconds: float
) -> Devices:
    """Count the devices in a process with the interpreter and environment of the workers."""
    interpreter, options, env = _interpreter(argv, env)
    root = str(Path(__file__).parents[1])
    command = [interpreter, *options, "-c", _RUN, root, word]
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CountError(f"cannot start {interpreter} to count the devices: {error}") from error
    try:
        answer, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stderr = _killed(process)
        raise CountError(
            f"counting the accelerators took longer than {seconds:g} s: correct the driver, or "
            f"{_NUMBER}{_last_line_of(stderr)}"
        ) from None
    return _answered(answer, stderr, process.returncode)


def _killed(process: subprocess.Popen[bytes]) -> bytes:
    """Kill the process group and return its error output, unless a driver keeps it alive."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=KILLED_SECONDS)[1]
    except subprocess.TimeoutExpired:
        return b""


def _answered(answer: bytes, stderr: bytes, code: int) -> Devices:
    try:
        found = json.loads(answer)
        if "error" not in found:
            return Devices(**found)
        how = str(found["error"])
    except (ValueError, TypeError):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        how += _last_line_of(stderr)
    raise CountError(
        f"cannot count the accelerators: {how}; correct the image or the driver, or {_NUMBER}"
    )


def _last_line_of(stderr: bytes) -> str:
    text = stderr.decode("utf-8", "replace").strip()
    return f": {text[-OUTPUT_CHARACTERS:]}" if text else ""


def _interpreter(
    argv: Sequence[str], env: Mapping[str, str]
) -> tuple[str, tuple[str, ...], Mapping[str, str]]:
    """Return the interpreter of the workers, its options, and their environment.

    For a command that is not a Python program, such as a shell's, it is this process's interpreter.
    """
    try:
        program = parse_command(argv, env.get("PATH", os.defpath))
    except ColdStart:
        return sys.executable, (), env
    return program.interpreter, program.options, {**env, **program.env}
