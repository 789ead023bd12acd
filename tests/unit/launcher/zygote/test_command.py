"""Commands that can be forked, and the reasons given for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticjob_launcher.zygote.command import ColdStart, Program, parse_command, require_forkable

PATH = "/nowhere"


@pytest.mark.parametrize(
    ("argv", "options", "module", "target", "arguments"),
    [
        ("python train.py", (), False, "train.py", ()),
        ("/opt/conda/bin/python3.12 -u train.py --lr 1", ("-u",), False, "train.py", ("--lr", "1")),
        ("python3 -uOO -X dev -Werror -W ignore t.py", ("-u", "-O", "-O", "-Xdev", "-Werror",
         "-Wignore"), False, "t.py", ()),
        ("python -m pkg.train -m x", (), True, "pkg.train", ("-m", "x")),
        ("python -um pkg.train", ("-u",), True, "pkg.train", ()),
        ("python -mpkg", (), True, "pkg", ()),
        ("python -u -- -t.py --", ("-u",), False, "-t.py", ("--",)),
        ("python --check-hash-based-pycs never t.py",
         ("--check-hash-based-pycs", "never"), False, "t.py", ()),
    ],
)  # fmt: skip
def test_python_commands(
    argv: str, options: tuple[str, ...], module: bool, target: str, arguments: tuple[str, ...]
) -> None:
    words = argv.split()
    expected = Program(words[0], options, module, target, arguments, tuple(words), {})
    assert parse_command(words, PATH) == expected


def test_env_prefix_is_followed() -> None:
    found = parse_command(["env", "A=1", "B=x=y", "python", "-u", "t.py"], PATH)
    assert (found.env, found.command) == ({"A": "1", "B": "x=y"}, ("python", "-u", "t.py"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("bash -c x", "a shell"),
        ("torchrun t.py", "starts the workers itself"),
        ("python -m torch.distributed.run t.py", "starts the workers itself"),
        ("python -m accelerate.commands.launch t.py", "starts the workers itself"),
        ("python -c pass", "option -c"),
        ("python -i t.py", "option -i"),
        ("python -x t.py", "option -x"),
        ("python --version", "--version"),
        ("python -", "standard input"),
        ("python", "standard input"),
        ("python -m", "names no module"),
        ("python t.pyc", "compiled"),
        ("env -i python t.py", "env -i"),
        ("env", "no command"),
        ("no-such-program", "was not found"),
        ("/bin/sleep 1", "not a Python program"),
    ],
)
def test_command_without_warm_start_reports_the_reason(argv: str, words: str) -> None:
    with pytest.raises(ColdStart, match=words):
        parse_command(argv.split(), PATH)


@pytest.mark.parametrize(
    ("head", "interpreter", "options"),
    [
        ("#!/opt/venv/bin/python3\n", "/opt/venv/bin/python3", ()),
        ("#! /usr/bin/python -Es\n", "/usr/bin/python", ("-E", "-s")),
        ("#!/usr/bin/env python3\n", "python3", ()),
        ("#!/bin/sh\n'''exec' \"/a long/bin/python3\" \"$0\" \"$@\"\n' '''\n",
         "/a long/bin/python3", ()),
    ],
)  # fmt: skip
def test_console_scripts(
    tmp_path: Path, head: str, interpreter: str, options: tuple[str, ...]
) -> None:
    tool = tmp_path / "train"
    tool.write_text(f"{head}import train\n")
    tool.chmod(0o755)
    found = parse_command(["train", "--lr", "1"], str(tmp_path))
    assert (found.interpreter, found.options) == (interpreter, options)
    assert (found.target, found.arguments) == (str(tool), ("--lr", "1"))


def test_script_of_another_language_starts_cold(tmp_path: Path) -> None:
    tool = tmp_path / "train"
    tool.write_text("#!/bin/sh\nexec python train.py\n")
    with pytest.raises(ColdStart, match="not a Python program"):
        parse_command([str(tool)], PATH)


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_script_that_cannot_be_executed_starts_cold(tmp_path: Path, ending: str) -> None:
    """A carriage return belongs to the name of the interpreter."""
    tool = tmp_path / "train"
    tool.write_text(f"#!/usr/bin/python3{ending}import train{ending}", newline="")
    tool.chmod(0o755 if ending == "\r\n" else 0o644)
    with pytest.raises(ColdStart, match=r"not a Python program|not executable"):
        parse_command([str(tool)], PATH)


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        ("python -v t.py", {}, "-v reports the imports"),
        ("python -X importtime=2 t.py", {}, "-Ximporttime=2 reports the imports"),
        ("python t.py", {"PYTHONVERBOSE": "1"}, "PYTHONVERBOSE reports the imports"),
        ("python -I t.py", {"PYTHONVERBOSE": "1"}, ""),
        ("python t.py", {"PYTHONVERBOSE": ""}, ""),
        ("python t.py", {"PYTHONVERBOSE": "0"}, ""),
        ("python t.py", {"PYTHONPROFILEIMPORTTIME": "0"}, "PYTHONPROFILEIMPORTTIME reports"),
    ],
)
def test_program_whose_imports_are_reported_starts_cold(
    argv: str, env: dict[str, str], words: str
) -> None:
    program = parse_command(argv.split(), PATH)
    if words:
        with pytest.raises(ColdStart, match=words):
            require_forkable(program, {"PATH": PATH, **env})
    else:
        require_forkable(program, {"PATH": PATH, **env})


PYENV = (
    '#!/usr/bin/env bash\nset -e\n[ -n "$PYENV_DEBUG" ] && set -x\n\nprogram="${0##*/}"\n'
    '%sexport PYENV_ROOT="/opt/py env"\nexec "/opt/py env/libexec/pyenv" exec "$program" "$@"\n'
)
FILE = (
    'if [[ "$program" = "python"* ]]; then\n  for arg; do\n    case "$arg" in\n'
    '    -c* | -- ) break ;;\n    */* )\n      if [ -f "$arg" ]; then\n        export %s\n'
    "        break\n      fi\n      ;;\n    esac\n  done\nfi\n\n"
)
SHIM_PATH = (
    'SHIM_PATH=${0%%/*}\nif [[ $SHIM_PATH != "/opt/py env/shims" ]]; then\n'
    '  export _PYENV_SHIM_PATH="$SHIM_PATH"\nfi\n'
)
ASDF = '#!/usr/bin/env bash\n# asdf-plugin: python 3.11.4\n%s "python" "$@"%s\n'


@pytest.mark.parametrize(
    ("script", "starts_cold"),
    [
        ('#!/bin/sh\nexec /usr/bin/python3 "$@"\n', True),
        (PYENV % "", False),
        (PYENV % (FILE % 'PYENV_FILE_ARG="$arg"'), False),
        (PYENV % (FILE % 'PYENV_DIR="${arg%/*}"'), False),
        (PYENV % (SHIM_PATH % ()), False),
        (PYENV % "export A=$LOCAL_RANK\n", True),
        (PYENV % (SHIM_PATH % () + "export A=$LOCAL_RANK\n"), True),
        # A search that tries each line in several ways would not end.
        ("#!/bin/sh\n" + "# x  \n" * 500 + "true\n", True),
        ("#!/bin/sh\n" + "    \n" * 500 + "true\n", True),
        (PYENV % (FILE % "A=$LOCAL_RANK"), True),
        (ASDF % ("exec asdf exec", ""), False),
        (ASDF % ("exec /opt/asdf/bin/asdf exec", " # asdf_allow: ' asdf '"), False),
        (ASDF % ("export A=$LOCAL_RANK\nexec asdf exec", ""), True),
        (ASDF % ("A=$LOCAL_RANK exec asdf exec", ""), True),
        (ASDF % ("exec env A=$LOCAL_RANK asdf exec", ""), True),
        (ASDF % ("exec asdf exec", "\necho ended"), True),
    ],
)
def test_script_in_place_of_the_interpreter_starts_cold_unless_it_selects_a_version(
    tmp_path: Path, script: str, starts_cold: bool
) -> None:
    """It may give each worker other variables, such as a device by its rank."""
    (tmp_path / "python").write_text(script)
    (tmp_path / "python").chmod(0o755)
    program = parse_command(["python", "t.py"], str(tmp_path))
    if starts_cold:
        with pytest.raises(ColdStart, match=f"{tmp_path}/python is a script"):
            require_forkable(program, {"PATH": str(tmp_path)})
    else:
        require_forkable(program, {"PATH": str(tmp_path)})


def test_pipe_in_place_of_a_program_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train")
    with pytest.raises(ColdStart, match="train is not a file"):
        parse_command([str(tmp_path / "train")], PATH)
