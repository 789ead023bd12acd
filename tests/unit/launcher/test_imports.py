"""What a program imports, read from its sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from elasticjob_agent.launcher.imports import Reading, Source, Wanted, module_files, read


class Project:
    """Files of a user, beside `lib`, a folder that counts as installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.search = [str(folder), str(folder / "lib"), str(Path(os.__file__).parent)]
        for name in ("torch", "numpy", "yaml"):
            self.write(f"lib/{name}/__init__.py", "")

    def write(self, name: str, source: str) -> Source:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return Source(str(path))

    def read(self, source: str) -> Reading:
        return read([self.write("train.py", source)], self.search, self.installed)

    def installed(self, spec: Any) -> bool:
        return not spec.has_location or "/lib/" in spec.origin or "/python3" in spec.origin

    def modules(self, source: str) -> list[str]:
        return [wanted.module for wanted in self.read(source).wanted]


def test_imports_that_run_when_the_program_starts(tmp_path: Path) -> None:
    source = """
import torch.nn, numpy as np
from torch import distributed, optim
try:
    import yaml
except ImportError:
    import json
if __name__ == "__main__":
    import argparse
with open("x") as f:
    import csv
class Model:
    import decimal
def main():
    import sqlite3
if TYPE_CHECKING:
    import fractions
import no_such_module
"""
    project = Project(tmp_path)
    found = project.read(source).wanted
    assert [wanted.module for wanted in found] == [
        "torch.nn", "numpy", "torch", "yaml", "json", "argparse", "csv", "decimal",
    ]  # fmt: skip
    assert found[2] == Wanted("torch", ("distributed", "optim"))


def test_the_users_own_files_are_followed_and_never_wanted(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("models/__init__.py", "import numpy\n")
    project.write("models/net.py", "from . import parts\nfrom ..other import x\n")
    project.write("models/parts.py", "import torch\nfrom .net import again\n")
    assert project.modules("from models import net\nfrom yaml import load\n") == [
        "yaml", "numpy", "torch",
    ]  # fmt: skip


def test_a_users_module_hides_an_installed_one(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("numpy.py", "import yaml\n")
    assert project.modules("import numpy") == ["yaml"]


def test_a_module_and_its_packages_run(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for name in ("a/__init__.py", "a/b/__init__.py", "a/b/__main__.py", "a/c.py"):
        project.write(name, "")
    files = module_files("a.b", project.search)
    assert [Path(f.path).relative_to(tmp_path).as_posix() for f in files] == [
        "a/__init__.py", "a/b/__init__.py", "a/b/__main__.py",
    ]  # fmt: skip
    assert module_files("a.c", project.search)[-1].package == "a"
    assert module_files("none", project.search) == []


def test_variables_that_the_program_sets(tmp_path: Path) -> None:
    source = """
import os
from os import environ
os.environ["A"] = "1"
def main():
    environ.setdefault("B", "1")
    os.environ.update({"C": "1"}, D="2")
    os.putenv("E", "1")
    os.environ[name] = "1"
    settings["F"] = os.environ["G"]
"""
    assert Project(tmp_path).read(source).sets == {"A", "B", "C", "D", "E"}


def test_who_mentions_ddp_gets_what_it_loads_later(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for source in ("import torch\nx = torch.nn.parallel.DistributedDataParallel",
                   "from torch.nn.parallel import DistributedDataParallel as DDP"):  # fmt: skip
        assert "torch._dynamo" in project.modules(source)
    assert "torch._dynamo" not in project.modules("import torch")


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("broken.py", "def (:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\x00\xfe")
    assert project.modules("import broken, binary, numpy") == ["numpy"]
    assert read([Source(str(tmp_path / "none.py"))], project.search, project.installed) == Reading(
        (), frozenset()
    )
