"""Commands `elasticjob get` and `describe`: local jobs, also after their end."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from elasticjob_cli.commands.explain import RUNNER_GONE, is_runner_gone, local_explanation
from elasticjob_cli.commands.options import (
    DEFAULT_NAMESPACE,
    Name,
    Namespace,
    Output,
    as_json,
    as_yaml,
    until_interrupted,
)
from elasticjob_cli.commands.tables import aligned, description, header, job_list, row
from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_cli.local.job_store import JobFolder, find_job, list_jobs
from elasticjob_cli.output import show, show_text
from elasticjob_operator.domain.status.conditions import recovered_text, trouble_text
from elasticjob_operator.model import ElasticJob

POLL_SECONDS = 0.2


def get(
    name: Annotated[
        str | None, typer.Argument(help="Name of a job. Default: all jobs.", metavar="NAME")
    ] = None,
    output: Annotated[Output | None, typer.Option("--output", "-o", help="Output format.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print each change until the job ends.")
    ] = False,
    namespace: Namespace = DEFAULT_NAMESPACE,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")
    ] = False,
) -> None:
    """List jobs of this machine, running or ended.

    \b
    Examples:
      elasticjob get
      elasticjob get digits -o yaml
      elasticjob get digits -w
    """
    folders = (
        [find_job(namespace, name)] if name else list_jobs(None if all_namespaces else namespace)
    )
    running = {folder: folder.running() for folder in folders}  # before the read, see `explain`
    found, unreadable = _read(folders)
    if name and unreadable:
        raise unreadable[0]
    for error in unreadable:
        show_text(f"elasticjob: {error}", err=True)
    objects = list(found.values())
    if not folders and output in (None, Output.WIDE):
        show("No local jobs: start one with `elasticjob run job.yaml`.", err=True)
        return
    _print(objects, output, single=name is not None)
    if output in (None, Output.WIDE):
        for folder, item in found.items():
            found_job = ElasticJob.model_validate(item)
            if is_runner_gone(found_job, running[folder]):
                show(f"{item['metadata']['name']}: {RUNNER_GONE}", err=True)
            elif trouble := trouble_text(found_job.status):
                show(f"{item['metadata']['name']}: {trouble}", err=True)
    if watch:
        with until_interrupted():
            _watch(found, output)
    if unreadable:
        raise typer.Exit(int(ExitCode.FAILED))


def _read(folders: list[JobFolder]) -> tuple[dict[JobFolder, dict[str, Any]], list[CommandError]]:
    """Return the readable objects by folder, and the errors of the others."""
    found: dict[JobFolder, dict[str, Any]] = {}
    unreadable = []
    for folder in folders:
        try:
            found[folder] = folder.object()
        except CommandError as error:
            unreadable.append(error)
    return found, unreadable


def _watch(found: dict[JobFolder, dict[str, Any]], output: Output | None) -> None:
    shown, folders = dict(found), list(found)
    while folders:
        time.sleep(POLL_SECONDS)
        # Checked before the read, so that a runner's last write is not missed.
        running = [folder for folder in folders if folder.running()]
        for folder in folders:
            if folder.exists() and (now := folder.object()) != shown[folder]:
                before, shown[folder] = shown[folder], now
                if output not in (None, Output.WIDE) or _cells(before, True) != _cells(now, True):
                    _print([now], output, single=True, head=False)
                if output in (None, Output.WIDE):
                    _print_store(before, now)
        folders = running


def _print(
    objects: list[dict[str, Any]], output: Output | None, single: bool, head: bool = True
) -> None:
    document = objects[0] if single else job_list(objects)
    match output:
        case Output.JSON:
            show_text(as_json(document))
        case Output.YAML:
            show_text(as_yaml(document))
        case Output.NAME:
            for item in objects:
                show(f"elasticjob.elasticjob.dev/{item['metadata']['name']}")
        case None | Output.WIDE:
            wide = output is Output.WIDE
            lines = aligned([header(wide), *(_cells(item, wide) for item in objects)])
            show(*(lines if head else lines[1:]))


def _print_store(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Print that the rendezvous store became unavailable, or available again."""
    was, job = ElasticJob.model_validate(before), ElasticJob.model_validate(now)
    known, text = trouble_text(was.status), trouble_text(job.status)
    if text != known and (said := text or recovered_text(job.status)):
        show(f"{job.metadata.name}: {said}", err=True)


def _cells(document: dict[str, Any], wide: bool) -> tuple[str, ...]:
    return row(ElasticJob.model_validate(document), wide, datetime.now(UTC))


def describe(name: Name, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
    """Show all details of one job.

    Members, rounds with their causes and times, the first failure, and conditions.

    \b
    Examples:
      elasticjob describe digits
    """
    folder = find_job(namespace, name)
    running = folder.running()  # before the read, so that a runner's last write is not missed
    found = ElasticJob.model_validate(folder.object())
    told = local_explanation(found, running)
    show(*description(found, str(folder.logs), running, told))
