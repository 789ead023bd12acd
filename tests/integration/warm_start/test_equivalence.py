"""Equivalence of forked and fresh workers: process state, `__main__`, exit.

Each program is run twice, cold and warm, with the same output and effects.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.launcher_rig import process_tag, soon
from tests.integration.warm_start.warm_rig import (
    SHARED,
    Warm,
    children_of,
    console_script,
    in_folder,
    parent_of,
    running,
    said,
    script,
    warm,
)

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

LOOK = """
import json, os, signal, sys, threading
import __main__
value = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "main": [__name__, __main__.__dict__ is globals(), getattr(__main__, "__file__", None)],
    "package": [__package__, __spec__ and __spec__.name, type(__loader__).__name__],
    "names": sorted(set(globals()) - {"value"}),
    "cwd": os.getcwd(), "stdin": sys.stdin.read(), "tty": sys.stdout.isatty(),
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.write_through],
    "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "umask": os.umask(0o22),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3],
    "fd_count": len(os.listdir("/proc/self/fd")),
    "environ": {k: v for k, v in sorted(os.environ.items()) if not k.startswith("TORCHEL")},
    "signals": {s.name: str(signal.getsignal(s)) for s in sorted(signal.valid_signals())
                if isinstance(s, signal.Signals)},
    "mask": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "thread": [threading.current_thread() is threading.main_thread(), threading.active_count()],
    "gc": __import__("gc").isenabled(), "hook": sys.excepthook is sys.__excepthook__,
    "ours": sorted(name for name in sys.modules if "launcher" in name or "elasticjob" in name),
    "parent": open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[0],
    "command": open("/proc/self/cmdline").read().split("\\0"),
    "process": open("/proc/self/comm").read(),
    "shown": sorted(v for v in open("/proc/self/environ").read().split("\\0") if v
                    and "ERROR_FILE" not in v),
}
print(json.dumps(value, indent=1))
"""


def both(tmp_path: Path, *argv: str, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return a program's output of a cold and of a warm start; both must end alike."""

    async def scenario(runtime: Warm) -> None:
        started, cold = await runtime.outcome(*argv, env=env)
        assert not started.warm
        await runtime.prepare(*argv, env={**SHARED, **(env or {})})
        assert runtime.prepared.ready, runtime.prepared.reason
        started, forked = await runtime.outcome(*argv, env=env)
        assert started.warm, started.cold_reason
        assert (forked.exit_code, forked.signal) == (cold.exit_code, cold.signal)

    warm(tmp_path / "logs", scenario)
    return said(tmp_path / "logs", 1), said(tmp_path / "logs", 2)


@pytest.mark.parametrize(
    "options",
    [(), ("-u",), ("-O", "-Xdev"), ("-I",), ("-W", "error", "-B"), ("-Xwarn_default_encoding",)],
)
def test_script_state_is_same_warm_and_cold(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = script(tmp_path / "code", LOOK)
    cold, forked = both(tmp_path, sys.executable, *options, path, "--lr", "0.1 x")
    assert forked == cold


def test_relative_script_behind_symlink_is_same_warm_and_cold(tmp_path: Path) -> None:
    script(tmp_path / "code", LOOK)
    (tmp_path / "link.py").symlink_to("code/train.py")
    back = in_folder(tmp_path)
    try:
        cold, forked = both(tmp_path, sys.executable, "link.py")
    finally:
        back()
    assert forked == cold


def test_folder_with_main_module_is_same_warm_and_cold(tmp_path: Path) -> None:
    path = script(tmp_path / "code", LOOK, "__main__.py")
    cold, forked = both(tmp_path, sys.executable, str(Path(path).parent))
    assert forked == cold


def test_package_module_state_is_same_warm_and_cold(tmp_path: Path) -> None:
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, "LOOK = 1\n", "package/other.py")
    script(tmp_path, f"from .other import LOOK\n{LOOK}", "package/train.py")
    back = in_folder(tmp_path)
    try:
        cold, forked = both(tmp_path, sys.executable, "-m", "package.train", "--lr", "0.1")
    finally:
        back()
    assert forked == cold


def test_folder_of_the_program_as_current_folder_is_same_warm_and_cold(tmp_path: Path) -> None:
    path = script(tmp_path / "code", LOOK, "__main__.py")
    back = in_folder(Path(path).parent)
    try:
        cold, forked = both(tmp_path, sys.executable, ".")
    finally:
        back()
    assert forked == cold


def test_package_of_a_module_finds_main_without_a_file_warm_and_cold(tmp_path: Path) -> None:
    script(tmp_path, "import __main__\nprint(vars(__main__).get('__file__'))", "pkg/__init__.py")
    script(tmp_path, "print(__file__)", "pkg/train.py")
    back = in_folder(tmp_path)
    try:
        cold, forked = both(tmp_path, sys.executable, "-m", "pkg.train")
    finally:
        back()
    assert forked == cold
    assert cold.splitlines()[0] == "None"


def test_interpreter_that_a_script_of_pyenv_selects_is_shown_warm_and_cold(tmp_path: Path) -> None:
    path = script(tmp_path / "code", LOOK)
    selects = f'#!/bin/sh\nshift 2\nexec {sys.executable} "$@"\n'
    Path(script(tmp_path, selects, "pyenv")).chmod(0o755)
    shim = Path(
        script(tmp_path, f'#!/bin/sh\nexec "{tmp_path}/pyenv" exec "python" "$@"\n', "python")
    )
    shim.chmod(0o755)
    cold, forked = both(tmp_path, str(shim), path)
    assert forked == cold


