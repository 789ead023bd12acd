"""Ranks that call `Snapshots` differently: an error on all of them, or a warning of the wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_agent.core.error_reports import ErrorReport
from elasticjob_agent.core.failures import failure_class
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from tests.integration.torch import forked_gang

DIFFERENT = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from elasticjob.train import SnapshotError, Snapshots
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

def created(settings):
    def work(rank, world):
        try:
            Snapshots(str(top / "storage"), **settings[rank]).restore()
        except SnapshotError as error:
            return str(error)
    return work

def saved(calls):
    def work(rank, world):
        snapshots = Snapshots(str(top / "storage"), replicas=0)
        snapshots.restore()
        try:
            snapshots.save(state={"x": 2}, **{"step": 2, **calls[rank]})
        except SnapshotError as error:
            return str(error)
    return work

def sharded(names):
    def work(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        state = dict.fromkeys(names[rank], tensor)
        snapshots = Snapshots(every_steps=1, sharded=True)
        snapshots.restore()
        try:
            snapshots.save(1, state)
        except SnapshotError as error:
            return str(error)
    return work

def stepped(rank, world):
    # Only this rank's interval depends on measurements: all exchange them.
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizers = torch.optim.SGD([weight], lr=0.1) if rank == 0 else ()
    snapshots = Snapshots(every_steps=1, replicas=0, optimizers=optimizers)
    snapshots.restore()
    for step in range(1, 8):
        dist.barrier()
        snapshots.save(step, {"weight": weight})
    snapshots.close()
    return "end"

told = {}
for number, settings in enumerate([
    ({"every_steps": 1}, {"every_steps": 3}),
    ({"every_steps": 1, "store_every": 2}, {"every_steps": 1}),
    ({"replicas": 0}, {"replicas": 1}),
    ({"sharded": True}, {}),
]):
    told[f"settings {number}"] = forked_gang.gang(top, f"s{number}", "ab", created(settings))
for name, calls in {
    "step": ({}, {"step": 7}),
    "store": ({"store": True}, {}),
    "rank_state": ({}, {"rank_state": 5}),
}.items():
    told[name] = forked_gang.gang(top, name, "ef", saved(calls))
for name, names in {
    "stages": (["a", "b"], ["a", "c"]),
    "one more": (["a"], ["a", "b"]),
    "no": (["a"], []),
    "order": (["a", "b"], ["b", "a"]),
    "same": (["a", "b"], ["a", "b"]),
}.items():
    nodes = ["g " + name, "h " + name]
    told["sharded " + name] = forked_gang.gang(top, name, nodes, sharded(names))
told["optimizers"] = forked_gang.gang(top, "optimizers", "cd", stepped)
print(json.dumps(told))
"""


OWN = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from elasticjob.train import SnapshotError, Snapshots
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

def saved(values, **settings):
    def work(rank, world):
        snapshots = Snapshots(every_steps=1, **settings)
        snapshots.restore()
        step = 0
        try:
            for step, value in enumerate(values[rank], 1):
                dist.barrier()
                snapshots.save(step, {"x": step}, value)
        except SnapshotError as error:
            return [step, str(error)]
        snapshots.close()
        return [step, ""]
    return work

told = {}
for name, values in {
    "values": ([None], [5]),
    "functions": ([lambda: 5], [lambda: None]),
    "later": ([None] * 5, [None, None, 5, 5, 5]),
    "same": ([None, 5, None, 5, 5], [None, 5, None, lambda: 5, 5]),
}.items():
    for replicas in (0, 1):
        case = f"{name} {replicas}"
        nodes = ["a " + case, "b " + case]
        told[case] = forked_gang.gang(top, case, nodes, saved(values, replicas=replicas))
print(json.dumps(told))
"""


def test_own_state_of_some_ranks_alone_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Also with a given interval, with which they exchange nothing else."""
    found, _ = forked_gang.run(OWN, tmp_path, seconds=60)
    text = "save() has rank_state={} on rank 0, and rank_state={} on rank 1: all ranks must make"
    expected = {
        "values": (1, text.format(False, True)),
        "functions": (1, text.format(True, False)),
        "later": (4, text.format(False, True)),
        "same": (5, ""),
    }
    for name, (step, start) in expected.items():
        for replicas in (0, 1):
            for ended, error in found[f"{name} {replicas}"]:
                assert (ended, error[: len(start)]) == (step, start), name


