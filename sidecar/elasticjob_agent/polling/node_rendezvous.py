"""Rendezvous of a pod and of `elasticjob agent` over a handler: etcd-v2 or c10d.

The joiner is the counterpart of `SimpleElasticAgent`'s rendezvous steps, without a worker spec:
the node's role comes from its settings, and its number of workers from the launcher.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticjob_agent.core.poll_step import PollingState, PollingTerms
from elasticjob_agent.core.state import LEFT_CODE, Ending, ExitCode
from elasticjob_agent.polling.agreement import (
    AssignedRanks,
    RestartBudget,
    RoleInstanceInfo,
    agreed_store_port,
    agreement_store,
    assign_ranks,
    known_ranks,
    offer_store,
)
from elasticjob_agent.polling.handler_rendezvous import HandlerRendezvous
from elasticjob_agent.polling.join import (
    Place,
    hosts_store,
    join_through_handler,
    partial_roster,
)
from elasticjob_agent.ports import StateReader
from elasticjob_agent.settings import AgentSettings
from elasticjob_agent.threads import in_thread
from elasticjob_rendezvous.api import RendezvousHandler
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

log = logging.getLogger("elasticjob.agent")

POLL_SECONDS = 1.0
SHUTDOWN_SECONDS = 15.0
"""Maximum time to close the rendezvous for all at the job's end, or to leave it at other ends."""
LEAVE_AGAIN_SECONDS = 4.5
"""Maximum time of a second leave: the first one has waited for a store that does not answer."""


class NodeJoiner:
    """Joiner of rounds for the node of an agent; see `polling.join.RoundJoiner`.

    Args:
        handler: rendezvous handler.
        member: this node's id.
        role: role of its workers.
        state: returns the agent's state.
    """

    def __init__(
        self, handler: RendezvousHandler, member: str, role: str, state: StateReader
    ) -> None:
        self._handler = handler
        self._member = member
        self._role = role
        self._state = state
        self._offered = 0

    def join_round(self, charge: bool, restarts: int, least: int) -> Place:
        """Join the next round, then agree with its nodes on ranks, budget and bootstrap store.

        The bootstrap store requires rank assignment through the round's store, which completes only
        after all agents have made their offers. An agent that joins the same round again has
        already made its offer.
        """
        slots = self._state().facts.slots
        answer = join_through_handler(self._handler)
        shared, budget = agreement_store(answer.store), RestartBudget(restarts, charge)
        budget.announce(shared)
        known = known_ranks(self._handler, answer.group_rank, slots)
        offers = shared is not None and known is None and answer.number != self._offered
        if offers:
            self._offered = answer.number
            offer_store(shared, answer.group_rank, self._served_port())
        info = RoleInstanceInfo(self._role, answer.group_rank, slots)
        assigned = assign_ranks(answer.store, info, answer.group_world_size, known)
        budget.agree(shared)
        # A single worker gains nothing, and processes that it starts may meet at another address.
        offers = offers and assigned.world_size > 1
        port = agreed_store_port(shared, answer.group_world_size) if offers else 0
        assert answer.master is not None, "ElasticJob's handlers name it"
        address, named = answer.master
        answer = replace(
            answer, number=max(answer.number, least + 1), master=(address, port or named)
        )
        log.info(
            "[%s] rendezvous %d: group rank %d of %d, workers %s, master %s:%d",
            self._role, answer.number, answer.group_rank, answer.group_world_size,
            _workers_text(assigned, slots), address, port or named,
        )  # fmt: skip
        served = port > 0 or hosts_store(self._handler)
        roster = partial_roster(
            answer, self._member, self._role, slots, assigned, budget.total, served
        )
        return Place(roster, answer.store)

    def _served_port(self) -> int:
        """Return the port of the store that this node's launcher serves for workers; 0 for none."""
        state = self._state()
        return state.port if state.served else 0


def _workers_text(assigned: AssignedRanks, slots: int) -> str:
    """Return the ranks of each worker for a log line."""
    workers = [
        f"local_rank={local_rank},global_rank={assigned.base_rank + local_rank},"
        f"role_rank={assigned.role_base_rank + local_rank},world_size={assigned.world_size},"
        f"role_world_size={assigned.role_world_size}"
        for local_rank in range(slots)
    ]
    return f"[{', '.join(workers)}]"


class NodeRendezvous:
    """Rendezvous of a node through a handler, from the agent's start to the handler's release.

    Args:
        settings: settings of the node.
        handler: rendezvous handler; `release` shuts it down.
        stepped: called after each step with the state before and after it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        handler: RendezvousHandler,
        stepped: Callable[[PollingState, PollingState], None],
    ) -> None:
        self._settings = settings
        self._handler = handler
        self._stepped = stepped
        self._entered: HandlerRendezvous | None = None

    def enter(self, state: StateReader) -> HandlerRendezvous:
        """Create the agent's rendezvous, see `agent.Agent`.

        A finished node waits as long as the others work: its exit would count as the job's end.
        """
        settings = self._settings
        budget = (settings.bounds or RendezvousParams(1, 1)).max_restarts
        terms = PollingTerms(
            settings.member, settings.run_id, budget, settings.stop_grace_seconds, settings.name
        )
        joiner = NodeJoiner(self._handler, settings.member, settings.role, state)
        self._entered = HandlerRendezvous(
            terms, self._handler, joiner, POLL_SECONDS, math.inf, self._stepped
        )
        return self._entered

    async def release(self, ending: Ending) -> None:
        """Release the handler; close the rendezvous only at the job's end.

        Handlers like torch's close the rendezvous on `shutdown`, so otherwise call `leave` if
        present.
        """
        handler, entered = self._handler, self._entered
        alone = entered is not None and entered.alone
        ended = ending.code in (ExitCode.OK, ExitCode.FAILED) and ending.launcher_code != LEFT_CODE
        leaves = not ended or alone
        again = leaves and entered is not None and entered.departed
        let_go: Callable[[], Any] = (
            getattr(handler, "leave", handler.shutdown) if leaves else handler.shutdown
        )
        seconds = LEAVE_AGAIN_SECONDS if again else SHUTDOWN_SECONDS
        for call, limit in (
            (let_go, seconds),
            (getattr(handler, "close", None), SHUTDOWN_SECONDS),
        ):
            try:
                if call is not None:
                    await in_thread(call, limit)
            except TimeoutError:
                log.warning(
                    "cannot leave the rendezvous: its store did not answer within %g s; %s",
                    limit,
                    "it lists this node until the others detect its loss"
                    if leaves
                    else "the rendezvous may still be open",
                )
            except Exception as error:
                log.warning("cannot leave the rendezvous: %r", error)