@pytest.mark.parametrize("line", [f"#!{sys.executable}", f"#! {sys.executable} -B"])
def test_console_script_state_is_same_warm_and_cold(tmp_path: Path, line: str) -> None:
    path = console_script(tmp_path / "bin", LOOK)
    Path(path).write_text(f"{line}\n{LOOK}")
    cold, forked = both(tmp_path, path, "--lr", "0.1")
    assert '"process": "train\\n"' in cold
    assert forked == cold


def test_console_script_of_a_shell_is_same_warm_and_cold(tmp_path: Path) -> None:
    """As pip writes it for a long path of the interpreter."""
    path = console_script(tmp_path / "bin", LOOK)
    lines = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
    Path(path).write_text(f"{lines}\n{LOOK}")
    cold, forked = both(tmp_path, path, "--lr", "0.1")
    assert '"process": "python' in cold
    assert forked == cold


FAILURES = {
    "raised": "def inner():\n    raise ValueError('no')\n\ninner()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('x') from e\n",
    "syntax": "def broken(:\n",
    "system exit": "raise SystemExit(7)\n",
    "a message": "import sys; sys.exit('the data is not there')\n",
    "interrupted": "raise KeyboardInterrupt\n",
    "at exit": "import atexit; atexit.register(print, 'bye'); raise SystemExit(3)\n",
    "threads": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start(); 1 / 0\n",
    "own hook": "import sys\nsys.excepthook = lambda k, v, t: print(k, v, t.tb_lineno,"
    " t.tb_frame.f_code.co_filename)\n1 / 0\n",
    "own hook that fails": "import sys\ndef hook(k, v, t):\n    {}['key']\n"
    "sys.excepthook = hook\n1 / 0\n",
    "own hook that cannot be called": "import sys\nsys.excepthook = None\n1 / 0\n",
    "removed hook": "import sys\ndel sys.excepthook\n1 / 0\n",
    "own hook that ends the program": "import sys\n"
    "sys.excepthook = lambda *a: sys.exit(5)\n1 / 0\n",
    "a message of a signal handler": "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *a: sys.exit('stopped'))\n"
    "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n",
    "segment": "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)\n",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    "missing import": "import no_such_module_at_all\n",
}


@pytest.mark.parametrize("name", FAILURES)
def test_exit_is_same_warm_and_cold(tmp_path: Path, name: str) -> None:
    path = script(tmp_path / "code", FAILURES[name])
    cold, forked = both(tmp_path, sys.executable, path)
    if name == "segment":  # the forked one has launcher frames below its own
        assert "Fatal Python error: Segmentation fault" in forked
        assert f'File "{path}", line 1 in <module>' in forked
    else:
        assert forked == cold


def test_missing_script_error_is_same_warm_and_cold(tmp_path: Path) -> None:
    cold, forked = both(tmp_path, sys.executable, str(tmp_path / "absent.py"))
    assert "can't open file" in cold
    assert forked == cold


SPAWNING = """
import multiprocessing as mp, os, sys
def square(x):
    return x * x, os.getppid() == parent if (parent := mp.parent_process().pid) else None
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(2) as pool:
            print(method, sorted(pool.map(square, range(4)))[-1][0])
"""


def test_multiprocessing_works_with_every_start_method(tmp_path: Path) -> None:
    path = script(tmp_path / "code", SPAWNING)
    cold, forked = both(tmp_path, sys.executable, path)
    assert forked == cold == "fork 9\nspawn 9\nforkserver 9\n"


def test_each_worker_has_its_own_random_numbers(tmp_path: Path) -> None:
    source = (
        "import random, uuid, numpy, torch, multiprocessing.process as mp\n"
        "print(random.random(), torch.rand(1).item(), numpy.random.rand(), uuid.uuid4(),"
        " bytes(mp.current_process().authkey).hex(), sep='\\n')\n"
    )
    path = script(tmp_path / "code", source)

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready
        for _ in range(2):
            assert (await runtime.start(sys.executable, path, count=2)).warm
            await runtime.ended(2)

    warm(tmp_path / "logs", scenario)
    words = [word for number in (1, 2) for rank in (0, 1)
             for word in said(tmp_path / "logs", number, rank).split()]  # fmt: skip
    assert len(words) == len(set(words)) == 20


def test_worker_ends_with_launcher_and_survives_zygote(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "import time, os; print(os.getpid(), flush=True)\n"
                  "time.sleep(100)\n")  # fmt: skip

    async def scenario(runtime: Warm) -> None:
        assert (await runtime.prepare(sys.executable, path)).ready
        started = await runtime.start(sys.executable, path)
        worker = started.pids[0]
        launcher = parent_of(worker)
        zygote = next(p for p in children_of(launcher) if p != worker)
        os.kill(zygote, signal.SIGKILL)
        # The standby is replaced; a next round is forked from it, maybe after a round that waited.
        await soon(lambda: any(p not in (worker, zygote) for p in children_of(launcher)))
        assert Path(f"/proc/{worker}").exists()
        assert (await runtime.kill())[0].signal == signal.SIGKILL
        for _ in range(20):
            started = await runtime.start(sys.executable, path)
            if started.warm:
                break
            assert started.cold_reason.startswith("waited ")
            await runtime.kill()
        assert started.warm, started.cold_reason
        os.kill(launcher, signal.SIGKILL)
        await soon(lambda: not running(started.pids[0]))

    warm(tmp_path / "logs", scenario)
