"""Accelerators that torch can use, counted in a process of its own: `main`.

The process has the interpreter and environment of the workers. torch is imported only if it may
find one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elasticjob_launcher import devices
from elasticjob_launcher.devices import (
    ACCELERATORS,
    AUTO,
    GPU,
    CountError,
    Devices,
    amd_files,
    device_files,
    hides,
    neuron_cores,
    nvidia_files,
    tpu_chips,
)


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
_BACKENDS = "torch.backends"
"""Entry point group of the packages that torch 2.5 and newer import to add a device type."""
_OWN_BUILD = re.compile(r"[0-9.]+(\+(cpu|cu[0-9]+|rocm[0-9.]+|xpu))?(\.post[0-9]+)?")
"""Versions of PyTorch's own builds; those of other makers have other devices as `cuda`."""
_DRIVERS = {
    "cuda": re.compile(r"nvidia|nvhost|nvmap|nvgpu|tegra|dxg"),
    "hip": re.compile(r"kfd|dxg"),
    "xpu": re.compile(r"dri|dxg"),
}
"""Start of the names of the device files without which a build of torch finds no device: those of
the drivers, of Tegra, and of Windows' subsystem for Linux."""


def visible_devices(word: str, environ: Mapping[str, str] = os.environ) -> Devices:
    """Count the accelerators that torch can use, or without torch the device files."""
    known = _built_torch() if word in (AUTO, GPU, ACCELERATORS) else None
    if known is not None and not _may_find_devices(known.version):
        return _others(known, environ)
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return Devices(device_files(environ) if word in (AUTO, GPU, ACCELERATORS) else 0)
    version = _version(torch)
    if word not in (AUTO, GPU, ACCELERATORS):
        return Devices(_number_of_type(torch, word), version)
    number = _accelerators(torch)
    for package in _BEFORE_AUTOLOAD if not number else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
            number = number or _accelerators(torch)
    return Devices(number, version) if number else _others(torch, environ)


def _others(torch: Any, environ: Mapping[str, str]) -> Devices:
    """Count the devices that torch reaches through XLA and does not count."""
    number = neuron_cores(environ) or tpu_chips(environ)
    if number:
        return Devices(number, _version(torch))
    return _explained(torch, _version(torch), environ)


def _version(torch: Any) -> str:
    return str(getattr(torch, "__version__", "unknown"))


def _built_torch() -> Any:
    """Return torch's `__version__` and `version` without the import of torch, which takes seconds.

    None if they are unknown, or if other packages may add a device type.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None or "torch" in sys.modules:
            return None
        version = SimpleNamespace(**runpy.run_path(str(Path(spec.origin).with_name("version.py"))))
        added = any(
            importlib.util.find_spec(name.partition(".")[0]) is not None
            for name in _BEFORE_AUTOLOAD
        ) or any(
            entry.group == _BACKENDS
            for distribution in importlib.metadata.distributions()
            for entry in distribution.entry_points
        )
        is_known = _OWN_BUILD.fullmatch(version.__version__) and hasattr(version, "cuda")
        known = SimpleNamespace(__version__=version.__version__, version=version)
        return known if is_known and not added else None
    except Exception:  # of another build, or damaged metadata: torch is imported then
        return None


def _has_cuda_driver() -> bool:
    """Return True if CUDA's driver library can be loaded: a remote GPU has no device file."""
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("ctypes").CDLL("libcuda.so.1")
        return True
    return False


def _may_find_devices(version: Any) -> bool:
    """Return True if a device file exists that this build of torch can use, or CUDA's driver."""
    if getattr(version, "cuda", None) is not None and _has_cuda_driver():
        return True
    try:
        names = os.listdir(devices.DEV)  # noqa: PTH208
    except OSError:
        return True
    return any(
        driver.match(name)
        for maker, driver in _DRIVERS.items()
        if getattr(version, maker, "") is not None  # torch 2.6 and older have no `xpu`
        for name in names
    )


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
        if not files or any(hides(environ.get(name)) for name in hidden_by):
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
