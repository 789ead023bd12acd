"""Command `elasticjob run`: runs a manifest's job on this machine to its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from elasticjob_cli import settings
from elasticjob_cli.commands.tables import failure_lines, history_lines, restarts_text
from elasticjob_cli.commands.validate import warnings
from elasticjob_cli.errors import BadInput, ExitCode
from elasticjob_cli.local import display
from elasticjob_cli.local.container import Trainer, interpreter, trainer
from elasticjob_cli.local.display import LiveView, PlainView, View
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, RunOutcome
from elasticjob_cli.output import final_summary, show, show_text
from elasticjob_operator.domain.explain.phrases import stop_report
from elasticjob_operator.domain.status.failures import latest_failure
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.manifest import STANDARD_INPUT, InvalidFile, read_file, shown
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_rendezvous.protocol.text import echoed


def run(
    file: Annotated[
        str,
        typer.Argument(
            help="Manifest with one ElasticJob; - is standard input.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the job instead of the manifest's.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=0, max=MAX_NODES, help="Initial number of nodes."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live table.")
    ] = False,
    console_logs: Annotated[
        bool, typer.Option("--logs", help="Also print the workers' output.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="PROGRAM",
            help="Path or name of the interpreter that replaces `python` in the job. Default: the "
            "active virtual environment's, else the one that runs elasticjob.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a job on this machine, with processes as pods.

    Ctrl-C stops the job after a checkpoint, if its script saves on request, and says what was not
    saved; a second Ctrl-C kills it. The exit code is 0 if the job
    succeeded, 1 if it failed, 2 for bad input, 130 if it was interrupted. The job's command runs
    in the manifest's folder, or in the current one if the manifest comes from standard input or a
    pipe.

    \b
    Examples:
      elasticjob run job.yaml
      elasticjob run job.yaml --plain --logs
      elasticjob run job.yaml --name second --nodes 1
      kubectl get elasticjob digits -o yaml | elasticjob run -
    """
    job, container = prepare(file, name, nodes, python)
    console = display.console()
    view: View = PlainView(console) if plain or not console.is_terminal else LiveView(console)
    try:
        ended = asyncio.run(execute(job, container, view, file, console_logs))
    except KeyboardInterrupt:  # before the run could handle it as a drain request
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    finally:
        view.close()
    with final_summary():
        print_outcome(ended)
    raise typer.Exit(int(ended.exit_code))


def prepare(
    file: str, name: str | None, nodes: int | None, python: str | None
) -> tuple[ElasticJob, Trainer]:
    """Return a manifest's job and its trainer container on this machine; raises `BadInput`."""
    found = read_file(file, warnings_of=warnings)
    if found.problems:
        error = InvalidFile(found.problems)
        was_read = all(problem.line for problem in error.problems)
        raise BadInput(f"{shown(file)} is not valid:\n{error}" if was_read else str(error))
    for warning in found.warnings:
        show_text(str(warning), err=True)
    jobs = found.jobs
    if len(jobs) > 1:
        names = ", ".join(job.metadata.name for job in jobs)
        raise BadInput(f"{shown(file)} must hold one ElasticJob; it has {len(jobs)}: {names}")
    job = jobs[0]
    if job.spec.run_policy.suspend:
        raise BadInput(f"{shown(file)}: spec.runPolicy.suspend must be false for the job to run")
    if name is not None:
        job = renamed(job, name)
    if nodes is not None:
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"nodes": nodes})})
    chosen = None if python is None else interpreter(python)
    environment = settings.container_environment(chosen)
    container = trainer(job, folder_of(file), environment, sys.executable, chosen)
    if container.unresolved:
        listed = ", ".join(container.unresolved)
        raise BadInput(
            f"{shown(file)}: valueFrom can only be resolved on a cluster: {listed}; "
            "set them in the environment of `elasticjob run`"
        )
    return job, container


def folder_of(file: str) -> Path:
    """Return the command's working folder: the manifest's, or the current one for a pipe."""
    path = Path(file)
    return path.resolve().parent if file != STANDARD_INPUT and path.is_file() else Path.cwd()


def renamed(job: ElasticJob, name: str) -> ElasticJob:
    """Return the job under another name; raises `BadInput` if the name is invalid."""
    document = job.manifest()
    document["metadata"]["name"] = name
    try:
        return ElasticJob.model_validate(document)
    except ValueError as error:
        raise BadInput(
            f"--name must be a DNS label of at most 55 characters: {echoed(name)}"
        ) from error


async def execute(
    job: ElasticJob, container: Trainer, view: View, file: str, console_logs: bool
) -> RunOutcome:
    """Run the job; raises `CommandError` if the local cluster fails."""
    # Imported here: it takes as long to load as everything else, and other commands do not need it.
    from elasticjob_cli.local.run import LocalRun

    manifest = shown(file) if file == STANDARD_INPUT else str(Path(file).resolve())
    return await LocalRun(job, container, view, manifest, console_logs).run()


def print_outcome(ended: RunOutcome) -> None:
    """Print the rounds with causes and times, and the latest failure of a failed job."""
    status = ended.job.status
    for line in history_lines(ended.rounds):
        show(line)
    if ended.exit_code is ExitCode.FAILED:
        reasons = [c for c in status.conditions if c.type == "Failed" and c.status == "True"]
        for condition in reasons:
            show(f"failed: {condition.reason}: {condition.message}", err=True)
        if failure := latest_failure(status):
            for line in failure_lines(failure):
                show(f"  {line}", err=True)
    metadata = ended.job.metadata
    name = metadata.name
    report = stop_report(status.last_stop)
    if report is not None:
        show(f"{name}: {report.text}", err=not report.complete)
    if metadata.deletion_timestamp is not None:
        show(f"{name}: deleted after {ended.seconds:.1f} s, with its status and logs")
        return
    there = "" if metadata.namespace == DEFAULT_NAMESPACE else f" -n {metadata.namespace}"
    show(
        f"{name}: {status.phase} after {ended.seconds:.1f} s, restarts {restarts_text(ended.job)}; "
        f"`elasticjob describe {name}{there}` and `elasticjob logs {name}{there}` show more"
    )
