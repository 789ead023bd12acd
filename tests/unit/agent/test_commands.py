"""`python -m elasticjob_agent VERB`: light processes beside the agent, and their output."""

from __future__ import annotations

import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

HEAVY = ("asyncio", "grpc", "google", "dataclasses", "logging", "inspect", "pyetcd", "zipfile")


def verb(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elasticjob_agent", *words]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    ("words", "code"), [(["leave"], 0), (["leave", "its", "node"], 0), (["ready"], 1)]
)
def test_command_without_agent_reports_it(words: list[str], code: int, tmp_path: Path) -> None:
    """There is no agent to leave: the kubelet should not report a failed hook."""
    place = tmp_path / "control"
    done = verb(*words, ELASTICJOB_CONTROL=str(place))
    assert done.returncode == code
    assert done.stderr.startswith(f"elasticjob: no agent answers at ELASTICJOB_CONTROL={place}:")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["leave"], ["ready"]])
def test_command_names_missing_variable(words: list[str]) -> None:
    done = verb(*words)
    assert (done.returncode, done.stderr) == (
        1,
        "elasticjob: ELASTICJOB_CONTROL must be set to the agent's socket\n",
    )


def test_leave_command_fails_when_agent_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "control"))
        silent.listen()
        left = subprocess.Popen(
            [sys.executable, "-m", "elasticjob_agent", "leave"],
            env={"ELASTICJOB_CONTROL": str(tmp_path / "control")},
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.accept()[0].close()
        assert "no agent answers" in left.communicate(timeout=120)[1]
    assert left.returncode == 1


@pytest.mark.parametrize("words", [["--help"], ["ready", "now"], ["install-launcher"]])
def test_invalid_call_shows_usage(words: list[str]) -> None:
    done = verb(*words)
    assert done.returncode == 2
    assert "usage: python -m elasticjob_agent [leave [REASON] | ready | install" in done.stderr


@pytest.mark.parametrize("words", [["leave"], ["ready"]])
def test_probe_command_imports_no_heavy_module(words: list[str]) -> None:
    """Heavy imports would cost a kubelet's probe its time, and the agent its share of CPU."""
    # -S: modules that this environment loads at start do not count.
    command = [sys.executable, "-S", "-X", "importtime", "-m", "elasticjob_agent", *words]
    path = str(ROOT / "sidecar")
    done = subprocess.run(command, env={"PYTHONPATH": path}, text=True, capture_output=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "elasticjob_agent.control" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_launcher_is_installed_atomically_and_repeatedly(tmp_path: Path) -> None:
    target = tmp_path / "launcher.pyz"
    for _ in range(2):  # a kubelet may run init containers twice
        done = verb("install-launcher", str(target))
        assert (done.returncode, done.stderr) == (0, "")
    library = tmp_path / "python" / "elasticjob"
    assert set(tmp_path.iterdir()) == {target, library.parent}
    source = ROOT / "sdk" / "elasticjob"
    names = {path.relative_to(library) for path in library.rglob("*.py")}
    assert names == {path.relative_to(source) for path in source.rglob("*.py")}
    assert Path("train", "snapshots", "api.py") in names
    assert (library / "train" / "__init__.py").stat().st_mode & 0o777 == 0o644
    assert target.stat().st_mode & 0o777 == 0o755
    assert zipfile.ZipFile(target).testzip() is None
    said = subprocess.run([sys.executable, str(target)], env={}, text=True, capture_output=True)
    assert said.returncode == 2
    assert "the command must follow `--`" in said.stderr


def test_launcher_install_failure_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = verb("install-launcher", str(tmp_path / "file" / "launcher.pyz"))
    assert done.returncode == 1
    assert "its folder must be writable" in done.stderr
    assert "Traceback" not in done.stderr
