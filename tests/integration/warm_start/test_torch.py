"""Equivalence of forked and fresh workers with real torch: results, output and remains."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.zipapp_build import install
from elasticjob_launcher.settings import library_beside
from tests.integration.etcd_server import Ports
from tests.integration.launcher_rig import process_tag
from tests.integration.warm_start.test_equivalence import both
from tests.integration.warm_start.warm_rig import Warm, said, said_warm, script, warm

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

THREADS = """
import torch, numpy, sklearn, os
import threadpoolctl
print(torch.get_num_threads(), torch.get_num_interop_threads())
print(sorted((pool["internal_api"], pool["num_threads"], os.path.basename(pool["filepath"]))
             for pool in threadpoolctl.threadpool_info()))
torch.ones(4_000_000).sum(); numpy.ones((600, 600)) @ numpy.ones((600, 600))
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "2"}, {"OPENBLAS_NUM_THREADS": "3"}])
def test_torch_and_numpy_thread_counts_are_same_warm_and_cold(
    tmp_path: Path, env: dict[str, str]
) -> None:
    path = script(tmp_path / "code", THREADS)
    cold, forked = both(tmp_path, sys.executable, path, env=env)
    assert "openblas" in cold
    assert forked == cold


BOUND_THREADS = """
import sys
print("torch" in sys.modules)
import numpy, torch, os, threadpoolctl
print(sorted((pool["internal_api"], pool["num_threads"], os.path.basename(pool["filepath"]))
             for pool in threadpoolctl.threadpool_info()))
torch.ones(4_000_000).sum(); numpy.ones((600, 600)) @ numpy.ones((600, 600))
print(os.sched_getaffinity(0))
print(sorted(sorted(os.sched_getaffinity(int(each))) for each in os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(
    "env",
    [{"OMP_PROC_BIND": "close"}, {"GOMP_CPU_AFFINITY": "1 0"}],
    ids=lambda env: next(iter(env)),
)
def test_processors_of_bound_threads_are_same_warm_and_cold(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """libgomp binds the thread that loads it, and numpy's OpenBLAS has its threads by then."""
    path = script(tmp_path / "code", BOUND_THREADS)
    cold, forked = (
        output.split("\n", 1) for output in both(tmp_path, sys.executable, path, env=env)
    )
    assert (cold[0], forked[0]) == ("False", "True")
    assert "openblas" in cold[1]
    assert forked[1] == cold[1]


NUMPY_THREADS = """
import numpy, os
import threadpoolctl
print(sorted((pool["internal_api"], pool["num_threads"], os.path.basename(pool["filepath"]))
             for pool in threadpoolctl.threadpool_info()))
numpy.ones((600, 600)) @ numpy.ones((600, 600))
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(
    "threads",
    [
        "1000",  # more than the number of processors
        "\u00b2",  # a digit, but no number
    ],
)
def test_numpy_thread_count_is_same_warm_and_cold_with_unusable_number(
    tmp_path: Path, threads: str
) -> None:
    path = script(tmp_path / "code", NUMPY_THREADS)
    cold, forked = both(tmp_path, sys.executable, path, env={"OPENBLAS_NUM_THREADS": threads})
    assert "openblas" in cold
    assert forked == cold


ELASTIC = """
import sys
there = "torch.distributed.elastic.rendezvous" in sys.modules
import torch.distributed.elastic.rendezvous
print(there)
"""


def test_elastic_modules_of_torch_are_preloaded_with_our_plug_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers and Accelerate import them; torch then loads the plug-ins of torchrun."""
    launcher = tmp_path / "elasticjob" / "launcher.pyz"
    launcher.parent.mkdir()
    install(launcher)
    monkeypatch.setenv("PYTHONPATH", library_beside(str(launcher)))
    path = script(tmp_path / "code", ELASTIC)
    assert said_warm(tmp_path / "logs", path) == "True\n"


TRAIN = """
import sys
there = {name for name in sys.modules if name.startswith("elasticjob.train.")}
from elasticjob.train.data import ElasticSampler
from elasticjob.train.snapshots import Snapshots
print(sorted(there & {"elasticjob.train.data", "elasticjob.train.snapshots.api"}))
"""


