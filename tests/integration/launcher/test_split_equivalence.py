"""Splits of generated shell lines in real shells: the worker's command gets the words, environment
and working directory that the line as written gives it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher.preparation import CODE, DESCRIPTOR, PYTHON, REPORT
from elasticjob_operator.domain.manifests.trainer_command import trainer_command
from elasticjob_operator.model.types import LaunchReason

SHELLS = ["bash", "dash"]
PIECES = (
    *("cd sub", "export A='b c'", "B=1", "export B", ". ./env.sh", "unset A", "umask 077", "true"),
    *(
        'X="$A-$B"',
        "C=$(echo two; echo lines)",
        "export C",
        "echo '; exec python' > f",
        "ulimit -n 99",
    ),
    *("printf '%s' \"it's\" >> f || true", "false || D=4", "IFS=,", "E='1,2'", "set -f", "# note"),
    *("cat > g <<E\n$A && python\nE", "test -d sub && cd sub", "export P=`pwd`", "set -a", "F=6"),
    *("set -- 1 '2 3' \"$A\"", "set -- $B"),
)
CONNECTORS = ("; ", "\n", " && ")
LASTS = (
    "{} a \"$A\" '$A' $B",
    'exec {} $X "$X" $C',
    'V=1 W="$A" {} $E "${{D:-none}}"',
    "{} * # a comment",
    "{} \\\n  --x \\\n  $D\"$D\"'$D'\n",
    "env -u A {} $(echo 1 2) `echo 3`;",
    'exec {} "$@" $# $1 "$*"',
)
RECORD = """
import json, os, sys
mask = os.umask(0)
json.dump([sys.argv[1:], dict(os.environ), os.getcwd(), mask], open(os.environ["OUT"], "w"))
"""


def generated(seed: int, program: str) -> str:
    chosen = random.Random(seed)
    text = ""
    for _ in range(1 + chosen.randrange(6)):
        piece = chosen.choice(PIECES)
        text += piece + ("\n" if "<<" in piece or "#" in piece else chosen.choice(CONNECTORS))
    return text + chosen.choice(LASTS).format(program)


def folder(path: Path) -> Path:
    (path / "sub" / "sub").mkdir(parents=True)
    for place in (path, path / "sub", path / "sub" / "sub"):
        (place / "env.sh").write_text("A=sourced; G=7; export G\n")
    return path


def run(command: list[str], cwd: Path, env: dict[str, str], fd: int = -1) -> int:
    fds = (fd,) if fd >= 0 else ()
    return subprocess.run(
        command, cwd=cwd, env=env, pass_fds=fds, capture_output=True, timeout=60, check=False
    ).returncode


def cleaned(found: list[Any]) -> list[Any]:
    argv, env, *rest = found
    own = ("_", PYTHON, CODE, DESCRIPTOR)
    return [argv, {name: value for name, value in env.items() if name not in own}, *rest]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("seed", range(60))
def test_split_line_starts_the_command_that_the_whole_line_starts(
    tmp_path: Path, shell: str, seed: int
) -> None:
    record = tmp_path / "record.py"
    record.write_text(RECORD)
    line = generated(seed, f"{sys.executable} {record}")
    place, base = tmp_path / "place", {"PATH": os.environ["PATH"]}
    out, split = tmp_path / "whole.json", tmp_path / "split.json"
    words = [shell, "-c", line, "name", "first word", "*"]
    whole = run(words, folder(place), {**base, "OUT": str(out)})
    place.rename(tmp_path / "used")

    found = trainer_command(words, (), 8)
    assert found.reason is LaunchReason.PREPARATION_SPLIT
    read_fd, write_fd = os.pipe()
    own = {PYTHON: sys.executable, CODE: REPORT, DESCRIPTOR: str(write_fd), "OUT": str(split)}
    code = run(list(found.words), folder(place), {**base, **own}, write_fd)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        text = file.read()
    assert (whole == 0) == (code == 0), line
    if whole:
        return
    report = json.loads(text)
    Path(report["cwd"]).chmod(0o755)
    env = {name: value for name, value in report["env"].items() if name not in own}
    subprocess.run(
        report["argv"],
        cwd=report["cwd"],
        env={**env, "OUT": str(split)},
        umask=report["umask"],
        check=True,
        timeout=60,
    )
    expected, actual = (cleaned(json.loads(path.read_text())) for path in (out, split))
    expected[1]["OUT"] = actual[1]["OUT"]
    assert actual == expected, line
