"""Imports of a program, read from its sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher.zygote.analysis import program_imports
from elasticjob_launcher.zygote.analysis.file_facts import FileFacts
from elasticjob_launcher.zygote.analysis.program_imports import (
    ImportAnalysis,
    Source,
    WantedImport,
    analyse_imports,
    module_files,
)


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

    def read(self, source: str) -> ImportAnalysis:
        return analyse_imports([self.write("train.py", source)], self.search, self.installed)

    def installed(self, spec: Any) -> bool:
        return not spec.has_location or "/lib/" in spec.origin or "/python3" in spec.origin

    def modules(self, source: str) -> list[str]:
        return [wanted.module for wanted in self.read(source).wanted]


def test_imports_that_run_at_program_start(tmp_path: Path) -> None:
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
        "torch._dynamo",
    ]  # fmt: skip
    assert found[2] == WantedImport("torch", ("distributed", "optim"))


def test_own_files_of_user_are_followed_in_order_and_not_preloaded(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("models/__init__.py", "import numpy\n")
    project.write("models/net.py", "from . import parts\nfrom ..other import x\n")
    project.write("models/parts.py", "import torch\nfrom .net import again\n")
    assert project.modules("from models import net\nfrom yaml import load\n") == [
        "numpy", "torch", "yaml",
    ]  # fmt: skip


def test_user_module_hides_installed_module(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("numpy.py", "import yaml\n")
    assert project.modules("import numpy") == ["yaml"]


def test_module_and_its_packages_run(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for name in ("a/__init__.py", "a/b/__init__.py", "a/b/__main__.py", "a/c.py"):
        project.write(name, "")
    files = module_files("a.b", project.search)
    assert [Path(f.path).relative_to(tmp_path).as_posix() for f in files] == [
        "a/__init__.py", "a/b/__init__.py", "a/b/__main__.py",
    ]  # fmt: skip
    assert module_files("a.c", project.search)[-1].package == "a"
    assert module_files("none", project.search) == []


def test_variables_set_by_the_program(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.nn.parallel.DistributedDataParallel",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "import torch\ntorch.optim.AdamW(())",
        "from torch.optim import AdamW",
        "import torch.optim.lr_scheduler as schedulers",
        "import torch\nfrom torch import nn, optim",
        "from transformers import Trainer, TrainingArguments",
        "import lightning as L\nL.Trainer()",
    ],
)
def test_program_with_an_optimizer_preloads_the_modules_that_it_loads(
    tmp_path: Path, source: str
) -> None:
    assert "torch._dynamo" in Project(tmp_path).modules(source)


@pytest.mark.parametrize(
    "source",
    ["import torch", "import optax.optim", "class Trainer: pass", "from .torch import optim",
     "import torch\noptimism = 'optim'"],
)  # fmt: skip
def test_program_without_an_optimizer_of_torch_preloads_no_more(
    tmp_path: Path, source: str
) -> None:
    assert "torch._dynamo" not in Project(tmp_path).modules(source)


def test_unreadable_files_are_skipped(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("broken.py", "def (:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\x00\xfe")
    assert project.modules("import broken, binary, numpy") == ["numpy"]
    none = str(tmp_path / "none.py")
    assert analyse_imports([Source(none)], project.search, project.installed) == ImportAnalysis(
        (), frozenset(), files=(none,)
    )


def test_function_that_is_passed_on_matters_only_before_a_certain_import(tmp_path: Path) -> None:
    """It is the main function, in most programs with a command line, and loads no package."""
    project = Project(tmp_path)
    text = "import os, torch.optim\ndef main():\n    os.environ['B'] = '1'\nFire(main)\n"
    source = f"{text}if main:\n    import yaml\n"
    found = analyse_imports([project.write("train.py", source)], project.search, project.installed)
    steps = [getattr(step, "module", step) for step in found.steps]
    assert steps == ["os", "torch.optim", "yaml", "torch._dynamo"]


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        ("import torch", ["os", "torch"]),
        ("if f():\n    import torch", ["os", "B", "torch"]),
    ],
)
def test_function_that_is_passed_on_matters_only_before_the_first_certain_import_of_a_module(
    tmp_path: Path, earlier: str, expected: list[str]
) -> None:
    source = f"import os\n{earlier}\ng = lambda: os.environ.pop('B')\nimport torch\n"
    steps = Project(tmp_path).read(source).steps
    assert [getattr(step, "module", getattr(step, "name", "")) for step in steps] == expected


@pytest.mark.parametrize(
    "call", ["importlib.import_module('own')", "own = __import__('own')", "import_module('own')"]
)
def test_module_that_is_imported_by_its_name_is_followed(tmp_path: Path, call: str) -> None:
    project = Project(tmp_path)
    project.write("own.py", "import os, yaml\nos.environ['B'] = '1'\n")
    source = f"import importlib\nfrom importlib import import_module\n{call}\nimport numpy\n"
    found = analyse_imports([project.write("train.py", source)], project.search, project.installed)
    steps = [getattr(step, "module", getattr(step, "name", None)) for step in found.steps]
    assert steps == ["importlib", "importlib", "os", "yaml", "B", "numpy"]


def test_file_that_cannot_be_parsed_is_read_again_after_a_change(tmp_path: Path) -> None:
    project = Project(tmp_path)
    broken = project.write("train.py", "def (:\n")
    found = analyse_imports([broken], project.search, project.installed)
    assert found.files == (broken.path,)


PASSED = "def f(n='B'):\n    os.environ[n] = '1'\n"
CONSTRUCTED = "class E:\n    def __init__(self):\n        os.environ['B'] = '1'\n"
CHANGES: dict[str, tuple[str, list[tuple[str, str | None]]]] = {
    "by getattr": ("getattr(os, 'environ')['B'] = '1'", [("B", "1")]),
    "by getattr and a name": ("e = getattr(os, 'environ')\ne['B'] = '1'", [("B", "?")]),
    "by the namespace of a module": (
        "os.__dict__['environ']['B'] = '1'\nvars(os)['environ'].update(C='1')",
        [("B", "1"), ("C", "1")],
    ),
    "by another name of its module": ("import os as o\ne = o.environ\ne['B'] = '1'", [("B", "?")]),
    "by a name in a function": (
        "def f():\n    e = os.environ\n    e['B'] = '1'\nf()",
        [("B", "1")],
    ),
    "by a name of an import in a function": (
        "def f():\n    from os import environ as e\n    e['B'] = '1'\nf()",
        [("B", "1")],
    ),
    "by a name with a choice in a function": (
        "def f(e=None):\n    e = os.environ if e is None else e\n    e['B'] = '1'\nf()",
        [("B", "1")],
    ),
    "by a name of the file in a function": (
        "e = os.environ\ndef f():\n    e['B'] = '1'\nf()",
        [("B", "1")],
    ),
    "by a name in a function that is passed on": (
        "def f():\n    e = os.environ\n    e['B'] = '1'\nlist(map(f, names))",
        [("B", "?")],
    ),
    "by a name that a function binds": (
        "e = None\ndef f():\n    global e\n    e = os.environ\nf()\ne['B'] = '1'",
        [("B", "?")],
    ),
    "by a name of an outer function": (
        "def f():\n    e = None\n    def g():\n        nonlocal e\n        e = os.environ\n"
        "    g()\n    e['B'] = '1'\nf()",
        [("B", "?")],
    ),
    "by a name in a later iteration": (
        "e = None\nwhile f():\n    if e:\n        e['B'] = '1'\n    e = os.environ",
        [("B", "?")],
    ),
    "by an attribute among several": (
        "class E:\n    pass\ne = E()\ndef f():\n    e.x, n = os.environ, 1\nf()",
        [("", "?")],
    ),
    "by a name among several": ("e, n = os.environ, 1\ne['B'] = '1'", [("B", "1")]),
    "by a name, perhaps": (
        "if f():\n    e = os.environ\nelse:\n    e = {}\ne['B'] = '1'",
        [("B", "?")],
    ),
    "by a name of other functions": (
        "def f():\n    e = os.environ\n    print(e)\ndef g(e):\n    e['B'] = '1'\nf()\ng({})\n"
        "e = dict(os.environ)\ne['C'] = '1'",
        [],
    ),
    "in a copy under the same name": (
        "def run(env=None):\n    env = env or os.environ\n    env = env.copy()\n    env['B'] = 1\n"
        "def again(env=os.environ):\n    env = dict(env)\n    env['B'] = '1'\nrun()\nagain()\n"
        "def merged(env=os.environ):\n    env = {**env, 'B': '1'}\n    env['C'] = '2'\nmerged()",
        [],
    ),
    "by a function that another one calls": (
        "def put(e):\n    e['B'] = '1'\ndef f():\n    put(os.environ)\nf()",
        [("B", "1")],
    ),
    "by a function that another one passes on": (
        f"{CONSTRUCTED}def f():\n    g = E\n    g()\nf()",
        [("B", "?")],
    ),
    "by a function that another one passes to a function": (
        f"{CONSTRUCTED}def h():\n    list(map(E, names))\nh()",
        [("B", "?")],
    ),
    "by a handler of a signal that the program sends": (
        "import signal\ndef f(*of):\n    os.environ['B'] = '1'\nsignal.signal(15, f)\n"
        "signal.raise_signal(15)",
        [("B", "?")],
    ),
    "by a lambda for a signal that the program sends": (
        "import signal\nsignal.signal(15, lambda *of: os.environ.pop('A'))\n"
        "os.kill(os.getpid(), 15)",
        [("A", "?")],
    ),
    "by no constructor of a static method": (
        f"{CONSTRUCTED}    @staticmethod\n    def f(n):\n        pass\n"
        "E.f(1)\nlist(map(E.f, names))",
        [],
    ),
    "by a static method": (
        "class E:\n    @staticmethod\n    def f(n):\n        os.environ[n] = '1'\nE.f('B')",
        [("B", "1")],
    ),
    "by a constructor in a class method": (
        f"{CONSTRUCTED}    @classmethod\n    def f(cls):\n        return cls()\nE.f()",
        [("B", "?")],
    ),
    "by no constructor in a union": (f"{CONSTRUCTED}T = E | None\nU = list[E]", []),
    "by no keyword argument": ("import yaml\nyaml.Settings(**os.environ)", []),
    "by an unused attribute": (
        "class E:\n    def __init__(self):\n        self.env = os.environ\nE()",
        [],
    ),
    "by an attribute of a class of another package": (
        "import yaml\nclass E(yaml.E):\n    def __init__(self):\n"
        "        self.env = os.environ\nE()",
        [("", "?")],
    ),
    "by an own function with the name of a reader": (
        "def create(env):\n    env['B'] = '1'\ncreate(os.environ)",
        [("B", "1")],
    ),
    "by a constructor in an annotation": (
        f"from typing import Annotated\n{CONSTRUCTED}T = Annotated[int, E()]",
        [("B", "1")],
    ),
    "by an inherited constructor": (f"{CONSTRUCTED}class F(E):\n    pass\nF()", [("B", "1")]),
    "by a constructor that a decorator may replace": (
        f"from dataclasses import dataclass\n{CONSTRUCTED}"
        "@dataclass\nclass F(E):\n    x: int = 1\nF()",
        [("B", "?")],
    ),
    "by a constructor that another base may replace": (
        f"import yaml\n{CONSTRUCTED}class F(yaml.Thing, E):\n    pass\nF()",
        [("B", "?")],
    ),
    "by a constructor that the class replaces": (
        f"{CONSTRUCTED}class F(E):\n    __init__ = object.__init__\nF()",
        [("B", "?"), ("B", "?")],
    ),
    "by no constructor of a base that another one precedes": (
        f"{CONSTRUCTED}class A:\n    def __init__(self):\n        pass\n"
        "class F(A, E):\n    pass\nF()",
        [],
    ),
    "by a constructor of a later base that precedes": (
        f"{CONSTRUCTED}class A(E):\n    pass\nclass M(E):\n    def __init__(self):\n"
        "        os.environ['C'] = '1'\nclass F(A, M):\n    pass\nF()",
        [("B", "?"), ("C", "?")],
    ),
    "by an inherited constructor that a base's base may replace": (
        f"import yaml\n{CONSTRUCTED}class G(yaml.Thing, E):\n    pass\nclass F(G):\n    pass\nF()",
        [("B", "?")],
    ),
    "by an inherited constructor beside ABC": (
        f"from abc import ABC\n{CONSTRUCTED}class F(E, ABC):\n    pass\nF()",
        [("B", "1")],
    ),
    "beside an own method with the name of a reader": (
        "import subprocess\nclass T:\n    def run(self):\n        pass\n"
        "subprocess.run(['x'], env=os.environ)\n"
        "if 'B' not in os.environ:\n    os.environ['B'] = '1'",
        [("B", "1")],
    ),
    "beside a map that only reads": (
        "from collections import ChainMap\nChainMap({}, os.environ)",
        [],
    ),
    "by a map that changes": (
        "from collections import ChainMap\nChainMap(os.environ, {})['B'] = '1'",
        [("", "?")],
    ),
    "by no function of an object named as one": (
        "import importlib\nclass W:\n    pass\nw = W()\nw.m = importlib.import_module('yaml')\n"
        "def close():\n    os.environ['B'] = '1'\nlist(map(open('x').close, []))",
        [],
    ),
    "by a function of a module that is passed on": (
        "import importlib\ndef setup():\n    os.environ['B'] = '1'\n"
        "m = importlib.import_module('helpers')\nlist(map(m.setup, [1]))",
        [("B", "?")],
    ),
    "beside a seed, of computed names": (
        "def f(k):\n    os.environ.update({'PYTHONHASHSEED': '1', k: '2'})\nlist(map(f, 'AB'))",
        [("", "?")],
    ),
    "by a mock": (
        "from unittest.mock import patch\npatch.dict(os.environ, B='1').start()",
        [("", "?")],
    ),
    "by a mock that is given a name": (
        "from unittest import mock\nwith mock.patch.dict('os.environ', {'B': '1'}):\n"
        "    import yaml",
        [("", "?")],
    ),
    "beside a block for type checkers": (
        "if TYPE_CHECKING:\n    os.environ['B'] = '1'\nelse:\n    os.environ['C'] = '1'\n"
        "if typing.TYPE_CHECKING and os.name:\n    os.environ['D'] = '1'",
        [("C", "1")],
    ),
    "in a block that type checkers skip": (
        "if not typing.TYPE_CHECKING:\n    os.environ['B'] = '1'\nelse:\n"
        "    os.environ['C'] = '1'",
        [("B", "1")],
    ),
    "in a block for type checkers and others": (
        "if TYPE_CHECKING or sys.argv[1:]:\n    os.environ['B'] = '1'",
        [("B", "?")],
    ),
    "by a function that its decorator runs": (
        "def now(f):\n    f()\n    return f\n@now\ndef g():\n    os.environ['B'] = '1'",
        [("B", "?")],
    ),
    "by a function that runs after its decorator": (
        "def later(f):\n    def wrapped():\n        return f()\n    return wrapped\n"
        "@later\ndef g():\n    os.environ['B'] = '1'",
        [],
    ),
    "beside a copy": (
        "import builtins\nbuiltins.dict(os.environ)\ndict(os.environ, B='1')\ndict(x='os.environ')",
        [],
    ),
    "by a method of the environment that is looked up": (
        "getattr(os.environ, 'pop')('A')",
        [("", "?")],
    ),
    "by C with several arguments in one": ("libc.setenv(*args)", [("", "?")]),
    "by C with bytes": ("libc.setenv(b'B', b'1')", [("", "?")]),
    "by an object named as a module of handlers": (
        "class Bus:\n    def signal(self, n, f):\n        f()\nsignal = Bus()\n"
        "def f():\n    os.environ['B'] = '1'\nsignal.signal(1, f)",
        [("B", "?"), ("B", "1")],
    ),
    "by a handler under another name of its module": (
        "import atexit as a\ndef f():\n    os.environ['B'] = '1'\na.register(f)",
        [],
    ),
    "assigned": ("os.environ['A'] = '1'", [("A", "1")]),
    "assigned by another name": (
        "from os import environ as there\nhere = os.environ\nthere['A'] = '1'\nhere['B'] = '2'",
        [("A", "1"), ("B", "2")],
    ),
    "default": ("os.environ.setdefault('A', '1')\nos.environ.setdefault('B', '1')", [("B", "1")]),
    "several": ("os.environ.update({'B': '1'}, C='2')", [("B", "1"), ("C", "2")]),
    "merged": ("os.environ |= {'B': '1'}", [("B", "1")]),
    "put": ("os.putenv('B', '1')", [("B", "1")]),
    "removed": ("del os.environ['A']\nos.environ.pop('B', None)", [("A", None), ("B", None)]),
    "computed": ("N = 2\nos.environ['B'] = str(N) + os.environ['A']", [("B", "2given")]),
    "for several": (
        "for each in ('B', 'C'):\n    os.environ[each] = '1'",
        [("B", "1"), ("C", "1")],
    ),
    "if it is not there": (
        "if 'B' not in os.environ:\n    os.environ['B'] = '1'\n"
        "if not os.environ.get('A'):\n    os.environ['A'] = '1'",
        [("B", "1")],
    ),
    "in a function": (
        "def inner(n):\n    os.environ['B'] = n\ndef outer():\n    inner('1')\nouter()",
        [("B", "1")],
    ),
    "in a function that is not called": ("def f():\n    os.environ['B'] = '1'", []),
    "if it is the program": (
        "if __name__ == '__main__':\n    os.environ['B'] = '1'\nelse:\n    os.environ['C'] = '1'",
        [("B", "1")],
    ),
    "suppressed error": (
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import absent\n"
        "    os.environ['B'] = '1'",
        [("B", "?")],
    ),
    "logged environment": (
        "import logging\nlogging.info('%s', os.environ)\n"
        "if 'B' not in os.environ:\n    os.environ['B'] = '1'",
        [("B", "1")],
    ),
    "unknown value": ("os.environ['B'] = str(len(sys.argv))", [("B", "?")]),
    "unknown condition": ("if len(sys.argv) > 1:\n    os.environ['B'] = '1'", [("B", "?")]),
    "value of a rank": ("os.environ['B'] = os.environ.get('LOCAL_RANK', '0')", [("B", "?")]),
    "value that was unknown": (
        "os.environ['B'] = f()\nos.environ['C'] = os.environ['B']",
        [("B", "?"), ("C", "?")],
    ),
    "reassigned by a function": (
        "N = '1'\ndef f():\n    global N\n    N = '2'\nf()\nos.environ['B'] = N",
        [("B", "?")],
    ),
    "reassigned, perhaps": ("N = '1'\nif f():\n    N = '2'\nos.environ['B'] = N", [("B", "?")]),
    "returned before, perhaps": (
        "def f():\n    if g():\n        return\n    os.environ['B'] = '1'\nf()",
        [("B", "?")],
    ),
    "after an import that may fail": (
        "try:\n    import absent\n    os.environ['B'] = '1'\nexcept ImportError:\n    pass",
        [("B", "?")],
    ),
    "after a call that may fail": (
        "try:\n    f()\nexcept OSError:\n    pass\nelse:\n    os.environ['B'] = '1'",
        [("B", "?")],
    ),
    "after an import without which the program ends": (
        "try:\n    import yaml\n    os.environ['B'] = '1'\nexcept ImportError:\n    sys.exit('no')",
        [("B", "1")],
    ),
    "in a statement that cannot fail": (
        "try:\n    os.environ.setdefault('B', '1')\n    os.environ['C'] = '2'\n"
        "except OSError:\n    pass\nfinally:\n    os.environ['D'] = '3'",
        [("B", "1"), ("C", "2"), ("D", "3")],
    ),
    "several by one statement": (
        "os.environ['B'], (os.environ['C'], N) = '1', ('2', 3)",
        [("B", "1"), ("C", "?")],
    ),
    "exchanged": (
        "os.environ['A'], os.environ['B'] = os.environ['B'], os.environ['A']",
        [("A", "?"), ("B", "?")],
    ),
    "in a returned value": ("def f():\n    return os.environ.pop('A')\nf()", [("A", None)]),
    "in a method": (
        "class E:\n    def put(self, name, value):\n        os.environ[name] = value\n"
        "E().put('B', '1')",
        [("B", "1")],
    ),
    "in a method of a named object": (
        "class E:\n    def put(self):\n        os.environ['B'] = '1'\n    def get(self):\n"
        "        self.put()\nclass F(E):\n    def update(self):\n        super().get()\n"
        "f = F()\nf.update()",
        [("B", "1")],
    ),
    "in a method of the same name as that of another object": (
        "class E:\n    def get(self, name):\n        os.environ[name] = '1'\n"
        "e = E()\ne = {'B': 2}\ne.get('B')",
        [("B", "?")],
    ),
    "in a method of the same name as that of an unknown object": (
        "class E:\n    def update(self):\n        os.environ['B'] = '1'\n"
        "e = make(E)\ne.update()",
        [("B", "?")],
    ),
    "in a method of a class that another package has too": (
        "from yaml import E\ne = E()\nclass E:\n    def put(self):\n"
        "        os.environ['B'] = '1'\ne.put()",
        [("B", "?")],
    ),
    "in a constructor": (
        "class E:\n    def __init__(self, name):\n        os.environ[name] = '1'\nE('B')",
        [("B", "1")],
    ),
    "in a function with collected arguments": (
        "def f(n, value='1'):\n    os.environ[n] = value\nf(*['B', '2'])\nf('C', **found)",
        [("", "?")],
    ),
    "in a decorator": (
        "def f(body):\n    os.environ['B'] = '1'\n@f\ndef main():\n    pass",
        [("B", "1")],
    ),
    "in a decorated function": (
        "@on_first\ndef f():\n    os.environ['B'] = '1'\nf()",
        [("B", "?")],
    ),
    "in a generator": (
        "def f():\n    os.environ['B'] = '1'\n    yield\nf()",
        [("B", "?")],
    ),
    "in a coroutine": ("async def f():\n    os.environ['B'] = '1'\nf()", [("B", "?")]),
    "in a function of another package": (
        "import yaml\ndef f():\n    os.environ['B'] = '1'\nyaml.f()",
        [("B", "?")],
    ),
    "in an operand": ("f() or os.environ.setdefault('B', '1')", [("B", "?")]),
    "in an operand after one that decides": (
        "'A' in os.environ or os.environ.update(B='1')\n"
        "'C' in os.environ or os.environ.update(D='1')",
        [("D", "1")],
    ),
    "in a choice": ("N = os.environ.pop('A') if f() else 0", [("A", "?")]),
    "in a known choice": ("N = os.environ.pop('A') if 'A' in os.environ else 0", [("A", None)]),
    "in a comprehension": ("N = [os.environ.pop(n) for n in ('A', 'B')]", [("", "?")]),
    "in the message of an assertion": ("assert f(), os.environ.pop('A')", [("A", "?")]),
    "in a condition": (
        "if os.environ.setdefault('B', '1') == '1':\n    os.environ['C'] = '1'",
        [("B", "1"), ("C", "?")],
    ),
    "in the cause of an error": (
        "try:\n    raise OSError from os.environ.pop('A')\nexcept OSError:\n    pass",
        [("A", None)],
    ),
    "in the target of a loop": ("for os.environ['B'] in sys.argv:\n    pass", [("B", "?")]),
    "in the type of a handler": (
        "try:\n    f()\nexcept os.environ.pop('A'):\n    pass",
        [("A", "?")],
    ),
    "in a loop that ends early": (
        "for each in ('B', 'C'):\n    if f():\n        break\n    os.environ[each] = '1'",
        [("B", "?"), ("C", "?")],
    ),
    "after a variable that may be missing": (
        "try:\n    os.environ['C']\n    os.environ['B'] = '1'\nexcept KeyError:\n    pass",
        [("B", "?")],
    ),
    "after a removal that may fail": (
        "try:\n    del os.environ['C']\n    os.environ['B'] = '1'\nexcept KeyError:\n    pass",
        [("C", None), ("B", "?")],
    ),
    "unknown name": ("os.environ[f()] = '1'", [("", "?")]),
    "unknown names": ("os.environ.update(found)", [("", "?")]),
    "in a function that is passed on": (f"{PASSED}list(map(f, names))", [("", "?")]),
    "in a function of another name": (f"{PASSED}g = f\ng()", [("", "?")]),
    "in a function of the name of an attribute": (
        f"import argparse\n{PASSED}args = parser.parse_args()\nprint(args.f, sys.f)\n"
        "class E:\n    def g(self):\n        os.environ['B'] = '1'\n"
        "args = parser.parse_args()\nprint(args.g)\nclass F:\n    pass\nh = F()\nprint(h.g)",
        [],
    ),
    "in a method that is passed on": (
        "class E:\n    def put(self):\n        os.environ['C'] = '1'\n        map(self.g, names)\n"
        "class F(E):\n    def g(self):\n        os.environ['B'] = '1'\nE().put()",
        [("C", "1"), ("B", "?")],
    ),
    "in a handler of a signal or of the end": (
        f"import atexit, signal\nfrom signal import signal as on\n{PASSED}atexit.register(f, 'B')\n"
        "signal.signal(15, f)\non(15, lambda *of: os.environ.pop('A'))",
        [],
    ),
    "a seed in a function that is passed on": (
        "def f(n):\n    os.environ['PYTHONHASHSEED'] = str(n)\n"
        "F = {'default': f}\npartial(f, 1)\ndict(worker_init_fn=f)",
        [],
    ),
    "a seed and others in a function that is passed on": (
        "def g():\n    os.environ['B'] = '1'\n"
        "def f(n):\n    os.environ['PYTHONHASHSEED'] = str(n)\n    g()\npartial(f, 1)",
        [("B", "?")],
    ),
    "a seed and unknown ones in a function that is passed on": (
        "def f(n):\n    os.environ['PYTHONHASHSEED'] = str(n)\n    os.environ[n] = '1'\n"
        "partial(f, 1)",
        [("", "?")],
    ),
    "a method setenv of another package": (
        "import yaml\njob = yaml.Job()\njob.setenv('B', '1')\n"
        "def f():\n    job.setenv('B', '1')\nmap(f, names)",
        [],
    ),
    "in a thread": (f"{PASSED}Thread(target=f).start()", [("", "?")]),
    "in a passed lambda": ("g = lambda: os.environ.pop('A')\ng()", [("A", "?")]),
    "in a property": (
        "class E:\n    @property\n    def b(self):\n        os.environ['B'] = '1'\nE().b",
        [("B", "?")],
    ),
    "in a method that Python calls": (
        "class E:\n    def __enter__(self):\n        os.environ['B'] = '1'\nwith E():\n    pass",
        [("B", "?")],
    ),
    "in the creation of a subclass": (
        "class E:\n    def __init_subclass__(cls):\n        os.environ['B'] = '1'\n"
        "    def __init__(self):\n        os.environ['C'] = '1'\nclass F(E):\n    pass",
        [("B", "?")],
    ),
    "in a class that is only named": (
        "import typing as t\nfrom typing import Optional\nclass E(Exception):\n    n = 1\n"
        "    def __init__(self):\n        os.environ['B'] = '1'\nF = Optional[E]\nt.List[E]\n"
        "print(isinstance(F, E), issubclass(int, (E, str)), E.n)\n"
        "try:\n    import yaml\nexcept E:\n    pass\nexcept (E, OSError):\n    pass",
        [],
    ),
    "in a class of a function in a table": (
        "class E:\n    def __init__(self):\n        os.environ['B'] = '1'\nF = table[E]",
        [("B", "?")],
    ),
    "in a method that Python calls of the base of a class": (
        "class E:\n    def __enter__(self):\n        os.environ['B'] = '1'\nclass F(E):\n    pass",
        [],
    ),
    "in a method that Python calls of a base": (
        "class E:\n    def __enter__(self):\n        os.environ['B'] = '1'\n"
        "class F(E):\n    pass\nclass G(F):\n    pass\nG()",
        [("B", "?")],
    ),
    "in the constructor of a base": (
        "class E:\n    def __init__(self, name):\n        os.environ[name] = '1'\n"
        "class F(E):\n    pass\nF('B')\nclass G(F):\n    def __init__(self):\n        pass\nG()",
        [("B", "1")],
    ),
    "in a metaclass": (
        "class M(type):\n    def __new__(cls, *of):\n        os.environ['B'] = '1'\n"
        "class E(metaclass=M):\n    pass",
        [("B", "?")],
    ),
    "in a function too deep to follow": (
        "def f0():\n    os.environ['B'] = '1'\n"
        + "".join(f"def f{n}():\n    f{n - 1}()\n" for n in range(1, 9))
        + "f8()",
        [("B", "?")],
    ),
    "by a parameter": ("def f(env):\n    env['B'] = '1'\nf(os.environ)", [("B", "1")]),
    "by a default": ("def f(env=os.environ):\n    env['B'] = '1'\nf()", [("B", "1")]),
    "by an attribute": (
        "class E:\n    def __init__(self):\n        self.env = os.environ\n"
        "E().env['B'] = '1'",
        [("B", "?")],
    ),
    "by an attribute of a class": ("class E:\n    env = os.environ\nE.env['B'] = '1'", [("", "?")]),
    "by a returned value": ("def f():\n    return os.environ\nf()['B'] = '1'", [("", "?")]),
    "by a function of another package": ("import yaml\nyaml.f(os.environ)", [("", "?")]),
    "read by functions of other packages": (
        "from string import Template\nimport yaml\n'\\n'.join(os.environ)\n"
        "Template('$A').safe_substitute(os.environ)\nyaml.create(os.environ)\n"
        "if f():\n    os.execvpe('python', ['python', 't.py'], os.environ)",
        [],
    ),
    "in bytes": ("os.environb[b'B'] = b'1'", [("B", "?")]),
    "by C": ("import ctypes\nctypes.CDLL(None).setenv(b'B', b'1', 1)", [("", "?")]),
    "by C in a function that is passed on": (
        "def f():\n    libc.setenv(b'B', b'1', 1)\nmap(f, names)",
        [("", "?")],
    ),
    "in an own function of that name": (
        "def setenv(name, value):\n    os.environ[name] = value\nsetenv('B', '1')",
        [("B", "1")],
    ),
    "in executed text": ("exec(open('settings.py').read())", [("", "?")]),
    "a rank in a function that is passed on": (
        "def f():\n    os.environ['MASTER_PORT'] = '1'\nlist(map(f, names))",
        [],
    ),
    "a file of variables": ("load_dotenv()", [("", "?")]),
}  # fmt: skip


def analysed(folder: Path, text: str) -> ImportAnalysis:
    """Return the analysis of a program with this text before its import of torch; A is set."""
    project = Project(folder)
    entry = project.write("train.py", f"import os, sys\n{text}\nimport torch\n")
    return analyse_imports([entry], project.search, project.installed, {"A": "given"})


@pytest.mark.parametrize("name", CHANGES)
def test_environment_changes_are_read_in_order(tmp_path: Path, name: str) -> None:
    source, expected = CHANGES[name]
    found = analysed(tmp_path, source)
    changes = [step for step in found.steps if not isinstance(step, WantedImport)]
    assert [(each.name, each.value if each.known else "?") for each in changes] == expected
    assert found.steps[-1] == WantedImport("torch")


def test_classes_of_the_same_names_inherit_a_method_once(tmp_path: Path) -> None:
    """Modules extend classes of others, each time by the same names."""
    put = "class E:\n    def __init__(self):\n        os.environ['B'] = '1'\n"
    again = "class F(E):\n    pass\nclass E(F):\n    pass\n" * 30
    assert analysed(tmp_path, f"{put}{again}F()").sets == {"B"}


def test_functions_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each definition adds to what the calls after it may change."""
    read: list[Any] = []
    uses = FileFacts.uses

    def counted(facts: FileFacts, function: Any) -> Any:
        read.append((facts, function))
        return uses(facts, function)

    monkeypatch.setattr(FileFacts, "uses", counted)
    pairs = (f"def f{n}():\n    f{n + 1}()\nf{n}()\n" for n in range(50))
    found = analysed(tmp_path, "".join(pairs) + "def f50():\n    os.environ['B'] = '1'\nf0()")
    assert found.sets == {"B"}
    assert len(read) == len(set(read)) == 51


