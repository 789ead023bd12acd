"""Adapter from the etcd v3 rendezvous to torch's `RendezvousHandler`.

`etcd.handler.EtcdV3RendezvousHandler` does the work, in its own thread. This module converts its
values and errors to torch's types.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic import rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from elasticjob_rendezvous import api
from elasticjob_rendezvous.etcd import handler as etcd_handler
from elasticjob_rendezvous.etcd.parameters import BACKEND
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.torchrun.launch import launch_of
from elasticjob_rendezvous.torchrun.replies import Answers, Disagreement
from elasticjob_rendezvous.torchrun.store import RosterStore
from elasticjob_rendezvous.torchrun.workers import WorkerKiller

ROUND = "ELASTICJOB_ROUND"
"""Environment variable with the round's number, the same as our own agents set for workers."""
IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"
_ERRORS = {
    api.RendezvousClosedError: torch_rendezvous.RendezvousClosedError,
    api.RendezvousTimeoutError: torch_rendezvous.RendezvousTimeoutError,
    api.RendezvousConnectionError: torch_rendezvous.RendezvousConnectionError,
    api.RendezvousStateError: torch_rendezvous.RendezvousStateError,
    api.RendezvousGracefulExitError: torch_rendezvous.RendezvousGracefulExitError,
    api.RendezvousError: torch_rendezvous.RendezvousError,
}


def create_handler(parameters: Any) -> TorchrunHandler:
    """Create a handler for torch's agent. Raise ValueError if a setting is malformed."""
    launch = launch_of(parameters.run_id)
    if launch and launch.forks:
        raise ValueError(
            "--start-method=fork would fork the threads of the etcd client: use spawn or forkserver"
        )
    config = {**(launch.settings() if launch else {}), **parameters.config}
    given = api.RendezvousParameters(
        parameters.backend,
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        **config,
    )
    with _torch_errors():
        return TorchrunHandler(etcd_handler.create_handler(given))


class TorchrunHandler(torch_rendezvous.RendezvousHandler):  # type: ignore[misc]
    """Rendezvous handler of one node, for one agent.

    torch does not shut a handler down when a signal ends the agent, since with its own backends
    that would close the run for all nodes. Our shutdown only leaves, so an exit handler of the
    process calls it in that case.
    """

    def __init__(self, ours: etcd_handler.EtcdV3RendezvousHandler) -> None:
        self._ours = ours
        self._killer = WorkerKiller(ours.get_run_id())
        self._shutdown = weakref.finalize(self, ours.shutdown)
        self._shutdown.atexit = False  # runs too late: atexit handlers run in reverse order
        atexit.register(self._shutdown)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Always False: the worker of rank 0 hosts the workers' store, under any agent."""
        return False

    def next_rendezvous(self) -> Any:
        self._killer.call_off()  # torch's agent calls this only after its workers have ended
        with _torch_errors():
            info = self._ours.next_rendezvous()
        roster = self._ours.roster
        assert roster is not None, "a round that began has a roster"
        answers = _answers(roster, info.rank)
        os.environ[ROUND] = str(roster.number)  # inherited by the workers
        master = info.bootstrap_store_info
        return torch_rendezvous.RendezvousInfo(
            RosterStore(answers, self._ours),
            info.rank,
            info.world_size,
            RendezvousStoreInfo(master.master_addr, master.master_port),
        )

    def is_closed(self) -> bool:
        return self._ours.is_closed()

    def set_closed(self) -> None:
        with _torch_errors():
            self._ours.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes; torch's agent stops its workers if it is above 0."""
        with _torch_errors():
            waiting = self._ours.num_nodes_waiting()
        if waiting:
            self._killer.within(self._ours.grace_seconds)
        return waiting

    def get_run_id(self) -> str:
        return self._ours.get_run_id()

    def shutdown(self) -> bool:
        self._killer.call_off()
        self._shutdown.detach()
        atexit.unregister(self._shutdown)
        return self._ours.shutdown()


def _answers(roster: Roster, group_rank: int) -> Answers:
    answers = Answers(roster, roster.seats[group_rank])
    if os.environ.get(IDENTICAL) == "1":
        try:
            answers.check_identical()
        except Disagreement as error:
            raise torch_rendezvous.RendezvousStateError(str(error)) from error
    return answers


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Convert our errors to torch's errors of the same name."""
    try:
        yield
    except api.RendezvousError as error:
        raise _torchs(error)(str(error)) from error


def _torchs(error: api.RendezvousError) -> Any:
    """Return torch's class of the same name, or of the nearest base class that torch has."""
    return next(_ERRORS[kind] for kind in type(error).__mro__ if kind in _ERRORS)
