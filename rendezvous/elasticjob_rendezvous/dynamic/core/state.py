"""Shared state of all nodes of a dynamic rendezvous, names of nodes, and transitions. No I/O.

A backend stores this state, and any node may write it by compare-and-set. The fields are those
of `torch.distributed.elastic.rendezvous.dynamic_rendezvous` (torch 2.13), whose nodes may write
it too; unknown fields are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings

WORLD = "elasticjob_world"
"""Extra field of ours: (round, size) at the completion of the round.

Nodes that do not know it preserve it; it is valid only for the round it names.
"""
MASTER = "elasticjob_master"
"""Extra field of ours: name of rank 0 in the last mixed round that one of our nodes completed.

Not written if there is a lasting store, since the choice of rank 0 then does not matter.
"""
_DIGITS = re.compile(r"([0-9]+)")
OUR_LOCAL_IDS = 1 << 30
"""Minimum `local_id` of our nodes. torch numbers the handlers of a process from 0."""
OURS_FIRST = "!"
"""Prefix of our nodes' `addr`, below the first character of every host name and address."""


@dataclass(frozen=True, slots=True)
class NodeDesc:
    """Name of one handler: address of its host, process id, and number within the process.

    The `addr` of our nodes begins with a prefix and their age (`addr_of_ours`). torch's nodes give
    rank 0 to the first node in the order of these fields, which is therefore the oldest of ours.
    """

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.host}_{self.pid}_{self.local_id}"

    @property
    def host(self) -> str:
        """Address of the host, published as MASTER_ADDR if the node becomes rank 0."""
        if not self.addr.startswith(OURS_FIRST):
            return self.addr
        return self.addr.partition(" ")[2] or self.addr


def addr_of_ours(host: str, created: datetime) -> str:
    """Return the `addr` of a node of ours that was created at that time."""
    return f"{OURS_FIRST}{int(created.timestamp() * 1000):015d} {host}"


def rank_order(node: NodeDesc) -> tuple[object, ...]:
    """Return a node's sort key: `node-2` before `node-10`, unlike torch's plain string order.

    The node that completes a round assigns its ranks and all others read them, so nodes with
    either order can share a round.
    """
    parts = _DIGITS.split(node.host)
    numbers = [digits.lstrip("0") for digits in parts[1::2]]
    # A number as (length, digits), which allows any length.
    natural = (parts[0], *zip(map(len, numbers), numbers, parts[2::2], strict=True))
    return (natural, *name_of(node))


def is_torch_node(node: NodeDesc) -> bool:
    """Return True if the node is one of torch's own."""
    return node.local_id < OUR_LOCAL_IDS


def in_rank_order(participants: Iterable[NodeDesc], last_master: object) -> list[NodeDesc]:
    """Return the nodes in rank order. In a mixed gang one of ours has rank 0, if it can.

    It is the one that torch's nodes would choose, too, unless there was another rank 0 before.

    Args:
        last_master: `name_of` the last rank 0 that one of our nodes assigned; other values match
            no node.
    """
    ordered = sorted(participants, key=rank_order)
    ours = [node for node in ordered if not is_torch_node(node)]
    if len(ours) in (0, len(ordered)):
        return ordered
    first = min(ours, key=name_of)
    master = next((node for node in ordered if name_of(node) == last_master), first)
    return [master, *(node for node in ordered if node != master)]


def name_of(node: NodeDesc) -> tuple[str, int, int]:
    """Return a node's representation in the field `MASTER`."""
    return (node.addr, node.pid, node.local_id)


@dataclass(frozen=True, slots=True)
class State:
    """Value of the shared state at one time.

    Args:
        round: number of the round, from 0; increases.
        complete: True once the round's membership and ranks are decided.
        deadline: end of the last call; set while enough nodes have joined.
        closed: True if no further round may begin.
        participants: rank of each node of the round; 0 until the round is complete.
        wait_list: nodes that wait for the next round.
        redundancy_list: surplus nodes; they join when a rank becomes free.
        last_heartbeats: time of each node's last heartbeat, on that node's clock.
        extra: unknown fields, unchanged.
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
        """Return True if the node is in any of the lists."""
        return (
            node in self.participants
            or node in self.wait_list
            or node in self.redundancy_list
            or node in self.last_heartbeats
        )


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Rank assignment of a node in a complete round, with all nodes of the round."""

    round: int
    rank: int
    roster: Mapping[NodeDesc, int]

    @property
    def master(self) -> NodeDesc:
        return next(node for node, rank in self.roster.items() if rank == 0)

    @property
    def torch_nodes(self) -> list[NodeDesc]:
        """Nodes of the round that are torch's own."""
        return [node for node in self.roster if is_torch_node(node)]


def gang_time(state: State, utc: datetime) -> datetime:
    """Return a timestamp to write: at least our clock's, and later than all heartbeats.

    torch compares timestamps of different hosts. It would consider a node with a slow clock dead,
    and end its last call before it began. Being strictly later makes every heartbeat a change,
    which our own nodes use to detect liveness.
    """
    latest = max(state.last_heartbeats.values(), default=utc)
    return max(utc, latest + timedelta(microseconds=1))


