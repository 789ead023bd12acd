"""Machines to avoid after repeated failures, and stragglers that slow down their peers. No I/O.

A machine that ended two rounds of the job within an hour is avoided for an hour: new pods prefer
other machines, and surplus pods on it are deleted first. It is only a preference, so that no pod
waits for a machine that does not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from statistics import median

from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.core.vocabulary import OFFENDED
from elasticjob_operator.model.status import MAX_AVOIDED, AvoidedNode, Status, Straggler

WINDOW = timedelta(hours=1)
OFFENCES = 2
SLOWER = 1.5
"""Minimum ratio of a straggler's own work per step to the median of its peers."""
LEAST_PEERS = 2
FLAGGED_AFTER = timedelta(seconds=30)


def avoided_nodes(view: RendezvousView, before: Status, now: datetime) -> list[AvoidedNode]:
    """Return the machines to avoid, latest end first; known ones stay until they expire."""
    recent = [each for each in view.offences if now - each.at < WINDOW]
    found = {node.node: node for node in before.avoided_nodes if node.until > now}
    for name, count in Counter(each.node for each in recent).items():
        if count < OFFENCES:
            continue
        mine = [each for each in recent if each.node == name]
        until = max(each.at for each in mine) + WINDOW
        if name not in found or until > found[name].until:
            what = ", ".join(dict.fromkeys(OFFENDED.get(each.what, each.what) for each in mine))
            found[name] = AvoidedNode(node=name, until=until, reason=f"{count} times: {what}")
    worst = sorted(found.values(), key=lambda node: (node.until, node.node), reverse=True)
    return worst[:MAX_AVOIDED]


def avoided(status: Status, now: datetime) -> tuple[str, ...]:
    """Return the names of the machines that are avoided at `now`."""
    return tuple(node.node for node in status.avoided_nodes if node.until > now)


def stragglers(view: RendezvousView, before: Status, now: datetime) -> list[Straggler]:
    """Return the nodes of this round whose own work per step takes longer than their peers'."""
    told = [each for each in view.members if each.round == view.round and each.busy_ms > 0]
    known = {each.pod: each for each in before.stragglers if each.round == view.round}
    found = []
    for member in told:
        peers = [each.busy_ms for each in told if each is not member]
        if len(peers) < LEAST_PEERS or member.busy_ms < median(peers) * SLOWER:
            continue
        earlier = known.get(member.name)
        since = now if earlier is None else earlier.since
        node = member.node or None
        found.append(Straggler(pod=member.name, node=node, round=view.round, since=since))
    return sorted(found, key=lambda each: each.pod)[:MAX_AVOIDED]


def flagged(members: Iterable[Straggler], now: datetime) -> frozenset[str]:
    """Return the pods that have been stragglers for at least `FLAGGED_AFTER`."""
    return frozenset(each.pod for each in members if now - each.since >= FLAGGED_AFTER)
