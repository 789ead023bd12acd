"""Preloading by the standby: its selection, its import record, and the handling of its failures."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag, soon
from tests.integration.warm_start.warm_rig import (
    LOADED,
    SHARED,
    Warm,
    installed,
    replaced,
    said,
    said_warm,
    script,
    standby_of,
    standbys_of,
    warm,
)
from tests.paths import ROOT

__all__ = ["installed", "process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")


REFUSED = {
    "a rank": ("import os; value = os.environ.get('RANK')\n", "", "reads RANK"),
    "a rank, its error swallowed": (
        "import os\ntry: value = os.environ['RANK']\nexcept BaseException: value = None\n",
        "",
        "reads RANK",
    ),
    "a variable that a function sets": (
        "import os; value = int(os.environ.get('MODE', '0'))\n",
        "import os\ndef choose(): os.environ['MODE'] = '0'\n",
        "reads MODE, which your program sets",
    ),
    "a variable that is changed twice": (
        "import os; os.environ['MODE'] = value = '0'\n",
        "import os; os.environ['MODE'] = '1'\n",
        "changes MODE, which your program sets",
    ),
    "a number of threads that is set": (
        "import os; value = int(os.environ['OPENBLAS_NUM_THREADS']) - 2\n",
        "import os; os.environ['OPENBLAS_NUM_THREADS'] = '2'\n",
        "reads OPENBLAS_NUM_THREADS, which your program sets",
    ),
    "a module of the user's": ("from mine import value\n", "", "imports mine, which is your own"),
    "a thread": (
        "import threading, time; value = 0\n"
        "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n",
        "",
        "starts threads",
    ),
    "an event loop": ("import asyncio; loop, value = asyncio.new_event_loop(), 0\n", "", "opens a"),
    "a connection": ("import socket; ends, value = socket.socketpair(), 0\n", "", "opens a socket"),
    "an error": (
        "import os; value = 0\nif 'ELASTICJOB_ROUND' not in dict(os.environ): 1 / 0\n",
        "",
        "ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsafe_module_is_left_to_worker(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    source, before, words = REFUSED[name]
    (installed / "odd_pkg.py").write_text(source)
    script(tmp_path / "code", "value = 0\n", "mine.py")
    program = f"{LOADED}{before}import plain_pkg, odd_pkg\nprint(there, odd_pkg.value)\n"
    path = script(tmp_path / "code", program)
    assert said_warm(tmp_path / "logs", path) == "['plain_pkg'] 0\n"
    assert words in capfd.readouterr().err


def test_package_in_a_folder_of_pip_install_target_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`mine`, in the same folder but in no RECORD, is the user's own."""
    target = tmp_path / "target"
    for name, text in {
        "odd_pkg/__init__.py": "from odd_pkg.part import value\nimport single\n",
        "odd_pkg/part.py": "value = 1\n",
        "single.py": "",
        "mine.py": "",
        "odd-1.0.dist-info/RECORD": "odd_pkg/__init__.py,,\nodd_pkg/part.py,,\nsingle.py,,\n",
    }.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(target))
    program = (
        "import sys\nthere = [n for n in ('odd_pkg', 'odd_pkg.part', 'single', 'mine')"
        " if n in sys.modules]\nimport mine, odd_pkg\nprint(there, odd_pkg.value)\n"
    )
    said = said_warm(tmp_path / "logs", script(tmp_path / "code", program))
    assert said == "['odd_pkg', 'odd_pkg.part', 'single'] 1\n"
    assert "not preloaded" not in capfd.readouterr().err


