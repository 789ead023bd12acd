"""Check of the files of a program that is to run once for each worker."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elasticjob_launcher.programs import program_files
from elasticjob_launcher.programs.program_check import ProgramError, node_launch
from elasticjob_launcher.settings import (
    Settings,
    SettingsError,
    read_settings,
    worker_environment,
)

CONSOLE = "import sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    {name}()\n"


def settings_of(
    *options: str, command: Sequence[str] = ("sh", "x"), several: str = "1"
) -> Settings:
    environ = {"ELASTICJOB_SOCKET": "/tmp/s", "ELASTICJOB_SEVERAL_NODES": several}
    return read_settings([*options, "--", *command], environ)


def reason_of(file: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the reason to run a program with this file once for the node."""
    return node_launch(settings_of("--program", file, several="0"), environ or {})


def program(folder: Path, text: str | bytes) -> str:
    path = folder / "train"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "first",
    ["#!/bin/sh", "#!/bin/bash -e", "#! /usr/bin/env bash", "#!/usr/bin/env -S bash -euo pipefail"],
)
def test_shell_script_is_refused(tmp_path: Path, first: str) -> None:
    path = program(tmp_path, f"{first}\npython train.py\n")
    with pytest.raises(ProgramError, match=r"is a shell script.*set spec\.launch to PerNode"):
        reason_of(path)
    with pytest.raises(ProgramError, match=path):
        reason_of("train", {"PATH": f"/nowhere:{tmp_path}"})


@pytest.mark.parametrize(
    ("module", "name", "launcher"),
    [
        ("torch.distributed.run", "main", "torchrun"),
        ("accelerate.commands.launch", "main", "accelerate launch"),
        ("torch.distributed", "run", "torchrun"),
        ("deepspeed.launcher.runner", "main", "deepspeed"),
        ("deepspeed.launcher", "runner", "deepspeed"),
        ("deepspeed", "main", "deepspeed"),
    ],
)
def test_console_script_of_a_launcher_runs_once_for_the_node(
    tmp_path: Path, module: str, name: str, launcher: str
) -> None:
    text = "#!/opt/conda/bin/python3.11\n" + CONSOLE.format(module=module, name=name)
    path = program(tmp_path, text)
    assert reason_of(path) == f"{path} starts {launcher}"


TRAMPOLINES = [
    f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n"
    for python in (
        '"/a folder/bin/python3.11"',
        "/a/long/folder/bin/python",
        "/opt/pypy/bin/pypy3",
        '"$(dirname -- "$(realpath -- "$0")")"/\'python3\'',
    )
]
"""Beginnings of console scripts by pip, distlib and uv."""


@pytest.mark.parametrize("first", TRAMPOLINES)
def test_console_script_that_a_shell_starts_is_a_python_program(tmp_path: Path, first: str) -> None:
    text = first + CONSOLE.format(module="my.package", name="main")
    path = program(tmp_path, text)
    assert not reason_of(path)
    if "realpath" not in first:
        folder = tmp_path / "a folder"
        python = folder / "python3"
        folder.mkdir()
        python.symlink_to(sys.executable)
        named = re.sub(r"exec' .*(python|pypy)\S*", f'exec\' "{python}"', first)
        started = program(tmp_path, f"{named}print('python')\n")
        assert subprocess.run([started], capture_output=True, text=True).stdout == "python\n"
        assert not reason_of(started)
    launcher = first + CONSOLE.format(module="torch.distributed.run", name="main")
    assert reason_of(program(tmp_path, launcher)).endswith("train starts torchrun")
    script = first.splitlines()[0] + "\nexec python train.py\n" + first
    with pytest.raises(ProgramError, match="is a shell script"):
        reason_of(program(tmp_path, script))


def test_pipe_in_place_of_a_program_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train")
    assert not reason_of(str(tmp_path / "train"))


def test_shim_of_pyenv_is_accepted(tmp_path: Path) -> None:
    shim = (
        '#!/usr/bin/env bash\nset -e\n[ -n "$PYENV_DEBUG" ] && set -x\n\nprogram="${0##*/}"\n\n'
        'export PYENV_ROOT="/opt/pyenv"\nSHIM_PATH=${0%/*}\n'
        'if [[ $SHIM_PATH != "/opt/pyenv/shims" ]]; then\n'
        '  export _PYENV_SHIM_PATH="$SHIM_PATH"\nfi\n'
        'exec "/opt/pyenv/libexec/pyenv" exec "$program" "$@"\n'
    )
    assert not reason_of(program(tmp_path, shim))
    prepared = shim.replace("set -e", "set -e\npython prepare.py")
    for other in (shim + "torchrun t.py\n", shim.replace('"$program"', "torchrun"), prepared):
        with pytest.raises(ProgramError, match="is a shell script"):
            reason_of(program(tmp_path, other))


