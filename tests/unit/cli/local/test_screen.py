"""Unwritable output: it does not end the run, is dropped, and its failure can be queried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob_cli.local.display import Screen

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
            screen.flush()
        assert not screen.gone
        with pytest.raises(OSError, match="No space"):
            full.close()  # the rest of the buffer may be lost


def test_screen_delegates_to_its_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="latin-1") as file:
        screen = Screen(file)
        assert (screen.encoding, screen.isatty(), screen.fileno()) == (
            "latin-1",
            False,
            file.fileno(),
        )
        screen.write("text")
        screen.flush()
    assert (tmp_path / "out").read_text() == "text"
