"""Commands that change a job, here or on a cluster; `fault` is for local jobs alone.

Those for local jobs load no models of the API, which take longer to load than the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from elasticjob_cli.commands.options import (
    Name,
    Names,
    Namespace,
    Output,
    Place,
    as_json,
    as_yaml,
    for_each,
    placed,
)
from elasticjob_cli.commands.tables import Cells, wrapped
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.control_client import delete_job, no_resume, send_command
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, JobFolder, find_job, list_jobs
from elasticjob_cli.output import show, show_text, terminal_width
from elasticjob_operator.enums import FINISHED, MAX_NODES
from elasticjob_rendezvous.protocol.text import counted, one_line


@placed
def scale(
    place: Place,
    names: Names,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            "--replicas",
            min=0,
            max=MAX_NODES,
            help="Desired number of nodes; must be given.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Change the desired number of nodes of running jobs.

    The number is clamped to the job's legal sizes (minNodes, maxNodes, nodeIncrement).

    \b
    Examples:
      elasticjob scale digits --nodes 4
    """

    if nodes is None:
        *jobs, last = names
        if not jobs or not last.isdecimal():
            jobs, last = names, "NUMBER"
        raise BadInput(
            "--nodes is missing, the desired number of nodes: "
            f"`elasticjob scale {' '.join(jobs)} --nodes {last}`"
        )

    def scaled(name: str) -> str:
        if place.kubectl is not None:
            from elasticjob_cli.commands import cluster_actions  # loads the API's models
            from elasticjob_cli.commands.cluster_reader import ClusterReader

            wanted = cluster_actions.scaled(ClusterReader.of(place.kubectl), name, nodes)
        else:
            folder = find_job(place.namespace, name)
            wanted = send_command(folder, "scale", nodes=nodes)["wanted"]
        note = "" if wanted == nodes else f" ({nodes} is not a legal size of this job)"
        return f"elasticjob.elasticjob.dev/{name} scaled to {counted(wanted, 'node')}{note}"

    for_each(names, scaled)


@placed
def suspend(
    place: Place,
    names: Names,
) -> None:
    """Suspend jobs after a checkpoint: their pods end, the objects and the logs remain.

    \b
    Examples:
      elasticjob suspend digits
      kubectl elasticjob suspend digits -n team-a
    """

    def suspended(name: str) -> str:
        if place.kubectl is not None:
            from elasticjob_cli.commands import cluster_actions  # loads the API's models
            from elasticjob_cli.commands.cluster_reader import ClusterReader

            cluster_actions.set_suspended(ClusterReader.of(place.kubectl), name, True)
        else:
            send_command(find_job(place.namespace, name), "suspend")
        return f"elasticjob.elasticjob.dev/{name} suspended"

    for_each(names, suspended)


@placed
def resume(
    place: Place,
    names: Names,
) -> None:
    """Resume suspended jobs of a cluster from their last checkpoints.

    A local job runs in its terminal: `elasticjob run` resumes it there.

    \b
    Examples:
      kubectl elasticjob resume digits -n team-a
    """

    def resumed(name: str) -> str:
        if place.kubectl is None:
            raise no_resume(find_job(place.namespace, name))
        from elasticjob_cli.commands import cluster_actions  # loads the API's models
        from elasticjob_cli.commands.cluster_reader import ClusterReader

        cluster_actions.set_suspended(ClusterReader.of(place.kubectl), name, False)
        return f"elasticjob.elasticjob.dev/{name} resumed"

    for_each(names, resumed)


@placed
def apply(
    place: Place,
    file: Annotated[
        str,
        typer.Option(
            "--filename",
            "-f",
            metavar="FILE",
            help="Manifest with ElasticJobs; - is standard input.",
        ),
    ],
) -> None:
    """Validate a manifest and apply it to a cluster. `elasticjob run` starts a local job.

    \b
    Examples:
      elasticjob apply -f job.yaml --context prod
      kubectl elasticjob apply -f job.yaml -n team-a
    """
    from elasticjob_operator.model.manifest import STANDARD_INPUT, shown  # loads the API's models

    there = place.kubectl
    if there is None:
        raise BadInput(
            "apply needs a cluster: add --cluster for the current context, or --context; "
            f"`elasticjob run {'-' if file == STANDARD_INPUT else shown(file)}` runs it on this "
            "machine"
        )
    from elasticjob_cli.commands import cluster_actions  # loads the API's models
    from elasticjob_cli.commands.cluster_reader import ClusterReader

    show(*cluster_actions.applied(ClusterReader.of(there), file))


