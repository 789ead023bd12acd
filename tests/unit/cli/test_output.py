"""Printing of the CLI: one way to the terminal, one line for each text."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml

from elasticjob_cli.commands.options import as_json, as_yaml
from elasticjob_cli.commands.tables import aligned
from elasticjob_cli.output import log_line, show, show_log, show_text
from elasticjob_rendezvous.protocol.text import printable
from tests.paths import ROOT

PRINTS = {"echo", "secho", "print"}
CONSOLE = "cli/elasticjob_cli/local/display.py"
"""Prints with a console of rich, after the same functions."""


def test_commands_print_only_through_the_output_module() -> None:
    found = []
    for path in sorted(ROOT.glob("cli/**/*.py")):
        name = str(path.relative_to(ROOT))
        if name in (CONSOLE, "cli/elasticjob_cli/output.py"):
            continue
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                text = getattr(called, "attr", getattr(called, "id", ""))
                found += [f"{name}:{node.lineno}"] if text in PRINTS else []
    assert found == []


def test_each_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show("a\nb\x1b[2J", "\u202ec")
    show_text("two\nlines\r\n", err=True)
    written = capsys.readouterr()
    assert written.out == "a\\nb\\x1b[2J\n\\u202ec\n"
    assert written.err == "two\nlines\\r\n"


def test_cell_with_newline_or_tab_stays_in_its_row() -> None:
    assert aligned([("NAME", "X"), ("a\nb\tc", "1")]) == ["NAME      X", "a\\nb\\tc   1"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext", "plain\ttext"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[38;2;1;2;3mrgb", "\x1b[38;2;1;2;3mrgb\x1b[0m"),
        ("\x1b[2Jx\x1b[?1049h\x1b[5A", "\\x1b[2Jx\\x1b[?1049h\\x1b[5A"),
        ("\x1b]0;t\x07\x9b31m", "\\x1b]0;t\\x07\\x9b31m"),
        ("  1%\r 50%\r100%\r", "100%"),
        ("\r", ""),
        (f"\x1b[{'1;' * 40}m", f"\\x1b[{'1;' * 40}m"),
    ],
)
def test_log_line_keeps_colours_only(line: str, shown: str) -> None:
    assert log_line(line) == shown


HOSTILE = "a\x1b\x7f\x85\u202e\u2028\ufeff\U000e0041\tb\nc"


@pytest.mark.parametrize("text", ["d\u00e9j\u00e0 vu", HOSTILE])
def test_objects_are_printable_and_can_be_read_back(text: str) -> None:
    for write, read in ((as_json, json.loads), (as_yaml, yaml.safe_load)):
        written = write({"a": text})
        assert printable(written) == written
        assert "\t" not in written
        assert read(written) == {"a": text}


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_terminal_without_colours_gets_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "typer._click.utils.should_strip_ansi", lambda *_: False
    )  # as at a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show_log("a-0 ", "\x1b[31mred")
    monkeypatch.setenv(name, "dumb")
    show_log("a-0 ", "\x1b[31mred")
    assert capsys.readouterr().out == "a-0 \x1b[31mred\x1b[0m\na-0 red\n"
