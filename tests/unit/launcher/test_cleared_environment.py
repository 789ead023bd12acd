"""Commands that keep the variables of the job from the program that they run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob_launcher.command_line.environment import clearing
from elasticjob_launcher.programs.command_texts import (
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_TOTAL_BYTES,
    command_texts,
)
from elasticjob_launcher.programs.program_check import cleared_environment

CLEARING = {
    "env -i python t.py": "env -i",
    "env - python t.py": "env -",
    "env --ignore-environment python t.py": "env --ignore-environment",
    "env -vi A=b /usr/bin/python3 t.py": "env -vi",
    "/usr/bin/env -iS 'python t.py'": "env -iS",
    "env -S '-i python t.py'": "env -i",
    "env -u RANK python t.py": "env -u RANK",
    "env -uRANK python t.py": "env -u RANK",
    "env --unset=WORLD_SIZE python t.py": "env -u WORLD_SIZE",
    "env -i torchrun t.py": "env -i",
    "env -u PET_RDZV_ENDPOINT torchrun t.py": "env -u PET_RDZV_ENDPOINT",
    "busybox env -i python t.py": "env -i",
    "nice -n 5 env -i python t.py": "env -i",
    "tini -- env -i bash -c 'python t.py'": "env -i",
    "sudo python t.py": "sudo",
    "sudo -Hu me python t.py": "sudo",
    "sudo -nuEve python t.py": "sudo",
    "doas -u me python t.py": "doas",
    "su - me -c 'python t.py'": "su -",
    "su me --login -c 'python t.py'": "su --login",
    "su -lc 'python t.py' me": "su -lc",
    "su -c 'env -i python t.py' me": "env -i",
    "runuser -l me -c 'python t.py'": "runuser -l",
    "setpriv --reuid=1 --reset-env python t.py": "setpriv --reset-env",
    "apptainer exec --cleanenv img.sif python t.py": "apptainer --cleanenv",
    "pixi run --clean-env python t.py": "pixi --clean-env",
    "bash -c 'env -i python t.py'": "env -i",
    "bash -c 'env -i python t.py; echo done'": "env -i",
    "bash -c 'cd /x && exec env -i python t.py'": "env -i",
    "bash -c 'exec -cl python t.py'": "exec -cl",
    "bash -c 'if true; then sudo python t.py; fi'": "sudo",
    "bash -c 'exec sudo -u $U python t.py'": "sudo",
    "timeout 5 bash -c 'python p.py && sudo ./train.sh'": "sudo",
    "bash -c 'exec sudo -u me \"$@\"' -- python t.py": "sudo",
    "bash -c 'sudo $PYTHON t.py'": "sudo",
    "bash -c 'sudo $PYTHON'": "sudo",
    "bash -c 'env RANK=1 sudo python t.py'": "sudo",
    "sudo env A=b python t.py": "sudo",
    "sudo --preserve-env=PATH python t.py": "sudo",
    "bash -c 'sudo timeout $T python t.py'": "sudo",
    "bash -c 'sudo timeout $OPTIONS 5 python t.py'": "sudo",
    "bash -c 'sudo nice $LEVEL python t.py'": "sudo",
    "bash -c 'sudo -u me numactl -N $NODE -m $NODE python t.py'": "sudo",
    "bash -c 'sudo taskset -c $CPUS nice python t.py'": "sudo",
    "bash -c 'sudo conda run -n $NAME python t.py'": "sudo",
    "bash -c 'env -i wait-for-it $HOST:5432 -- torchrun t.py'": "env -i",
    "bash -c 'env -i $VENV/bin/python -u t.py'": "env -i",
    "bash -c 'sudo $VENV/bin/python -m t'": "sudo",
    "bash -c 'sudo $HOME/train.sh --lr 1'": "sudo",
    "bash -c 'doas -u $USER timeout $T python t.py'": "doas",
    "bash -c 'apptainer exec -e --bind $DATA:/data $IMAGE python t.py'": "apptainer -e",
    "bash -c 'runuser -l $USER -c \"timeout \\$T python t.py\"'": "runuser -l",
}
KEEPING = [
    "python t.py",
    "python t.py env -i",
    "env A=b python t.py",
    "env -u FOO python t.py",
    "env -u RANK -u WORLD_SIZE torchrun t.py",
    "env -C -i python t.py",
    "env -i",
    "sudo -E python t.py",
    "sudo -EHu me python t.py",
    "sudo --preserve-env python t.py",
    "sudo --preserve-env=RANK,WORLD_SIZE python t.py",
    "su me -c 'python t.py'",
    "su -w RANK,WORLD_SIZE -l me -c 'python t.py'",
    "runuser -u me python t.py -l",
    "apptainer exec --cleanenv --env RANK=1 img.sif python t.py",
    "bash -c 'env -i RANK=$RANK WORLD_SIZE=$WORLD_SIZE python t.py'",
    "bash -c 'env -i $(env | grep RANK) python t.py'",
    "bash -c 'env -i $VARS python t.py'",
    "bash -c 'sudo $VARS python t.py'",
    "bash -c 'sudo $(env | grep RANK) torchrun t.py'",
    "bash -c 'sudo -u me $VARS python -m t'",
    "bash -c 'sudo $OPTIONS -u me python t.py'",
    "bash -c 'sudo --preserve-env=$NAMES python t.py'",
    "bash -c 'sudo env RANK=$RANK WORLD_SIZE=$WORLD_SIZE python t.py'",
    "bash -c 'sudo env $VARS python t.py'",
    "bash -c 'sudo timeout $T env RANK=$RANK python t.py'",
    "bash -c 'sudo timeout $T env $VARS python t.py'",
    "bash -c 'apptainer exec -e $OPTIONS img.sif python t.py'",
    "bash -c 'sudo $(cat /etc/vars) python t.py'",
    "apptainer exec --cleanenv --env-file vars img.sif python t.py",
    "bash -c 'apptainer exec --cleanenv --env=$VARS img.sif python t.py'",
    "bash -c 'apptainer exec --cleanenv --env $VARS img.sif python t.py'",
    "bash -c 'apptainer exec --cleanenv $OPTIONS $IMAGE $PYTHON t.py'",
    "bash -c 'env -i make; python t.py'",
    "bash -c 'sudo mount /x; torchrun t.py; sudo umount /x'",
    "bash -c 'sudo sh setup.sh && exec \"$@\"' -- python t.py",
    "bash -c 'exec -a x python t.py'",
    "bash -c 'exec python t.py -c'",
    'bash -c "env -i \'python t.py"',
    "",
]


@pytest.mark.parametrize(("command", "by"), CLEARING.items())
def test_part_of_a_command_that_takes_the_variables_is_found(command: str, by: str) -> None:
    found = clearing(shlex.split(command))
    assert found is not None
    assert found.by.partition("S")[0] == by.partition("S")[0]


@pytest.mark.parametrize("command", KEEPING)
def test_command_that_keeps_the_variables_is_not_reported(command: str) -> None:
    assert clearing(shlex.split(command)) is None


@pytest.mark.parametrize(
    "command", [each for each in CLEARING if each.startswith(("env", "/usr/bin/env", "nice"))]
)
def test_program_behind_env_really_lacks_the_variables(command: str, tmp_path: Path) -> None:
    """The table agrees with the program of this machine."""
    names = ("RANK", "WORLD_SIZE", "PET_RDZV_ENDPOINT")
    script = tmp_path / "t.py"
    script.write_text(f"import os\nprint(all(name in os.environ for name in {names}))\n")
    for program in ("/usr/bin/python3", "python", "torchrun"):
        command = command.replace(f"{program} t.py", f"{sys.executable} {script}")
    environ = {**os.environ, **dict.fromkeys(names, "1")}
    done = subprocess.run(
        shlex.split(command), env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\ncd /tmp\nenv -i python t.py\n",
        "#!/bin/sh\nsudo apt-get update\nsudo -u me python t.py --x 1\n",
        "#!/usr/bin/env -iS /bin/sh\npython t.py\n",
    ],
)
@pytest.mark.parametrize("shell", [[], ["bash"]])
def test_script_that_takes_the_variables_is_reported(
    tmp_path: Path, text: str, shell: list[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    script.chmod(0o755)
    note = cleared_environment([*shell, str(script)], {"PATH": os.defpath})
    read_by_kernel = not shell or "env -iS" not in text
    assert ("a script of the command: " in note) is read_by_kernel
    assert ("have no RANK" in note) is read_by_kernel


@pytest.mark.parametrize("text", ["#!/usr/bin/env python3\nenv = 1\n", "#!/bin/sh\npython t.py\n"])
def test_script_that_keeps_the_variables_is_not_reported(tmp_path: Path, text: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    script.chmod(0o755)
    assert cleared_environment([str(script)], {"PATH": os.defpath}) == ""


PREPARING = "sudo apt-get install -y x\n"


@pytest.mark.parametrize(
    ("files", "command", "is_reported"),
    [
        ({"setup.sh": PREPARING}, "sh -c './setup.sh && python t.py'", False),
        ({"setup.sh": PREPARING}, "python t.py --hook setup.sh", False),
        ({"setup.sh": PREPARING}, "sh -c './setup.sh && ./train'", False),
        ({"setup.sh": "sudo ./install.sh\n"}, "torchrun t.py --hook ./setup.sh", False),
        ({"run.sh": "./setup.sh\npython t.py\n", "setup.sh": "sudo ./a.py\n"}, "sh run.sh", False),
        ({"run.sh": "./a.sh\n", "a.sh": "sudo python t.py\n"}, "sh run.sh", True),
        ({"run.sh": "./a.sh\nsudo ./b.sh\n", "a.sh": "python t.py\n"}, "sh run.sh", True),
        ({"entrypoint.sh": 'exec sudo -u me "$@"\n'}, "./entrypoint.sh python t.py", True),
        ({"entrypoint.sh": 'sudo ./a.sh\nexec "$@"\n'}, "./entrypoint.sh python t.py", False),
    ],
)
def test_only_scripts_that_run_the_training_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    command: str,
    is_reported: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(f"#!/bin/sh\n{text}")
        Path(name).chmod(0o755)
    note = cleared_environment(shlex.split(command), {"PATH": os.defpath})
    assert bool(note) is is_reported


def script_of(path: Path, text: str, size: int) -> str:
    """Write a script of this size with a comment; return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n#".ljust(size, "x"))
    path.chmod(0o755)
    return str(path)


def test_scripts_are_read_up_to_a_total_size(tmp_path: Path) -> None:
    """The command waits for the result, and each node finds the same."""
    size = MAX_FILE_BYTES
    for number in range(MAX_FILES):
        script_of(tmp_path / f"{number}.sh", f"{tmp_path}/{number + 1}.sh", size)
    texts = list(command_texts([f"{tmp_path}/0.sh"], {}, tmp_path))
    assert len(texts) - 1 == MAX_TOTAL_BYTES // size


def test_script_is_read_once_until_it_changes(tmp_path: Path) -> None:
    name = script_of(tmp_path / "run.sh", "env -i python t.py", 100)
    assert cleared_environment([name], {"PATH": os.defpath})
    before = Path(name).stat()
    script_of(tmp_path / "run.sh", "sudo -E python t.py", 100)
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cleared_environment([name], {"PATH": os.defpath}), "read before"
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not cleared_environment([name], {"PATH": os.defpath})
