"""Verbs on the jobs of a cluster, with the user's kubectl and the tables of local jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from elasticjob_cli.cluster import RESOURCE, Answer, Kubectl, checked_name
from elasticjob_cli.commands.explain import Cluster, event_time
from elasticjob_cli.commands.tables import Cells
from elasticjob_cli.errors import BadInput
from elasticjob_cli.manifest_job import script_hint
from elasticjob_cli.output import show
from elasticjob_operator.domain.plan.lifecycle import FINISHED
from elasticjob_operator.domain.plan.sizes import wanted_size
from elasticjob_operator.model.manifest import InvalidFile, read_file, shown

Json = dict[str, Any]


def scaled(there: Cluster, name: str, nodes: int) -> int:
    """Write a job's number of nodes through the scale subresource; return its legal size."""
    there.call("scale", RESOURCE, checked_name(name), f"--replicas={nodes}")
    return wanted_size(there.job(name)).nodes


def set_suspended(there: Cluster, name: str, suspended: bool) -> None:
    """Suspend or resume a job. Raises `CommandError` if it has ended."""
    job = there.job(name)
    if job.status.phase in FINISHED:
        raise BadInput(f'job "{name}" has ended ({job.status.phase})')
    patch = json.dumps({"spec": {"runPolicy": {"suspend": suspended}}})
    there.call("patch", RESOURCE, name, "--type=merge", f"--patch={patch}")


def chosen_names(there: Kubectl, names: Sequence[str], finished: bool) -> list[str]:
    """Return the given jobs, or all jobs of the namespace, that a deletion is for."""
    names = [checked_name(name) for name in names]
    if names and not finished:
        return names
    jobs = map(Cells, there.jobs(None))
    return [
        name
        for job in jobs
        if (name := job.text("metadata", "name")) in names or not names
        if not finished or job.text("status", "phase") in FINISHED
    ]


def deletion(there: Kubectl, names: Sequence[str]) -> Answer:
    """Delete jobs, whose pods end in the background; return kubectl's answer."""
    return there.attempt("delete", RESOURCE, *map(checked_name, names), "--wait=false")


def delete(there: Kubectl, names: Sequence[str]) -> None:
    """Delete jobs, whose pods end in the background, and print kubectl's line for each.

    Raises `CommandError` with kubectl's messages on the others.
    """
    done = deletion(there, names)
    show(*(line.replace(" from", ", from") for line in done.lines))
    done.check()


def applied(there: Cluster, file: str) -> list[str]:
    """Apply a manifest whose jobs are valid; return kubectl's lines. Raises `CommandError`."""
    checked = read_file(file)
    if checked.problems:
        lines = [str(InvalidFile(checked.problems)), script_hint(file)]
        raise BadInput("\n".join([f"{shown(file)} was not applied:", *filter(None, lines)]))
    return applied_text(there, checked.text)


def applied_text(there: Kubectl, text: str) -> list[str]:
    """Apply the text of a valid manifest; return kubectl's lines. Raises `CommandError`."""
    return there.call("apply", "--filename=-", given=text).splitlines()


def events(there: Cluster, name: str) -> list[Json]:
    """Return the events on a job, oldest first: time, type, reason, message."""
    return [
        {
            "time": f"{event_time(event):%Y-%m-%dT%H:%M:%SZ}",
            "type": event.get("type") or "",
            "reason": event.get("reason") or "",
            "message": event.get("message") or "",
        }
        for event in there.events(there.job(name))
    ]