def test_module_that_reads_a_variable_set_before_it_is_preloaded(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """tqdm, which torch imports, reads the whole environment."""
    (installed / "odd_pkg.py").write_text(
        "import os; value = [v for n, v in os.environ.items() if n.startswith('MODE')]\n"
    )
    (installed / "late_pkg.py").write_text("from odd_pkg import value as early\n"
        "import os; value = os.environ.get('MODE_B')\n")  # fmt: skip
    program = (
        f"{LOADED}import os; os.environ['MODE_A'] = '1'\nimport odd_pkg\n"
        "os.environ['MODE_B'] = '2'\nimport late_pkg\n"
        "print(there, odd_pkg.value, late_pkg.value, os.environ['MODE_A'])\n"
    )
    path = script(tmp_path / "code", program)
    said = said_warm(tmp_path / "logs", path)
    assert said == "['late_pkg', 'odd_pkg'] ['1'] 2 1\n"
    assert "not preloaded" not in capfd.readouterr().err


def test_module_that_may_be_imported_before_a_variable_is_set_finds_the_value_of_its_import(
    tmp_path: Path, installed: Path
) -> None:
    (installed / "odd_pkg.py").write_text(
        "import os; value = [v for n, v in os.environ.items() if n == 'MODE']\n"
    )
    program = (
        f"{LOADED}import os\nif len(sys.argv) > 5:\n    import odd_pkg\n"
        "os.environ['MODE'] = '1'\nimport odd_pkg\nprint(there, odd_pkg.value)\n"
    )
    said = said_warm(tmp_path / "logs", script(tmp_path / "code", program))
    assert said == "['odd_pkg'] ['1']\n"


def test_configured_module_that_reads_a_variable_of_the_program_is_left_to_worker(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The program may import it before it sets the variable, as here."""
    (installed / "odd_pkg.py").write_text("import os; value = os.environ.get('MODE')\n")
    program = (
        f"{LOADED}import importlib, os\nodd = importlib.import_module(''.join(['odd_pkg']))\n"
        "os.environ['MODE'] = '1'\nimport plain_pkg\nprint(there, odd.value)\n"
    )
    path = script(tmp_path / "code", program)

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path, modules=("odd_pkg",))).ready
        started, exited = await runtime.outcome(sys.executable, path)
        assert started.warm, started.cold_reason
        assert exited.exit_code == 0, exited.stderr_tail

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "['plain_pkg'] None\n"
    assert "odd_pkg: it reads MODE, which your program sets" in capfd.readouterr().err


def test_packages_that_import_threaded_module_are_left_out_individually(
    tmp_path: Path, installed: Path
) -> None:
    (installed / "thread_pkg.py").write_text(REFUSED["a thread"][0])
    names = [f"user{number}_pkg" for number in range(6)]
    for name in names:
        (installed / f"{name}.py").write_text("from thread_pkg import value\n")
    program = f"{LOADED}import plain_pkg, {', '.join(names)}\nprint(there)\n"
    path = script(tmp_path / "code", program)
    assert said_warm(tmp_path / "logs", path) == "['plain_pkg']\n"


def test_module_that_is_only_looked_for_costs_nothing(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch._dynamo looks for pandas, which starts threads; both may be imported by the program."""
    (installed / "thread_pkg.py").write_text(REFUSED["a thread"][0])
    (installed / "finder_pkg.py").write_text(
        "from importlib.util import find_spec\n"
        "spec = find_spec('thread_pkg')\n"
        "assert spec.origin.endswith('thread_pkg.py') and spec.loader.name == 'thread_pkg'\n"
        "assert find_spec('mine').origin.endswith('mine.py') and find_spec('no_such') is None\n"
    )
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("")
    path = script(tmp_path / "code", f"{LOADED}import thread_pkg, finder_pkg, mine\nprint(there)\n")
    assert said_warm(tmp_path / "logs", path) == "['finder_pkg']\n"
    told = capfd.readouterr().err
    assert "not preloaded: thread_pkg: it starts threads" in told
    assert "finder_pkg:" not in told


def test_part_of_a_lazy_package_that_starts_threads_does_not_cost_the_package(
    tmp_path: Path, installed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers loads its parts when they are used; one of them imports pandas."""
    (installed / "thread_pkg.py").write_text(REFUSED["a thread"][0])
    (installed / "heavy_pkg.py").write_text("import thread_pkg\n")
    lazy = installed / "lazy_pkg"
    lazy.mkdir()
    (lazy / "__init__.py").write_text(
        "import importlib\n"
        "def __getattr__(name):\n"
        "    if name not in ('trainer', 'model'): raise AttributeError(name)\n"
        "    return importlib.import_module('.' + name, __name__)\n"
    )
    (lazy / "trainer.py").write_text("import heavy_pkg\n")
    (lazy / "model.py").write_text("import plain_pkg\n")
    path = script(
        tmp_path / "code",
        "import sys; there = sorted(n for n in sys.modules if '_pkg' in n)\n"
        "from lazy_pkg import trainer, model\n"
        "assert 'thread_pkg' in sys.modules and sys.modules['lazy_pkg'].trainer is trainer\n"
        "print(there)\n",
    )
    assert said_warm(tmp_path / "logs", path) == "['lazy_pkg', 'lazy_pkg.model', 'plain_pkg']\n"
    told = capfd.readouterr().err.splitlines()
    assert [line.partition("not preloaded: ")[2] for line in told if "not preloaded" in line] == [
        "thread_pkg: it starts threads",
        "heavy_pkg: it imports thread_pkg, which is not preloaded",
        "lazy_pkg.trainer: it imports thread_pkg, which is not preloaded",
    ]


def test_rank_that_a_known_package_keeps_is_set_in_each_worker(
    tmp_path: Path, installed: Path
) -> None:
    """torchmetrics keeps LOCAL_RANK while it is imported, and Lightning imports it."""
    folder = installed / "torchmetrics" / "utilities"
    folder.mkdir(parents=True)
    (installed / "torchmetrics" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from torchmetrics.utilities.prints import rank_zero_only")
    (folder / "prints.py").write_text(
        "import os\n"
        "def rank_zero_only(): pass\n"
        "rank_zero_only.rank = getattr(rank_zero_only, 'rank', "
        "int(os.environ.get('LOCAL_RANK', 0)))\n"
    )
    path = script(
        tmp_path / "code",
        "import sys; there = 'torchmetrics.utilities.prints' in sys.modules\n"
        "from torchmetrics.utilities import rank_zero_only\n"
        "print(there, rank_zero_only.rank)\n",
    )

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready
        assert (await runtime.start(sys.executable, path, count=2)).warm
        await runtime.ended(2)

    warm(tmp_path / "logs", scenario)
    assert [said(tmp_path / "logs", 1, rank) for rank in (0, 1)] == ["True 0\n", "True 1\n"]


@pytest.mark.parametrize(
    ("name", "preloaded"), [("jemalloc_bg_thd", True), ("jemalloc_other", False)]
)
def test_only_threads_of_a_library_that_handles_forks_are_allowed(
    tmp_path: Path, installed: Path, name: str, preloaded: bool
) -> None:
    """pyarrow starts jemalloc's background thread, and with it the C library's signal handlers."""
    (installed / "thread_pkg.py").write_text(
        "import ctypes, threading, time\n"
        "named = threading.Event()\n"
        "def run():\n"
        f"    ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
        "    named.set(); time.sleep(100)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "named.wait()\n"
    )
    path = script(tmp_path / "code", f"{LOADED}import thread_pkg\nprint(there)\n")
    expected = ["thread_pkg"] if preloaded else []
    assert said_warm(tmp_path / "logs", path) == f"{expected}\n"


@pytest.mark.parametrize(
    ("first", "inner", "preloaded"),
    [
        ("", "random.random()", ["user_pkg"]),
        ("random.random()", "", []),
        ("random.seed(1)", "random.random()", []),
        ("random.random()", "random.random()", []),
    ],
)
def test_random_numbers_drawn_by_a_trusted_package_alone_are_allowed(
    tmp_path: Path, installed: Path, first: str, inner: str, preloaded: list[str]
) -> None:
    """rich draws numbers for its links while it is imported; Python seeds anew in each fork."""
    (installed / "rich.py").write_text(f"import random\n{inner}\n")
    (installed / "user_pkg.py").write_text(f"import random\n{first}\nimport rich\n")
    path = script(tmp_path / "code", f"{LOADED}import user_pkg\nprint(there)\n")
    assert said_warm(tmp_path / "logs", path) == f"{preloaded}\n"


def test_package_that_loads_our_torchrun_plug_in_is_preloaded(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's elastic modules load it through its entry point, from the launcher's folder."""
    monkeypatch.setenv("PYTHONPATH", f"{installed}{os.pathsep}{ROOT / 'sdk'}")
    (installed / "elastic_pkg.py").write_text(
        "import elasticjob_torchrun\nelasticjob_torchrun.plugin()\n"
    )
    path = script(tmp_path / "code", f"{LOADED}import elastic_pkg\nprint(there)\n")
    assert said_warm(tmp_path / "logs", path) == "['elastic_pkg']\n"


def test_start_that_waited_for_the_zygote_does_not_count_as_warm(
    tmp_path: Path, installed: Path
) -> None:
    ordered = tmp_path / "ordered"
    (installed / "slow_pkg.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(ordered)!r}): time.sleep(0.02)\n"
        "time.sleep(1.5)\n"
    )
    path = script(tmp_path / "code", f"{LOADED}import slow_pkg\nprint(there)\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.ask(sys.executable, path)
        await runtime.order(sys.executable, path)
        ordered.touch()
        started = await runtime.started()
        await runtime.ended()
        assert not started.warm
        waited = r"waited [0-9]+\.[0-9] s: the standby is still preloading"
        assert re.fullmatch(waited, started.cold_reason)

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "['slow_pkg']\n"


def test_workers_are_forked_at_once_while_the_zygote_loads_more(
    tmp_path: Path, installed: Path
) -> None:
    """The import takes long in the standby alone, as one that reads a slow disk does."""
    begun = tmp_path / "begun"
    begun.mkdir()
    (installed / "lazy_pkg.py").write_text(
        "import os, time\n"
        f"if 'ELASTICJOB_ROUND' not in dict(os.environ):\n"
        f"    os.utime({str(begun)!r}, (0, 0))\n    time.sleep(100)\n"
    )
    path = script(
        tmp_path / "code",
        "import time\ndef main():\n    import lazy_pkg\n    time.sleep(99)\nmain()\n",
    )

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        env = {"ELASTICJOB_ROUND": "1"}
        await runtime.start(sys.executable, path, env=env)
        await soon(lambda: begun.stat().st_mtime == 0)
        await runtime.kill()
        started = await runtime.start(sys.executable, path, env=env)
        assert started.warm, started.cold_reason
        await soon(lambda: len(standbys_of(started)) == 1)  # the one that was loading has ended
        await runtime.kill()

    warm(tmp_path / "logs", scenario)


LATER = {
    "threads": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
    "file": "import os\nwith open(os.environ['PLACE'], 'a') as file:\n    file.write('x')\n",
}


@pytest.mark.parametrize("name", LATER)
def test_later_import_that_is_refused_keeps_the_zygote_and_the_other_imports(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    (installed / "odd_pkg.py").write_text(LATER[name])
    (installed / "lazy_pkg.py").write_text("")
    path = script(
        tmp_path / "code",
        f"{LOADED}import time\nprint(there, flush=True)\ndef main():\n"
        "    import odd_pkg, lazy_pkg\n    time.sleep(99)\nmain()\n",
    )
    memory = tmp_path / "preload.json"

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, memory=str(memory))
        started = await runtime.start(sys.executable, path)
        await replaced(started)
        assert json.loads(memory.read_text())["excluded"] == ["odd_pkg"]
        await runtime.kill()
        started = await runtime.start(sys.executable, path)
        assert started.warm, started.cold_reason
        await runtime.told()
        await runtime.kill()

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 2) == "['lazy_pkg']\n"


def test_later_imports_are_recorded_and_program_modules_are_reloaded(
    tmp_path: Path, installed: Path
) -> None:
    (installed / "lazy_pkg.py").write_text("")
    own = tmp_path / "code" / "mine.py"
    program = (
        f"{LOADED}import mine, time\ndef main():\n    import lazy_pkg\n"
        "    print(there, mine.value, flush=True)\n    time.sleep(100)\nmain()\n"
    )
    path = script(tmp_path / "code", program)
    own.write_text("value = 1\n")
    memory = tmp_path / "preload.json"

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, memory=str(memory))
        started = await runtime.start(sys.executable, path)
        assert started.warm
        # Recorded 3, 10 and 60 s after the start; the scenario's own limit bounds this.
        await replaced(started)
        assert "lazy_pkg" in json.loads(memory.read_text())["learned"]
        await runtime.kill()
        own.write_text("value = 'two'\n")
        assert (await runtime.start(sys.executable, path)).warm
        await runtime.told()
        await runtime.kill()

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "[] 1\n"
    assert said(tmp_path / "logs", 2) == "['lazy_pkg'] two\n"


def test_imports_from_worker_specific_folder_are_not_recorded(
    tmp_path: Path, installed: Path
) -> None:
    for folder in (installed, tmp_path / "vendor"):
        script(folder, f"value = {folder.name!r}\n", "some_pkg.py")
    (installed / "lazy_pkg.py").write_text("")
    path = script(
        tmp_path / "code",
        f"import sys, time\ndef main():\n    sys.path.insert(0, {str(tmp_path / 'vendor')!r})\n"
        "    import some_pkg, lazy_pkg\n    print(some_pkg.value, flush=True)\n"
        "    time.sleep(100)\nmain()\n",
    )
    memory = tmp_path / "preload.json"

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, memory=str(memory))
        assert (await runtime.start(sys.executable, path)).warm
        while not memory.exists():
            await asyncio.sleep(0.02)
        learned = json.loads(memory.read_text())["learned"]
        assert ("lazy_pkg" in learned, "some_pkg" in learned) == (True, False)
        await runtime.kill()
        assert (await runtime.start(sys.executable, path)).warm
        await runtime.told()
        await runtime.kill()

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 2) == "vendor\n"


