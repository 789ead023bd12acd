"""SIGTERM while a container's first process is still importing: the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob_agent.zipapp_build import PACKAGE, build_zipapp

TOLD_WHILE_IMPORTING = """
import os, runpy, signal, sys
from importlib.abc import MetaPathFinder

class Tells(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {part!r}:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Tells())
sys.argv = [{program!r}]
{run}
"""
"""Script that receives the signal during an import. A first process ignores unhandled signals."""


MODULE = "runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
FILE = "runpy.run_path({program!r}, run_name='__main__')"


def ended(program: str, part: str, run: str) -> tuple[int, str]:
    """Return exit status and errors of a program terminated while it begins to import `part`."""
    script = TOLD_WHILE_IMPORTING.format(
        part=part, program=program, run=run.format(program=program)
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    return found.returncode, found.stderr


@pytest.mark.parametrize(
    ("package", "part"),
    [
        ("elasticjob_operator", "elasticjob_operator.replica.main"),
        ("elasticjob_operator", "kopf"),
        ("elasticjob_agent", "elasticjob_agent.main"),
        ("elasticjob_agent", "grpc"),
    ],
)
def test_sigterm_during_import_ends_the_program(package: str, part: str) -> None:
    assert ended(package, part, MODULE) == (0, "")


def test_sigterm_during_import_ends_the_launcher(tmp_path: Path) -> None:
    launcher = build_zipapp(tmp_path / "launcher.pyz")
    assert ended(str(launcher), f"{PACKAGE}.app", FILE) == (128 + signal.SIGTERM, "")
