"""Launcher that counts its node's workers: real torch, and packages that stand in for torch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from elasticjob_agent.worker_runtime import Hello
from elasticjob_launcher.worker_count import usable_cpus
from tests.integration.launcher_rig import (
    LauncherProcess,
    StartLauncher,
    attached,
    launcher_file,
    process_tag,
    soon,
    start_launcher,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

EIGHT = """
print("a banner of the driver")
__version__ = "2.9.0"
class accelerator:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 8)
"""
OLD = """
__version__ = "2.1.0"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 4)
"""
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
HANGS = """
import pathlib, sys, time
pathlib.Path(__file__).with_name("hangs").touch()
print("waiting for the driver", file=sys.stderr, flush=True)
time.sleep(1000)
"""


def counted(launcher: LauncherProcess) -> Hello:
    """Return the launcher's hello."""

    async def hear() -> Hello:
        runtime, _, hello = await attached(launcher)
        await runtime.aclose()
        return hello

    return asyncio.run(hear())


def torch_of(folder: Path, source: str) -> str:
    """Write a package in place of torch; return the PYTHONPATH that finds it."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(source)
    return str(folder)


@pytest.mark.parametrize(
    ("word", "workers"),
    [
        ("accelerators", 1),
        ("auto", usable_cpus()),
        ("cpu", usable_cpus()),
        ("3", 3),
        ("8/2", 4),
    ],
)
def test_hello_has_the_number_that_torch_counts(
    start_launcher: StartLauncher, word: str, workers: int
) -> None:
    hello = counted(start_launcher(ELASTICJOB_NPROC=word))
    assert hello.slots == workers
    assert "ELASTICJOB_NPROC" not in hello.env_names


def test_launcher_without_a_word_counts_nothing(start_launcher: StartLauncher) -> None:
    hello = counted(start_launcher())
    assert hello.slots is None


@pytest.mark.parametrize(
    ("source", "word", "workers", "said"),
    [
        (EIGHT, "accelerators", 8, ""),
        (EIGHT, "auto", 8, ""),
        (EIGHT, "gpu", 8, ""),
        (EIGHT, "cpu", usable_cpus(), ""),
        (OLD, "accelerators", 4, ""),
        (NO_TORCH, "accelerators", 1, "torch is not installed"),
        (NO_TORCH, "auto", usable_cpus(), "torch is not installed"),
        (HANGS, "2", 2, ""),
    ],
)
def test_devices_are_counted_as_torch_shows_them(
    start_launcher: StartLauncher,
    tmp_path: Path,
    source: str,
    word: str,
    workers: int,
    said: str,
) -> None:
    path = torch_of(tmp_path, source)
    launcher = start_launcher(ELASTICJOB_NPROC=word, PYTHONPATH=path)
    hello = counted(launcher)
    assert hello.slots == workers
    assert said in launcher.stderr.read_text()


AUTOLOADED = """
import sys, types, torch

def load():
    torch.utils.rename_privateuse1_backend("plugged")
    module = types.ModuleType("plugged")
    module.is_available, module.device_count = (lambda: True), (lambda: 6)
    torch._register_device_module("plugged", module)
"""


@pytest.mark.parametrize("word", ["accelerators", "gpu", "plugged"])
def test_devices_of_a_torch_plug_in_are_counted(
    start_launcher: StartLauncher, tmp_path: Path, word: str
) -> None:
    (tmp_path / "plugged_backend.py").write_text(AUTOLOADED)
    about = tmp_path / "plugged-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nplugged = plugged_backend:load\n")
    launcher = start_launcher(ELASTICJOB_NPROC=word, PYTHONPATH=str(tmp_path))
    hello = counted(launcher)
    assert hello.slots == 6


def test_environment_of_the_command_applies_to_the_count(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    path = torch_of(tmp_path, EIGHT)
    command = ("env", f"PYTHONPATH={path}", sys.executable, "-u", "train.py")
    hello = counted(start_launcher(command=command, ELASTICJOB_NPROC="auto"))
    assert hello.slots == 8


@pytest.mark.parametrize(
    ("source", "word", "message"),
    [
        ("", "gpu", "nprocPerNode is gpu, but there is no accelerator: torch "),
        ("", "xpu", "nprocPerNode is xpu, but there is no xpu device: torch "),
        ("", "$(WORKERS)", "got '$(WORKERS)': in a pod, the container has no such variable"),
        ("", "8x", "nprocPerNode must be auto, gpu, cpu or a number, got '8x'"),
        ("", "0", "must be from 1 to 1024, got 0"),
        ("", "5/2", "5 processes cannot be divided evenly among 2 machines"),
        (NO_TORCH, "gpu", "torch is not installed, and there are no device files. Set it"),
        ("import libcuda_missing", "auto", "No module named 'libcuda_missing'"),
        ("raise OSError('libcudart.so.12: cannot open')", "auto", "libcudart.so.12: cannot open"),
        ("import os, sys; sys.stderr.write('Xid 79'); os.abort()", "gpu", "signal 6: Xid 79"),
        ("import os; os._exit(7)", "accelerators", "cannot count the accelerators: exit code 7"),
    ],
)
def test_failed_count_ends_the_launcher_with_a_message(
    start_launcher: StartLauncher, tmp_path: Path, source: str, word: str, message: str
) -> None:
    path = {"PYTHONPATH": torch_of(tmp_path, source)} if source else {}
    launcher = start_launcher(ELASTICJOB_NPROC=word, **path)
    assert launcher.wait() == 2
    assert message in launcher.termination_log.read_text()
    assert message in launcher.stderr.read_text()
    assert not Path(launcher.socket).exists(), "no agent may join a rendezvous for it"


def test_hanging_count_ends_the_launcher_after_its_limit(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    limit = {"ELASTICJOB_NPROC": "auto", "ELASTICJOB_COUNT_SECONDS": "1"}
    launcher = start_launcher(PYTHONPATH=torch_of(tmp_path, HANGS), **limit)
    assert launcher.wait() == 2
    said = launcher.termination_log.read_text()
    assert "counting the accelerators took longer than 1 s" in said
    assert "set nprocPerNode to a number: waiting for the driver" in said


def test_launcher_ends_at_once_on_sigterm_during_a_count(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    path = torch_of(tmp_path, HANGS)
    launcher = start_launcher(PYTHONPATH=path, ELASTICJOB_NPROC="auto")
    asyncio.run(soon((tmp_path / "torch" / "hangs").exists))
    began = time.monotonic()
    os.kill(launcher.process.pid, signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 50, "its own limit is longer"