def test_selected_modules_are_preloaded(tmp_path: Path, installed: Path) -> None:
    path = script(tmp_path / "code", f"{LOADED}print(there)\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, modules=("plain_pkg",))
        assert (await runtime.outcome(sys.executable, path))[0].warm

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "['plain_pkg']\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("sh", "-c", "exit 0"), "the command is a shell"),
        ((sys.executable, "-c", "pass"), "option -c"),
        (("true",), "not a Python program"),
        ((sys.executable, "/dev/null", *["x" * 99_000] * 16), "longer than 200000 letters"),
    ],
)
def test_unsupported_command_is_started_cold(
    tmp_path: Path, argv: tuple[str, ...], words: str
) -> None:
    async def scenario(runtime: Warm) -> None:
        prepared = await runtime.prepare(*argv)
        assert not prepared.ready
        assert words in prepared.reason
        started, exited = await runtime.outcome(*argv)
        assert (started.warm, started.cold_reason) == (False, prepared.reason)
        assert exited.exit_code == 0

    warm(tmp_path / "logs", scenario)


def test_changed_environment_causes_one_cold_round(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "import os; print(os.environ['MODE'])\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path, env={**SHARED, "MODE": "1"})
        assert (await runtime.outcome(sys.executable, path, env={"MODE": "1"}))[0].warm
        started, _ = await runtime.outcome(sys.executable, path, env={"MODE": "2"})
        assert started.cold_reason == "the environment changed (MODE)"
        await runtime.until_ready()
        assert (await runtime.outcome(sys.executable, path, env={"MODE": "2"}))[0].warm

    warm(tmp_path / "logs", scenario)
    assert [said(tmp_path / "logs", number) for number in (1, 2, 3)] == ["1\n", "2\n", "2\n"]


def test_hung_zygote_delays_start_by_seconds_and_is_replaced(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "import time; time.sleep(100)\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        started = await runtime.start(sys.executable, path)
        zygote = standby_of(started)
        await runtime.kill()
        os.kill(zygote, signal.SIGSTOP)
        started = await runtime.start(sys.executable, path)
        assert "did not fork within" in started.cold_reason
        assert started.pids
        await runtime.until_ready()
        await runtime.kill()
        assert (await runtime.start(sys.executable, path)).warm

    warm(tmp_path / "logs", scenario)


def test_workers_forked_before_zygote_death_are_not_duplicated(
    tmp_path: Path,
) -> None:
    """Unreadable requests kill the standby after it has forked the first worker."""
    born = tmp_path / "born"
    born.mkdir()
    program = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(born)!r}, os.environ['RANK'] + '-' + str(os.getpid())).touch()\n"
        "time.sleep(100)\n"
    )
    path = script(tmp_path / "code", program)
    long = {f"ELASTICJOB_TEST_{number}": "x" * 100_000 for number in range(12)}

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        await runtime.order(sys.executable, path, count=4, env_of=lambda rank: long if rank else {})
        started = await runtime.started()
        assert (started.warm, len(started.pids)) == (False, 4)
        wanted = {f"{rank}-{pid}" for rank, pid in started.pids.items()}
        await soon(lambda: wanted <= {file.name for file in born.iterdir()})
        assert {file.name for file in born.iterdir()} == wanted
        await runtime.kill(4)

    warm(tmp_path / "logs", scenario)


