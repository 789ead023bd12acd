"""Local job with a worker that waits for a disk that does not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.frozen_disk import freezable_disk, state_of
from tests.integration.local_rig import WORKER, LocalRig, rig, until

__all__ = ["rig"]

WRITES = """
while env["RANK"] == "1" and env["ELASTICJOB_ROUND"] == "1":
    with open(sys.argv[1], "a") as file:
        file.write("x")
    (folder / "notes").write_text(str(time.monotonic()))
    time.sleep(0.01)
"""


def test_job_goes_on_without_the_node_whose_worker_waits_for_a_disk(
    rig: LocalRig, tmp_path: Path
) -> None:
    before, loop, after = WORKER.partition("while not")
    (rig.job / "work.py").write_text(before + WRITES + loop + after)
    with freezable_disk(tmp_path) as disk:
        command = ["python3", "work.py", str(disk.path / "file")]
        runner = rig.start(rig.manifest(command=command, maxNodes=2), "--plain")
        rig.running(2)
        workers = until(lambda: len(found := rig.workers()) == 2 and found, "both workers")
        until((rig.job / "notes").exists, "the first write")
        disk.freeze()
        if disk.real:
            until(lambda: state_of(workers[1]) == "D", "the wait for the disk")
        os.kill(workers[0], signal.SIGKILL)
        rig.running(2, after=1)
        if disk.real:
            assert state_of(workers[1]) == "D"
            said = rig.call("explain", "job")
            assert f"process {workers[1]} of the workers did not end" in said.stdout
            assert "uninterruptible wait in the kernel" in said.stdout
            notes = (rig.job / "notes").read_text()
            disk.thaw()
            until(lambda: workers[1] not in rig.processes(), "the end of the worker")
            assert (rig.job / "notes").read_text() == notes
        rig.finish()
        output, _ = runner.communicate(timeout=60)
        assert runner.returncode == 0, output
        rig.nothing_left()