@pytest.mark.parametrize(
    "text",
    [
        b"\x7fELF\x02\x01",
        "",
        "#!",
        "#!/opt/conda/bin/python\n" + CONSOLE.format(module="my.package", name="main"),
        "#!/usr/bin/env python\nfrom torch.distributed.run import get_args_parser\n",
        "#!/usr/bin/perl\n",
        "#!/usr/bin/env python\nimport deepspeed\n",
        "#!/usr/bin/env python\nimport deepspeed\nimport main\nmain.main()\n",
        "#!/usr/bin/env python\nfrom deepspeed import initialize\n",
        "#!/usr/bin/env python\nimport deepspeed.comm\n",
        "#!/usr/bin/env python3\n" + "x = 1\n" * 1000 + "from torch.distributed.run import main\n",
    ],
    ids=str,
)
def test_other_file_is_accepted(tmp_path: Path, text: str | bytes) -> None:
    assert not reason_of(program(tmp_path, text))


def test_program_of_a_launcher_that_reaches_no_other_node_is_refused_for_several(
    tmp_path: Path,
) -> None:
    text = "#!/usr/bin/env python\nimport sys\nimport deepspeed.launcher.runner\n"
    path = program(tmp_path, text)
    one = settings_of("--program", path, several="0")
    assert node_launch(one, {}) == f"{path} starts deepspeed"
    several = settings_of("--program", path)
    with pytest.raises(ProgramError, match="train starts deepspeed, which does not join") as found:
        node_launch(several, {})
    assert "set spec.maxNodes to 1" in str(found.value)


@pytest.mark.parametrize(
    ("source", "launcher"),
    [
        ("import subprocess\nsubprocess.run(['torchrun', 'gang.py'])\n", "torchrun"),
        ("import torch.distributed.run as r\nr.main(['gang.py'])\n", "torchrun"),
        ("import os\nos.system('accelerate launch gang.py')\n", "accelerate launch"),
    ],
)
def test_python_program_that_starts_a_launcher_runs_once_for_the_node(
    tmp_path: Path, source: str, launcher: str
) -> None:
    path = tmp_path / "run_all.py"
    path.write_text(source)
    command = ("python3", str(path))
    for several in ("0", "1"):
        reason = node_launch(settings_of("--check", command=command, several=several), {})
        assert reason == f"{path}, line 2 starts {launcher}"
    assert not node_launch(settings_of(command=command), {})  # an explicit spec.launch
    path.write_text("print('no launcher')\n")
    assert not node_launch(settings_of("--check", command=command), {})


TRAINING = {
    "evaluation": (
        "import subprocess, sys, torch\ntrain()\n"
        "subprocess.run([sys.executable, '-m', 'torch.distributed.run', 'gang.py'])\n"
    ),
    "evaluation of a group": (
        "import subprocess\nimport torch.distributed as dist\ndist.init_process_group()\n"
        "subprocess.run(['torchrun', '--nproc-per-node=1', 'eval.py'])\n"
    ),
    "harness": "import os, torch\ntrain()\nos.system('accelerate launch -m lm_eval x')\n",
    "function of torchrun": (
        "import torch\nfrom torch.distributed import run\ntrain()\nrun.main(['eval.py'])\n"
    ),
    "asks for its rank": (
        "import os, subprocess\nprint(os.environ['RANK'])\nsubprocess.run(['torchrun', 'x.py'])\n"
    ),
}