@placed
def events(
    place: Place,
    name: Name,
    output: Annotated[
        Output | None, typer.Option("--output", "-o", help="json, yaml, or wide: not wrapped.")
    ] = None,
) -> None:
    """List the events on a job, oldest first, in UTC.

    A cluster keeps events for an hour, this machine those of the last run.

    \b
    Examples:
      elasticjob events digits
      elasticjob events digits -o json
      kubectl elasticjob events digits -n team-a
    """
    if output is Output.NAME:
        raise BadInput("events have no names: use -o json, yaml or wide")
    if place.kubectl is not None:
        from elasticjob_cli.commands import cluster_actions  # loads the API's models
        from elasticjob_cli.commands.cluster_reader import ClusterReader

        found = cluster_actions.events(ClusterReader.of(place.kubectl), name)
        gone = "a cluster keeps them for an hour"
    else:
        found = [dict(event) for event in find_job(place.namespace, name).events()]
        gone = "an earlier release ran it"
    match output:
        case Output.JSON:
            show_text(as_json(found))
        case Output.YAML:
            show_text(as_yaml(found))
        case _ if not found:
            raise CommandError(f'job "{name}" has no events: {gone}')
        case _:
            width = terminal_width() if output is None else None
            for event in found:
                show(*wrapped(one_line(_event_text(event)), width, indent=9))


def _event_text(event: Mapping[str, str]) -> str:
    """Format an event as `12:01:03 RoundFinal: round 2 is final`."""
    parts = filter(None, (event.get("reason"), event["message"]))
    return f"{event['time'][11:19]} {': '.join(parts)}"


@placed
def delete(
    place: Place,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of the jobs.", metavar="NAME", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs of the namespace.")] = False,
    finished: Annotated[
        bool, typer.Option("--finished", help="Only jobs that succeeded or failed.")
    ] = False,
) -> None:
    """Stop jobs if they run, and delete their status and logs.

    \b
    Examples:
      elasticjob delete digits other
      elasticjob delete --finished
      kubectl elasticjob delete --all -n team-a
    """
    if names and everything:
        raise BadInput("--all must come without names")
    if not names and not everything and not finished:
        raise BadInput("a name, --all or --finished must be given")
    given = list(dict.fromkeys(names or ()))
    if place.kubectl is not None:
        from elasticjob_cli.commands import cluster_actions  # loads the API's models

        chosen = cluster_actions.chosen_names(place.kubectl, given, finished)
        if chosen:
            cluster_actions.delete(place.kubectl, chosen)
    else:
        space = place.namespace
        here = given or [folder.name for folder in list_jobs(space)]
        chosen = [n for n in here if not finished or _is_finished(find_job(space, n))]

        def deleted(job: str) -> str:
            delete_job(find_job(space, job))
            return f'elasticjob.elasticjob.dev "{job}" deleted'

        for_each(chosen, deleted)
    if not chosen:
        show(f"no job was deleted: {'none is finished' if finished else 'there are none'}")


def _is_finished(folder: JobFolder) -> bool:
    """Return True if a local job has ended; a job without a readable status has not."""
    try:
        phase = Cells(folder.object()).text("status", "phase")
    except CommandError:
        return False
    return phase in FINISHED and not folder.running()


class Fault(StrEnum):
    """Faults that can be injected into a pod of a local job."""

    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    KILL_NODE = "kill-node"
    DRAIN = "drain"


def fault(
    kind: Annotated[
        Fault, typer.Argument(help="Fault to inject.", metavar="FAULT", show_default=False)
    ],
    name: Name,
    pod: Annotated[
        str, typer.Argument(help="Name of the pod, as `describe` shows it.", metavar="POD")
    ],
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Inject a fault into a local job to test its recovery.

    kill-worker sends SIGKILL to the pod's first worker, kill-agent to its agent, kill-node to
    all of its processes. drain removes the pod as a node drain does, with its grace period.

    \b
    Examples:
      elasticjob fault kill-worker digits digits-0
      elasticjob fault drain digits digits-1
    """
    folder = find_job(namespace, name)
    if not folder.running():
        raise BadInput(f'job "{name}" is not running: faults need a running job')
    answer = send_command(folder, "fault", kind=kind, pod=pod)
    show(answer["done"])