def test_library_beside_the_launcher_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that import it themselves would take a tenth of a second longer after each fault."""
    launcher = tmp_path / "elasticjob" / "launcher.pyz"
    launcher.parent.mkdir()
    install(launcher)
    monkeypatch.setenv("PYTHONPATH", library_beside(str(launcher)))
    path = script(tmp_path / "code", TRAIN)
    names = "['elasticjob.train.data', 'elasticjob.train.snapshots.api']\n"
    assert said_warm(tmp_path / "logs", path) == names


LOADERS = """
import torch
from torch.utils.data import DataLoader
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i * i)
if __name__ == "__main__":
    for how, workers in (("fork", 2), ("spawn", 1)):  # a spawned one imports torch
        for persistent in (False, True):
            loader = DataLoader(Squares(), batch_size=4, num_workers=workers,
                                multiprocessing_context=how, persistent_workers=persistent)
            print(how, persistent, [batch.tolist() for batch in loader])
            del loader
"""


def test_data_loaders_work_with_worker_processes(tmp_path: Path) -> None:
    path = script(tmp_path / "code", LOADERS)
    cold, forked = both(tmp_path, sys.executable, path)
    assert cold.count("[[0, 1, 4, 9], [16, 25, 36, 49]]") == 4
    assert forked == cold


LOADED = """
import sys
there = {name.partition(".")[0] + "." + name.split(".")[1] for name in sys.modules
         if name.startswith("torch.")}
import torch, numpy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
DistributedDataParallel, torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
print(sorted(there & {"torch._dynamo", "torch.distributed", "torch.nn", "torch.optim"}))
"""


def test_all_of_torch_is_preloaded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A recovery would cost the seconds that a refused module of torch takes to load."""
    path = script(tmp_path / "code", LOADED)
    names = "['torch._dynamo', 'torch.distributed', 'torch.nn', 'torch.optim']\n"
    assert said_warm(tmp_path / "logs", path) == names
    told = [line for line in capfd.readouterr().err.splitlines() if "not preloaded" in line]
    assert told == []


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
def inner():
    raise ArithmeticError("the loss is not a number")
@record
def main():
    inner()
main()
"""


def test_record_decorator_writes_error_file(tmp_path: Path) -> None:
    path = script(tmp_path / "code", RECORDED)
    reports: list[Any] = []

    async def scenario(runtime: Warm) -> None:
        for _ in range(2):
            _, exited = await runtime.outcome(sys.executable, path)
            assert exited.exit_code == 1
            reports.append(json.loads(runtime.error_file().read_text())["message"])
            await runtime.prepare(sys.executable, path)
            assert runtime.prepared.ready, runtime.prepared.reason

    warm(tmp_path / "logs", scenario)
    for report in reports:
        del report["extraInfo"]["timestamp"]
    assert reports[0]["message"] == "ArithmeticError: the loss is not a number"
    assert reports[1] == reports[0]
    assert frames(said(tmp_path / "logs", 2)) == frames(said(tmp_path / "logs", 1))


def frames(text: str) -> list[str]:
    return re.findall(r'File "[^"]+", line \d+, in \S+', text)


GANG = """
import os, sys, time
began = time.monotonic()
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
print(dist.get_rank(), dist.get_world_size(), model.module.weight.grad.sum().item(),
      os.environ["TORCHELASTIC_USE_AGENT_STORE"], int(1000 * (time.monotonic() - began)))
if dist.get_rank() == 0:
    sys.exit()  # done first; the others still need the store
time.sleep(0.5)
dist.get_group_rank(dist.group.WORLD, 0)
print(dist.distributed_c10d._get_default_store().get("last") if
      dist.distributed_c10d._get_default_store().check(["last"]) else "reached")
"""


def test_gang_meets_at_store_that_survives_rank_0(tmp_path: Path) -> None:
    path = script(tmp_path / "code", GANG)

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        assert runtime.prepared.ready, runtime.prepared.reason
        ports = []
        for _ in range(2):
            assert runtime.store_port > 0
            ports.append(runtime.store_port)
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runtime.store_port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
            assert (await runtime.start(sys.executable, path, count=2, env=env)).warm
            ended = await runtime.ended(2)
            assert [exited.exit_code for exited in ended.values()] == [0, 0], ended
            await runtime.until_store()
        assert ports[0] != ports[1]

    warm(tmp_path / "logs", scenario)
    for number in (1, 2):
        assert said(tmp_path / "logs", number, 0).split()[:4] == ["0", "2", "32.0", "True"]
        assert said(tmp_path / "logs", number, 1).split()[-1] == "reached"


def test_no_store_is_served_without_torch(tmp_path: Path) -> None:
    path = script(tmp_path / "code", "print(1)\n")

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        assert (runtime.prepared.ready, runtime.store_port) == (True, 0)

    warm(tmp_path / "logs", scenario)


OWN_ADDRESS = """
import os, torch.distributed as dist
def meet(port):
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo")
    dist.barrier()
