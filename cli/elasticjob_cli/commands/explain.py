"""Command `elasticjob explain`: the state of a job and its reasons, here or on a cluster.

A job on a cluster is read with the user's kubectl, which already has the user's contexts and
credentials. Without permission to read nodes or events the explanation does without them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticjob_cli.commands.options import DEFAULT_NAMESPACE, Name
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.job_store import JobFolder, find_job
from elasticjob_cli.output import show
from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.explain.phrases import sentence, stop_texts
from elasticjob_operator.domain.manifests.names import uid_selector
from elasticjob_operator.domain.manifests.owned_objects import is_owned
from elasticjob_operator.domain.observed.node_state import Node, parse_node
from elasticjob_operator.domain.observed.pod_state import index_of, pod_of
from elasticjob_operator.model import ElasticJob, InvalidManifest, Phase, parse_manifest

RESOURCE = "elasticjobs.elasticjob.dev"
REQUEST_SECONDS = 15
CALL_SECONDS = 60.0
EVENTS = 5
"""Maximum number of newest events shown."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Sentences about a job, and the newest events on it, oldest first."""

    sentences: tuple[str, ...]
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster and namespace to read; None means the kubeconfig's default."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    def explain(self, name: str) -> Explanation:
        """Explain the state of a job. Raises `CommandError`."""
        # Without these the setter of spec.nodes, which may follow maxNodes, is unknown.
        document = self._get(RESOURCE, name, "--show-managed-fields")
        job = _job(document)
        pods = self._items("pods", "--selector", uid_selector(job.metadata.uid))
        pods += self._unlisted(job, pods)
        return Explanation(cluster_explanation(job, pods, self._nodes(pods)), self._events(job))

    def _unlisted(self, job: ElasticJob, pods: list[Json]) -> list[Json]:
        """Return the pods of members that the selector misses because they lost their label."""
        there = {pod["metadata"]["name"] for pod in pods}
        members = {member.pod for member in job.status.members if member.state != "done"}
        names = sorted(name for name in members - there if index_of(job, name) is not None)
        found = self._items("pods", *names, "--ignore-not-found") if names else []
        return [raw for raw in found if is_owned(job, raw)]

    def _nodes(self, pods: list[Json]) -> dict[str, Node] | None:
        """Return the nodes of the pods by name; None without permission to read nodes."""
        names = sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})
        if not names:
            return {}
        try:
            found = self._items("nodes", *names, "--ignore-not-found")
        except CommandError:
            return None
        return {raw["metadata"]["name"]: parse_node(raw) for raw in found}

    def _events(self, job: ElasticJob) -> tuple[str, ...]:
        try:
            selector = f"involvedObject.uid={job.metadata.uid}"
            found = self._items("events", "--field-selector", selector)
        except CommandError:
            return ()
        newest = sorted(found, key=_time)[-EVENTS:]
        return tuple(event_line(event) for event in newest)

    def _items(self, *arguments: str) -> list[Json]:
        found = self._get(*arguments)
        items: list[Json] = found.get("items", [found] if found else [])
        return items

    def _get(self, *arguments: str) -> Json:
        where = [f"--request-timeout={REQUEST_SECONDS}s"]
        where += [f"--namespace={self.namespace}"] if self.namespace else []
        where += [f"--context={self.context}"] if self.context else []
        where += [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        said = _kubectl("get", *arguments, "--output=json", *where)
        document: Json = json.loads(said) if said.strip() else {}
        return document


def cluster_explanation(
    job: ElasticJob, pods: list[Json], nodes: Mapping[str, Node] | None
) -> tuple[str, ...]:
    """Return the same explanation as the operator's, from the job, its pods and their nodes."""
    found = (pod_of(job, raw, nodes) for raw in pods)
    return explanation(job, [pod for pod in found if pod is not None])


def event_line(event: Mapping[str, Any]) -> str:
    """Format an event as `12:01:03 RoundFinal: round 2 is final`, in UTC."""
    return f"{_time(event):%H:%M:%S} {event['reason']}: {event.get('message') or ''}".rstrip(": ")


def _time(event: Mapping[str, Any]) -> datetime:
    series = event.get("series") or {}
    said = (
        series.get("lastObservedTime")
        or event.get("eventTime")
        or event.get("lastTimestamp")
        or event["metadata"]["creationTimestamp"]
    )
    return datetime.fromisoformat(said).astimezone(UTC)


def _job(document: Json) -> ElasticJob:
    try:
        return parse_manifest(document)
    except InvalidManifest as error:
        raise CommandError(
            f"cannot parse the job; it may be from another release: {error}"
        ) from error


def _kubectl(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["kubectl", *arguments], capture_output=True, text=True, timeout=CALL_SECONDS
        )
    except FileNotFoundError as error:
        raise CommandError(
            "kubectl was not found on PATH; it is required to read a job on a cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"kubectl did not answer within {CALL_SECONDS:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CommandError(f"kubectl: {lines[-1]}")
    return done.stdout


Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace of the job.", show_default=False),
]
Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)
]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", help="The kubeconfig file.", show_default=False)
]

