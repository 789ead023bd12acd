"""Commands that can be forked, and the reasons given for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticjob_launcher.zygote.command import ColdStart, Program, parse_command

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
        ("/bin/sleep 1", "no Python program"),
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
    with pytest.raises(ColdStart, match="no Python program"):
        parse_command([str(tool)], PATH)


def test_pipe_in_place_of_a_program_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train")
    with pytest.raises(ColdStart, match="train is no file"):
        parse_command([str(tmp_path / "train")], PATH)
