"""Run of a command at the lowest priority beside others.

`beside OUTPUT "LOWEST" COMMAND ...` runs the first command beside the second one. It gets the
processor time that the second one leaves, and must not wait for real time. Its output goes to a
file and is printed at its end. A failure of the second command stops the first one.

`beside OUTPUT "LOWEST" --before MARK "COMMAND" COMMAND ...` runs two commands beside the first
one: the last one begins when the other has created the file MARK, or has ended. From then on the
output of the other is held back and printed at the end. If the other fails before, the last one is
not run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

STOP_SECONDS = 10
POLL_SECONDS = 0.2
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


class _Output:
    """Output of a process, copied to ours until it is held back.

    A thread reads it, so that the process never waits for a reader.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._lock = threading.Lock()
        self._held: list[bytes] | None = None
        self._thread = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _copy(self, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 65536):
            with self._lock:
                if self._held is None:
                    _write(data)
                else:
                    self._held.append(data)

    def hold(self) -> None:
        with self._lock:
            self._held = []

    def print_rest(self) -> None:
        """Print what was held back, after the end of the process."""
        self._thread.join(STOP_SECONDS)
        with self._lock:
            _write(b"".join(self._held or []))
            self._held = None


def _write(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@contextmanager
def _lowest(command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the shell command at the lowest priority; stop it at the end if it still runs."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", LOWEST, "bash", command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            _stop(process)


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


def _run_overlapped(mark: Path, before: str, command: Sequence[str]) -> int:
    """Run `before` and, from its mark on, `command`; return the status of the one that failed."""
    mark.unlink(missing_ok=True)
    other = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", before],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output = _Output(other)
    try:
        while not mark.exists():
            with suppress(subprocess.TimeoutExpired):
                if status := other.wait(POLL_SECONDS):
                    return status
                output.print_rest()
                return _run(command)
        output.hold()
        return _run(command) or other.wait()
    finally:
        other.wait()
        output.print_rest()


def main(arguments: Sequence[str]) -> int:
    """Run the commands; return the status of one that failed, else 0."""
    output, lowest, *command = arguments
    with _lowest(lowest, Path(output)) as process:
        if command[0] == "--before":
            status = _run_overlapped(Path(command[1]), command[2], command[3:])
        else:
            status = _run(command)
        if status != 0:
            print(f"\n{lowest}: stopped; its output: {output}", flush=True)
            return status
        status = process.wait()
        print(f"\n{lowest}\n{Path(output).read_text(errors='replace')}", flush=True)
        return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
