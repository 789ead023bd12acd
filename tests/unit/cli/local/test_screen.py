"""Unwritable output: it does not end the run, is dropped, and its failure can be queried."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from elasticjob_cli.local.display import LiveView
from elasticjob_cli.local.screen import Screen

SCRIPT = """
import sys
from elasticjob_cli.local import display
from elasticjob_cli.local.display import {view}
console = display.console()
view = {view}(console)
for number in range(3):
    view.note(0.0, "line")
view.output("pod", "text")
view.close()
print("nobody can read this", flush={flush})
print(view.gone, display.is_gone(console), file=sys.stderr)
"""


@pytest.mark.parametrize("view", ["PlainView", "LiveView"])
def test_closed_output_is_reported_once_and_breaks_nothing(view: str) -> None:
    read, written = os.pipe()
    os.close(read)
    script = SCRIPT.format(view=view, flush=True)
    ran = subprocess.run(
        [sys.executable, "-c", script],
        stdout=written,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(written)
    said = "elasticjob: the output was closed: stopping the job\nTrue True\n"
    assert (ran.returncode, ran.stderr) == (0, said)


def test_full_disk_does_not_break_the_screen(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        screen = Screen(full)
        for _ in range(3):
            assert screen.write("text\n") == 5
            screen.drain()
        assert not screen.gone
        assert not screen.busy


def test_unread_pipe_blocks_no_caller_and_gets_every_line() -> None:
    read, written = os.pipe()
    lines = [f"{number:09}\n" for number in range(200_000)]  # more than a pipe holds
    with open(written, "w", encoding="ascii") as file:  # noqa: PTH123
        screen = Screen(file)
        for line in lines:
            screen.write(line)
        assert screen.busy
        assert screen.congested
        got = b""
        while len(got) < 10 * len(lines):
            got += os.read(read, 1 << 20)
        screen.drain()
        assert not screen.congested
    os.close(read)
    assert got.decode() == "".join(lines)


def test_table_of_unread_terminal_is_not_drawn_again() -> None:
    read, written = os.pipe()
    with open(written, "w", encoding="ascii") as file:  # noqa: PTH123
        console = Console(file=cast("IO[str]", Screen(file)), force_terminal=True, width=80)
        view = LiveView(console)
        view.output("pod", "x" * 100_000)  # fills the pipe
        assert isinstance(console.file, Screen)
        before = len(console.file._pending)
        for number in range(100):
            view.note(0.0, f"note {number}")
        assert len(console.file._pending) == before
        reader = threading.Thread(target=view.close)
        reader.start()
        got = b""
        while b"note 99" not in got:
            got += os.read(read, 1 << 16)
        reader.join()
    os.close(read)
    assert got.count(b"x") == 100_000
    assert b"note 90" not in got


def test_screen_delegates_to_its_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="latin-1") as file:
        screen = Screen(file)
        assert (screen.encoding, screen.isatty(), screen.fileno()) == (
            "latin-1",
            False,
            file.fileno(),
        )
        screen.write("text")
        screen.drain()
    assert (tmp_path / "out").read_text() == "text"