LIMITS = {
    "MAX_FILES": (2, "your program has more than 2 files of its own, too many to read"),
    "MAX_PROCESSOR_SECONDS": (
        -1.0,
        "reading your program's 0 files takes longer than -1 s of processor time",
    ),
    "MAX_SOURCE_BYTES": (99, "{folder}/c.py is larger than 99 bytes, too large to read"),
    "MAX_PROGRAM_BYTES": (
        99,
        "your program's own files are larger than 99 bytes in all, too large to read",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_program_beyond_a_limit_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its changes before its imports are unknown, so its workers start cold."""
    limit, reason = LIMITS[name]
    project = Project(tmp_path)
    project.write("b.py", "import c\n")
    project.write("c.py", f"import os\nos.environ['B'] = '1'\n# {'.' * 99}\n")
    source = "import b\nimport torch\n"
    assert project.read(source).unread == ""
    monkeypatch.setattr(program_imports, name, limit)
    assert project.read(source).unread == reason.format(folder=tmp_path)


def test_calls_are_followed_up_to_a_number(tmp_path: Path) -> None:
    """Later calls count as doubtful; each level multiplies the calls that would be followed."""
    text = "def f0():\n    os.environ['B'] = '1'\n"
    text += "".join(f"def f{n}():\n" + f"    f{n - 1}()\n" * 10 for n in range(1, 5))
    steps = analysed(tmp_path, f"{text}f4()").steps
    doubtful = [step.doubtful for step in steps if not isinstance(step, WantedImport)]
    assert [doubtful[0], doubtful[-1]] == [False, True]


UNCHANGED = {
    "a default of one that is there": "os.environ.setdefault('A', '1')",
    "a condition that does not hold": "if 'A' not in os.environ:\n    os.environ['A'] = '1'",
    "another program": "if __name__ != '__main__':\n    os.environ['A'] = '1'",
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_variable_that_the_program_leaves_unchanged_is_known(tmp_path: Path, name: str) -> None:
    """Workers have OMP_NUM_THREADS, and many packages read it: else none would be preloaded."""
    found = analysed(tmp_path, UNCHANGED[name])
    assert found.sets == found.known == {"A"}


UNFOLLOWED = {
    "a condition on a name of another module": "D = 0\nfrom cfg import *\nif D:\n    {sets}",
    "a condition on a global name": "D = 0\nglobals()['D'] = 1\nif D:\n    {sets}",
    "a condition on a name of executed code": "D = 0\nexec('D = 1')\nif D:\n    {sets}",
    "a condition on a constant": "D = 0\nsetattr(sys.modules[__name__], 'D', 1)\nif D:\n    {sets}",
    "the end of a loop": "for n in ('B', 'C'):\n    pass\nelse:\n    {sets}",
    "an assertion": "assert len(sys.argv), os.environ.pop('A')",
    "a default and an assertion": "os.environ.setdefault('A', '1')\n"
    "assert sys, os.environ.pop('A')",
    "a default and unknown changes": "os.environ.setdefault('A', '1')\nos.environ.update(found())",
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_variable_whose_change_is_not_followed_is_unknown(tmp_path: Path, name: str) -> None:
    found = analysed(tmp_path, UNFOLLOWED[name].format(sets="os.environ['A'] = input()"))
    assert found.sets == {"A"}
    assert not found.known


UNSEEN = {
    "an assertion's message": "try:\n    assert f(), {pops}\nexcept AssertionError:\n    pass",
    "an operand": "f() and {pops}",
    "a default argument": "def f(x={pops} if g() else 0):\n    pass",
    "a function that is passed on": "def f():\n    {pops}\ncall(f)",
    "a function with another name": "def f():\n    {pops}\ng = f\ng()",
    "a method of a decorated class": "@made\nclass E:\n    @late\n    def f(self):\n        {pops}",
    "a lambda": "call(lambda: {pops})",
    "a handler of a signal": "import signal\ndef f(*of):\n    {pops}\nsignal.signal(15, f)",
    "a lambda for a signal": "import signal\nsignal.signal(15, lambda *of: {pops})",
    "another function with the environment": "change(os.environ)",
    "a method of the environment that is passed on": "list(map(os.environ.pop, ['B']))",
    "a condition on a value from before": "def f():\n    {pops}\ncall(f)\nN = 'B' in os.environ",
}


@pytest.mark.parametrize("name", UNSEEN)
def test_condition_on_a_variable_that_may_have_changed_is_unknown(
    tmp_path: Path, name: str
) -> None:
    project, source = Project(tmp_path), UNSEEN[name].format(pops="os.environ.pop('B')")
    condition = "N" if "N =" in source else "'B' in os.environ"
    branches = f"if {condition}:\n    import yaml\nelse:\n    import numpy\n"
    entry = project.write("train.py", f"import os\n{source}\n{branches}")
    found = analyse_imports([entry], project.search, project.installed, {"B": "1"})
    assert found.possible == {WantedImport("yaml"), WantedImport("numpy")}


def test_functions_of_own_modules_are_followed_by_their_imported_names(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("pkg/__init__.py", "from pkg.env import put\n")
    project.write("pkg/env.py", "import os\ndef put(name):\n    os.environ[name] = '1'\n")
    calls = "from pkg import put as there, env\nimport pkg.env as e\n"
    calls += "there('A')\nenv.put('B')\ne.put('C')\npkg.env.put('D')\n"
    found = project.read(f"import pkg.env\n{calls}import torch\n")
    changes = {s.name: s.value for s in found.steps if not isinstance(s, WantedImport)}
    assert changes == dict.fromkeys("ABCD", "1")


SHARED = {
    "a name": "from cfg import e\ne['B'] = '1'",
    "a name in a function": "from cfg import e\ndef f():\n    e['B'] = '1'\nf()",
    "any name": "from cfg import *\ndef f():\n    e['B'] = '1'\nf()",
    "an attribute": "import cfg\ncfg.e['B'] = '1'",
    "an attribute in a function": "import cfg as c\ndef f():\n    c.e['B'] = '1'\nf()",
    "a function under another name": "from cfg import g as h\ndef f():\n    h()\nf()",
    "an attribute of an object": "import cfg\nclass F:\n    def __init__(self):\n"
    "        self.env = os.environ\ncfg.E.put(F())",
}


@pytest.mark.parametrize("name", SHARED)
def test_environment_under_a_name_of_another_own_file_is_followed(
    tmp_path: Path, name: str
) -> None:
    project = Project(tmp_path)
    project.write(
        "cfg.py",
        "import os\ne = os.environ\ndef g():\n    e['B'] = '1'\n"
        "class E:\n    def put(self):\n        self.env['B'] = '1'\n",
    )
    steps = _steps(project, f"import os\n{SHARED[name]}\nimport torch\n")
    assert [each.name for each in steps if not isinstance(each, WantedImport)] == ["B"]


def test_condition_in_a_loop_may_hold_in_a_later_iteration(tmp_path: Path) -> None:
    loop = "for x in sys.argv:\n    if 'B' in os.environ:\n        os.environ['A'] = x\n"
    found = analysed(tmp_path, f"{loop}    os.environ['B'] = x")
    assert found.sets == {"A", "B"}
    assert "A" not in found.known


LATER = {
    "a function": "def f():\n    os.environ.setdefault('A', '1')",
    "an unknown value": "os.environ['A'] = input()",
    "an unknown condition": "if len(sys.argv) > 1:\n    os.environ['A'] = '1'",
}


@pytest.mark.parametrize("name", LATER)
def test_variable_that_the_program_may_change_is_unknown(tmp_path: Path, name: str) -> None:
    found = analysed(tmp_path, LATER[name])
    assert found.sets == {"A"}
    assert not found.known


def test_lines_are_those_of_imports_of_main_alone(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("settings.py", "import yaml\n")
    lines = project.read("import settings\nfrom torch import (\n    nn,\n)\n").lines
    assert lines == {WantedImport("settings"): 1, WantedImport("torch", ("nn",)): 2}


def test_environment_changes_of_imported_files_are_applied_at_their_import(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("settings.py", "import os\nos.environ['A'] = '1'\n")
    entry = project.write("train.py", "import yaml\nimport settings\nimport torch\n")
    steps = analyse_imports([entry], project.search, project.installed, {}).steps
    names = [getattr(step, "module", getattr(step, "name", "")) for step in steps]
    assert names == ["yaml", "os", "A", "torch"]


EARLY = {
    "a condition": "if len(sys.argv) > 5:\n    import yaml\n",
    "a condition that does not hold": "if 'B' in os.environ:\n    import yaml\n",
    "another import, if it fails": "try:\n    import json\nexcept ImportError:\n    import yaml\n",
    "an import above that fails": (
        "try:\n    import absent\n    import yaml\nexcept ImportError:\n    pass\n"
    ),
    "a loop": "for each in sys.argv[5:]:\n    import yaml\n",
}


@pytest.mark.parametrize("name", EARLY)
def test_import_that_may_not_run_is_no_step_before_a_change(tmp_path: Path, name: str) -> None:
    """It would be loaded with a value that the program's own import may not find."""
    project = Project(tmp_path)
    source = f"import os, sys\n{EARLY[name]}"
    assert WantedImport("yaml") in _steps(project, source)
    assert WantedImport("yaml") not in _steps(project, f"{source}os.environ['B'] = '1'\n")
    again = _steps(project, f"{source}os.environ['B'] = '1'\nimport yaml\n")
    assert again.index(WantedImport("yaml")) == len(again) - 1


@pytest.mark.parametrize("name", EARLY)
def test_import_that_may_not_run_is_only_possible_unless_another_runs(
    tmp_path: Path, name: str
) -> None:
    project = Project(tmp_path)
    source = f"import os, sys\n{EARLY[name]}"
    assert _possible(project, source) == {WantedImport("yaml")}
    assert _possible(project, f"{source}import yaml\n") == set()
    assert _possible(project, f"import torch.optim\n{source}") == {WantedImport("yaml")}


def _possible(project: Project, source: str) -> set[WantedImport]:
    entry = project.write("train.py", source)
    return set(analyse_imports([entry], project.search, project.installed, {}).possible)


def test_module_that_an_optimizer_loads_is_no_step_before_a_change(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("model.py", "from torch import optim\n")
    source = "import os\nimport model\n"
    assert WantedImport("torch._dynamo") in _steps(project, source)
    changed = f"{source}os.environ['TORCHDYNAMO_DISABLE'] = '1'\n"
    assert WantedImport("torch._dynamo") not in _steps(project, changed)


def _steps(project: Project, source: str) -> list[Any]:
    entry = project.write("train.py", source)
    return list(analyse_imports([entry], project.search, project.installed, {}).steps)


RUNS = {
    "a file": ("runpy.run_path('{folder}/other.py', run_name='other')", ["yaml", "numpy"]),
    "a file as the program": (
        "run_path('{folder}/other.py', run_name='__main__')",
        ["yaml", "torch", "numpy"],
    ),
    "a module": ("x = runpy.run_module('pkg.other')", ["json", "yaml", "numpy"]),
    "an argument": ("runpy.run_path(sys.argv[1])", ["numpy"]),
    "an unknown name": ("runpy.run_path('{folder}/other.py', run_name=name())", ["numpy"]),
    "a method of that name": ("queue.run_path('{folder}/other.py')", ["numpy"]),
    "no path": ("runpy.run_path(3)", ["numpy"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_program_run_by_runpy_is_followed(tmp_path: Path, name: str) -> None:
    statement, expected = RUNS[name]
    project = Project(tmp_path)
    other = "import yaml\nif __name__ == '__main__':\n    import own\n"
    project.write("own.py", "import torch\n")
    project.write("other.py", other)
    project.write("pkg/__init__.py", "import json\n")
    project.write("pkg/other.py", other)
    program = f"import runpy, sys\n{statement.format(folder=tmp_path)}\nimport numpy\n"
    left_out = {"runpy", "sys"}
    assert [one for one in project.modules(program) if one not in left_out] == expected


def test_changes_of_a_program_run_by_runpy_are_applied_in_order(tmp_path: Path) -> None:
    project = Project(tmp_path)
    other = project.write("other.py", "import os\nos.environ['A'] = '1'\n")
    found = project.read(f"import runpy\nrunpy.run_path({other.path!r})\nimport torch\n")
    assert found.sets == {"A"}
    assert [type(step).__name__ for step in found.steps[-2:]] == [
        "EnvironmentChange", "WantedImport",
    ]  # fmt: skip
    assert other.path in found.files
