"""Variables set by a program before its imports: visible to C code loaded by those imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag
from tests.integration.warm_start.test_equivalence import both
from tests.integration.warm_start.warm_rig import Warm, replaced, said, said_warm, script, warm

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

TORCH = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
there = "torch" in __import__("sys").modules
import torch, torch.distributed as dist, threadpoolctl
print(torch.get_num_threads(), dist.get_debug_level())
print(sorted((p["internal_api"], p["num_threads"]) for p in threadpoolctl.threadpool_info()))
print({name: os.environ[name] for name in sorted(os.environ) if "NUM_THREADS" in name})
print(there, file=__import__("sys").stderr)
"""


def test_variables_read_at_torch_import_are_honoured(tmp_path: Path) -> None:
    path = script(tmp_path / "code", TORCH)
    cold, forked = both(tmp_path, sys.executable, path, env={"OMP_NUM_THREADS": "1"})
    assert cold.startswith("2 DebugLevel.DETAIL\n")
    assert forked == cold.replace("False\n", "True\n")


OPENBLAS = """
import os
{text}
import threadpoolctl
print([each["num_threads"] for each in threadpoolctl.threadpool_info()])
"""
REMOVED = 'os.environ.pop("OMP_NUM_THREADS")'


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (f"{REMOVED}\nimport numpy", True),
        ('os.putenv("OPENBLAS_NUM_THREADS", "2")\nimport numpy', True),
        (f"import numpy\n{REMOVED}", False),
    ],
)
def test_threads_of_openblas_follow_the_changes_before_it_alone(
    tmp_path: Path, text: str, changed: bool
) -> None:
    path = script(tmp_path / "code", OPENBLAS.format(text=text))
    cold, forked = both(tmp_path, sys.executable, path, env={"OMP_NUM_THREADS": "1"})
    assert forked == cold
    if len(os.sched_getaffinity(0)) > 1:
        assert (cold != "[1]\n") == changed


