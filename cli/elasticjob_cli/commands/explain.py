"""Command `elasticjob explain`: the state of a job and its reasons, here or on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elasticjob_cli.cluster import Cluster, Told
from elasticjob_cli.commands.options import DEFAULT_NAMESPACE, Name
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.state import JobFolder, job
from elasticjob_operator.core.explain import explanation
from elasticjob_operator.model import ElasticJob, Phase

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

ABANDONED = (
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
        folder = job(folder.namespace, name)
        running = folder.running()  # before the read, so that a runner's last write is not missed
        _print(Told(local_explanation(ElasticJob.model_validate(folder.object()), running)))


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


def abandoned(found: ElasticJob, running: bool) -> bool:
    """Return True if the runner of a local job ended before the job did."""
    return found.status.phase is Phase.INTERRUPTED or (not running and found.status.phase is None)


def local_explanation(found: ElasticJob, running: bool) -> tuple[str, ...]:
    """Explain a local job from its runner's last status, or that the runner is gone."""
    if found.status.phase is Phase.SUSPENDED:
        return (INTERRUPTED,)
    if found.status.phase is None:
        return (JUST_BEGUN,) if running else (ABANDONED,)
    said = tuple(found.status.explanation) or explanation(found, ())
    return (ABANDONED, *said) if abandoned(found, running) else said


def _on_cluster(there: Cluster, name: str, alone: bool | None) -> Told:
    try:
        return there.explain(name)
    except CommandError as error:
        if alone:
            raise
        raise CommandError(f'this machine has no job "{name}", and on the cluster {error}') from (
            error
        )


def _print(told: Told) -> None:
    for sentence in told.sentences:
        typer.echo(sentence)
    if told.events:
        typer.echo("\nThe newest events:")
        for line in told.events:
            typer.echo(f"  {line}")