def test_zygote_that_cannot_start_is_abandoned(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "print(1)\n")
    argv = (sys.executable, "-X", "no-such-thing=", "-W", "error", path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import os, sys\nif '-c' in sys.orig_argv: os._exit(9)\n"
    )

    async def scenario(runtime: Warm) -> None:
        env = {"PYTHONPATH": str(tmp_path / "broken")}
        await runtime.prepare(*argv, env={**SHARED, **env})
        assert runtime.prepared.reason == (
            "given up after 4 standbys: the standby ended with exit code 9"
        )
        started, exited = await runtime.outcome(*argv, env=env)
        assert (started.warm, exited.exit_code) == (False, 0)

    warm(tmp_path / "logs", scenario)


def test_round_stops_while_its_zygote_is_loading(tmp_path: Path, installed: Path) -> None:
    (installed / "slow_pkg.py").write_text(
        f"import time, pathlib\npathlib.Path({str(tmp_path / 'loads')!r}).touch()\n"
        "time.sleep(100)\n"
    )
    path = script(tmp_path / "code", "import slow_pkg\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.ask(sys.executable, path)
        await soon((tmp_path / "loads").exists)
        await runtime.order(sys.executable, path)
        await runtime.runtime.stop(1, 0)
        await runtime.stopped()

    warm(tmp_path / "logs", scenario)


LIMITS = {
    "time": (
        "ELASTICJOB_STANDBY_SECONDS",
        "10",
        "if 'ELASTICJOB_ROUND' not in dict(os.environ): time.sleep(100)\n",
        "preloading used no processor for 10 s, importing greedy_pkg",
    ),
    "memory": (
        "ELASTICJOB_STANDBY_MIB",
        "200",
        "if 'ELASTICJOB_ROUND' not in dict(os.environ): held = b'1' * (1 << 28); time.sleep(99)\n",
        "the standby grew over 200 MiB, importing greedy_pkg",
    ),
    "memory, once all is imported": (
        "ELASTICJOB_STANDBY_MIB",
        "1",
        "",
        "the standby grew over 1 MiB",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_zygote_above_memory_limit_is_ended_and_workers_start_cold(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variable, limit, source, reason = LIMITS[name]
    monkeypatch.setenv(variable, limit)
    (installed / "greedy_pkg.py").write_text(
        f"import os, time, pathlib\nvalue = 'well'\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n{source}"
    )
    path = script(tmp_path / "code", "import greedy_pkg; print(greedy_pkg.value)\n")

    async def scenario(runtime: Warm) -> None:
        prepared = await runtime.prepare(sys.executable, path)
        assert (prepared.ready, prepared.reason.startswith(reason)) == (False, True), prepared
        zygotes = [file.name for file in tmp_path.iterdir() if file.name.isdigit()]
        await soon(lambda: not any(Path("/proc", pid).exists() for pid in zygotes))
        started, exited = await runtime.outcome(sys.executable, path, env={"ELASTICJOB_ROUND": "1"})
        assert (started.warm, started.cold_reason) == (False, prepared.reason)
        assert exited.exit_code == 0, exited.stderr_tail

    warm(tmp_path / "logs", scenario)
    assert said(tmp_path / "logs", 1) == "well\n"


def test_slow_zygote_is_retried_once(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt may be slow, for example while an image's files are first read."""
    monkeypatch.setenv("ELASTICJOB_STANDBY_SECONDS", "10")
    (installed / "slow_pkg.py").write_text(
        f"import pathlib, time\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch()\n    time.sleep(100)\n"
    )
    path = script(tmp_path / "code", "import slow_pkg\n")

    async def scenario(runtime: Warm) -> None:
        assert not (await runtime.prepare(sys.executable, path)).ready
        started, exited = await runtime.outcome(sys.executable, path)
        assert started.cold_reason == "preloading used no processor for 10 s, importing slow_pkg"
        assert exited.exit_code == 0, exited.stderr_tail
        await runtime.until_ready()
        assert (await runtime.outcome(sys.executable, path))[0].warm

    warm(tmp_path / "logs", scenario)
