"""A terminal that accepts no output does not block the job that writes to it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess

import pytest

from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, read_all, rig, until

__all__ = ["rig"]

UNREAD = 100
"""Lines of 1,000 characters: more than a pseudo-terminal buffers (64 KiB)."""


@pytest.mark.parametrize("options", [["--logs"], ["--logs", "--plain"]], ids=["table", "plain"])
def test_terminal_that_accepts_no_output_blocks_no_recovery(
    rig: LocalRig, options: list[str]
) -> None:
    """As after Ctrl-S: nobody reads the terminal while the job runs, recovers and is scaled."""
    (rig.job / "talk").touch()  # each worker prints more in a moment than a terminal holds
    ours, theirs = pty.openpty()
    runner = subprocess.Popen(
        rig.command("run", rig.manifest(), *options),
        env={**rig.env, "TERM": "xterm-256color"},
        cwd=rig.job,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    rig.runners.append(runner)
    before = rig.running(2)["rendezvous"]["round"]
    victim: int = until(lambda: rig.workers().get(1), "the worker of rank 1")
    os.kill(victim, signal.SIGKILL)
    before = rig.running(2, after=before)["rendezvous"]["round"]
    assert rig.call("scale", "job", "--nodes", "3").returncode == 0
    rig.running(3, after=before)
    until(lambda: logged(rig) > UNREAD, "more lines than the terminal holds")
    rig.finish()
    until(lambda: rig.status().get("phase") == "Succeeded", "the end of the job")
    assert runner.poll() is None, "its last lines are not written yet"
    written = read_all(ours)
    assert runner.wait(PATIENCE_SECONDS) == 0
    assert b"job: Succeeded after" in written
    # The table wraps long lines; other text has less than 1,000 times this letter.
    assert written.count(b"x") // 1000 == logged(rig), "every line of the logs is written"
    rig.nothing_left()


def logged(rig: LocalRig) -> int:
    """Count the long lines in the logs of the pods' workers."""
    return sum(log.read_bytes().count(b"x" * 1000) for log in rig.state.rglob("trainer.log"))
