"""Failure classes of real workers that really fail, through a real launcher.

Failures that need a GPU are made of the real exception. The kernel's out-of-memory kill is real if
this machine permits a cgroup; otherwise only the launcher's unit tests cover it, with the counters'
text.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from elasticjob_agent.agent import PortHolder
from elasticjob_agent.core.failures import first_failure_of
from elasticjob_agent.core.state import WorkerEnded, WorkerGroup
from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.worker_runtime import Stopped, WorkerExited
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from tests.integration.agent.memory_cgroup import memory_group, possible
from tests.integration.launcher_rig import process_tag, python, start_workers, until
from tests.unit.agent.builders import FACTS

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

TORCH_SECONDS = 240.0
"""Timeout for several interpreters that import torch at a time, on a busy machine."""


def ended(
    commands: Sequence[tuple[str, ...]],
    kill: int | None = None,
    first: tuple[str, ...] = (),
    env: Mapping[str, str] = {},
) -> WorkerGroup:
    """Run the commands as one node's workers, to their end.

    The rank `kill`, which waits on purpose, is killed when the others have ended. `first` is a
    worker of an earlier round.
    """

    async def whole() -> list[WorkerExited]:
        found: list[WorkerExited] = []
        runtime = LocalRuntime(("train",))
        events = runtime.events()
        try:
            async with asyncio.timeout(TORCH_SECONDS):
                await anext(events)
                if first:
                    await runtime.start(start_workers(1, first))
                    await until(events, Stopped)
                await runtime.start(start_workers(2, *commands, log_dir=None, **env))
                async for event in events:
                    match event:
                        case WorkerExited():
                            found.append(event)
                            if kill is not None and len(found) == len(commands) - 1:
                                await runtime.stop(2, 0)
                        case Stopped():
                            break
        finally:
            await runtime.aclose()
        return found

    exits = [e for e in asyncio.run(whole()) if kill is None or e.local_rank != kill]
    return WorkerGroup(1, len(commands), 0, 0.0, started=True, exits=tuple(map(WorkerEnded, exits)))


def first_failure(worker_group: WorkerGroup) -> Failure:
    failure = first_failure_of(worker_group, FACTS)
    assert failure is not None
    return failure


def alone(worker_group: WorkerGroup, rank: int) -> Failure:
    """Return the failure attributed to this rank without knowledge of the others."""
    (exit_,) = [found for found in worker_group.exits if found.exit.local_rank == rank]
    return first_failure(WorkerGroup(1, 1, 0, 0.0, started=True, exits=(exit_,)))


# -- without torch ------------------------------------------------------------------

NO_MEMORY = "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 40)"
IMPORT = "import no_such_module"
SEGFAULT = "import ctypes; ctypes.string_at(0)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
NUMPY = (sys.executable, "-c", "import numpy; numpy.ones(1 << 56, dtype='u1')")


@pytest.mark.parametrize(
    ("command", "kind", "said"),
    [
        (python("import sys; sys.exit(3)"), FailureClass.USER_ERROR, "exit code 3"),
        (python("1 / 0"), FailureClass.USER_ERROR, "ZeroDivisionError: division by zero"),
        (python(IMPORT), FailureClass.USER_ERROR, "No module named 'no_such_module'"),
        (python("def ("), FailureClass.USER_ERROR, "SyntaxError: "),
        (("no-such-program",), FailureClass.LAUNCH_ERROR, "'no-such-program' was not found"),
        (("/etc/passwd",), FailureClass.LAUNCH_ERROR, "/etc/passwd is not executable"),
        (python(SEGFAULT), FailureClass.SIGNAL, "killed by SIGSEGV"),
        (python(KILLED), FailureClass.SIGNAL, "killed by SIGKILL"),
        (python("import os; os.abort()"), FailureClass.SIGNAL, "killed by SIGABRT"),
        (python(NO_MEMORY), FailureClass.HOST_OUT_OF_MEMORY, "MemoryError"),
        (NUMPY, FailureClass.HOST_OUT_OF_MEMORY, "Unable to allocate"),
    ],
    ids=lambda value: value.value if isinstance(value, FailureClass) else None,
)
def test_failed_worker_is_classified(
    command: tuple[str, ...], kind: FailureClass, said: str
) -> None:
    failure = first_failure(ended([command]))
    assert failure.kind is kind
    assert said in failure.message


if possible():

    def test_kernel_out_of_memory_kill_differs_from_other_kills() -> None:
        group = memory_group()
        assert group is not None
        # The launcher enters the group, because in a container it shares one with its workers.
        enter = f"import os; open({str(group.procs)!r}, 'w').write(str(os.getppid()))"
        hog = "kept = []\nwhile True: kept.append(bytearray(1 << 20))"
        try:
            worker_group = ended([python(hog)], first=python(enter))
        finally:
            group.close()
        assert worker_group.exits[0].exit.signal == signal.SIGKILL
        failure = first_failure(worker_group)
        assert failure.kind is FailureClass.HOST_OUT_OF_MEMORY
        assert "the memory ran out" in failure.message


# -- with torch ---------------------------------------------------------------------

GANG = """
import os, sys, time, datetime
import torch, torch.distributed as dist
rank, limit = int(sys.argv[1]), float(sys.argv[3])
os.environ.update(RANK=str(rank), WORLD_SIZE=sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
ones = torch.ones(8)
dist.all_reduce(ones)
group = dist.new_group(timeout=datetime.timedelta(seconds=60))
late = dist.new_group(timeout=datetime.timedelta(seconds=limit))
dist.all_reduce(ones, group=late)
dist.all_reduce(ones, group=group)
"""


def torch_gang(*lasts: str, limit: float = 60.0, kill: int | None = None) -> WorkerGroup:
    """Run one gloo gang with a rank for each of the given script endings."""
    world = str(len(lasts))
    commands = [
        (sys.executable, "-c", GANG + last, str(rank), world, str(limit))
        for rank, last in enumerate(lasts)
    ]
    with closing(PortHolder("127.0.0.1")) as ports:
        port = ports.hold()
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        return ended(commands, kill=kill, env=env)


REDUCE, REDUCE_LATE = "dist.all_reduce(ones, group=group)", "dist.all_reduce(ones, group=late)"


@pytest.mark.parametrize(
    ("last", "kind", "said"),
    [
        ("torch.empty(1 << 60, dtype=torch.uint8)", FailureClass.HOST_OUT_OF_MEMORY, "allocate"),
        (
            "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 "
            "has a total capacity of 79.10 GiB of which 1.21 GiB is free.')",
            FailureClass.CUDA_OUT_OF_MEMORY,
            "GPU 0 has a total capacity",
        ),
    ],
)
def test_torch_out_of_memory_messages_are_classified(
    last: str, kind: FailureClass, said: str
) -> None:
    failure = first_failure(ended([(sys.executable, "-c", f"import torch; {last}")]))
    assert failure.kind is kind
    assert said in failure.message


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("raise ArithmeticError('the loss is not a number')", FailureClass.USER_ERROR),
        ("os.kill(os.getpid(), 11)", FailureClass.SIGNAL),
    ],
)
def test_abort_caused_by_peer_is_never_first_failure(last: str, kind: FailureClass) -> None:
    worker_group = torch_gang(REDUCE, last)
    assert alone(worker_group, 0).kind is FailureClass.PEER_ABORT
    failure = first_failure(worker_group)
    assert (failure.local_rank, failure.kind) == (1, kind)


def test_exception_raised_from_peer_abort_is_classified_as_peer_abort() -> None:
    wrapped = f"""
try:
    {REDUCE}
except RuntimeError as error:
    raise ArithmeticError("step 7 failed") from error
"""
    failure = alone(torch_gang(wrapped, "os.kill(os.getpid(), 9)"), 0)
    assert failure.kind is FailureClass.PEER_ABORT
    assert failure.message == "ArithmeticError: step 7 failed"
    assert "The above exception was the direct cause" in failure.traceback


LOADER = """
import os, signal, torch
class Images(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): os.kill(os.getpid(), signal.SIGKILL)
for batch in torch.utils.data.DataLoader(Images(), num_workers=1): pass
"""


def test_killed_data_loader_is_classified() -> None:
    """torch reports the kill only in a cause; the kernel's counter tells the reason."""
    worker_group = ended([(sys.executable, "-c", LOADER)])
    for memory, kind in (
        (False, FailureClass.USER_ERROR),
        (True, FailureClass.HOST_OUT_OF_MEMORY),
    ):
        exits = tuple(
            replace(each, exit=replace(each.exit, out_of_memory=memory))
            for each in worker_group.exits
        )
        assert first_failure(replace(worker_group, exits=exits)).kind is kind


def test_stuck_collective_is_classified_as_timeout() -> None:
    worker_group = torch_gang(REDUCE_LATE, "time.sleep(600)", limit=3.0, kill=1)
    failure = first_failure(worker_group)
    assert (failure.local_rank, failure.kind) == (0, FailureClass.COLLECTIVE_TIMEOUT)
    assert "Timed out waiting" in failure.message


def test_absent_store_is_classified_as_timeout() -> None:
    connect = (
        "import datetime; from torch.distributed import TCPStore; import sys;"
        "TCPStore('127.0.0.1', int(sys.argv[1]), 2, False, datetime.timedelta(seconds=1))"
    )
    with closing(PortHolder("127.0.0.1")) as ports:
        port = ports.hold()
        failure = first_failure(ended([(sys.executable, "-c", connect, str(port))]))
    assert failure.kind is FailureClass.COLLECTIVE_TIMEOUT, failure.message
