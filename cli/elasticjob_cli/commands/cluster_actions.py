"""Actions on the jobs of a cluster with the user's kubectl: scale, suspend, delete, apply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from elasticjob_cli.commands.cluster_reader import ClusterReader, event_time
from elasticjob_cli.commands.tables import Cells
from elasticjob_cli.errors import BadInput
from elasticjob_cli.kubectl import RESOURCE, Answer, Kubectl, checked_name
from elasticjob_cli.manifest_job import script_hint
from elasticjob_cli.output import show
from elasticjob_operator.domain.plan.lifecycle import FINISHED
from elasticjob_operator.domain.plan.sizes import wanted_size
from elasticjob_operator.model.manifest import InvalidFile, read_file, shown

Json = dict[str, Any]


def scaled(cluster: ClusterReader, name: str, nodes: int) -> int:
    """Write a job's number of nodes through the scale subresource; return its legal size."""
    cluster.call("scale", RESOURCE, checked_name(name), f"--replicas={nodes}")
    return wanted_size(cluster.job(name)).nodes


def set_suspended(cluster: ClusterReader, name: str, suspended: bool) -> None:
    """Suspend or resume a job. Raises `CommandError` if it has ended."""
    job = cluster.job(name)
    if job.status.phase in FINISHED:
        raise BadInput(f'job "{name}" has ended ({job.status.phase})')
    patch = json.dumps({"spec": {"runPolicy": {"suspend": suspended}}})
    cluster.call("patch", RESOURCE, name, "--type=merge", f"--patch={patch}")


def chosen_names(kubectl: Kubectl, names: Sequence[str], finished: bool) -> list[str]:
    """Return the given jobs, or all jobs of the namespace, that a deletion is for."""
    names = [checked_name(name) for name in names]
    if names and not finished:
        return names
    jobs = map(Cells, kubectl.jobs(None))
    return [
        name
        for job in jobs
        if (name := job.text("metadata", "name")) in names or not names
        if not finished or job.text("status", "phase") in FINISHED
    ]


def deletion(kubectl: Kubectl, names: Sequence[str]) -> Answer:
    """Delete jobs, whose pods end in the background; return kubectl's answer."""
    return kubectl.attempt("delete", RESOURCE, *map(checked_name, names), "--wait=false")


def delete(kubectl: Kubectl, names: Sequence[str]) -> None:
    """Delete jobs, whose pods end in the background, and print kubectl's line for each.

    Raises `CommandError` with kubectl's messages on the others.
    """
    done = deletion(kubectl, names)
    show(*(line.replace(" from", ", from") for line in done.lines))
    done.check()


def applied(cluster: ClusterReader, file: str) -> list[str]:
    """Apply a manifest whose jobs are valid; return kubectl's lines. Raises `CommandError`."""
    checked = read_file(file)
    if checked.problems:
        lines = [str(InvalidFile(checked.problems)), script_hint(file)]
        raise BadInput("\n".join([f"{shown(file)} was not applied:", *filter(None, lines)]))
    return applied_text(cluster, checked.text)


def applied_text(kubectl: Kubectl, text: str) -> list[str]:
    """Apply the text of a valid manifest; return kubectl's lines. Raises `CommandError`."""
    return kubectl.call("apply", "--filename=-", given=text).splitlines()


def events(cluster: ClusterReader, name: str) -> list[Json]:
    """Return the events on a job, oldest first: time, type, reason, message."""
    return [
        {
            "time": f"{event_time(event):%Y-%m-%dT%H:%M:%SZ}",
            "type": event.get("type") or "",
            "reason": event.get("reason") or "",
            "message": event.get("message") or "",
        }
        for event in cluster.events(cluster.job(name))
    ]
