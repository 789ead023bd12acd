"""Number of workers of a node: `nprocPerNode`, counted in the container that runs the workers.

Accelerators are counted by torch, in a process of its own with the interpreter and environment of
the workers: a driver that hangs or crashes there is an error with a text. Without torch the device
files are counted. Everything else needs no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob_launcher.processes.spawn import die_with_parent
from elasticjob_launcher.settings import DEFAULT_COUNT_SECONDS
from elasticjob_launcher.zygote.command import ColdStart, parse_command

ACCELERATORS = "accelerators"
"""One worker for each accelerator, or one worker: an absent `nprocPerNode`."""
AUTO, GPU, CPU = "auto", "gpu", "cpu"
WORDS = (AUTO, GPU, CPU)
MAX_WORKERS = 1024
KILLED_SECONDS = 2.0
OUTPUT_CHARACTERS = 1500

_NUMBER = "set nprocPerNode to a number"
_WHOLE = re.compile(r"[0-9]{1,18}")
_POSITIVE = re.compile(r"0*[1-9][0-9]{0,17}")
_SHARE = re.compile(r"([0-9]+)/([0-9]+)")
_DEVICE_TYPE = re.compile(r"[a-z_][a-z0-9_]*")
_RUN = (
    "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]; "
    "sys.path.append(sys.argv.pop(1)); import elasticjob_launcher.worker_count as m; m.main()"
)


class CountError(Exception):
    """Number of workers that cannot be determined; the message names the cause and the fix."""


class Devices(NamedTuple):
    """Accelerators of this container.

    `torch` is its version, empty if torch is not installed. `trouble` is the reason for which none
    can be used although there are device files. `note` is advice to the user.
    """

    number: int
    torch: str = ""
    trouble: str = ""
    note: str = ""


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
            + (": the container has no such variable" if "$(" in word else "")
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
    where = f"torch {devices.torch} finds none in this container"
    if not devices.torch:
        where = "torch is not installed in this container, and there are no device files"
    note = f"; {devices.note}" if devices.note else ""
    return (
        f"nprocPerNode is {word}, but there is no {what}: {where}{note}. Request one in the "
        "container's resources, or set nprocPerNode to auto, cpu or a number"
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
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # In a container the mount's root is the container's own cgroup.
        places = [Path(*parts[:depth]) for depth in range(len(parts) + 1)]
        for place in places:
            if not controllers:
                quota, _, period = _text(mount / place / "cpu.max").partition(" ")
            elif "cpu" in controllers.split(","):
                quota = _text(mount / "cpu" / place / "cpu.cfs_quota_us")
                period = _text(mount / "cpu" / place / "cpu.cfs_period_us")
            else:
                continue
            if _WHOLE.fullmatch(quota.strip()) and _POSITIVE.fullmatch(period.strip()):
                yield int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


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

    For a command that is no Python program, such as a shell's, it is this process's interpreter.
    """
    try:
        program = parse_command(argv, env.get("PATH", os.defpath))
    except ColdStart:
        return sys.executable, (), env
    return program.interpreter, program.options, {**env, **program.env}


# -- in the other process


def main() -> None:
    """Write the devices as JSON to standard output; redirect all other output to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        try:
            found: dict[str, Any] = visible_devices(sys.argv[1])._asdict()
        except CountError as error:
            found = {"error": str(error)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        json.dump(found, answer)
    os._exit(0)  # a driver may hang at the exit


_BEFORE_AUTOLOAD = (
    *("torch_npu", "torch_mlu", "torch_musa", "intel_extension_for_pytorch"),
    "habana_frameworks.torch",
)
"""Packages that add a device type, which only torch 2.5 and newer import by themselves."""


def visible_devices(word: str, environ: Mapping[str, str] = os.environ) -> Devices:
    """Count the accelerators that torch can use, or without torch the device files."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return Devices(device_files(environ) if word in (AUTO, GPU, ACCELERATORS) else 0)
    version = str(getattr(torch, "__version__", "unknown"))
    if word not in (AUTO, GPU, ACCELERATORS):
        return Devices(_number_of_type(torch, word), version)
    number = _accelerators(torch)
    for package in _BEFORE_AUTOLOAD if not number else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
            number = number or _accelerators(torch)
    if number:
        return Devices(number, version)
    # torch reaches these through XLA and does not count them.
    number = neuron_cores(environ) or tpu_chips(environ)
    if number:
        return Devices(number, version)
    return _explained(torch, version, environ)


def _accelerators(torch: Any) -> int:
    """Return the number that torchrun's `auto` uses; 0 without accelerators.

    Before version 2.6 torch has no common interface to them, and a plug-in may not implement it.
    """
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return int(accelerator.device_count())
    names = ["cuda", "xpu", "hpu"]
    with contextlib.suppress(AttributeError):
        names.append(torch._C._get_privateuse1_backend_name())
    return next((number for number in (_available(torch, name) for name in names) if number), 0)


