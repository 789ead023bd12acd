"""Join of a round through a handler, and lookup of the outcome of a job that ended meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elasticjob_agent.core.poll_step import Join, JoinTrouble
from elasticjob_agent.polling.agreement import AssignedRanks
from elasticjob_agent.polling.poll import ENDED_NOTE, read_note, trouble_of
from elasticjob_agent.polling.round_store import RETRY_SECONDS, TERMINAL_STATE_SYNC_ID, last_member
from elasticjob_agent.threads import CALL_SECONDS, in_thread
from elasticjob_rendezvous.api import RendezvousTimeoutError
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster

log = logging.getLogger("elasticjob.agent")


@dataclass(frozen=True, slots=True)
class Place:
    """Place in a round: the roster with this node, and the round's store if it has one."""

    roster: Roster
    store: Any


class RoundJoiner(Protocol):
    """Port to join a round, called in a thread: `node_rendezvous.NodeJoiner`, the torch API."""

    def join_round(self, charge: bool, restarts: int, least: int) -> Place:
        """Block until this node has a place in a round numbered above `least`.

        `charge`: the last round ended by a failure to charge; `restarts`: failures charged so far.
        """
        ...


@dataclass(frozen=True, slots=True)
class HandlerAnswer:
    """Answer of a handler. `master` is None and `number` 0 if the handler does not set them."""

    store: Any
    group_rank: int
    group_world_size: int
    master: tuple[str, int] | None = None
    number: int = 0

    def at(self, address: str, port: int) -> HandlerAnswer:
        return replace(self, master=(address, port))


def join_through_handler(handler: Any) -> HandlerAnswer:
    """Join the next round through the handler. Blocks.

    Supports handlers of ElasticJob and torch, also those of old versions, which return a tuple.
    """
    info = handler.next_rendezvous()
    if isinstance(info, tuple):
        store, group_rank, group_world_size = info
        return HandlerAnswer(store, group_rank, group_world_size)
    host = info.bootstrap_store_info
    master = None if host is None else (host.master_addr, int(host.master_port))
    # Some handlers number from 0, which means no round to an agent; all members must agree.
    number = getattr(info, "round", -1) + 1
    return HandlerAnswer(info.store, info.rank, info.world_size, master, number)


def hosts_store(handler: Any) -> bool:
    """Return True if the handler hosts a store at the master's address, so no worker may."""
    return bool(getattr(handler, "use_agent_store", False))


def partial_roster(
    answer: HandlerAnswer,
    member: str,
    role: str,
    slots: int,
    assigned: AssignedRanks,
    restarts: int,
    served: bool,
) -> Roster:
    """Return the roster as far as it is known: this node's ranks and the number of nodes.

    Args:
        answer: place of the node, with the round's number and the master's address.
        member: id of the node.
        role: role of its workers.
        slots: number of its workers.
        assigned: their ranks.
        restarts: failures charged to the job so far.
        served: True if a store for the workers listens at the master's address already.
    """
    assert answer.master is not None, "it is known before ranks are assigned"
    mine = RankAssignment(
        id=member,
        name=member,
        address="",
        slots=slots,
        role=role,
        group_rank=answer.group_rank,
        base_rank=assigned.base_rank,
        role_base_rank=assigned.role_base_rank,
        role_world_size=assigned.role_world_size,
    )
    seats = tuple(
        mine
        if rank == answer.group_rank
        else RankAssignment("", f"node {rank}", "", 0, "", rank, 0, 0, 0)
        for rank in range(answer.group_world_size)
    )
    return Roster(
        answer.number, assigned.world_size, *answer.master, seats, restarts, master_served=served
    )


async def join_round(handler: Any, joiner: RoundJoiner, order: Join, least: int) -> Place:
    """Join a round; retry after errors if the handler survives a loss of its store.

    Raises any exception of the handler, which may be user code.
    """
    began, limit_seconds = time.monotonic(), getattr(handler, "join_seconds", 0.0)
    while True:
        try:
            return await in_thread(lambda: joiner.join_round(order.charge, order.restarts, least))
        except Exception as error:
            waited = time.monotonic() - began
            persists = getattr(handler, "persists", False)
            # The round lost its store or a node during the join: join the next one.
            if not persists or trouble_of(error) is not JoinTrouble.ERROR:
                raise
            if waited > limit_seconds:
                raise RendezvousTimeoutError(str(error)) from error
            log.warning("lost the place in a round while joining, retrying: %r", error)
        await asyncio.sleep(RETRY_SECONDS)


async def read_outcome(handler: Any, place: Place | None) -> Outcome | None:
    """Return the job's outcome as recorded in the store of this node's last round or a newer one.

    None if there is no record: the job was stopped, or ended by agents that write no notes.
    """

    def read() -> Outcome | None:
        stores = [] if place is None or place.store is None else [place.store]
        stores += getattr(handler, "last_stores", list)()
        for store in stores:
            if text := read_note(store, ENDED_NOTE):
                return Outcome(OutcomeKind.FAILED, text)
        last = last_member(TERMINAL_STATE_SYNC_ID)
        done = any(store.check([last]) for store in stores)
        return Outcome(OutcomeKind.SUCCEEDED) if done else None

    try:
        return await in_thread(read, CALL_SECONDS)
    except Exception as error:
        log.warning("cannot read the job's outcome: %r", error)
        return None
