"""CPUs and device files that the launcher counts."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher import devices, visible_devices
from elasticjob_launcher.devices import CountError, device_files
from elasticjob_launcher.worker_count import usable_cpus

CPUSET = len(os.sched_getaffinity(0))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {}, CPUSET),
        ("0::/\n", {"cpu.max": "max 100000\n"}, CPUSET),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": f"{CPUSET * 4}00000 100000\n"}, CPUSET),
        ("0::/pod/trainer\n", {"pod/cpu.max": "100000 100000\n"}, 1),
        ("0::/pod/trainer\n", {"pod/trainer/cpu.max": "100000 100000\n"}, 1),
        ("0::/../other\n", {"cpu.max": "100000 100000\n"}, 1),
        (
            "4:memory:/x\n3:cpu,cpuacct:/kubepods/pod/trainer\n",
            {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        (
            "3:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            CPUSET,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n"}, CPUSET),
        ("nonsense", {"cpu.max": "words"}, CPUSET),
        ("0::/\n", {"cpu.max": "\u00b2 100000\n"}, CPUSET),
        ("0::/\n", {"cpu.max": "100000 \u00b2\n"}, CPUSET),
        ("0::/\n", {"cpu.max": "100000 0\n"}, CPUSET),
    ],
)
def test_cpus_are_those_of_the_cpuset_within_the_quota(
    tmp_path: Path, own: str, files: dict[str, str], cpus: int
) -> None:
    write(tmp_path, {f"cgroup/{name}": text for name, text in files.items()} | {"own": own})
    assert usable_cpus(tmp_path / "cgroup", tmp_path / "own") == cpus


NVIDIA = {f"nvidia{number}": "" for number in range(4)} | {"nvidiactl": "", "nvidia-uvm": ""}
NEURON = {"neuron0": "", "neuron1": ""}


@pytest.mark.parametrize(
    ("files", "environ", "number"),
    [
        ({}, {}, 0),
        ({"null": "", "vfio/vfio": "", "vfio/12": "", "dri/renderD128": ""}, {}, 0),
        (NVIDIA, {}, 4),
        (NVIDIA, {"NVIDIA_VISIBLE_DEVICES": "all"}, 4),
        (NVIDIA, {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 2),
        (NVIDIA, {"NVIDIA_VISIBLE_DEVICES": "void"}, 0),
        (NVIDIA, {"CUDA_VISIBLE_DEVICES": "0"}, 1),
        (NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"kfd": "", "dri/renderD128": "", "dri/renderD129": "", "dri/card0": ""}, {}, 2),
        ({"davinci0": "", "davinci1": "", "davinci_manager": ""}, {}, 2),
        ({"cambricon_dev0": "", "cambricon_ctl": ""}, {}, 1),
        ({"hl0": "", "hl_controlD0": ""}, {}, 1),
        ({"accel0": "", "accel1": ""}, {}, 2),
        ({"vfio/vfio": "", "vfio/0": "", "vfio/1": ""}, {"TPU_WORKER_ID": "0"}, 2),
        (NEURON, {"NEURON_RT_VISIBLE_CORES": "0-3,8"}, 5),
        (NEURON, {"NEURON_RT_VISIBLE_CORES": "2"}, 1),
        (NEURON, {"NEURON_RT_NUM_CORES": "4"}, 4),
        (NEURON, {"NEURON_RT_NUM_CORES": "\u00b2"}, 16),
        (NEURON, {"NEURON_RT_NUM_CORES": "0"}, 16),
        (NEURON, {}, 16),
    ],
)
def test_device_files_are_counted_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    environ: dict[str, str],
    number: int,
) -> None:
    write(tmp_path / "dev", files)
    cores = {f"{name}/core_count": "8\n" for name in NEURON}
    write(tmp_path / "sys", cores)
    monkeypatch.setattr(devices, "DEV", tmp_path / "dev")
    monkeypatch.setattr(devices, "NEURON", tmp_path / "sys")
    assert device_files(environ) == number


@pytest.mark.parametrize("selected", ["\u00b2", "0-\u00b2", "0-", "3-1", "all", "0,,1"])
def test_selected_cores_that_are_no_numbers_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selected: str
) -> None:
    write(tmp_path, NEURON)
    monkeypatch.setattr(devices, "DEV", tmp_path)
    with pytest.raises(CountError, match="NEURON_RT_VISIBLE_CORES must be cores and ranges"):
        device_files({"NEURON_RT_VISIBLE_CORES": selected})


@pytest.mark.parametrize("count", ["", "\u00b2\n"])
def test_unknown_number_of_cores_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    write(tmp_path / "dev", NEURON)
    write(tmp_path / "sys", {f"{name}/core_count": count for name in NEURON} if count else {})
    monkeypatch.setattr(devices, "DEV", tmp_path / "dev")
    monkeypatch.setattr(devices, "NEURON", tmp_path / "sys")
    with pytest.raises(CountError, match=r"the number of NeuronCores of .*neuron0, .*is unknown"):
        device_files({})


class Torch:
    """A torch that finds no device."""

    def __init__(self, cuda: str | None, trouble: str = "") -> None:
        self.version = type("version", (), {"cuda": cuda, "hip": None})
        self._trouble = trouble
        self.cuda = self

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def init(self) -> None:
        if self._trouble:
            raise RuntimeError(self._trouble)


@pytest.mark.parametrize(
    ("torch", "environ", "trouble", "note"),
    [
        (Torch("12.8", "CUDA driver version is insufficient"), {}, "is insufficient", ""),
        (Torch("12.8"), {}, "it finds no device", ""),
        (Torch("12.8", "no"), {"CUDA_VISIBLE_DEVICES": ""}, "", ""),
        (Torch("12.8", "no"), {"NVIDIA_VISIBLE_DEVICES": "void"}, "", ""),
        (Torch(None), {}, "", "is built without CUDA"),
    ],
)
def test_devices_that_torch_cannot_use_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch: Any,
    environ: dict[str, str],
    trouble: str,
    note: str,
) -> None:
    write(tmp_path, {"nvidia0": ""})
    monkeypatch.setattr(devices, "DEV", tmp_path)
    found = visible_devices._explained(torch, "2.9", environ)
    assert found.number == 0
    assert (trouble in found.trouble, bool(found.trouble)) == (True, bool(trouble))
    assert (note in found.note, bool(found.note)) == (True, bool(note))


def version_file(folder: Path, **built: str | None) -> Path:
    """Write a torch that cannot be imported; return its folder."""
    values = {"__version__": "2.9", "cuda": None, "hip": None, "xpu": None, **built}
    text = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    torch = 'raise AssertionError("torch is imported")\n'
    write(folder, {"torch/version.py": text, "torch/__init__.py": torch})
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of /dev, `dev`, and of packages, `packages`, in place of those of this machine."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(devices, "DEV", tmp_path / "dev")
    monkeypatch.setattr(visible_devices, "_has_cuda_driver", lambda: False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), sysconfig.get_path("stdlib")])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    importlib.invalidate_caches()
    return tmp_path


@pytest.mark.parametrize("word", ["accelerators", "auto", "gpu"])
@pytest.mark.parametrize(
    ("built", "files"),
    [
        ({}, []),
        ({}, ["nvidia0", "kfd"]),
        ({"cuda": "12.8"}, ["null", "tty0", "kfd", "dri/renderD128"]),
        ({"hip": "6.4"}, ["nvidia0"]),
        ({"xpu": "2025"}, ["nvidia0"]),
    ],
)
def test_torch_is_not_imported_where_its_build_can_find_no_device(
    place: Path, built: dict[str, str], files: list[str], word: str
) -> None:
    version_file(place / "packages", **built)
    write(place / "dev", dict.fromkeys(files, ""))
    found = visible_devices.visible_devices(word, {})
    assert (found.number, found.torch, found.trouble) == (0, "2.9", "")
    assert ("nvidia0" in files) == ("built without CUDA" in found.note)


@pytest.mark.parametrize(
    ("built", "files"),
    [
        ({"cuda": "12.8"}, ["nvidia0", "nvidiactl"]),
        ({"cuda": "12.8"}, ["dxg"]),
        ({"cuda": "12.8"}, ["nvhost-ctrl"]),
        ({"hip": "6.4"}, ["kfd"]),
        ({"xpu": "2025"}, ["dri/renderD128"]),
    ],
)
def test_torch_is_imported_where_its_build_may_find_a_device(
    place: Path, built: dict[str, str], files: list[str]
) -> None:
    version_file(place / "packages", **built)
    write(place / "dev", dict.fromkeys(files, ""))
    with pytest.raises(AssertionError, match="torch is imported"):
        visible_devices.visible_devices("accelerators", {})


@pytest.mark.parametrize(
    "added",
    [
        {"torch_npu/__init__.py": ""},
        {"habana_frameworks/torch/__init__.py": ""},
        {
            "new-1.dist-info/METADATA": "Name: new\n",
            "new-1.dist-info/entry_points.txt": "[torch.backends]\nnew = new:load\n",
        },
        {"torch/version.py": "__version__ = '0.1'\n"},
        {"torch/version.py": "__version__ = '2.8.0+metax3.5'\ncuda = hip = xpu = None\n"},
        {"torch/version.py": "raise ValueError\n"},
    ],
    ids=["npu", "gaudi", "entry point", "unknown build", "build of another maker", "damaged"],
)
def test_torch_is_imported_if_a_package_may_add_a_device_type(
    place: Path, added: dict[str, str]
) -> None:
    version_file(place / "packages")
    write(place / "packages", added)
    with pytest.raises(AssertionError, match="torch is imported"):
        visible_devices.visible_devices("accelerators", {})


def test_torch_before_the_version_of_xpu_is_imported_where_there_is_a_render_node(
    place: Path,
) -> None:
    version_file(place / "packages")
    build = {"torch/version.py": "__version__ = '2.6.0+xpu'\ncuda = hip = None\n"}
    write(place / "packages", build)
    write(place / "dev", {"dri/renderD128": ""})
    with pytest.raises(AssertionError, match="torch is imported"):
        visible_devices.visible_devices("accelerators", {})


def test_torch_is_imported_where_cuda_is_reached_without_a_device_file(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version_file(place / "packages", cuda="12.8")
    monkeypatch.setattr(visible_devices, "_has_cuda_driver", lambda: True)
    with pytest.raises(AssertionError, match="torch is imported"):
        visible_devices.visible_devices("accelerators", {})


def test_torch_is_imported_where_the_device_files_cannot_be_listed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version_file(place / "packages")
    monkeypatch.setattr(devices, "DEV", place / "absent")
    with pytest.raises(AssertionError, match="torch is imported"):
        visible_devices.visible_devices("accelerators", {})


def test_torch_is_imported_for_the_name_of_a_device_type(place: Path) -> None:
    version_file(place / "packages")
    with pytest.raises(AssertionError, match="torch is imported"):
        visible_devices.visible_devices("cuda", {})


def test_cores_that_torch_reaches_through_xla_are_counted_without_its_import(place: Path) -> None:
    version_file(place / "packages")
    write(place / "dev", {"neuron0": ""})
    found = visible_devices.visible_devices("accelerators", {"NEURON_RT_NUM_CORES": "4"})
    assert found.number == 4