def _available(torch: Any, name: str) -> int:
    module = getattr(torch, name, None)
    if module is None or not hasattr(module, "device_count") or not module.is_available():
        return 0
    return int(module.device_count())


def _number_of_type(torch: Any, name: str) -> int:
    for package in _BEFORE_AUTOLOAD:
        if hasattr(torch, name):
            break
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    return _available(torch, name)


def _explained(torch: Any, version: str, environ: Mapping[str, str]) -> Devices:
    """Return no devices, with the reason if there are device files of a GPU."""
    built = getattr(torch, "version", None)
    for maker, files, hidden_by in (
        ("cuda", nvidia_files(), ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")),
        ("hip", amd_files(), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")),
    ):
        if not files or any(_hides(environ.get(name)) for name in hidden_by):
            continue
        names = ", ".join(files)
        if getattr(built, maker, None) is None:
            note = f"{names} are not used: torch {version} is built without {maker.upper()}"
            return Devices(0, version, "", note)
        try:
            torch.cuda.init()
            why = "it finds no device"
        except Exception as error:
            why = str(error)
        return Devices(0, version, f"torch {version} cannot use {names}: {why}")
    return Devices(0, version)


def _hides(value: str | None) -> bool:
    """Return True if a variable that selects devices selects none."""
    return value is not None and value.strip() in ("", "-1", "void", "none", "NoDevFiles")


# -- device files


DEV = Path("/dev")
NEURON = Path("/sys/devices/virtual/neuron_device")
_FILES = (
    ("", re.compile(r"davinci[0-9]+")),  # Ascend
    ("", re.compile(r"cambricon_dev[0-9]+")),
    ("", re.compile(r"hl[0-9]+")),  # Gaudi
)


def device_files(environ: Mapping[str, str]) -> int:
    """Return the number of device files of accelerators, without those that variables hide."""
    nvidia = len(nvidia_files())
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        value = environ.get(name)
        if _hides(value):
            nvidia = 0
        elif value is not None and value.strip() != "all":
            nvidia = min(nvidia, len([part for part in value.split(",") if part.strip()]))
    others = (len(_named(folder, pattern)) for folder, pattern in _FILES)
    counts = (nvidia, len(amd_files()), *others, neuron_cores(environ), tpu_chips(environ))
    return next((number for number in counts if number), 0)


def expected_workers(word: str, environ: Mapping[str, str]) -> int:
    """Return the number of workers that torchrun would start for a word of its option, by device
    files alone; 0 is an unknown number."""
    devices = device_files(environ)
    if word == CPU or (word == AUTO and not devices):
        return usable_cpus()
    return devices


def nvidia_files() -> list[str]:
    return _named("", re.compile(r"nvidia[0-9]+"))


def amd_files() -> list[str]:
    """Return the render nodes of AMD's compute driver; other drivers have render nodes too."""
    return _named("dri", re.compile(r"renderD[0-9]+")) if (DEV / "kfd").exists() else []


def tpu_chips(environ: Mapping[str, str]) -> int:
    """Return the number of TPU chips; other devices of a machine may be in /dev/vfio too."""
    accel = len(_named("", re.compile(r"accel[0-9]+")))
    is_tpu = any(name.startswith("TPU_") for name in environ)
    return accel or (len(_named("vfio", re.compile(r"[0-9]+"))) if is_tpu else 0)


def neuron_cores(environ: Mapping[str, str]) -> int:
    """Return the number of NeuronCores: the selected ones, or all of the container's devices."""
    devices = _named("", re.compile(r"neuron[0-9]+"))
    if not devices:
        return 0
    selected = environ.get("NEURON_RT_VISIBLE_CORES", "")
    if selected:
        return sum(_length(part) for part in selected.split(","))
    number = environ.get("NEURON_RT_NUM_CORES", "")
    if _POSITIVE.fullmatch(number):
        return int(number)
    cores = [_text(NEURON / Path(device).name / "core_count").strip() for device in devices]
    if not all(_WHOLE.fullmatch(core) for core in cores):
        raise CountError(f"the number of NeuronCores of {', '.join(devices)} is unknown")
    return sum(int(core) for core in cores)


def _length(part: str) -> int:
    first, dash, last = part.strip().partition("-")
    last = last if dash else first
    if not (_WHOLE.fullmatch(first) and _WHOLE.fullmatch(last)) or int(last) < int(first):
        raise CountError(
            f"NEURON_RT_VISIBLE_CORES must be cores and ranges of them, such as 0-3,8; {part!r} "
            "is neither"
        )
    return int(last) - int(first) + 1


def _named(folder: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        names = sorted(os.listdir(DEV / folder))  # noqa: PTH208
    except OSError:
        return []
    return [str(DEV / folder / name) for name in names if pattern.fullmatch(name)]
