"""Before a planned change the whole gang saves, and no step is lost.

Each kind of change is tested with torch once, and each way to save with torch once here or in
test_planned_stops.py. The other scripts imitate its collectives.

Saving is a collective here, so ranks that saved at different steps would wait for each other
forever.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.integration.agent_rig import AgentProcess, Gang, gang, until
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SCRIPT = """
import os, pathlib, random, sys, time
import torch, torch.distributed as dist
from elasticjob import train

folder, way = pathlib.Path(sys.argv[1]), (*sys.argv[2:], "question")[0]
checkpoint = folder / "checkpoint"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, number = dist.get_rank(), os.environ["ELASTICJOB_ROUND"]
first = [int(checkpoint.read_text()) if checkpoint.exists() else 0]
dist.broadcast_object_list(first, src=0)
done = open(folder / f"steps-{number}-{rank}", "w", buffering=1)

def save():
    agreed = [None] * dist.get_world_size()
    dist.all_gather_object(agreed, step)
    assert set(agreed) == {step}, agreed
    time.sleep(0.3)  # a checkpoint takes its time
    if rank == 0:
        draft = checkpoint.with_name("checkpoint.new")
        draft.write_text(str(step + 1))
        draft.replace(checkpoint)
        if way == "exit":
            time.sleep(0.3)
        train.checkpointed(step + 1)
    if way == "exit":
        sys.exit()

if way != "question":
    train.on_leave(save)
step = first[0]
while True:
    time.sleep(0.1 * random.random())  # ranks are never quite at the same place
    stop = torch.tensor([int((folder / "finish").exists())])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop.item():
        break
    print(step, file=done)
    train.progress(step, loss=1 / (step + 1))
    if way == "question" and train.should_checkpoint():
        save()
    step += 1
dist.destroy_process_group()
"""
COLLECTIVES = """
import json
from datetime import timedelta
from elasticjob_rendezvous.tcpstore import TCPStore, TCPStoreServer

class torch:
    set_num_threads = staticmethod(lambda number: None)
    class tensor:
        def __init__(self, values):
            self.values = values
        def item(self):
            return self.values[0]

class dist:
    class ReduceOp:
        MAX = max
    calls = 0
    get_rank = staticmethod(lambda: int(os.environ["RANK"]))
    get_world_size = staticmethod(lambda: int(os.environ["WORLD_SIZE"]))

    def init_process_group(backend):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if dist.get_rank() == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":
            dist.server = TCPStoreServer("0.0.0.0", port)
        dist.store = TCPStore(address, port)

    def gathered(value):
        dist.calls += 1
        call = f"{os.environ['ELASTICJOB_ROUND']}/{dist.calls}"
        keys = [f"{call}/{rank}" for rank in range(dist.get_world_size())]
        dist.store.set(keys[dist.get_rank()], json.dumps(value))
        dist.store.wait(keys, timedelta(hours=1))
        return [json.loads(each) for each in dist.store.multi_get(keys)]

    def all_gather_object(found, value):
        found[:] = dist.gathered(value)

    def broadcast_object_list(values, src):
        values[:] = dist.gathered(values)[src]

    def all_reduce(tensor, op):
        tensor.values = [op(each) for each in zip(*dist.gathered(tensor.values))]

    def destroy_process_group():
        if dist.get_rank() != 0:
            try:
                dist.store.set(f"ended/{dist.get_rank()}", "")
            except ConnectionError:  # rank 0 ends once it has the last key, perhaps unanswered
                pass
        else:
            ranks = range(1, dist.get_world_size())
            dist.store.wait([f"ended/{rank}" for rank in ranks], timedelta(hours=1))
"""
"""Collectives over the round's store in place of torch's, whose imports would take most of the
processor time of these tests."""
IMPORT = "import torch, torch.distributed as dist\n"
WITHOUT_TORCH = SCRIPT.replace(IMPORT, COLLECTIVES)
CONF = "settle=0,stop_grace=3,keep_alive=10,leave_grace=25,last_call_timeout={last_call}"
PATIENT, SHORT = 30, 2
"""Last calls: for a gang that starts complete, and for one that another node joins later."""


def script_of(folder: Path, with_torch: bool) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT if with_torch else WITHOUT_TORCH)
    return path


def begin(
    gang: Gang,
    script: Path,
    nnodes: str,
    way: str = "question",
    last_call: int = PATIENT,
    options: tuple[str, ...] = (),
) -> AgentProcess:
    command = (str(script), str(gang.folder), way)
    return gang.agent(nnodes, *options, command=command, conf=CONF.format(last_call=last_call))


def steps(gang: Gang, number: int, rank: int) -> list[int]:
    """Return the steps of a rank in a round."""
    path = gang.folder / f"steps-{number}-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def members(gang: Gang) -> list[dict[str, object]]:
    """Return the members' records."""
    folder = f"{gang.prefix}members/"
    found = gang.etcd.ctl("get", "--prefix", "--print-value-only", folder)
    return [json.loads(line) for line in found.splitlines() if line.strip()]