@pytest.mark.parametrize("source", TRAINING.values(), ids=TRAINING)
def test_program_that_may_train_and_then_starts_a_launcher_is_refused(
    tmp_path: Path, source: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    for several in ("1", "0"):
        settings = settings_of("--check", command=("python3", str(path)), several=several)
        with pytest.raises(ProgramError, match=r"train\.py, line \d starts .* may train") as found:
            node_launch(settings, {})
        assert "set spec.launch to PerNode" in str(found.value)
        assert "or to PerWorker" in str(found.value)


def test_program_of_slurm_alone_or_beside_a_training_is_refused_for_several_nodes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text("import subprocess, torch\nsubprocess.check_output(['srun', 'hostname'])\n")
    for several, said in (("1", "does not join the job's rendezvous"), ("0", "may train besides")):
        settings = settings_of("--check", command=("python3", str(path)), several=several)
        with pytest.raises(ProgramError, match=said):
            node_launch(settings, {})


@pytest.mark.parametrize("first", ["from torch.distributed import run", "import sys"])
def test_program_whose_training_is_the_launchers_runs_once_for_the_node(
    tmp_path: Path, first: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{first}\nfrom torch.distributed.run import main\nmain(['gang.py'])\n")
    settings = settings_of("--check", command=("python3", str(path)))
    assert node_launch(settings, {}) == f"{path}, line 3 starts torchrun"


def test_function_of_the_program_is_its_training_on_one_node(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom accelerate import notebook_launcher\ndef train(): pass\n"
        "notebook_launcher(train, num_processes=2)\n"
    )
    one = settings_of("--check", command=("python3", str(path)), several="0")
    assert node_launch(one, {}) == f"{path}, line 4 starts notebook_launcher"
    with pytest.raises(ProgramError, match="may train besides"):
        node_launch(settings_of("--check", command=("python3", str(path))), {})


def test_analysis_without_a_result_in_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\n")
    settings = settings_of("--check", command=("python3", str(path)))
    assert not node_launch(settings, {})
    monkeypatch.setattr(program_files, "MAX_SECONDS", -1.0)
    with pytest.raises(ProgramError, match=r"train\.py could not be searched.*set spec\.launch"):
        node_launch(settings, {})


def test_missing_program_is_left_to_its_start(tmp_path: Path) -> None:
    assert not reason_of(str(tmp_path / "absent"))
    assert not reason_of("absent", {"PATH": str(tmp_path)})
    assert not reason_of(str(tmp_path))


def test_program_is_read_after_the_other_options() -> None:
    environ = {"ELASTICJOB_LAUNCHER_SOCKET": "/tmp/s"}
    words = ["--setup", "1", "true", "--prepare", "--check"]
    words += ["--program", "./train", "--", "sh", "x"]
    settings = read_settings(words, environ)
    assert settings.several_nodes  # without the variable of an older operator
    assert not read_settings(words, {**environ, "ELASTICJOB_SEVERAL_NODES": "0"}).several_nodes
    assert "ELASTICJOB_SEVERAL_NODES" not in worker_environment({"ELASTICJOB_SEVERAL_NODES": "0"})
    assert (settings.program, settings.argv) == ("./train", ("sh", "x"))
    assert (settings.prepare, settings.check) == (True, True)
    assert not read_settings(["--", "--check", "x"], environ).check
    assert read_settings(["--", "--program", "x"], environ).program == ""
    for wrong in (["--program"], ["--program", "", "--", "x"]):
        with pytest.raises(SettingsError, match="--program must be followed by a file"):
            read_settings(wrong, environ)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --nproc_per_node=8 t.py", "torchrun"),
        ("nice -n 5 numactl -N 0,1 /opt/bin/torchrun t.py", "torchrun"),
        ("env A=1 timeout -k 5 9s accelerate launch t.py", "accelerate launch"),
        ("gosu me python3 -u -m torch.distributed.run t.py", "torchrun"),
        ("nohup deepspeed --num_gpus 8 t.py", "deepspeed"),
        ("conda run -n x torchrun t.py", "torchrun"),
        ("uv run --extra gpu -m torch.distributed.run t.py", "torchrun"),
        ("py-spy record -o x -- torchrun t.py", "torchrun"),
        ("python -m cProfile -o x -m torch.distributed.run t.py", "torchrun"),
        ("coverage run -m accelerate.commands.launch t.py", "accelerate launch"),
        ("env -S 'nice torchrun t.py'", "torchrun"),
        ("su me -c 'torchrun t.py'", "torchrun"),
        ("bash -c '# both\nexec nice -n 5 torchrun t.py 2>&1'", "torchrun"),
    ],
)
def test_prepared_command_that_is_a_launcher_runs_once_for_the_node(
    command: str, launcher: str
) -> None:
    words = shlex.split(command)
    settings = settings_of("--check", command=words, several="0")
    assert node_launch(settings, {}) == f"the command {words[0]} starts {launcher}"
    assert not node_launch(settings_of(command=words), {})  # an explicit spec.launch
    if launcher == "deepspeed":
        with pytest.raises(ProgramError, match="deepspeed, which does not join"):
            node_launch(settings_of("--check", command=words), {})


@pytest.mark.parametrize(
    "command",
    ["./train torchrun t.py", "nice -n 5 ./train torchrun t.py", "python3 x/t.py torchrun t.py",
     "gosu torchrun ./train x", "timeout 9 /bin/echo deepspeed t.py", "env A=torchrun ./train x",
     "python3 -c pass torchrun t.py", "conda run -n torchrun ./train x",
     "sudo -u torchrun ./train x"],
)  # fmt: skip
def test_prepared_command_with_a_launcher_in_its_arguments_runs_for_each_worker(
    command: str,
) -> None:
    assert not node_launch(settings_of("--check", command=command.split()), {})


@pytest.mark.parametrize(
    "command",
    ["uv run {}", "python -m cProfile -s time {}", "coverage run {}", "nsys profile -o x python {}",
     "my-wrapper python3 {}", "bash -c 'cd_is_no_program=1 exec python {} --lr 1 2>&1'"],
)  # fmt: skip
def test_program_behind_a_wrapper_is_searched_for_launchers(tmp_path: Path, command: str) -> None:
    path = tmp_path / "run_all.py"
    path.write_text("import subprocess\nsubprocess.run(['torchrun', 'gang.py'])\n")
    settings = settings_of("--check", command=shlex.split(command.format(path)))
    assert node_launch(settings, {}) == f"{path}, line 2 starts torchrun"
