"""Real gangs on a real etcd: a planned stop of the whole job, or of several nodes, saves first.

One stop of the whole job is tested with torch, whose collectives the other scripts imitate.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind, RoundState
from elasticjob_rendezvous.protocol.records.params import ClosingRequest, RendezvousParams
from tests.integration.agent.test_checkpoints import (
    WITHOUT_TORCH,
    begin,
    script_of,
    steps,
    trained,
)
from tests.integration.agent_rig import Gang, Pod, gang, until
from tests.integration.launcher_rig import launcher_file, process_tag

__all__ = ["gang", "launcher_file", "process_tag"]

SUSPENDED = Outcome(OutcomeKind.STOPPED, "Suspended", reason="Suspended")
END_SECONDS = 120.0


def request_stop(gang: Gang) -> None:
    """Write the request to save and to close the job, as the operator does."""
    key = Keys(gang.prefix).bounds
    bounds = decode(RendezvousParams, key, gang.etcd.ctl("get", "--print-value-only", key).encode())
    closing = ClosingRequest(SUSPENDED, time.time_ns() // 1_000_000)
    gang.etcd.ctl("put", key, encode(replace(bounds, closing=closing)).decode())


def closed(gang: Gang) -> SaveReport:
    """Wait until the job is closed; return the report on its checkpoint."""
    until(lambda: gang.round().state is RoundState.CLOSED, f"the end: {gang.outputs()}", 60)
    outcome = gang.round().outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == (OutcomeKind.STOPPED, "Suspended")
    assert outcome.save is not None, gang.outputs()
    return outcome.save


def assert_last_step_is_saved(gang: Gang, world: int, number: int = 1) -> int:
    """Check that the checkpoint contains the last step of all ranks, and that none came later."""
    last = {steps(gang, number, rank)[-1] for rank in range(world)}
    saved = int((gang.folder / "checkpoint").read_text())
    assert last == {saved - 1}, gang.outputs()
    assert not steps(gang, number + 1, 0), gang.outputs()
    return saved


def pods(gang: Gang, count: int, launcher: Path) -> list[Pod]:
    gang.script.write_text(WITHOUT_TORCH)
    return gang.pods(count, launcher)


@pytest.mark.parametrize("way", ["question", "callback", "exit"])
def test_stop_of_the_job_saves_its_last_step(gang: Gang, tmp_path: Path, way: str) -> None:
    script = script_of(tmp_path, with_torch=way == "callback")
    # There is no second round, for which a standby would import torch again.
    agents = [begin(gang, script, "3:3", way, options=("--warm-start=never",)) for _ in range(3)]
    trained(gang, 1, 3)
    request_stop(gang)
    report = closed(gang)
    for agent in agents:
        agent.wait(END_SECONDS)
    saved = assert_last_step_is_saved(gang, 3)
    assert (report.result, report.checkpoint_step) == (SaveResult.SAVED, saved)
    assert f"saved at step {saved}" in agents[0].output()


def test_agent_of_the_coordinator_dies_while_the_job_saves(gang: Gang, launcher_file: Path) -> None:
    nodes = pods(gang, 3, launcher_file)
    trained(gang, 1, 3)
    request_stop(gang)
    until(lambda: gang.round().save is not None, "the request")
    [leader] = [node for node in nodes if f"uid-{node.name}" == gang.round().coordinator]
    leader.agent.signal(signal.SIGKILL)
    leader.agent.wait()
    returned = leader.start_agent()
    report = closed(gang)
    for node in nodes:
        node.launcher.wait(END_SECONDS)
    returned.signal(signal.SIGTERM)  # on a busy machine it may begin after its launcher has ended
    returned.wait(END_SECONDS)
    assert_last_step_is_saved(gang, 3)
    assert report.result is SaveResult.SAVED, gang.outputs()


def test_worker_that_dies_while_the_job_saves_ends_the_wait(
    gang: Gang, launcher_file: Path
) -> None:
    nodes = pods(gang, 2, launcher_file)
    trained(gang, 1, 2)
    request_stop(gang)
    until(lambda: gang.round().save is not None, "the request")
    nodes[1].launcher.signal(signal.SIGKILL)
    report = closed(gang)  # after half a minute it would be TIMED_OUT
    assert report.result in (SaveResult.INTERRUPTED, SaveResult.SAVED), report
    assert gang.round().number == 1
    nodes[0].launcher.wait(END_SECONDS)


@pytest.mark.parametrize("requested", [True, False], ids=["closed by the operator", "alone"])
def test_nodes_that_leave_together_save_once(
    gang: Gang, launcher_file: Path, requested: bool
) -> None:
    """A deleted job: its pods are deleted, and the operator learns of it before or after that."""
    nodes = pods(gang, 3, launcher_file)
    trained(gang, 1, 3)
    leaves = [threading.Thread(target=node.pre_stop) for node in nodes]
    for leave in leaves:
        leave.start()
    if requested:
        request_stop(gang)
    for leave in leaves:
        leave.join()
    for node in nodes:
        node.launcher.wait(END_SECONDS)
        node.agent.wait(END_SECONDS)
    assert_last_step_is_saved(gang, 3)
    if requested:
        assert closed(gang).result is SaveResult.SAVED


@pytest.mark.parametrize("way", ["preStop", "SIGTERM to the launcher", "SIGTERM to the agent"])
def test_node_that_is_evicted_saves_with_its_peers(
    gang: Gang, launcher_file: Path, way: str
) -> None:
    nodes = pods(gang, 2, launcher_file)
    trained(gang, 1, 2)
    if way == "preStop":
        nodes[1].pre_stop()
    else:
        ended = nodes[1].launcher if way.endswith("launcher") else nodes[1].agent
        ended.signal(signal.SIGTERM)
    nodes[1].launcher.wait(END_SECONDS)
    until(lambda: steps(gang, 2, 0), f"round 2: {gang.outputs()}", 60)
    last = {steps(gang, 1, rank)[-1] for rank in range(2)}
    assert last == {steps(gang, 2, 0)[0] - 1}, gang.outputs()
    gang.finish()
    assert nodes[0].launcher.wait() == 0, gang.outputs()


def test_gang_that_does_not_save_is_closed_at_once(gang: Gang) -> None:
    agents = [gang.agent("2:2") for _ in range(2)]
    gang.started(1, 2)
    request_stop(gang)
    report = closed(gang)  # with a request it would be TIMED_OUT, half a minute later
    assert (report.result, report.unsaved) == (SaveResult.NOT_SUPPORTED, ("node-0", "node-1"))
    for agent in agents:
        agent.wait(END_SECONDS)
