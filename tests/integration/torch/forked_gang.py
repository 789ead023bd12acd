"""Gangs of ranks for scripts of tests: each rank is a fork, each node a folder in memory.

`run` executes such a script, which ends with the results of its gangs as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.paths import ROOT


def gang(top: Path, name: str, nodes: Sequence[str], work: Callable[[int, int], Any]) -> list[Any]:
    """Return the results of `work(rank, world)` in a process for each rank, over gloo.

    Args:
        top: folder of the test.
        nodes: name of each rank's node, which is that of its folder in memory.
    """
    assert forked(top, name, nodes, work) == [0] * len(nodes)
    return [json.loads((top / f"{name}-{rank}").read_text()) for rank in range(len(nodes))]


def forked(
    top: Path, name: str, nodes: Sequence[str], work: Callable[[int, int], Any]
) -> list[int]:
    """Run `work` as `gang` does; return the wait status of each rank's process."""
    pids = []
    for rank in range(len(nodes)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _work(top, name, nodes, rank, work)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in pids]


def _work(
    top: Path, name: str, nodes: Sequence[str], rank: int, work: Callable[[int, int], Any]
) -> None:
    import torch.distributed as dist

    folder = top / nodes[rank]
    folder.mkdir(exist_ok=True)
    os.environ["ELASTICJOB_SNAPSHOT_FOLDER"] = str(folder)
    os.environ["LOCAL_RANK"] = str(list(nodes[:rank]).count(nodes[rank]))
    os.environ["LOCAL_WORLD_SIZE"] = str(list(nodes).count(nodes[rank]))
    store = f"file://{top}/store-{name}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(nodes))
    (top / f"{name}-{rank}").write_text(json.dumps(work(rank, len(nodes))))
    dist.barrier()
    dist.destroy_process_group()


def damage(path: Path) -> None:
    """Change the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def lose(top: Path, *nodes: str) -> None:
    """Remove the memory of these nodes."""
    for node in nodes:
        shutil.rmtree(top / node)


def run(script: str, *arguments: object, seconds: float = 90) -> tuple[Any, str]:
    """Execute a script; return the JSON in its last line, and its standard error."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    for name in ("ELASTICJOB_SNAPSHOT_FOLDER", "MASTER_ADDR"):
        env.pop(name, None)
    ran = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr
