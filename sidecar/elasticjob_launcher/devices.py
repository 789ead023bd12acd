"""Accelerators of a container by their device files, and the record of those that were counted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ACCELERATORS = "accelerators"
"""One worker for each accelerator, or one worker: an absent `nprocPerNode`."""
AUTO, GPU, CPU = "auto", "gpu", "cpu"

DEV = Path("/dev")
NEURON = Path("/sys/devices/virtual/neuron_device")
WHOLE = re.compile(r"[0-9]{1,18}")
POSITIVE = re.compile(r"0*[1-9][0-9]{0,17}")
_FILES = (
    ("", re.compile(r"davinci[0-9]+")),  # Ascend
    ("", re.compile(r"cambricon_dev[0-9]+")),
    ("", re.compile(r"hl[0-9]+")),  # Gaudi
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


def device_files(environ: Mapping[str, str]) -> int:
    """Return the number of device files of accelerators, without those that variables hide."""
    nvidia = len(nvidia_files())
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        value = environ.get(name)
        if hides(value):
            nvidia = 0
        elif value is not None and value.strip() != "all":
            nvidia = min(nvidia, len([part for part in value.split(",") if part.strip()]))
    others = (len(_named(folder, pattern)) for folder, pattern in _FILES)
    counts = (nvidia, len(amd_files()), *others, neuron_cores(environ), tpu_chips(environ))
    return next((number for number in counts if number), 0)


def hides(value: str | None) -> bool:
    """Return True if a variable that selects devices selects none."""
    return value is not None and value.strip() in ("", "-1", "void", "none", "NoDevFiles")


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
    if POSITIVE.fullmatch(number):
        return int(number)
    cores = [text_of(NEURON / Path(device).name / "core_count").strip() for device in devices]
    if not all(WHOLE.fullmatch(core) for core in cores):
        raise CountError(f"the number of NeuronCores of {', '.join(devices)} is unknown")
    return sum(int(core) for core in cores)


def _length(part: str) -> int:
    first, dash, last = part.strip().partition("-")
    last = last if dash else first
    if not (WHOLE.fullmatch(first) and WHOLE.fullmatch(last)) or int(last) < int(first):
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


def text_of(path: Path) -> str:
    """Return the file's text; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