"""


def test_no_store_is_served_for_a_program_with_an_address_of_its_own(tmp_path: Path) -> None:
    path = script(tmp_path / "code", OWN_ADDRESS)

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        assert (runtime.prepared.ready, runtime.store_port) == (True, 0)

    warm(tmp_path / "logs", scenario)


def test_rank_0_gets_port_to_serve_store_itself(tmp_path: Path) -> None:
    path = script(tmp_path / "code", GANG)

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(sys.executable, path)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runtime.store_port),
               "TORCHELASTIC_USE_AGENT_STORE": "False"}  # fmt: skip
        assert (await runtime.start(sys.executable, path, env=env, count=1)).warm
        assert (await runtime.ended())[0].exit_code == 0

    warm(tmp_path / "logs", scenario)


GROUPS = """
import gc, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dist.barrier()
    dist.destroy_process_group()

def threads():
    gc.collect()
    names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
    return sorted(name.strip() for name in names if "gloo" in name)

train()
first = threads()
train()
print(len(first), threads() == first, dist.distributed_c10d._update_default_pg.__module__)
"""


def test_first_process_group_stays_until_the_end_warm_and_cold(tmp_path: Path) -> None:
    """Without a last reference the main thread destroys it: it joins a thread that may need the
    GIL, which the main thread holds, and both wait for ever."""
    path = script(tmp_path / "code", GROUPS)
    cold, forked = both(tmp_path, sys.executable, path)
    assert cold.splitlines()[-1].endswith(" True torch.distributed.distributed_c10d")
    assert not cold.startswith("0 ")
    assert forked == cold


GROUPS_IN_TURN = """
import datetime, os, socket, sys, time, torch, torch.distributed as dist
import torch._dynamo  # it loads torch.distributed.nn, before there is a group
rank, port, destroyed = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]

def train():
    limit = datetime.timedelta(seconds=20)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", place, rank=rank, world_size=2, timeout=limit)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(total.item())
    dist.barrier()
    dist.destroy_process_group()

train()
if rank == 0:
    with socket.socket() as client:
        print("served" if client.connect_ex(("127.0.0.1", port)) == 0 else "closed")
    open(destroyed, "w").close()
else:
    while not os.path.exists(destroyed):
        time.sleep(0.02)
train()
"""


def test_program_that_imports_torch_dynamo_makes_two_process_groups_in_turn(
    tmp_path: Path,
) -> None:
    """A first group that is kept keeps its store: the second finds the first one's addresses."""
    path = script(tmp_path / "code", GROUPS_IN_TURN)
    ports = Ports(1)
    argv = [sys.executable, path, str(ports.numbers[0]), str(tmp_path / "destroyed")]

    async def scenario(runtime: Warm) -> None:
        await runtime.prepare(*argv)
        assert runtime.prepared.ready, runtime.prepared.reason
        started = await runtime.start(*argv, count=2)
        assert started.warm, started.cold_reason
        ends = await runtime.ended(2)
        assert [ends[rank].exit_code for rank in range(2)] == [0, 0], ends

    try:
        warm(tmp_path / "logs", scenario)
    finally:
        ports.close()
    assert said(tmp_path / "logs", 1, rank=0) == "2.0\nclosed\n2.0\n"


CHANGED_UPDATE = """
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
before, groups = c10d._update_default_pg, []

def update(group):
    groups.append(group)
    before(group)

c10d._update_default_pg = update
for again in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    dist.destroy_process_group()
print(len(groups), c10d._update_default_pg is update)
"""


def test_function_that_program_puts_in_torch_stays_warm_and_cold(tmp_path: Path) -> None:
    path = script(tmp_path / "code", CHANGED_UPDATE)
    cold, forked = both(tmp_path, sys.executable, path)
    assert forked == cold
    assert cold == "4 True\n"
