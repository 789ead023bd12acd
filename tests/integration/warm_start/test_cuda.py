"""Standby and CUDA: a process in which CUDA was started never forks workers.

The responsible import is left to the workers. There is no GPU: the driver is a fake with NVIDIA's
answers, and torch a fake with torch's rule that a process which counted devices has no children
that may use them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag
from tests.integration.warm_start.fake_cuda_driver import write_driver
from tests.integration.warm_start.warm_rig import Warm, installed, said, said_warm, script, warm

__all__ = ["installed", "process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

# As a cold worker: the standby has no round.
IN_STANDBY = "import os\nif 'ELASTICJOB_ROUND' not in dict(os.environ):\n"
TORCH = """
import os
_counted = bad = False
def in_child():
    global bad
    bad = _counted
os.register_at_fork(after_in_child=in_child)
class _C:
    _cuda_isInBadFork = staticmethod(lambda: bad)
class cuda:
    @staticmethod
    def is_available():
        global _counted
        _counted = True
        return False
"""


def outcome(folder: Path, imports: str) -> str:
    """Return the modules loaded before a warm worker of this program began."""
    source = (
        f"import sys; there = sorted(n for n in sys.modules if n in {imports.split(', ')})\n"
        f"import {imports}\nprint(*there)\n"
    )
    path = script(folder / "code", source)
    return said_warm(folder / "logs", path).strip()


def test_loaded_but_uninitialized_driver_is_preloaded(tmp_path: Path, installed: Path) -> None:
    driver = write_driver(tmp_path / "libcuda.so.1")
    (installed / "gpu_pkg.py").write_text(f"import ctypes\ndriver = ctypes.CDLL({str(driver)!r})\n")
    assert outcome(tmp_path, "gpu_pkg, plain_pkg") == "gpu_pkg plain_pkg"


def test_module_that_initializes_cuda_is_left_to_workers(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = write_driver(tmp_path / "libcuda.so.1")
    (installed / "gpu_pkg.py").write_text(
        f"import ctypes\ndriver = ctypes.CDLL({str(driver)!r})\ndriver.cuInit(0)\n"
    )
    assert outcome(tmp_path, "gpu_pkg, plain_pkg") == "plain_pkg", "what follows is not to blame"
    told = capfd.readouterr().err
    assert "not preloaded: gpu_pkg: it initialised CUDA, which does not work in a fork" in told
    assert "plain_pkg" not in told


def test_driver_of_unknown_state_counts_as_initialized(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(bytes(4096))
    (installed / "gpu_pkg.py").write_text(
        f"import mmap\nfile = open({str(tmp_path / 'libcuda.so.1')!r}, 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
    )
    assert outcome(tmp_path, "gpu_pkg") == ""
    assert "not preloaded: gpu_pkg: it initialised CUDA" in capfd.readouterr().err


def test_module_imported_after_thread_start_is_not_blamed(tmp_path: Path, installed: Path) -> None:
    (installed / "busy_pkg.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
    )
    assert outcome(tmp_path, "busy_pkg, plain_pkg") == "plain_pkg"


def test_module_that_counts_devices_is_left_to_workers(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (installed / "torch.py").write_text(TORCH)
    (installed / "gpu_pkg.py").write_text("import torch\nDEVICE = torch.cuda.is_available()\n")
    assert outcome(tmp_path, "torch, gpu_pkg, plain_pkg") == "plain_pkg torch"
    assert "not preloaded: gpu_pkg: torch reports that its accelerator" in capfd.readouterr().err


def test_device_count_missed_during_preload_causes_cold_start(
    tmp_path: Path, installed: Path
) -> None:
    """The worker checks once more: an effect missed during the import shows after the fork."""
    told = "    bad = _counted\n    _C._cuda_isInBadFork = staticmethod(lambda: bad)\n"
    source = TORCH.replace("    bad = _counted\n", told)
    (installed / "torch.py").write_text(f"{source}\nclass _C: pass\n")
    (installed / "late_pkg.py").write_text(
        f"import os, torch\n{IN_STANDBY}    torch.cuda.is_available()\n"
    )
    path = script(tmp_path / "code", "import torch, late_pkg\nprint(torch._counted)\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        assert runtime.prepared.ready, runtime.prepared.reason
        started, exited = await runtime.outcome(sys.executable, path, env={"ELASTICJOB_ROUND": "1"})
        assert not started.warm
        assert started.cold_reason.startswith("torch reports that its accelerator cannot be used")
        assert exited.exit_code == 0, exited.stderr_tail

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "False\n"
