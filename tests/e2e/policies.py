"""NetworkPolicy enforcement, for a pod network that lacks it.

This module owns a table of packet filters on each node, made from the policies of one namespace and
the current addresses of its pods. It supports the features used here: selectors of pods and
namespaces, and ports by number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.cluster.cluster import Cluster
from tests.e2e.api import Json, Refused
from tests.e2e.console import Console

POLL_SECONDS = 1.0
"""A quarter of the time that the pods under test wait before their first traffic."""
_REMOVE = "add table ip policies\ndelete table ip policies\n"


@dataclass(frozen=True, slots=True)
class World:
    """Input of the rules: every pod, and the labels of every namespace that already existed."""

    pods: Sequence[Json]
    namespaces: Mapping[str, Json]

    def chosen(self, namespace: str, peer: Json) -> list[str]:
        """Return the addresses of the pods that match a peer of a policy in that namespace."""
        inside = peer.get("namespaceSelector")
        return [
            pod["status"]["podIP"]
            for pod in self.pods
            if pod["status"].get("podIP")
            and _matches(peer.get("podSelector") or {}, pod["metadata"].get("labels") or {})
            and (
                pod["metadata"]["namespace"] == namespace
                if inside is None
                else _matches(inside, self.namespaces.get(pod["metadata"]["namespace"], {}))
            )
        ]


def ruleset(namespace: str, policies: Sequence[Json], world: World) -> str:
    """Return nft's rules: a pod selected by a policy exchanges only the traffic that a policy
    allows, and the answers to it.
    """
    egress = _chain("Egress", "saddr", "daddr", namespace, policies, world)
    ingress = _chain("Ingress", "daddr", "saddr", namespace, policies, world)
    # Two chains: traffic that may leave one pod must still be allowed to enter the other.
    return (
        f"{_REMOVE}table ip policies {{\n"
        f"chain egress {{ type filter hook forward priority 10; {egress} }}\n"
        f"chain ingress {{ type filter hook forward priority 11; {ingress} }}\n}}\n"
    )


def _chain(
    kind: str, own: str, other: str, namespace: str, policies: Sequence[Json], world: World
) -> str:
    specs = [policy["spec"] for policy in policies if kind in policy["spec"]["policyTypes"]]
    lines = ["ct state established,related accept"]
    isolated: set[str] = set()
    for spec in specs:
        selected = world.chosen(namespace, {"podSelector": spec["podSelector"]})
        isolated.update(selected)
        for address in selected:
            for rule in spec.get(kind.lower()) or ():
                lines += _allowed(f"ip {own} {address}", other, rule, namespace, world)
    lines += [f"ip {own} {address} drop" for address in sorted(isolated)]
    return "".join(f"{line}; " for line in lines)


def _allowed(own: str, other: str, rule: Json, namespace: str, world: World) -> Iterator[str]:
    peers = rule.get("to") or rule.get("from")
    addresses = sorted({ip for peer in peers or () for ip in world.chosen(namespace, peer)})
    if peers and not addresses:
        return
    whom = f" ip {other} {{ {', '.join(addresses)} }}" if peers else ""
    if not rule.get("ports"):
        yield f"{own}{whom} accept"
    for port in rule.get("ports") or ():
        yield f"{own}{whom} {port.get('protocol', 'TCP').lower()} dport {port['port']} accept"


def _matches(selector: Json, labels: Json) -> bool:
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions") or ():
        key, values = expression["key"], expression.get("values") or ()
        match expression["operator"]:
            case "Exists":
                good = key in labels
            case "In":
                good = labels.get(key) in values
            case other:
                raise NotImplementedError(f"{other} in a NetworkPolicy of these tests")
        if not good:
            return False
    return True


def _read(console: Console, namespace: str) -> str:
    policies = console.api.items("networkpolicies", namespace)
    namespaces = {
        found["metadata"]["name"]: found["metadata"]["labels"]
        for found in console.api.items("namespaces")
    }
    pods = [pod for pod in console.api.items("pods") if not pod["spec"].get("hostNetwork")]
    return ruleset(namespace, policies, World(pods, namespaces))


@contextmanager
def enforced(cluster: Cluster, console: Console, namespace: str) -> Iterator[None]:
    """Enforce a namespace's policies for the block, unless the cluster's own network does."""
    if cluster.engine is None or not cluster.engine.ours:
        yield
        return
    over = threading.Event()

    def keep() -> None:
        told = ""
        while not over.wait(POLL_SECONDS):
            try:
                found = _read(console, namespace)
            except Refused:
                continue
            if found != told:
                _run_commands(cluster, found)
                told = found

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join(timeout=60)
        _run_commands(cluster, _REMOVE)


def clear(cluster: Cluster) -> None:
    """Remove the filters of a run that was killed: they would drop traffic of later pods."""
    if cluster.engine is not None and cluster.engine.ours:
        _run_commands(cluster, _REMOVE)


def _run_commands(cluster: Cluster, rules: str) -> None:
    for node in cluster.nodes:
        cluster.exec_on_node(node, "sh", "-c", 'printf %s "$1" | nft -f -', "sh", rules)
