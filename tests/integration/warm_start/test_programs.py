"""Other observable process properties: identical for cold and warm starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag
from tests.integration.warm_start.test_equivalence import both
from tests.integration.warm_start.warm_rig import Warm, in_folder, said, script, warm

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

PROGRAMS = {
    "annotations are evaluated": "def f(x: 1 + 1): pass\nprint(f.__annotations__)\n",
    "what is left is finalised": "class Last:\n"
    "    def __del__(self): print('gone')\n"
    "last = Last()\n",
    "the thread has its number": "import threading\n"
    "print(threading.main_thread().native_id == threading.get_native_id())\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_prints_same_output_warm_and_cold(tmp_path: Path, name: str) -> None:
    path = script(tmp_path / "code", PROGRAMS[name])
    cold, forked = both(tmp_path, sys.executable, path)
    assert forked == cold != ""


def test_deprecated_import_of_the_program_is_reported_by_the_standby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python shows a DeprecationWarning if it concerns a line of `__main__` alone."""
    warning = "import warnings\nwarnings.warn('use new_pkg', DeprecationWarning, stacklevel=2)\n"
    packages = tmp_path / "site-packages"
    script(packages, warning, "old_pkg.py")
    script(packages, "import oldest_pkg, future_pkg\n", "other_pkg.py")
    script(packages, warning, "oldest_pkg.py")
    script(packages, warning.replace("Deprecation", "Future"), "future_pkg.py")
    path = script(tmp_path / "code", "import sys\nimport other_pkg\n\nimport old_pkg\nprint(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    cold, forked = both(tmp_path, sys.executable, path)
    assert cold == (
        f"1\n{packages}/other_pkg.py:1: FutureWarning: use new_pkg\n"
        "  import oldest_pkg, future_pkg\n"
        f"{path}:4: DeprecationWarning: use new_pkg\n  import old_pkg\n"
    )
    assert forked == "1\n"
    lines = [line for line in capfd.readouterr().err.splitlines() if "[standby]" in line]
    assert [line.partition("[standby] ")[2] for line in lines] == cold.splitlines()[1:]


LEAKING = """
import importlib.machinery, os

class Kept:
    def __del__(self, write=os.write):
        write(1, b"gone\\n")

kept = Kept()
kept.itself = kept
value = type("nb_type", (type,), {"__module__": "nanobind"})("Bound", (), {})
"""


def test_objects_are_finalised_if_a_library_reports_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanobind prints every object that is left; a package without it keeps its objects."""
    packages = tmp_path / "site-packages"
    loader = "__loader__ = importlib.machinery.ExtensionFileLoader(__name__, __file__)\n"
    script(packages, f"{LEAKING}{loader}", "native_pkg.py")
    path = script(tmp_path / "code", "import native_pkg; del native_pkg.kept\nprint('end')\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    cold, forked = both(tmp_path, sys.executable, path)
    assert forked == cold == "end\ngone\n"


LAZY = """
import importlib.util, sys

class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)

spec = importlib.util.find_spec("lazy_pkg")
loader = spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules["lazy_pkg"] = module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
sys.modules["odd_pkg"] = Odd()
print("end")
"""


def test_end_of_a_program_loads_no_lazy_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    script(packages, "print('loaded', flush=True)\nraise OSError('absent')\n", "lazy_pkg.py")
    path = script(tmp_path / "code", LAZY)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    cold, forked = both(tmp_path, sys.executable, path)
    assert forked == cold == "end\n"


ENVIRONMENT = """
import os, subprocess, sets_pkg
names = ("SET", "TAKEN", "CHOSEN", "SITE", "LC_CTYPE", "OPENBLAS_NUM_THREADS", "RANK")
print([os.environ.get(name) for name in names])
print(subprocess.check_output(["env"]).decode().count("SET=package"))
"""
SETS = """
import os
os.environ["SET"] = "package"
os.environ.setdefault("CHOSEN", "package")
del os.environ["TAKEN"]
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_environment_changes_of_imports_are_kept(tmp_path: Path, locale: str) -> None:
    """Python itself sets LC_CTYPE for the locale "C"."""
    packages = tmp_path / "site-packages"
    script(packages, SETS, "sets_pkg.py")
    script(packages, "import os; os.environ['SITE'] = 'customized'\n", "sitecustomize.py")
    path = script(tmp_path / "code", ENVIRONMENT)
    env = {"PYTHONPATH": str(packages), "TAKEN": "1", "CHOSEN": "job", "LANG": locale}
    cold, forked = both(tmp_path, sys.executable, path, env={**env, "LC_ALL": "", "LC_CTYPE": ""})
    ctype = "C.UTF-8" if locale == "C" else ""
    assert cold == f"['package', None, 'job', 'customized', {ctype!r}, None, '0']\n1\n"
    assert forked == cold


def test_program_module_shadows_standard_library_module(tmp_path: Path) -> None:
    script(tmp_path / "code", "own = 1\n", "json.py")
    path = script(tmp_path / "code", "import json; print(json.own)\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        started, exited = await runtime.outcome(sys.executable, path)
        assert started.cold_reason == (
            f"the standby cannot be forked: {tmp_path}/code/json.py takes the place of a module of "
            "Python's that it needs"
        )
        assert exited.exit_code == 0, exited.stderr_tail

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "1\n"


VENDORED = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "vendor"))
there = sorted(name for name in sys.modules if name.endswith("_pkg"))
import some_pkg, other_pkg, plain_pkg
print(some_pkg.value, other_pkg.value, sys.path[:2])
print(there, file=sys.stderr)
"""


def test_folder_prepended_to_path_precedes_installed_packages(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "site-packages"
    script(packages, "value = 'installed'\n", "some_pkg.py")
    script(packages, "from some_pkg import value\n", "other_pkg.py")
    script(packages, "", "plain_pkg.py")
    script(tmp_path / "code" / "vendor", "value = 'vendored'\n", "some_pkg.py")
    path = script(tmp_path / "code", VENDORED)
    cold, forked = both(tmp_path, sys.executable, path, env={"PYTHONPATH": str(packages)})
    assert cold.startswith("vendored vendored")
    assert forked == cold.replace("[]", "['plain_pkg']")


def test_path_known_only_at_run_time_causes_cold_start(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "import sys\nsys.path.insert(0, sys.argv[1])\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, "vendor")
        started, exited = await runtime.outcome(sys.executable, path, "vendor")
        assert started.cold_reason == (
            f"the standby cannot be forked: {path}, line 2: what it puts first on sys.path cannot "
            "be read"
        )
        assert exited.exit_code == 0, exited.stderr_tail

    warm(tmp_path / "logs", scenario)


def test_modules_of_working_directory_belong_to_worker(tmp_path: Path) -> None:
    for name in ("json.py", "socket.py", "array.py"):
        script(tmp_path / "work", "print('loaded')\n", name)
    path = script(tmp_path / "code", "import json, socket; print(json.dumps(1))\n")
    back = in_folder(tmp_path / "work")
    try:
        cold, forked = both(tmp_path, sys.executable, path)
    finally:
        back()
    assert forked == cold == "1\n"


def test_at_most_two_extra_stack_frames_are_visible(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "import traceback\nprint(len(traceback.extract_stack()))\n")
    cold, forked = both(tmp_path, sys.executable, path)
    assert (int(cold), int(forked)) == (1, 3)
