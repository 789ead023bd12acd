"""Settings that a program and its packages change in turn: the same warm and cold.

A package whose import changes a setting is left to the workers; see also `test_import_effects`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag
from tests.integration.warm_start.warm_rig import (
    LOADED,
    SHARED,
    Warm,
    in_folder,
    installed,
    said,
    script,
    warm,
)

__all__ = ["installed", "process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

PROGRAMS = {
    "logging configured by the program, then by the package": (
        "import logging; logging.basicConfig(format='package %(message)s')",
        "import logging\nlogging.basicConfig(format='program %(message)s', level=10)\n"
        "import odd_pkg\nlogging.info('x')",
        (0, "program x\n"),
    ),
    "start method set by the program, then used by the package": (
        "import multiprocessing; method = multiprocessing.get_start_method()",
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n"
        "import odd_pkg; print(odd_pkg.method)",
        (0, "spawn\n"),
    ),
    "exception hook of the program, called by the package's": (
        "import sys; inner = sys.excepthook\n"
        "sys.excepthook = lambda *about: (print('package'), inner(*about))",
        "import sys; sys.excepthook = lambda *about: print('program')\nimport odd_pkg\n1 / 0",
        (1, "package\nprogram\n"),
    ),
    "package that is not imported": (
        "import sys, torch; sys.setrecursionlimit(5000); torch.set_default_dtype(torch.float64)",
        "import sys, torch\nif len(sys.argv) > 9:\n    import odd_pkg\n"
        "print(sys.getrecursionlimit(), torch.get_default_dtype())",
        (0, "1000 torch.float32\n"),
    ),
    "package that registers itself and is not imported": (
        "import plain_pkg; plain_pkg.registered = True",
        "import sys, plain_pkg\nif len(sys.argv) > 9:\n    import odd_pkg\n"
        "print(hasattr(plain_pkg, 'registered'), 'odd_pkg' in sys.modules)",
        (0, "False False\n"),
    ),
    "collection turned off by the package": (
        "import gc; before = gc.isenabled(); gc.disable()",
        "import gc, odd_pkg; print(odd_pkg.before, gc.isenabled(), gc.get_threshold()[0])",
        (0, "True False 700\n"),
    ),
    "thresholds of collection changed by the package": (
        "import gc; gc.set_threshold(*[10 * each for each in gc.get_threshold()])",
        "import gc, odd_pkg; print(gc.isenabled(), gc.get_threshold()[0])",
        (0, "True 7000\n"),
    ),
    "default context of decimals set by the program": (
        "import decimal",
        "import decimal, odd_pkg\ndecimal.DefaultContext.prec = 50\n"
        "print(decimal.getcontext().prec)",
        (0, "50\n"),
    ),
    "arguments taken by the package": (
        "import sys; sys.argv = [each for each in sys.argv if each != '--package']",
        "import odd_pkg, sys; print(sys.argv[1:])",
        (0, "['--program']\n"),
    ),
    "process in the package": (
        "import psutil; process = psutil.Process()",
        "import odd_pkg, os; print(odd_pkg.process.pid == os.getpid())",
        (0, "True\n"),
    ),
    "functions that the package registers for forks": (
        "import os; forks = []\n"
        "os.register_at_fork(before=lambda: forks.append('before'),\n"
        "    after_in_parent=lambda: forks.append('parent'),\n"
        "    after_in_child=lambda: forks.append('child'))",
        "import odd_pkg, os; print(odd_pkg.forks, flush=True)\nif os.fork():\n    os.wait()\n"
        "print(odd_pkg.forks)",
        (0, "[]\n['before', 'child']\n['before', 'parent']\n"),
    ),
    "thresholds of collection": (
        "",
        "import gc, odd_pkg; print(gc.isenabled(), gc.get_threshold()[0])",
        (0, "True 700\n"),
    ),
}


def both(tmp_path: Path, *argv: str) -> list[tuple[int | None, str]]:
    """Return exit code and output of a cold and of a warm start."""
    codes: list[int | None] = []

    async def scenario(runtime: Warm) -> None:
        started, exited = await runtime.outcome(*argv)
        assert not started.warm
        codes.append(exited.exit_code)
        await runtime.prepare(*argv, env=SHARED)
        await runtime.until_ready()
        started, exited = await runtime.outcome(*argv)
        assert started.warm, started.cold_reason
        codes.append(exited.exit_code)

    warm(tmp_path / "logs", scenario)
    return [(code, said(tmp_path / "logs", number)) for number, code in enumerate(codes, 1)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_setting_is_same_warm_and_cold(tmp_path: Path, installed: Path, name: str) -> None:
    package, program, expected = PROGRAMS[name]
    (installed / "odd_pkg.py").write_text(f"{package}\n")
    path = script(tmp_path / "code", f"{program}\n")
    expected = (expected[0], expected[1].replace("700", str(gc.get_threshold()[0])))
    assert both(tmp_path, sys.executable, path, "--package", "--program") == [expected, expected]


SEEN = "import __main__, sys; seen = (__main__.__file__, sys.argv, sys.path[0])\n"
LOOK = f"{LOADED}import odd_pkg\nprint(odd_pkg.seen)\nprint(there)\n"


@pytest.mark.parametrize("form", ["script", "module", "folder"])
def test_package_finds_the_program_while_it_is_imported(
    tmp_path: Path, installed: Path, form: str
) -> None:
    """Without `__main__.__file__` many packages assume an interactive session."""
    (installed / "odd_pkg.py").write_text(SEEN)
    script(tmp_path, "", "code/__init__.py")
    script(tmp_path, LOOK, "code/train.py")
    script(tmp_path, LOOK, "code/__main__.py")
    target = {"script": ["code/train.py"], "module": ["-m", "code.train"], "folder": ["code"]}
    back = in_folder(tmp_path)
    try:
        cold, forked = both(tmp_path, sys.executable, *target[form])
    finally:
        back()
    assert forked[1].splitlines()[1] == "['odd_pkg']"
    assert (forked[0], forked[1].splitlines()[0]) == (cold[0], cold[1].splitlines()[0])
    assert "/code/" in forked[1].splitlines()[0]


STARTUP = {
    "identifier": ("import uuid; value = uuid.uuid4().hex", "it draws a random seed or identifier"),
    "seed": ("import random; random.seed(1)", "it seeds or uses the random numbers of random"),
    "open file": ("log = open(__file__)", "sitecustomize.py open"),
    "temporary folder": ("import tempfile; tempfile.mkdtemp()", "it makes the temporary"),
    "time": ("import time; began = time.time()", "it keeps the time of its import"),
    "process number": ("import os; own = os.getpid()", "it keeps the process number"),
    "rank": ("import os; device = os.environ.get('LOCAL_RANK')", "it reads LOCAL_RANK"),
    "module of its own": ("import startup_pkg", "startup_pkg runs at every start"),
    "timer": ("import signal; signal.alarm(99)", "it sets a timer"),
}


@pytest.mark.parametrize("name", STARTUP)
def test_startup_code_with_an_effect_for_each_process_prevents_forks(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, reason = STARTUP[name]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (installed / "startup_pkg.py").write_text("import uuid; value = uuid.uuid4().hex\n")
    (installed / "sitecustomize.py").write_text(f"{source}\n")
    path = script(tmp_path / "code", "import plain_pkg\n")

    async def scenario(runtime: Warm) -> None:
        prepared = await runtime.prepare(sys.executable, path)
        assert not prepared.ready
        started, exited = await runtime.outcome(sys.executable, path)
        assert (started.warm, exited.exit_code) == (False, 0)
        assert "runs at every start of Python, not in a fork" in started.cold_reason
        assert reason in started.cold_reason

    warm(tmp_path / "logs", scenario)


HARMLESS = """
import atexit, logging, os, signal, sys, tempfile
atexit.register(print, "end")
logging.basicConfig(format="%(levelname)s %(message)s")
signal.signal(signal.SIGUSR2, lambda number, frame: print("signal"))
os.environ["FROM_STARTUP"] = os.environ.get("HOME", "")
sys.setrecursionlimit(1234)
os.umask(0o27)
"""
INHERITED = """
import logging, os, signal, sys, plain_pkg
logging.warning("x")
signal.raise_signal(signal.SIGUSR2)
print(os.environ["FROM_STARTUP"], sys.getrecursionlimit(), os.umask(0))
"""


def test_startup_code_whose_settings_forks_inherit_allows_them(
    tmp_path: Path, installed: Path
) -> None:
    (installed / "sitecustomize.py").write_text(HARMLESS)
    path = script(tmp_path / "code", INHERITED)
    cold, forked = both(tmp_path, sys.executable, path)
    assert forked == cold
    assert forked[1].endswith("WARNING x\n")
    assert "signal\n" in forked[1]
    assert "1234 23\nend\n" in forked[1]