def test_different_calls_are_an_error_with_both_values_on_all_ranks(tmp_path: Path) -> None:
    found, _ = forked_gang.run(DIFFERENT, tmp_path)
    remedy = "all ranks must make the same calls, with the same values"
    expected = {
        "settings 0": "Snapshots has every_steps=1 on rank 0, and every_steps=3 on rank 1",
        "settings 1": "Snapshots has store_every=2 on rank 0, and store_every=500 on rank 1",
        "settings 2": "Snapshots has replicas=0 on rank 0, and replicas=1 on rank 1",
        "settings 3": "Snapshots has sharded=True on rank 0, and sharded=False on rank 1",
        "step": "save() has step=2 on rank 0, and step=7 on rank 1",
        "store": "save() has store=True on rank 0, and store=False on rank 1",
        "rank_state": "save() has rank_state=False on rank 0, and rank_state=True on rank 1",
    }
    assert found.pop("optimizers") == ["end", "end"]
    assert found.pop("sharded same") == [None, None]
    tensor = "state['{}'] (float32, shape [4])"
    text = (
        "save() has the distributed tensor {} on rank {}, and not on rank {} (a state that differs "
        "between ranks, as of the stages of a pipeline, belongs in rank_state, as local tensors)"
    )
    expected["sharded stages"] = text.format(tensor.format("b"), 0, 1)
    expected["sharded one more"] = text.format(tensor.format("b"), 1, 0)
    expected["sharded no"] = text.format(tensor.format("a"), 0, 1)
    expected["sharded order"] = (
        "save() has the distributed tensor state['a'] (float32, shape [4]) on rank 0 where rank 1 "
        "has state['b'] (float32, shape [4]) (build the state in the same order on all ranks, such "
        "as by sorted names)"
    )
    assert found == {name: [f"{text}: {remedy}"] * 2 for name, text in expected.items()}


WAITING = """
import datetime, json, logging, sys, time
from pathlib import Path
import torch.distributed as dist
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.ranks import gang
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

class Told(logging.Handler):
    def emit(self, record):
        with (top / f"warned-{dist.get_rank()}").open("a") as file:
            file.write(record.getMessage() + "\\n")

def until_warned():
    path, end = top / "warned-0", time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)

def work(rank, world):
    logging.getLogger("elasticjob.train").addHandler(Told())
    snapshots = Snapshots(replicas=0)
    snapshots.restore()
    dist.barrier()
    if rank == 0:
        gang.PATIENCE = datetime.timedelta(seconds=0.2)
    for step in (3, 4):
        if rank == 1 and step == 3:
            until_warned()
        if rank == 1 and step == 4:
            time.sleep(0.6)  # longer than the patience of rank 0, which warns once
        assert snapshots.save(step, {"x": step})
        dist.barrier()
    snapshots.close()
    path = top / f"warned-{rank}"
    return path.read_text().splitlines() if path.exists() else []

print(json.dumps(forked_gang.gang(top, "waiting", "ab", work)))
"""


def test_rank_that_waits_for_others_warns_once_and_goes_on(tmp_path: Path) -> None:
    (waiting, other), _ = forked_gang.run(WAITING, tmp_path)
    assert other == []
    (line,) = waiting
    assert line.startswith("rank 0 has waited 0 s for other ranks in save() of step 3: all ranks")
    assert "recovery.hangTimeoutSeconds" in line


