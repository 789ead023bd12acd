"""Files and folders that an import makes, and those of them that are removed afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import elasticjob_launcher

PROGRAM = """
import os, sys
from elasticjob_launcher.zygote.effects.import_effects import Effects
folder, told = os.environ["PLACE"], []
open(f"{folder}/old-{os.getpid()}.x", "w").close()
effects = Effects(told.append)
effects.start()
effects.begin()
import odd_pkg
effects.found()
effects.stop()
effects.clean_up()
print(len(told))
for name in os.listdir(folder):
    print(name.replace(str(os.getpid()), "PID"))
"""
OWN = "import os, pathlib; place = pathlib.Path(os.environ['PLACE'])\n"
READ = f"{OWN}pid = os.getpid()\n"
BY_CHANCE = f"{OWN}import other_pkg; pid = os.readlink('/proc/self')\n"


def removed(folder: Path, source: str) -> tuple[int, list[str]]:
    """Return the number of paths reported to the launcher, and the names that are left."""
    place = folder / "place"
    place.mkdir()
    (folder / "odd_pkg.py").write_text(source)
    (folder / "other_pkg.py").write_text("import os; os.getpid()\n")
    package = Path(elasticjob_launcher.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": f"{folder}:{package}", "PLACE": str(place)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=240)
    told, *names = done.stdout.split()
    assert "old-PID.x" in names
    return int(told), sorted({*names} - {"old-PID.x"})


def test_file_named_by_the_process_number_is_removed_by_the_process_alone(tmp_path: Path) -> None:
    source = f"{READ}(place / f'log-{{pid}}').touch(); (place / 'settings').touch()"
    assert removed(tmp_path, source) == (0, ["settings"])


KEPT = {
    "file with the number by chance": (BY_CHANCE, "(place / f'llvm-{pid}').touch()", "llvm-PID"),
    "folder with the number by chance": (BY_CHANCE, "(place / f'llvm-{pid}').mkdir()", "llvm-PID"),
    "folder": (READ, "(place / f'run-{pid}').mkdir()", "run-PID"),
    "compiled module": (READ, "(place / f'x.cpy-{pid}.pyc').touch()", "x.cpy-PID.pyc"),
}


@pytest.mark.parametrize("name", KEPT)
def test_path_with_the_process_number_that_a_worker_may_use_is_kept(
    tmp_path: Path, name: str
) -> None:
    start, makes, kept = KEPT[name]
    assert removed(tmp_path, f"{start}{makes}\n") == (0, [kept])


READS = {
    "a submodule alone": ("from odd_pkg import part\nloaded('odd_pkg.part')", "set()"),
    "its own status": ("open('/proc/self/stat').read()", "{'odd_pkg'}"),
    "memory of the machine": ("open('/proc/meminfo').read()", "set()"),
}


@pytest.mark.parametrize("name", READS)
def test_package_that_may_have_read_the_process_number_is_known(tmp_path: Path, name: str) -> None:
    """The recorder itself reads the status of the process after each module."""
    source, known = READS[name]
    (tmp_path / "odd_pkg").mkdir()
    (tmp_path / "odd_pkg" / "__init__.py").write_text(f"{source}\n")
    (tmp_path / "odd_pkg" / "part.py").write_text("x = 1\n")
    hook = "import builtins; builtins.loaded = effects.module_loaded"
    program = PROGRAM.partition("effects.found()")[0]
    program = program.replace("effects.begin()", f"{hook}\neffects.begin()")
    package = Path(elasticjob_launcher.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{package}", "PLACE": str(tmp_path)}
    command = [sys.executable, "-c", f"{program}\nprint(effects.identifiers._numbered)\n"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == known, done.stderr


FAILS = {
    "link": "os.symlink('/', old)",
    "socket": "import socket; socket.socket(socket.AF_UNIX).bind(str(old))",
}


@pytest.mark.parametrize("name", FAILS)
def test_older_file_in_the_place_of_a_new_one_is_kept(tmp_path: Path, name: str) -> None:
    source = (
        f"{READ}old = place / f'old-{{pid}}.x'\ntry:\n    {FAILS[name]}\nexcept OSError: pass\n"
    )
    assert removed(tmp_path, source) == (0, [])


def test_file_named_by_a_drawn_identifier_is_reported_and_removed(tmp_path: Path) -> None:
    source = f"{OWN}import uuid; (place / str(uuid.uuid4())).mkdir()"
    assert removed(tmp_path, source) == (1, [])
