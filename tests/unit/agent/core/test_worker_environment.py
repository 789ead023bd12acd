"""Environment of the workers, name by name."""

from __future__ import annotations

import pytest

from elasticjob_agent.core.worker_environment import (
    Run,
    WorkerFiles,
    command_environment,
    worker_environment,
)
from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.records.roster import seal

MEMBERS = (
    Member("a", "s", "node-2", "10.0.0.2", 7000, slots=2, role="trainer", master_port=31000),
    Member("b", "s", "node-10", "10.0.0.10", 7000, slots=1, role="trainer"),
    Member("c", "s", "node-3", "10.0.0.3", 7000, slots=4, role="reader"),
)
RUN = Run("digits", 3)


def environment(member: str, local_rank: int, inherited: frozenset[str] = frozenset()):
    roster = seal(5, MEMBERS, restarts=1, ceiling_nodes=4)
    assignment = roster.assignment(member)
    assert assignment is not None
    files = WorkerFiles("/logs/error.json", "/logs/progress", "/logs/request", "/logs/saved")
    return worker_environment(roster, assignment, local_rank, RUN, files, inherited)


def test_worker_environment_variables() -> None:
    assert environment("b", 0) == {
        "RANK": "6",
        "GROUP_RANK": "2",
        "ROLE_RANK": "2",
        "ROLE_NAME": "trainer",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "7",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "31000",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "digits",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "ELASTICJOB_ROUND": "5",
        "ELASTICJOB_MAX_WORLD_SIZE": "16",
        "ELASTICJOB_ACCUMULATION": "3",
        "ELASTICJOB_PROGRESS_FILE": "/logs/progress",
        "ELASTICJOB_REQUEST_FILE": "/logs/request",
        "ELASTICJOB_SAVED_FILE": "/logs/saved",
    }


def test_ranks_are_unique_over_nodes_of_different_sizes() -> None:
    ranks = [
        int(environment(member.id, local_rank)["RANK"])
        for member in MEMBERS
        for local_rank in range(member.slots)
    ]
    assert sorted(ranks) == list(range(7))


@pytest.mark.parametrize(
    ("member", "inherited", "threads"),
    [
        ("a", frozenset(), "1"),
        ("a", frozenset({"OMP_NUM_THREADS"}), None),
        ("b", frozenset(), None),
    ],
    ids=["several workers", "the user's own", "one worker"],
)
def test_threads_are_limited_only_where_workers_share_a_node(
    member: str, inherited: frozenset[str], threads: str | None
) -> None:
    assert environment(member, 0, inherited).get("OMP_NUM_THREADS") == threads


def test_error_handling_of_user_is_inherited() -> None:
    names = frozenset({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES"})
    given = environment("a", 0, names)
    assert not names & given.keys()


@pytest.mark.parametrize(("nproc", "number"), [("8", "8"), ("auto", None), ("", None)])
def test_command_environment_makes_frameworks_use_torchrun(nproc: str, number: str | None) -> None:
    env = command_environment("job", "default", "1:4", nproc)
    assert env["FORCE_TORCHRUN"] == "1"
    assert env["NNODES"] == "4"  # frameworks read a number
    assert "NNODES" not in command_environment("job", "default", "1:1", nproc)
    assert env.get("NPROC_PER_NODE") == number
    assert env.get("PET_NPROC_PER_NODE") == (nproc or None)


@pytest.mark.parametrize(
    ("nnodes", "name", "expected"),
    [
        ("1:4", "digits-2", ("1:4", "2")),
        ("4:4", "digits-0", ("4", "0")),
        ("4", "node", ("4", None)),
        ("1:1", "a-07", ("1", "7")),
        ("1:1", "3", ("1", "3")),
    ],
)
def test_command_environment_numbers_the_node(
    nnodes: str, name: str, expected: tuple[str, str | None]
) -> None:
    env = command_environment("job", "default", nnodes, "", name)
    assert (env["PET_NNODES"], env.get("PET_NODE_RANK")) == expected