# `getenv` as called by C code at its loading, and the value that Python sees.
NATIVE = """
import ctypes, os
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
value = {name: getenv(name.encode()) for name in ("PLAIN", "PUT", "TAKEN", "LATE", "CALLED")}
"""
SETTING = """
import os, sys
os.environ["PLAIN"] = "1"
os.putenv("PUT", "1")
os.environ.pop("TAKEN", None)
there = sorted(name for name in sys.modules if name.endswith("_pkg"))
def choose(value):
    os.environ.setdefault("CALLED", value)
import early_pkg
choose("2")
import native_pkg
before = dict(os.environ).get("LATE")
os.environ["LATE"] = "1"
print(early_pkg.value, native_pkg.value, before)
print(there, file=sys.stderr)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site-packages"
    for name in ("early_pkg.py", "native_pkg.py"):
        script(folder, NATIVE, name)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_any_variable_takes_effect_from_its_assignment(tmp_path: Path, installed: Path) -> None:
    path = script(tmp_path / "code", SETTING)
    cold, forked = both(tmp_path, sys.executable, path, env={"TAKEN": "1"})
    assert "'PLAIN': b'1', 'PUT': b'1', 'TAKEN': None, 'LATE': None, 'CALLED': b'2'" in cold
    assert forked == cold.replace("[]", "['early_pkg', 'native_pkg']")


BORN = """
import ctypes, os, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(os.environ.get("PLAIN"), getenv(b"PLAIN"), getenv(b"PUT"), os.environ.get("TAKEN"))
os.environ["PLAIN"] = "1"; os.putenv("PUT", "1"); del os.environ["TAKEN"]
import native_pkg
"""


def test_worker_starts_with_its_given_environment(tmp_path: Path, installed: Path) -> None:
    path = script(tmp_path / "code", BORN)
    cold, forked = both(tmp_path, sys.executable, path, env={"TAKEN": "1"})
    assert forked == cold == "None None None 1\n"


UNKNOWN = {
    "an argument": "os.environ['VALUE'] = sys.argv[1]",
    "a condition": "if len(sys.argv) > 1:\n    os.environ['VALUE'] = '1'",
    "a function": "def choose():\n    os.environ['VALUE'] = sys.argv[1]\nchoose()",
    "a file": "import mine",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_value_known_only_at_run_time_causes_cold_start(
    tmp_path: Path, installed: Path, name: str
) -> None:
    script(tmp_path / "code", f"import os, sys\n{UNKNOWN['an argument']}\n", "mine.py")
    path = script(tmp_path / "code", f"import os, sys\n{UNKNOWN[name]}\nimport native_pkg\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, "x")
        started, exited = await runtime.outcome(sys.executable, path, "x")
        assert not started.warm
        assert ": it sets VALUE to what cannot be read, before it imports native_pkg" in (
            started.cold_reason
        )
        assert exited.exit_code == 0, exited.stderr_tail

    warm(tmp_path / "logs", scenario)


HARMLESS = {
    "of the worker's own": "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']",
    "after the imports": "import native_pkg\nos.environ['VALUE'] = sys.argv[1]",
    "before modules of Python's": "os.environ['VALUE'] = sys.argv[0]\nimport json\nsys.exit()",
    "in a function that is called later": "import native_pkg\ndef main():\n"
    "    os.environ['VALUE'] = sys.argv[0]\nmain()",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_value_unreadable_by_imports_causes_no_cold_start(
    tmp_path: Path, installed: Path, name: str
) -> None:
    source = HARMLESS[name].replace("sys.argv[1]", "sys.argv[0]")
    said_warm(tmp_path / "logs", script(tmp_path / "code", f"import os, sys\n{source}\n"))


def test_imports_after_environment_change_are_not_recorded(tmp_path: Path, installed: Path) -> None:
    script(installed, "", "plain_pkg.py")
    path = script(
        tmp_path / "code",
        "import sys, time\nthere = sorted(n for n in sys.modules if n.endswith('_pkg'))\n"
        "def main():\n    import os, plain_pkg\n    os.environ['LATE'] = sys.argv[0]\n"
        "    import native_pkg\n    print(there, native_pkg.value['LATE'] is not None)\n"
        "    sys.stdout.flush()\n    time.sleep(100)\nmain()\n",
    )
    memory = tmp_path / "preload.json"

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, memory=str(memory))
        started = await runtime.start(sys.executable, path)
        assert started.warm
        await replaced(started)
        assert "plain_pkg" in memory.read_text()
        assert "native_pkg" not in memory.read_text()
        await runtime.kill()
        assert (await runtime.start(sys.executable, path)).warm
        await runtime.told()
        await runtime.kill()

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 2) == "['plain_pkg'] True\n"


def test_folders_appended_to_path_are_searched(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    script(
        packages, "try:\n    import extra\nexcept ImportError:\n    extra = None\n", "some_pkg.py"
    )
    script(tmp_path / "more" / "site-packages", "", "extra.py")
    path = script(
        tmp_path / "code",
        f"import sys\nsys.path.append({str(tmp_path / 'more' / 'site-packages')!r})\n"
        "import some_pkg\nprint(some_pkg.extra is not None, sys.path[-1])\n",
    )
    cold, forked = both(tmp_path, sys.executable, path, env={"PYTHONPATH": str(packages)})
    assert cold.startswith("True")
    assert forked == cold


def test_appended_folder_known_only_at_run_time_causes_cold_start(
    tmp_path: Path,
) -> None:
    path = script(tmp_path / "code", "import sys\nsys.path.append(sys.argv[1])\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, "vendor")
        started, _ = await runtime.outcome(sys.executable, path, "vendor")
        assert started.cold_reason == (
            f"the standby cannot be forked: {path}, line 2: what it appends to sys.path cannot be "
            "read"
        )

    warm(tmp_path / "logs", scenario)


def test_edited_program_is_read_again(tmp_path: Path, installed: Path) -> None:
    imports = "import native_pkg\nprint(native_pkg.value['PLAIN'])\n"
    path = script(tmp_path / "code", imports)

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        assert (await runtime.outcome(sys.executable, path))[0].warm
        script(tmp_path / "code", f"{imports}print('edited')\n")
        assert (await runtime.outcome(sys.executable, path))[0].warm
        script(tmp_path / "code", f"import os\nos.environ['PLAIN'] = '1'\n{imports}")
        started, _ = await runtime.outcome(sys.executable, path)
        assert started.cold_reason == "the program has changed, in what it sets before its imports"
        await runtime.until_ready()
        assert (await runtime.outcome(sys.executable, path))[0].warm

    warm(tmp_path / "logs", scenario)
    told = [said(tmp_path / "logs", number) for number in (1, 2, 3, 4)]
    assert told == ["None\n", "None\nedited\n", "b'1'\n", "b'1'\n"]