RUNNER_GONE = (
    "The process that ran the job ended before the job did, and nothing of it is running: "
    "`elasticjob run` starts it again, and a script that keeps checkpoints resumes from the last."
)
INTERRUPTED = (
    "Stopped before its end, by Ctrl-C or a signal to its runner: `elasticjob run` starts it "
    "again, and a script that keeps checkpoints goes on from the last."
)
JUST_BEGUN = "The job has just started: it has no status yet."


def explain(
    name: Name,
    namespace: Namespace = None,
    cluster: Annotated[
        bool | None,
        typer.Option(
            "--cluster/--local",
            help="Location of the job. Default: this machine if it has a job of that name.",
            show_default=False,
        ),
    ] = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Explain the state of a job, its reasons, and the remedy.

    Shows missing nodes and their obstacles, the last interruption and its cost, and the failure.
    A job on a cluster is read with kubectl.

    \b
    Examples:
      elasticjob explain digits
      elasticjob explain digits --cluster -n team-a
    """
    there = Cluster(namespace, context, kubeconfig)
    asks_there = context is not None or kubeconfig is not None
    folder = JobFolder(namespace or DEFAULT_NAMESPACE, name)
    if cluster or (cluster is None and (asks_there or not folder.exists())):
        _print(_on_cluster(there, name, alone=cluster or asks_there))
    else:
        folder = find_job(folder.namespace, name)
        running = folder.running()  # before the read, so that a runner's last write is not missed
        _print(Explanation(local_explanation(ElasticJob.model_validate(folder.object()), running)))


def explain_on_cluster(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Explain the state of a job, its reasons, and the remedy.

    \b
    Examples:
      kubectl elasticjob explain digits -n team-a
    """
    _print(Cluster(namespace, context, kubeconfig).explain(name))


def is_runner_gone(found: ElasticJob, running: bool) -> bool:
    """Return True if the runner of a local job ended before the job did."""
    return found.status.phase is Phase.INTERRUPTED or (not running and found.status.phase is None)


def local_explanation(found: ElasticJob, running: bool) -> tuple[str, ...]:
    """Explain a local job from its runner's last status, or that the runner is gone."""
    if found.status.phase in (Phase.SUSPENDING, Phase.SUSPENDED):
        return (INTERRUPTED, *map(sentence, stop_texts(found.status)))
    if found.status.phase is None:
        return (JUST_BEGUN,) if running else (RUNNER_GONE,)
    said = tuple(found.status.explanation) or explanation(found, ())
    return (RUNNER_GONE, *said) if is_runner_gone(found, running) else said


def _on_cluster(there: Cluster, name: str, alone: bool | None) -> Explanation:
    try:
        return there.explain(name)
    except CommandError as error:
        if alone:
            raise
        raise CommandError(f'this machine has no job "{name}", and on the cluster {error}') from (
            error
        )


def _print(told: Explanation) -> None:
    show(*told.sentences)
    if told.events:
        show("", "The newest events:", *(f"  {event}" for event in told.events))
