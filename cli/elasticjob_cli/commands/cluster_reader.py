"""Reader of the jobs of a cluster with the user's kubectl: objects, events and explanations.

Without permission to read nodes or events an explanation does without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from elasticjob_cli.errors import CommandError
from elasticjob_cli.kubectl import RESOURCE, Kubectl, checked_name
from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.manifests.names import uid_selector
from elasticjob_operator.domain.observed.node_state import Node, parse_node
from elasticjob_operator.domain.observed.pod_identity import index_of, is_own
from elasticjob_operator.domain.observed.pod_state import pod_of
from elasticjob_operator.model import ElasticJob, InvalidManifest, Problem, parse_manifest

EVENTS = 5
"""Maximum number of newest events shown."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Sentences about a job, and the newest events on it, oldest first."""

    sentences: tuple[str, ...]
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterReader(Kubectl):
    """Reader of the jobs of a cluster."""

    @classmethod
    def of(cls, kubectl: Kubectl) -> ClusterReader:
        """Return a reader of the namespace and cluster that `kubectl` uses."""
        return cls(kubectl.namespace, kubectl.context, kubectl.kubeconfig)

    def explain(self, name: str) -> Explanation:
        """Explain the state of a job. Raises `CommandError`."""
        return self.described(name)[1]

    def described(self, name: str) -> tuple[ElasticJob, Explanation]:
        """Return a job and the explanation of its state. Raises `CommandError`."""
        job = self.job(name)
        pods = self.items("pods", "--selector", uid_selector(job.metadata.uid))
        pods += self._unlisted(job, pods)
        sentences = cluster_explanation(job, pods, self._nodes(pods))
        return job, Explanation(sentences, self._events(job))

    def job(self, name: str) -> ElasticJob:
        """Return a job. Raises `CommandError`."""
        # Without these the setter of spec.nodes, which may follow maxNodes, is unknown.
        return parsed(self.get(RESOURCE, checked_name(name), "--show-managed-fields"))

    def _unlisted(self, job: ElasticJob, pods: list[Json]) -> list[Json]:
        """Return the pods of members that the selector misses because they lost their label."""
        listed = {pod["metadata"]["name"] for pod in pods}
        members = {member.pod for member in job.status.members if member.state != "done"}
        names = sorted(name for name in members - listed if index_of(job, name) is not None)
        found = self.items("pods", *names, "--ignore-not-found") if names else []
        return [raw for raw in found if is_own(job, raw)]

    def _nodes(self, pods: list[Json]) -> dict[str, Node] | None:
        """Return the nodes of the pods by name; None without permission to read nodes."""
        names = sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})
        if not names:
            return {}
        try:
            found = self.items("nodes", *names, "--ignore-not-found")
        except CommandError:
            return None
        return {raw["metadata"]["name"]: parse_node(raw) for raw in found}

    def _events(self, job: ElasticJob) -> tuple[str, ...]:
        try:
            return tuple(map(event_line, self.events(job)[-EVENTS:]))
        except CommandError:
            return ()

    def events(self, job: ElasticJob) -> list[Json]:
        """Return the events on a job, oldest first. Raises `CommandError`."""
        selector = f"involvedObject.uid={job.metadata.uid}"
        return sorted(self.items("events", "--field-selector", selector), key=event_time)


def cluster_explanation(
    job: ElasticJob, pods: list[Json], nodes: Mapping[str, Node] | None
) -> tuple[str, ...]:
    """Return the same explanation as the operator's, from the job, its pods and their nodes."""
    found = (pod_of(job, raw, nodes) for raw in pods)
    return explanation(job, [pod for pod in found if pod is not None])


def event_line(event: Mapping[str, Any]) -> str:
    """Format an event as `12:01:03 RoundFinal: round 2 is final`, in UTC."""
    text = f"{event['reason']}: {event.get('message') or ''}".rstrip(": ")
    return f"{event_time(event):%H:%M:%S} {text}"


def event_time(event: Mapping[str, Any]) -> datetime:
    """Return the time of an event's newest occurrence, in UTC."""
    series = event.get("series") or {}
    time = (
        series.get("lastObservedTime")
        or event.get("eventTime")
        or event.get("lastTimestamp")
        or event["metadata"]["creationTimestamp"]
    )
    return datetime.fromisoformat(time).astimezone(UTC)


def parsed(document: Json, ignored: list[Problem] | None = None) -> ElasticJob:
    """Return the job of an object from the API server; `ignored` gets the problems of its status.
    Raises `CommandError`."""
    try:
        return parse_manifest(document, ignored)
    except InvalidManifest as error:
        raise CommandError(
            f"cannot parse the job; it may be from another release: {error}"
        ) from error
