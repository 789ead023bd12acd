"""Workers of function jobs: warm starts, with the same process as cold ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launcher_rig import process_tag
from tests.integration.warm_start.test_equivalence import both
from tests.integration.warm_start.warm_rig import installed, script

__all__ = ["installed", "process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

TOP = """
import os, sys
preloaded = "reader_pkg" in sys.modules
os.environ["MODE"] = "fast"
import reader_pkg

def seen(word):
    import json, __main__
    print(json.dumps({
        "word": word, "argv": sys.argv, "path": sys.path, "folder": os.getcwd(),
        "main": [__name__, __main__.__name__, getattr(__main__, "__file__", None)],
        "names": sorted(vars(__main__)), "mode": reader_pkg.MODE, "set": os.environ.get("MODE"),
        "preloaded": preloaded,
    }))
    return word
"""
SUBMIT = """
if __name__ == "__main__":
    from functools import partial
    from pathlib import Path
    from elasticjob_agent.runtimes.function_entrypoint import CallFolder, FunctionCall
    folder = CallFolder(Path(sys.argv[1]))
    folder.write(FunctionCall(partial(seen, "hello"), ()), Path(sys.argv[2]))
    print(*folder.command(), sep="\\n")
"""


def written(tmp_path: Path, *words: str) -> list[str]:
    """Run a program in its folder, which writes a call; return the workers' command."""
    for name in ("call", "work"):
        (tmp_path / name).mkdir()
    command = [sys.executable, *words, str(tmp_path / "call"), str(tmp_path / "work")]
    ran = subprocess.run(
        command, cwd=tmp_path / "code", capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def outcomes(tmp_path: Path, command: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the lines that the function printed in a cold and in a warm worker."""
    cold, warm = both(tmp_path, *command, env={"ELASTICJOB_ROUND": "1", "RANK": "0"})
    return json.loads(cold), json.loads(warm)


@pytest.fixture(autouse=True)
def reader(installed: Path) -> None:
    """Install a package that reads a variable of the program when it is imported."""
    (installed / "reader_pkg.py").write_text("import os\nMODE = os.environ.get('MODE')\n")


@pytest.mark.parametrize("way", ["script", "module of a script", "module"])
def test_function_runs_in_the_same_process_warm_and_cold(tmp_path: Path, way: str) -> None:
    """The standby has loaded the package, in the environment that the program gives it."""
    code = tmp_path / "code"
    if way == "script":
        words = [script(code, f"{TOP}{SUBMIT}")]
    elif way == "module of a script":
        script(code, TOP, "mine.py")
        words = [script(code, f"import sys\nfrom mine import seen\n{SUBMIT}")]
    else:
        words = ["-m", "mine"]
        script(code, f"{TOP}{SUBMIT}", "mine.py")
    cold, warm = outcomes(tmp_path, written(tmp_path, *words))
    assert (cold.pop("preloaded"), warm.pop("preloaded")) == (False, True)
    assert warm == cold
    assert warm["word"] == "hello"
    assert warm["mode"] == warm["set"] == "fast"
    assert warm["folder"] == str(tmp_path / "work")
    assert str(code) in warm["path"]


def test_function_passed_by_value_has_its_modules_preloaded(tmp_path: Path) -> None:
    """A program that is no file cannot be run again: its function refers to the package."""
    (tmp_path / "code").mkdir()
    command = written(tmp_path, "-c", f"{TOP}{SUBMIT}")
    program = Path(command[-1]).read_text()
    assert "\nimport reader_pkg\n" in program
    assert "runpy.run" not in program
    cold, warm = outcomes(tmp_path, command)
    assert warm == cold
    assert warm["mode"] is None


def test_module_that_is_passed_by_value_is_not_imported(tmp_path: Path) -> None:
    script(tmp_path / "code", "def seen(word):\n    print(repr(word))\n", "mine.py")
    by_value = "import cloudpickle, mine, sys\ncloudpickle.register_pickle_by_value(mine)\n"
    source = f"{by_value}seen = lambda word: mine.seen(word)\n{SUBMIT}"
    command = written(tmp_path, "-c", source)
    assert "import mine" not in Path(command[-1]).read_text()


SPAWNING = """
import sys

def seen(word):
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(abs, [-1, -2]), flush=True)
"""


def test_processes_that_a_function_spawns_do_not_run_it_again(tmp_path: Path) -> None:
    """A program that is no file leaves none for the main module of spawned processes."""
    (tmp_path / "code").mkdir()
    command = written(tmp_path, "-c", f"{SPAWNING}{SUBMIT}")
    cold, warm = both(tmp_path, *command, env={"ELASTICJOB_ROUND": "1", "RANK": "0"})
    assert warm == cold == "[1, 2]\n"