def trained(gang: Gang, number: int | None, world: int) -> int:
    """Wait until all ranks make steps and their wish to save is recorded; return the round.

    Without a number the newest round counts.
    """

    def known() -> int | None:
        found = members(gang)
        wanted = number or max((int(str(one.get("round", 0))) for one in found), default=0)
        saving = [one for one in found if one.get("round") == wanted and one.get("saves")]
        made = len(saving) == world and all(steps(gang, wanted, rank) for rank in range(world))
        return wanted if made else None

    try:
        return int(until(known, f"steps of {f'round {number}' if number else 'a round'}"))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{gang.outputs()}") from error


def assert_no_step_is_lost(gang: Gang, number: int, world: int, next_world: int) -> None:
    """Check that all ranks made all steps of the round, and that the next round continues there."""
    last = [steps(gang, number, rank)[-1] for rank in range(world)]
    begun = [steps(gang, number + 1, rank)[0] for rank in range(next_world)]
    assert len(set(last)) == 1, gang.outputs()
    assert set(begun) == {last[0] + 1}, (last, begun, gang.outputs())


@pytest.mark.parametrize("way", ["question", "callback"])
def test_drain_checkpoints_before_stop_and_loses_no_step(
    gang: Gang, tmp_path: Path, way: str
) -> None:
    script = script_of(tmp_path, with_torch=way == "question")
    agents = [begin(gang, script, "1:3", way) for _ in range(3)]
    trained(gang, 1, 3)
    agents[1].signal(signal.SIGTERM)
    assert agents[1].wait() == 0, gang.outputs()
    trained(gang, 2, 2)
    gang.finish()
    assert [agents[0].wait(), agents[2].wait()] == [0, 0], gang.outputs()
    assert_no_step_is_lost(gang, 1, 3, 2)
    assert gang.round().charged == ()


@pytest.mark.parametrize("way", ["question", "exit"])
def test_join_is_preceded_by_checkpoint(gang: Gang, tmp_path: Path, way: str) -> None:
    """A script that exits after its save had not finished."""
    script = script_of(tmp_path, with_torch=way == "exit")
    agents = [begin(gang, script, "1:3", way, last_call=SHORT) for _ in range(2)]
    # On a busy machine the second agent may start later than the last call of the first round.
    number = trained(gang, None, 2)
    agents.append(begin(gang, script, "1:3", way, last_call=SHORT))
    assert trained(gang, None, 3) == number + 1
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0, 0], gang.outputs()
    assert_no_step_is_lost(gang, number, 2, 3)


def test_loss_does_not_wait_for_checkpoint(gang: Gang, tmp_path: Path) -> None:
    script = script_of(tmp_path, with_torch=True)
    agents = [begin(gang, script, "1:2") for _ in range(2)]
    trained(gang, 1, 2)
    agents[0].process.kill()
    trained(gang, 2, 1)
    gang.finish()
    assert agents[1].wait() == 0, gang.outputs()
    assert "all workers save" not in agents[1].output()
    assert gang.round().charged == ()


WITHOUT_LIBRARY = """
folder=$1; number=$ELASTICJOB_ROUND; asked=
trap 'asked=1' USR1
step=$(cat "$folder/checkpoint" 2>/dev/null || echo 0)
: > "$ELASTICJOB_SAVED_FILE"
until [ -e "$folder/finish" ]; do
    sleep 0.01
    if [ "$asked" ] && [ "$RANK" = 0 ]; then
        sleep 0.3
        echo "$((step + 1))" > "$folder/checkpoint"
        echo "$((step + 1))" > "$ELASTICJOB_SAVED_FILE"
        sleep 60
    fi
    echo "$step" >> "$folder/steps-$number-$RANK"
    step=$((step + 1))
done
"""


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "below a shell"])
def test_program_without_library_receives_checkpoint_signal(
    gang: Gang, tmp_path: Path, wrapped: bool
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(WITHOUT_LIBRARY)
    command = ("bash", str(script), str(gang.folder))
    if wrapped:
        command = ("sh", "-c", f"{' '.join(command)}; exit $?")
    agents = [
        gang.agent(
            "1:2",
            "--no-python",
            command=command,
            conf=CONF.format(last_call=PATIENT),
            env={"ELASTICJOB_SAVE_SIGNAL": "USR1"},
        )
        for _ in range(2)
    ]
    trained(gang, 1, 2)
    agents[1].signal(signal.SIGTERM)
    assert agents[1].wait() == 0, gang.outputs()
    until(lambda: steps(gang, 2, 0), "round 2")
    gang.finish()
    assert agents[0].wait() == 0, gang.outputs()
    # It continued at the saved step, not at the step of the stop.
    assert steps(gang, 2, 0)[0] == steps(gang, 1, 0)[-1] + 2, gang.outputs()
    assert gang.round().charged == ()


def test_member_record_contains_training_progress(gang: Gang, tmp_path: Path) -> None:
    script = script_of(tmp_path, with_torch=False)
    agent = begin(gang, script, "1:1")
    trained(gang, 1, 1)
    until(lambda: int(str(members(gang)[0].get("step", -1))) > 0, "its step")
    gang.finish()
    assert agent.wait() == 0, gang.outputs()
