"""Standard streams of a process started without any: they are opened on /dev/null."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import os, subprocess, sys
from elasticjob_launcher.standard_streams import open_missing
open_missing()
held = os.open("/", os.O_RDONLY)
subprocess.run(["sh", "-c", "echo lost; echo lost >&2; ls -l /proc/self/fd/0 > $0", sys.argv[1]])
with open(sys.argv[1], "a") as file:
    print(held, [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)], file=file)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_standard_streams_are_replaced_by_null_device(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    found = tmp_path / "found"
    redirections = " ".join(f"{fd}>&-" for fd in closed)
    script = f'exec "$0" -c "$1" "$2" {redirections}'
    subprocess.run(
        ["sh", "-c", script, sys.executable, LOOK, str(found)],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    of_child, own = found.read_text().splitlines()
    assert of_child.endswith("-> /dev/null")
    held, links = own.split(" ", 1)
    assert int(held) > 2, "it would have been taken for a stream"
    assert [links.split("'")[1 + 2 * fd] for fd in closed] == ["/dev/null"] * len(closed)
