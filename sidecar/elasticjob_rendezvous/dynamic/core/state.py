"""The state that all nodes of a dynamic rendezvous share, and how it may change.

Owns the datum that a backend stores: any node may write it, by compare-and-set. The
fields are those of `torch.distributed.elastic.rendezvous.dynamic_rendezvous` (torch 2.13),
whose nodes may write it too; fields that are not known here are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc, is_torchs
from elasticjob_rendezvous.dynamic.core.ranking import in_rank_order, name_of
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings

WORLD = "elasticjob_world"
"""A field of ours among the extra ones: (round, size) as the round was completed.

Nodes that do not know it carry it along; it counts only for the round that it names.
"""
MASTER = "elasticjob_master"
"""Another: the name of the node that got rank 0 when one of ours last completed a round of both
kinds. Not written where it does not matter who has it: there is a lasting store."""


@dataclass(frozen=True, slots=True)
class State:
    """One version of the shared state.

    Args:
        round: number of the round, from 0; grows.
        complete: whether the round's membership and ranks are decided.
        deadline: when the last call ends; set while enough nodes have joined.
        closed: no round begins any more.
        participants: the nodes of the round; the rank of each, 0 until it is complete.
        wait_list: nodes that want into the next round.
        redundancy_list: nodes to spare; they step in when a place is free.
        last_heartbeats: when each node last said that it lives, on its own clock.
        extra: further fields, as they were found.
    """

    round: int = 0
    complete: bool = False
    deadline: datetime | None = None
    closed: bool = False
    participants: Mapping[NodeDesc, int] = field(default_factory=dict)
    wait_list: frozenset[NodeDesc] = frozenset()
    redundancy_list: frozenset[NodeDesc] = frozenset()
    last_heartbeats: Mapping[NodeDesc, datetime] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    def knows(self, node: NodeDesc) -> bool:
        """Whether the node stands in any of the lists."""
        return (
            node in self.participants
            or node in self.wait_list
            or node in self.redundancy_list
            or node in self.last_heartbeats
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a complete round, and who else has one."""

    round: int
    rank: int
    roster: Mapping[NodeDesc, int]

    @property
    def master(self) -> NodeDesc:
        return next(node for node, rank in self.roster.items() if rank == 0)

    @property
    def torchs(self) -> list[NodeDesc]:
        """The nodes in it that are torch's own."""
        return [node for node in self.roster if is_torchs(node)]


def gang_time(state: State, utc: datetime) -> datetime:
    """The time to write: later than every heartbeat in the state, whatever our own clock says.

    The reference compares times of different hosts. A node whose clock is behind would look
    dead to it, and its last call would be over before it began. That it is strictly later
    makes every heartbeat a change, by which our own nodes know life.
    """
    latest = max(state.last_heartbeats.values(), default=utc)
    return max(utc, latest + timedelta(microseconds=1))


def alive(state: State, node: NodeDesc, utc: datetime) -> State:
    """The node said that it lives."""
    heartbeats = {**state.last_heartbeats, node: gang_time(state, utc)}
    return replace(state, last_heartbeats=heartbeats)


def joined(
    state: State,
    node: NodeDesc,
    settings: RendezvousSettings,
    utc: datetime,
    least_round: int = 0,
) -> State:
    """The node takes part in the open round; the last one that fits completes it.

    Where the store was lost and made anew by a node that knew of no round, the numbers go on
    with whoever knows better: `least_round` is the first that is new to the node.
    """
    if state.round < least_round:
        state = replace(state, round=least_round, deadline=None)
    state = replace(
        alive(state, node, utc),
        participants={**state.participants, node: 0},
        wait_list=state.wait_list - {node},
        redundancy_list=state.redundancy_list - {node},
    )
    if len(state.participants) >= settings.max_nodes:
        return completed(state, settings.lasting_store)
    if len(state.participants) >= settings.min_nodes and state.deadline is None:
        deadline = gang_time(state, utc) + settings.last_call(state.round)
        return replace(state, deadline=deadline)
    return state


def completed(state: State, lasting_store: bool = False) -> State:
    """The round is decided: every participant has its rank."""
    ordered = in_rank_order(state.participants, state.extra.get(MASTER))
    ranks = {node: rank for rank, node in enumerate(ordered)}
    known: dict[str, object] = {WORLD: (state.round, len(ranks))}
    if not lasting_store and 0 < sum(map(is_torchs, ordered)) < len(ordered):
        known[MASTER] = name_of(ordered[0])
    return replace(
        state,
        complete=True,
        deadline=None,
        participants={node: ranks[node] for node in state.participants},
        extra={**state.extra, **known},
    )


