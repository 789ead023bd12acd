"""Real torch and gloo: an aborted collective is attributed to the process that broke it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.integration.agent_rig import Gang, gang, until
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
{imports}

{decorator}
def main():
    folder = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, number = dist.get_rank(), os.environ["ELASTICJOB_ROUND"]
    try:
        while True:
            ones = torch.ones(8)
            dist.all_reduce(ones)
            assert int(ones[0]) == dist.get_world_size()
            (folder / f"reduced-{{number}}-{{rank}}").write_text(str(os.getpid()))
            stop = torch.tensor([int((folder / "finish").exists())])
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                return
            if rank == 1 and (folder / "fail-1").exists():
                raise ArithmeticError("the loss is not a number")
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()

main()
"""


def reduced(gang: Gang, number: int, world: int) -> list[int]:
    """Return the pids of a round's workers, once each has finished an all-reduce."""
    paths = [gang.folder / f"reduced-{number}-{rank}" for rank in range(world)]
    try:
        until(lambda: all(path.exists() and path.read_text() for path in paths), "all-reduces", 60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{gang.outputs()}") from error
    return [int(path.read_text()) for path in paths]


def test_killed_worker_is_only_failure_and_gang_recovers(gang: Gang, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(imports="", decorator=""))
    command = (str(script), str(gang.folder))
    agents = [gang.agent("2:2", command=command) for _ in range(2)]
    os.kill(reduced(gang, 1, 2)[0], signal.SIGKILL)
    reduced(gang, 2, 2)
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()
    assert gang.round().charged == (1,)


def test_raising_worker_is_first_failure_not_its_peers(gang: Gang, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    imports = "from torch.distributed.elastic.multiprocessing.errors import record"
    script.write_text(SCRIPT.format(imports=imports, decorator="@record"))
    command = (str(script), str(gang.folder))
    options = ("--nproc-per-node=2", "--max-restarts=0", f"--log-dir={tmp_path / 'logs'}")
    agent = gang.agent("1:1", *options, command=command)
    reduced(gang, 1, 2)
    gang.fail(1)
    assert agent.wait() == 1, agent.output()
    summary = agent.output().rpartition(f"job {gang.run_id} failed")[2]
    assert re.search(r"first failure: rank 1 \(local rank 1 on node-0\) in round 1", summary)
    assert "ArithmeticError: the loss is not a number" in summary
    assert "UserError" in summary