def alive(state: State, node: NodeDesc, utc: datetime) -> State:
    """Record a heartbeat of the node."""
    heartbeats = {**state.last_heartbeats, node: gang_time(state, utc)}
    return replace(state, last_heartbeats=heartbeats)


def joined(
    state: State,
    node: NodeDesc,
    settings: RendezvousSettings,
    utc: datetime,
    least_round: int = 0,
) -> State:
    """Add the node to the open round; the node that reaches the maximum completes it.

    After a loss of the store, a node without knowledge of earlier rounds may have recreated the
    state. The numbers continue with the first node that knows better: `least_round` is the first
    round that is new to the node.
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
    """Complete the round: assign a rank to every participant."""
    ordered = in_rank_order(state.participants, state.extra.get(MASTER))
    ranks = {node: rank for rank, node in enumerate(ordered)}
    known: dict[str, object] = {WORLD: (state.round, len(ranks))}
    if not lasting_store and 0 < sum(map(is_torch_node, ordered)) < len(ordered):
        known[MASTER] = name_of(ordered[0])
    return replace(
        state,
        complete=True,
        deadline=None,
        participants={node: ranks[node] for node in state.participants},
        extra={**state.extra, **known},
    )


def waiting(state: State, node: NodeDesc, utc: datetime) -> State:
    """Put the node on the wait list for the next round."""
    return replace(
        alive(state, node, utc),
        wait_list=state.wait_list | {node},
        redundancy_list=state.redundancy_list - {node},
    )


def redundant(state: State, node: NodeDesc, utc: datetime) -> State:
    """Make the node stand by: it requests no new round, and joins when a rank becomes free."""
    return replace(
        alive(state, node, utc),
        wait_list=state.wait_list - {node},
        redundancy_list=state.redundancy_list | {node},
    )


def without(state: State, nodes: Iterable[NodeDesc], settings: RendezvousSettings) -> State:
    """Remove nodes that left or died from every list.

    Without participants, a complete round is followed by the next open one. An open round with
    too few participants loses its last call.
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
    """Move the node from its round to the next one, in a single write."""
    state = without(state, [node], settings)
    if state.complete:
        return waiting(state, node, utc)
    return joined(state, node, settings, utc, least_round)


def assignment(state: State, node: NodeDesc) -> RankAssignment | None:
    """Return the node's rank assignment in the complete round, or None without a valid one.

    A node may have gone since the round was completed. Readers before and after that would
    disagree about the world size, so no node may start on such a round.
    """
    ranks = state.participants
    if not state.complete or node not in ranks:
        return None
    if sorted(ranks.values()) != list(range(len(ranks))):
        return None
    world = state.extra.get(WORLD)
    # The field is of another round if a node that does not know it completed this one.
    if (
        isinstance(world, tuple)
        and world[:1] == (state.round,)
        and world != (state.round, len(ranks))
    ):
        return None
    return RankAssignment(state.round, ranks[node], dict(ranks))


def follows_on(state: State) -> bool:
    """Return True if the previous round was complete; False if the store was lost since."""
    world = state.extra.get(WORLD)
    return isinstance(world, tuple) and world[:1] == (state.round - 1,)


def nodes_waiting(state: State, held: RankAssignment | None, settings: RendezvousSettings) -> int:
    """Return the number of nodes that a new round would serve; above 0, stop workers and rejoin.

    Unlike in torch, at least 1 if our round has lost a node or is over, and 0 if no waiting node
    could be admitted.
    """
    count = len(state.wait_list)
    if held is None or state.closed:
        return count
    if state.round != held.round or not held.roster.keys() <= state.participants.keys():
        return max(1, count)
    return 0 if len(state.participants) >= settings.max_nodes else count


def moved_on(state: State, held: RankAssignment, node: NodeDesc) -> bool:
    """Return True if another node of our round has not finished and wants a newer one.

    If the lost nodes cannot be identified (see `gone`), also True if any node wants a newer round
    and a node of ours is gone. A finished node remains in its round, also a node of torch's.
    """
    if state.closed:
        return False
    here, newer = frozenset(state.participants), state.wait_list | state.redundancy_list
    if state.round != held.round:
        here, newer = frozenset(), newer | here
    gone = held.roster.keys() - here - {node}
    if state.round != held.round or any(map(is_torch_node, state.participants)):
        return bool(gone) and bool(newer)
    return bool(gone & newer)


def gone(state: State, held: RankAssignment, node: NodeDesc) -> frozenset[int]:
    """Return the ranks of our round whose nodes are no longer in any list.

    Empty while a torch node takes part: a finished torch node keeps its rank, and holds up nodes
    that request another round, until its exit barrier times out.
    """
    if state.closed or state.round != held.round or any(map(is_torch_node, state.participants)):
        return frozenset()
    there = state.participants.keys() | state.wait_list | state.redundancy_list | {node}
    return frozenset(rank for each, rank in held.roster.items() if each not in there)
