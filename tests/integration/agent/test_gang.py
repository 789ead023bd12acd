"""Agents of one run on a real etcd, with real workers: all transitions visible to a user."""

from __future__ import annotations

import os
import signal
import time

from tests.integration.agent_rig import STEADY, Gang, gang, until
from tests.integration.launcher_rig import alive, process_tag

__all__ = ["gang", "process_tag"]


def test_two_nodes_start_train_and_succeed(gang: Gang) -> None:
    agents = [gang.agent("2:2", "--nproc_per_node=2", "--role=trainer") for _ in range(2)]
    workers = gang.started(1, 4)
    assert [worker["GROUP_RANK"] for worker in workers] == ["0", "0", "1", "1"]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0", "1", "0", "1"]
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in workers} == {gang.run_id}
    assert {worker["ROLE_NAME"] for worker in workers} == {"trainer"}
    assert {worker["MASTER_ADDR"] for worker in workers} == {"127.0.0.1"}
    assert len({worker["MASTER_PORT"] for worker in workers}) == 1
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()
    assert agents[0].output().splitlines()[-1] == f"job {gang.run_id} succeeded"
    assert gang.round().outcome is not None


def test_killed_worker_starts_new_round_and_is_charged(gang: Gang) -> None:
    agents = [gang.agent("2:2") for _ in range(2)]
    first = gang.started(1, 2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = gang.started(2, 2)
    assert not {worker["pid"] for worker in first} & {worker["pid"] for worker in second}
    assert first[0]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    assert not alive(first[0]["pid"]), "no worker of round 1 may outlive it"
    until(lambda: gang.round().charged == (1,), "the charge")
    gang.fail(0)
    third = gang.started(3, 2)
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in third} <= {"1", "2"}
    until(lambda: gang.round().charged == (1, 2), "the second charge")
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()


def test_terminated_agent_leaves_and_others_continue(gang: Gang) -> None:
    agents = [gang.agent("1:3", conf=STEADY) for _ in range(3)]
    gang.started(1, 3)
    agents[0].signal(signal.SIGTERM)
    workers = gang.started(2, 2)
    assert agents[0].wait() == 0, agents[0].output()
    assert "left (SIGTERM)" in agents[0].output()
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    gang.finish()
    assert [agent.wait() for agent in agents[1:]] == [0, 0], gang.outputs()
    assert gang.round().charged == ()


def test_killed_agent_is_detected_at_once(gang: Gang) -> None:
    conf = "last_call_timeout=60,settle=0.3,keep_alive_seconds=90"
    agents = [gang.agent("1:3", conf=conf) for _ in range(3)]
    lost = gang.started(1, 3)
    began = time.monotonic()
    agents[1].signal(signal.SIGKILL)
    workers = gang.started(2, 2)
    took = time.monotonic() - began
    assert took < 60.0, f"a dead process shows in milliseconds, its lease only after 90 s: {took:g}"
    assert not alive(lost[1]["pid"]), "workers below an agent die with it"
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    gang.finish()
    assert [agents[0].wait(), agents[2].wait()] == [0, 0], gang.outputs()


def test_node_joins_running_job(gang: Gang) -> None:
    agents = [gang.agent("1:2")]
    gang.started(1, 1)
    agents.append(gang.agent("1:2"))
    workers = gang.started(2, 2)
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()


def test_exhausted_restart_budget_ends_job_and_shows_first_failure(gang: Gang) -> None:
    agents = [gang.agent("2:2", "--max-restarts=0") for _ in range(2)]
    gang.started(1, 2)
    gang.fail(1)
    assert [agent.wait() for agent in agents] == [1, 1], gang.outputs()
    for agent in agents:
        summary = agent.output().rpartition(f"job {gang.run_id} failed")[2]
        assert "first failure: rank 1 (local rank 0 on node-1) in round 1: exit code 1" in summary
        assert "ValueError: told to fail by a file" in summary
        assert 'worker.py", line' in summary


def test_training_continues_during_etcd_outage(gang: Gang, start_etcd) -> None:
    gang.etcd = start_etcd()
    conf = "last_call_timeout=60,settle=0.3,keep_alive_seconds=2,stop_grace=3"
    agents = [gang.agent("2:2", conf=conf) for _ in range(2)]
    workers = gang.started(1, 2)
    gang.etcd.kill()
    away_until = time.monotonic() + 3.0  # well beyond the lease of 2 s
    while time.monotonic() < away_until:
        gang.stepping(workers[0])
        gang.stepping(workers[1])
    gang.etcd.start()
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()


def test_closed_run_is_not_restarted(gang: Gang) -> None:
    gang.finish()
    assert gang.agent("1:1").wait() == 0, gang.outputs()
    again = gang.agent("1:1")
    assert again.wait() == 3
    assert f"the run {gang.run_id!r} is closed (succeeded)" in again.output()
    assert "--rdzv-id of its own, or --rdzv-conf incarnation=1" in again.output()
    assert gang.agent("1:1", conf="incarnation=1").wait() == 0, gang.outputs()


def test_members_with_different_sizes_are_refused(gang: Gang) -> None:
    first = gang.agent("1:2")
    gang.started(1, 1)
    other = gang.agent("1:3")
    assert other.wait() == 3, gang.outputs()
    assert "max_nodes=3, but the job has 2" in other.output()
    gang.finish()
    assert first.wait() == 0, gang.outputs()
