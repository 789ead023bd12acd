"""What becomes of errors that no command handles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob_cli import main
from elasticjob_cli.errors import ExitCode

INTERRUPTED_IMPORT = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
sys.argv = ["elasticjob", "get"]
from elasticjob_cli.main import main
main()
"""


def test_ctrl_c_while_the_command_is_loaded_is_no_traceback() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (ExitCode.INTERRUPTED, "")


def test_output_that_nobody_can_take_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "elasticjob_cli", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == ExitCode.FAILED
    assert ran.stderr == "elasticjob: the output cannot be written: No space left on device\n"


def test_a_disk_that_is_full_elsewhere_is_not_taken_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def command() -> None:
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(main, "application", lambda first: lambda prog_name: command())
    with pytest.raises(OSError, match="some/file"):
        main.main()