APART = """
import datetime, json, multiprocessing.util, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.ranks import gang
from tests.integration.torch import forked_gang

top, first, second = Path(sys.argv[1]), *sys.argv[2:]
gang.PATIENCE = datetime.timedelta(seconds=0.2)

def until_ended(rank):
    end = time.monotonic() + 60
    while time.monotonic() < end and not (top / f"ended-{rank}").exists():
        time.sleep(0.01)
    return time.monotonic() < end

def call(snapshots, name):
    if name == "close":
        snapshots.close()
    elif name == "restore":
        snapshots.restore()
    elif name == "other":
        Snapshots(replicas=0).restore()
    elif name == "end":
        multiprocessing.util._run_finalizers()  # as at the end of a process
        os._exit(0)
    elif name == "kill":
        os._exit(1)
    else:
        snapshots.save(int(name), {"x": int(name)})

def work(rank, world):
    snapshots = Snapshots(replicas=0)
    snapshots.restore()
    snapshots.save(1, {"x": 1})
    dist.barrier()
    error = None
    try:
        for name in (first, second)[rank].split():
            call(snapshots, name)
    except (SnapshotError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    if rank == 0 and error is None and not until_ended(1):  # its connection stays
        error = "rank 1 does not end"
    (top / f"error-{rank}").write_text(json.dumps(error))
    dist.destroy_process_group()
    (top / f"ended-{rank}").touch()
    os._exit(0)

forked_gang.forked(top, "apart", "ab", work)
told = [top / f"error-{rank}" for rank in (0, 1)]
print(json.dumps([json.loads(each.read_text()) if each.exists() else None for each in told]))
"""
SAME_CALLS = "all ranks must make the same calls, with the same values"
RANK_1 = "rank 1 has called save() of step 2"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (("close", "2"), [None, f"SnapshotError: rank 0 has called close(), and {RANK_1}: "]),
        (
            ("close", "restore"),
            [None, "SnapshotError: rank 0 has called close(), and rank 1 has called restore(): "],
        ),
        (
            ("close end", "close 2"),
            [None, f"SnapshotError: rank 0 has called close(), and {RANK_1}: "],
        ),
        (("end", "2"), [None, f"RankEndedError: rank 0 has ended its process, and {RANK_1}: "]),
        (("kill", "2"), [None, "RuntimeError: "]),
        *[
            ((call, "2"), ["SnapshotError: rank 0 has called restore(), and rank 1 save() of "] * 2)
            for call in ("restore", "other")
        ],
        (("close 2 3 close", "close close 2 3"), [None, None]),
    ],
)
def test_rank_whose_calls_differ_leaves_no_other_waiting(
    tmp_path: Path, calls: tuple[str, str], expected: list[str | None]
) -> None:
    found, _ = forked_gang.run(APART, tmp_path, *calls)
    for error, text in zip(found, expected, strict=True):
        assert (error is None) == (text is None), error
        assert error is None or error.startswith(text or ""), error
        remedy = "see the output of rank 0" if calls[0] == "end" else SAME_CALLS
        assert error is None or "RuntimeError" in error or remedy in error
    if calls[0].endswith("end"):  # with gloo's error, if the connection breaks before the next look
        kind = failure_class(None, ErrorReport(str(found[1])), 1)
        lost = kind is FailureClass.PEER_ABORT
        assert lost or (calls[0] == "close end" and kind is FailureClass.USER_ERROR)


LIBRARIES = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.core import exchange
from elasticjob.train.snapshots.ranks import gang
from tests.integration.torch import forked_gang

top, other = Path(sys.argv[1]), sys.argv[2]

def of_version_0_1_0(rank, world):
    content = torch.zeros(40, dtype=torch.uint8)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([40]))
    found = [torch.zeros(max(map(int, counts)), dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(found, content)

def work(rank, world):
    error = None
    try:
        if rank == 0 and other == "0.1.0":
            of_version_0_1_0(rank, world)
        else:
            if rank == 0:
                gang.OURS = exchange.Protocols(*json.loads(other))
            snapshots = Snapshots(replicas=0)
            snapshots.restore()
            snapshots.save(1, {"x": 1})
            error = snapshots._gang._channel.protocol
    except (SnapshotError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    (top / f"error-{rank}").write_text(json.dumps(error))
    os._exit(0)

forked_gang.forked(top, "libraries", "ab", work)
print(json.dumps([json.loads((top / f"error-{rank}").read_text()) for rank in (0, 1)]))
"""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("0.1.0", ["RuntimeError: ", "SnapshotError: rank 0 has an older version of the elast"]),
        ("[1, 1]", ["SnapshotError: rank 0 has an older version of the elasticjob library"] * 2),
        ("[6, 7]", ["SnapshotError: rank 1 has an older version of the elasticjob library"] * 2),
        ("[1, 5]", [5, 5]),
    ],
)
def test_nodes_with_two_versions_of_the_library_use_a_common_protocol_or_fail(
    tmp_path: Path, other: str, expected: list[object]
) -> None:
    found, _ = forked_gang.run(LIBRARIES, tmp_path, other)
    for result, text in zip(found, expected, strict=True):
        assert result == text or (isinstance(text, str) and str(result).startswith(text)), found
