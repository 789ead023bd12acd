"""SIGTERM while a container's first process still imports: it ends, instead of not hearing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOLD_WHILE_IMPORTING = """
import os, runpy, signal, sys
from importlib.abc import MetaPathFinder

class Tells(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {part!r}:
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Tells())
sys.argv = [{package!r}]
runpy.run_module({package!r}, run_name="__main__", alter_sys=True)
"""
"""As a container's first process it would not even die of a signal that nobody handles."""


@pytest.mark.parametrize(
    ("package", "part"),
    [
        ("elasticjob_operator", "elasticjob_operator.process"),
        ("elasticjob_operator", "kopf"),
        ("elasticjob_agent", "elasticjob_agent.wiring"),
        ("elasticjob_agent", "grpc"),
    ],
)
def test_who_is_told_to_end_while_it_imports_ends(package: str, part: str) -> None:
    script = TOLD_WHILE_IMPORTING.format(package=package, part=part)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
