"""Rendezvous handler for torch's agent in a pod; the launcher of the pod answers it.

The agent beside the trainer is the member of the rendezvous. A round's variables, the same that a
worker gets with launch: PerWorker, come from there; torch's agent computes the same ranks from
them and starts the workers. Limits that apply to one torchrun alone, such as its restarts, are
lifted: the job has its own.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any, Iterable, Mapping, Sequence

from torch.distributed import Store
from torch.distributed.elastic import rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from elasticjob_torchrun import ADDRESS, BACKEND
from elasticjob_torchrun.link import Link, LinkLost, LinkRefused
from elasticjob_torchrun.watch import Exit, Watch, copy_error_file

ROUND = "ELASTICJOB_ROUND"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"
MAX_RESTARTS = 1_000_000
MONITOR_SECONDS = 0.1
TORCHS = frozenset(
    {ERROR_FILE, "LOCAL_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"}
)
"""Variables of a worker that torch's agent chooses itself."""


class NodeHandler(torch_rendezvous.RendezvousHandler):  # type: ignore[misc]
    """Rendezvous handler of one torchrun; `backend` is the name under which it asked for one."""

    def __init__(self, address: str, backend: str, run_id: str) -> None:
        self._address = address
        self._backend = backend
        self._run_id = run_id
        self._envs: dict[int, dict[str, str]] = {}
        self._number = 0
        self._watch: Watch | None = None
        self._reported: set[int] = set()
        try:
            self._link = Link(address)
        except LinkLost as error:
            raise torch_rendezvous.RendezvousConnectionError(str(error)) from error
        os.environ.pop(ADDRESS, None)  # a torchrun inside a worker is not a node of the job

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Always False: the worker of rank 0 hosts the workers' store."""
        return False

    def next_rendezvous(self) -> Any:
        """Report how the last workers ended, and wait for the next round."""
        agent = _caller("_worker_group")
        if agent is None:
            raise torch_rendezvous.RendezvousStateError(
                f"{BACKEND} works with torch's elastic agent alone: no agent calls it"
            )
        self._report_failures()
        if self._watch is not None:
            self._watch.end()
        spec = agent._worker_group.spec
        _lift_limits(agent, spec)
        self._wrap_environment(agent)
        self._link.forget_round()
        self._link.send(type="join", workers=spec.local_world_size, role=spec.role)
        try:
            found = self._link.next_round()
        except LinkLost as error:
            raise torch_rendezvous.RendezvousConnectionError(str(error)) from error
        except LinkRefused as error:
            raise torch_rendezvous.RendezvousStateError(str(error)) from error
        self._number = int(found["round"])
        self._envs = {int(rank): env for rank, env in found["envs"].items()}
        self._reported = set()
        own = self._envs[0]
        os.environ[ROUND] = own[ROUND]  # for workers that are functions, not commands
        group_rank, nodes = int(own["GROUP_RANK"]), int(own["GROUP_WORLD_SIZE"])
        _check_identical(own, group_rank, nodes, spec.local_world_size)
        number = self._number
        self._watch = Watch(
            agent,
            lambda pids: self._link.send(type="running", round=number, pids=pids),
            lambda found: self._worker_exited(number, found),
        )
        return torch_rendezvous.RendezvousInfo(
            RoundStore(own, spec.role, spec.local_world_size),
            group_rank,
            nodes,
            RendezvousStoreInfo(own["MASTER_ADDR"], int(own["MASTER_PORT"])),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: the end of one torchrun is not the end of the job."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers are to stop; torch's agent then asks for the next round."""
        return int(self._link.stops(self._number))

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Report the end of this torchrun. A later one in the same process may join again."""
        self._report_failures()
        if self._watch is not None:
            self._watch.end()
        result = _local("launch_agent", "result")
        succeeded = result is not None and not result.is_failed()
        self._link.send(type="bye", succeeded=succeeded)
        self._link.close()
        os.environ[ADDRESS] = self._address
        return True

    # -- workers ------------------------------------------------------------------------

    def _wrap_environment(self, agent: Any) -> None:
        """Add the round's variables to those that torch's agent gives each worker."""
        specs = getattr(agent, "_logs_specs", None)
        if specs is None or getattr(specs, "_elasticjob", False):
            return
        reify = specs.reify

        def reify_with_round(envs: dict[int, dict[str, str]], *rest: Any, **named: Any) -> Any:
            found = reify(envs, *rest, **named)
            for local_rank, env in envs.items():
                given = self._envs.get(local_rank, {})
                env.update({name: given[name] for name in given if name not in TORCHS})
            return found

        specs.reify = reify_with_round
        specs._elasticjob = True

    def _worker_exited(self, number: int, found: Exit) -> None:
        if number != self._number or found.local_rank in self._reported:
            return
        self._reported.add(found.local_rank)
        if found.code != 0:
            source = self._watch.error_files.get(found.local_rank, "") if self._watch else ""
            target = self._envs.get(found.local_rank, {}).get(ERROR_FILE, "")
            copy_error_file(source, target)
        self._link.send(
            type="exited",
            round=number,
            local_rank=found.local_rank,
            pid=found.pid,
            exit_code=found.code,
            signal=found.signum,
        )

    def _report_failures(self) -> None:
        """Report failures that torch's agent saw before the watch did."""
        result = _local("_invoke_run", "run_result")
        for failure in (getattr(result, "failures", None) or {}).values():
            code = int(failure.exitcode)
            ended = (code, None) if code >= 0 else (None, -code)
            self._worker_exited(
                self._number, Exit(int(failure.local_rank), int(failure.pid), *ended)
            )


def _check_identical(own: Mapping[str, str], group_rank: int, nodes: int, workers: int) -> None:
    """Verify the assumption of TORCH_ELASTIC_WORKER_IDENTICAL: all nodes have as many workers."""
    if os.environ.get(IDENTICAL) != "1":
        return
    if int(own["WORLD_SIZE"]) != nodes * workers or int(own["RANK"]) != group_rank * workers:
        raise torch_rendezvous.RendezvousStateError(
            f"{IDENTICAL}=1 is set, but the nodes of this job have different numbers of workers: "
            "unset it"
        )


def _lift_limits(agent: Any, spec: Any) -> None:
    """Remove the limits and the addresses that a command line set for this torchrun alone."""
    if spec.max_restarts < MAX_RESTARTS:
        agent._remaining_restarts += MAX_RESTARTS
        spec.max_restarts += MAX_RESTARTS
    spec.monitor_interval = min(spec.monitor_interval, MONITOR_SECONDS)
    # With the backend static they would replace the round's MASTER_ADDR and MASTER_PORT.
    spec.master_addr = spec.master_port = None


def _caller(attribute: str) -> Any:
    """Return the object with this attribute whose method is in the call stack; None if none is."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if found is not None and hasattr(found, attribute):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _local(function: str, name: str) -> Any:
    """Return a local variable of a function of torch in the call stack; None if there is none."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


class RoundStore(Store):  # type: ignore[misc]
    """Store of torch's agents for a round, which holds the ranks that the round assigned.

    The agents' exit barrier does not wait: the end of the job is the rendezvous' decision.
    """

    def __init__(self, own: Mapping[str, str], role: str, workers: int) -> None:
        super().__init__()
        self._own = own
        self._role = role
        self._workers = workers
        self._timeout = timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: Any) -> None:
        """Ignore the value: the agents exchange only values that the round already has."""

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Ignore the values."""

    def get(self, key: str) -> bytes:
        if "assigned_ranks" in key:
            own = self._own
            names = ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
            return json.dumps([int(own[name]) for name in names]).encode()
        rank = int(key.rpartition("/")[2]) if key.rpartition("/")[2].isdigit() else 0
        node = {"role": self._role, "rank": rank, "local_world_size": self._workers}
        return json.dumps(node).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return amount

    def check(self, keys: Sequence[str]) -> bool:
        return True

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Return at once."""
