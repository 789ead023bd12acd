"""Gangs of ranks for scripts of tests: each rank is a fork, each node a folder in memory.

`run` executes such a script, which ends with the results of its gangs as JSON. Scripts are forks of
a server that has imported torch: half of their processor time would be its import.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOADED = [
    "elasticjob_agent.api",
    "tests.integration.torch.dynamic_gang",
    "torch._dynamo",  # optimizers import it at their first step
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.rendezvous.registry",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",  # of torchrun
]
"""Modules that members and scripts of tests use."""


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


def fork_server() -> ForkServerContext:
    """Return the context of the server that has imported torch once, for all tests of a process."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_fork_server() -> None:
    """Start the server now, so that it has no environment of one test."""
    fork_server()
    forkserver.ensure_running()


class ForkedModule:
    """Fork that executes a module as `python -m` does, with methods of `subprocess.Popen`.

    It exists for modules that import torch, which the fork has imported.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path
    ) -> None:
        output.touch()
        target = (module, list(arguments), dict(env), cwd, output)
        self._process = fork_server().Process(target=_execute_module, args=target)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(str(self._process), seconds or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _execute_module(
    module: str, arguments: list[str], env: dict[str, str], cwd: Path, output: Path
) -> None:
    with output.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(script: str, *arguments: object, seconds: float = 240) -> tuple[Any, str]:
    """Execute a script in a fork; return the JSON in its last line, and its standard error."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        words = ["-c", *map(str, arguments)]
        process = fork_server().Process(target=_execute, args=(script, words, outputs))
        process.start()
        process.join(seconds)
        ended = process.exitcode is not None
        process.kill()
        process.join()
        stdout, stderr = (path.read_text() for path in outputs)
    assert ended, f"no end within {seconds:g} s\n{stdout}{stderr}"
    assert process.exitcode == 0, stdout + stderr
    return json.loads(stdout.splitlines()[-1]), stderr


UNDISTURBED = """
import contextlib, io, json, os, pathlib, runpy, sys
import torch.distributed as dist
from tests.integration.torch.forked_gang import gang

folder, *words = sys.argv[1:]
os.chdir(folder)

def work(rank, world):
    dist.init_process_group = dist.destroy_process_group = lambda *backend: None  # the gang's
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    sys.argv, output = words, io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(words[0], run_name="__main__")
    return output.getvalue()

print(json.dumps("".join(gang(pathlib.Path(folder), "undisturbed", ["node"] * 2, work))))
"""


def undisturbed_output(folder: Path, *words: object) -> str:
    """Return the output of a script with two ranks in this folder, without a job."""
    output, _ = run(UNDISTURBED, folder, *words)
    assert isinstance(output, str)
    return output


def _execute(script: str, words: list[str], outputs: Sequence[Path]) -> None:
    """Execute a script in this process, as `python -c` with these words does."""
    import torch

    for path, stream in zip(outputs, (sys.stdout, sys.stderr), strict=True):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    for name in ("ELASTICJOB_SNAPSHOT_FOLDER", "MASTER_ADDR"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    sys.argv = words
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
