"""Environment of a worker: its ranks, its peers, the job's variables.

Names and values match those of torch's own agent, so any script written for `torchrun` runs
unchanged; `ELASTICJOB_*` is specific to ElasticJob.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elasticjob.layout import PROGRESS_FILE, REQUEST_FILE, SAVED_FILE
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
THREADS = "OMP_NUM_THREADS"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ROUND = "ELASTICJOB_ROUND"
MAX_WORLD_SIZE = "ELASTICJOB_MAX_WORLD_SIZE"
"""Number of workers of a job at its full size: the same in every round."""
ACCUMULATION = "ELASTICJOB_ACCUMULATION"
"""Gradient accumulation factor that keeps the global batch at least as large as at full size."""
FAULT_HANDLER = "PYTHONFAULTHANDLER"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """Paths of one worker's files; empty where there are none."""

    error: str = ""
    progress: str = ""
    request: str = ""
    saved: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings shared by a round's workers besides the roster. `dumps`: they can dump stacks."""

    run_id: str
    max_restarts: int
    dumps: bool = False


def shared_environment(slots: int, inherited: Collection[str], dumps: bool) -> dict[str, str]:
    """Return the variables that are the same for all of a node's workers in all rounds.

    See `worker_environment`.
    """
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if ASYNC_ERRORS not in inherited:
        env[ASYNC_ERRORS] = "1"
    if slots > 1 and THREADS not in inherited:
        env[THREADS] = "1"  # several workers with a thread for each core slow each other down
    if dumps and FAULT_HANDLER not in inherited:
        env[FAULT_HANDLER] = "1"  # so that SIGABRT writes the stacks of all threads
    return env


PER_NODE_BACKEND = "elasticjob-node"
"""Name under which torchrun's plug-in `elasticjob_torchrun` is registered."""


_INDEX = re.compile(r"(?:.*\D)?(\d{1,9})")


def command_environment(
    run_id: str, role: str, nnodes: str, nproc: str, name: str = ""
) -> Mapping[str, str]:
    """Return torchrun's defaults for a command that runs once for the node.

    Options in the command take precedence, and the plug-in makes those for the rendezvous
    ineffective. Three variables are those by which frameworks decide if they use torchrun at all:
    LLaMA-Factory does not for one device without FORCE_TORCHRUN, ms-swift only with NPROC_PER_NODE
    or NNODES, XTuner only if one of them is above 1. They expect plain numbers; the launcher adds
    NPROC_PER_NODE where the job has a word. It also adds the variables of other operators that the
    command refers to, with the index at the end of the node's name as its number.
    """
    least, _, most = nnodes.rpartition(":")
    index = _INDEX.fullmatch(name)
    return {
        "PET_RDZV_BACKEND": PER_NODE_BACKEND,
        "PET_RDZV_ENDPOINT": "localhost:0",  # torchrun requires one
        "PET_RDZV_ID": run_id,
        "PET_NNODES": most if least == most else nnodes,
        **({"PET_NODE_RANK": str(int(index[1]))} if index else {}),
        **({"PET_NPROC_PER_NODE": nproc} if nproc else {}),
        **({"NPROC_PER_NODE": nproc} if nproc.isascii() and nproc.isdigit() else {}),
        **({} if most == "1" else {"NNODES": most}),
        "FORCE_TORCHRUN": "1",
        "PET_ROLE": role,
        "PET_MAX_RESTARTS": "1000000",  # the job has a budget of its own
        "PET_MONITOR_INTERVAL": "0.1",
    }


def worker_environment(
    roster: Roster,
    assignment: RankAssignment,
    local_rank: int,
    run: Run,
    files: WorkerFiles,
    inherited: Collection[str],
) -> Mapping[str, str]:
    """Return the variables to lay over a worker's base environment.

    Args:
        local_rank: 0 … assignment.slots - 1.
        inherited: names set in the base environment; the user's value wins where it should.
    """
    env = {
        "RANK": assignment.base_rank + local_rank,
        "GROUP_RANK": assignment.group_rank,
        "ROLE_RANK": assignment.role_base_rank + local_rank,
        "ROLE_NAME": assignment.role,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": assignment.slots,
        "WORLD_SIZE": roster.world_size,
        "GROUP_WORLD_SIZE": len(roster.seats),
        "ROLE_WORLD_SIZE": assignment.role_world_size,
        "MASTER_ADDR": roster.master_address,
        "MASTER_PORT": roster.master_port,
        "TORCHELASTIC_RESTART_COUNT": roster.restarts,
        "TORCHELASTIC_MAX_RESTARTS": run.max_restarts,
        "TORCHELASTIC_RUN_ID": run.run_id,
        # Each round has its own store at its own port; rank 0 serves it unless one already
        # listens there.
        "TORCHELASTIC_USE_AGENT_STORE": roster.master_served,
        ROUND: roster.number,
        **shared_environment(assignment.slots, inherited, run.dumps),
    }
    if roster.max_world_size:
        env[MAX_WORLD_SIZE] = roster.max_world_size
        env[ACCUMULATION] = -(-roster.max_world_size // roster.world_size)
    if files.error:
        env[ERROR_FILE] = files.error
    if files.progress:
        env[PROGRESS_FILE] = files.progress
        env[REQUEST_FILE] = files.request
        env[SAVED_FILE] = files.saved
    return {name: str(value) for name, value in env.items()}
