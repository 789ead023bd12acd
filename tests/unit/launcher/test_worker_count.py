"""CPUs and device files that the launcher counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher import worker_count
from elasticjob_launcher.worker_count import CountError, device_files, usable_cpus

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
    ("files", "environ", "devices"),
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
    devices: int,
) -> None:
    write(tmp_path / "dev", files)
    cores = {f"{name}/core_count": "8\n" for name in NEURON}
    write(tmp_path / "sys", cores)
    monkeypatch.setattr(worker_count, "DEV", tmp_path / "dev")
    monkeypatch.setattr(worker_count, "NEURON", tmp_path / "sys")
    assert device_files(environ) == devices


@pytest.mark.parametrize("selected", ["\u00b2", "0-\u00b2", "0-", "3-1", "all", "0,,1"])
def test_selected_cores_that_are_no_numbers_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selected: str
) -> None:
    write(tmp_path, NEURON)
    monkeypatch.setattr(worker_count, "DEV", tmp_path)
    with pytest.raises(CountError, match="NEURON_RT_VISIBLE_CORES must be cores and ranges"):
        device_files({"NEURON_RT_VISIBLE_CORES": selected})


@pytest.mark.parametrize("count", ["", "\u00b2\n"])
def test_unknown_number_of_cores_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    write(tmp_path / "dev", NEURON)
    write(tmp_path / "sys", {f"{name}/core_count": count for name in NEURON} if count else {})
    monkeypatch.setattr(worker_count, "DEV", tmp_path / "dev")
    monkeypatch.setattr(worker_count, "NEURON", tmp_path / "sys")
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
    monkeypatch.setattr(worker_count, "DEV", tmp_path)
    found = worker_count._explained(torch, "2.9", environ)
    assert found.number == 0
    assert (trouble in found.trouble, bool(found.trouble)) == (True, bool(trouble))
    assert (note in found.note, bool(found.note)) == (True, bool(note))