def waiting(state: State, node: NodeDesc, utc: datetime) -> State:
    """The node wants into the next round."""
    return replace(
        alive(state, node, utc),
        wait_list=state.wait_list | {node},
        redundancy_list=state.redundancy_list - {node},
    )


def redundant(state: State, node: NodeDesc, utc: datetime) -> State:
    """The node stands by: it asks for no new round, and steps in when a place is free."""
    return replace(
        alive(state, node, utc),
        wait_list=state.wait_list - {node},
        redundancy_list=state.redundancy_list | {node},
    )


def without(state: State, nodes: Iterable[NodeDesc], settings: RendezvousSettings) -> State:
    """The nodes are gone from every list, because they left or died.

    The last one to go from a complete round opens the next; too few left in an open round
    take its last call back.
    """
    gone = frozenset(nodes)
    participants = {n: rank for n, rank in state.participants.items() if n not in gone}
    fewer = len(participants) < len(state.participants)
    state = replace(
        state,
        participants=participants,
        wait_list=state.wait_list - gone,
        redundancy_list=state.redundancy_list - gone,
        last_heartbeats={n: t for n, t in state.last_heartbeats.items() if n not in gone},
    )
    if fewer and state.complete and not participants:
        return replace(state, complete=False, round=state.round + 1)
    if fewer and not state.complete and len(participants) < settings.min_nodes:
        return replace(state, deadline=None)
    return state


def rejoined(
    state: State,
    node: NodeDesc,
    settings: RendezvousSettings,
    utc: datetime,
    least_round: int = 0,
) -> State:
    """The node gives up its place in a round and asks for one in the next, in one write."""
    state = without(state, [node], settings)
    if state.complete:
        return waiting(state, node, utc)
    return joined(state, node, settings, utc, least_round)


def seat(state: State, node: NodeDesc) -> Seat | None:
    """The node's place in the complete round, or None if it has none that is good.

    A node may have gone since the round was completed. Then those who read the state before
    and after would not agree on the world's size: nobody may start on such a round.
    """
    ranks = state.participants
    if not state.complete or node not in ranks:
        return None
    if sorted(ranks.values()) != list(range(len(ranks))):
        return None
    world = state.extra.get(WORLD)
    # Of another round, if this one was completed by a node that does not know the field.
    if (
        isinstance(world, tuple)
        and world[:1] == (state.round,)
        and world != (state.round, len(ranks))
    ):
        return None
    return Seat(state.round, ranks[node], dict(ranks))


def follows_on(state: State) -> bool:
    """Whether the round before this one was complete. Not so where the store was lost meanwhile."""
    world = state.extra.get(WORLD)
    return isinstance(world, tuple) and world[:1] == (state.round - 1,)


def nodes_waiting(state: State, held: Seat | None, settings: RendezvousSettings) -> int:
    """How many nodes a new round would serve; more than 0 means: stop the workers and rejoin.

    Unlike the reference's, this is also 1 when the round that we hold has lost a node or is
    over, and 0 when nobody who waits could be taken in.
    """
    count = len(state.wait_list)
    if held is None or state.closed:
        return count
    if state.round != held.round or not held.roster.keys() <= state.participants.keys():
        return max(1, count)
    return 0 if len(state.participants) >= settings.max_nodes else count


def moved_on(state: State, held: Seat, node: NodeDesc) -> bool:
    """Whether the round that we hold did not end well for another: it wants a newer one, or,
    where `gone` cannot be told, somebody does in place of one that is gone.

    Who is done stays in the round that it was done with, also a node of torch's.
    """
    if state.closed:
        return False
    here, newer = frozenset(state.participants), state.wait_list | state.redundancy_list
    if state.round != held.round:
        here, newer = frozenset(), newer | here
    gone = held.roster.keys() - here - {node}
    if state.round != held.round or any(map(is_torchs, state.participants)):
        return bool(gone) and bool(newer)
    return bool(gone & newer)


def gone(state: State, held: Seat, node: NodeDesc) -> frozenset[int]:
    """The ranks of the round that we hold whose nodes are in no list any more.

    None where a torch node still has its place: it may be done, and then keeps it, and who
    asks for another round, until its exit barrier's time is over.
    """
    if state.closed or state.round != held.round or any(map(is_torchs, state.participants)):
        return frozenset()
    there = state.participants.keys() | state.wait_list | state.redundancy_list | {node}
    return frozenset(rank for each, rank in held.roster.items() if each not in there)
