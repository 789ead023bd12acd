"""Run of a command at the lowest priority beside another: `beside OUTPUT "COMMAND" COMMAND ...`.

The first command gets the processor time that the second one leaves, and must not wait for real
time. Its output goes to a file and is printed at its end. A failure of the second command stops
the first one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 10
LOWEST = """
{ echo 19 > /proc/self/autogroup; } 2>/dev/null || true
exec nice -n19 bash -euo pipefail -c "$1"
"""
"""Start of a command with the lowest priority. Linux groups processes by session, and within a
session only their niceness counts; between sessions, that of the group.
"""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children; they have a session of their own."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, wanted)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def main(output: Path, nice: str, command: Sequence[str]) -> int:
    """Run the shell command `nice` beside `command`; return the status of the one that failed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as log:
        filler = subprocess.Popen(
            ["bash", "-c", LOWEST, "bash", nice],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            status = subprocess.run(command, check=False).returncode
            if status == 0:
                status = filler.wait()
                print(f"\n{nice}\n{output.read_text(errors='replace')}", flush=True)
                return status
            print(f"\n{nice}: stopped; its output: {output}", flush=True)
            return status
        finally:
            _stop(filler)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
