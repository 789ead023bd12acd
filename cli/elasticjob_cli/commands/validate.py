"""Command `elasticjob validate`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from elasticjob_cli.errors import BadInput, ExitCode
from elasticjob_cli.local.container import nested_launch
from elasticjob_cli.manifest_job import folder_of, script_hint, warnings
from elasticjob_cli.output import show, show_text
from elasticjob_cli.settings import container_environment
from elasticjob_launcher.programs.program_check import trains_besides
from elasticjob_operator.domain.manifests.job_command import command_for
from elasticjob_operator.domain.manifests.template_check import check_pods
from elasticjob_operator.domain.manifests.trainer_command import CHECK_OPTION
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.manifest import STANDARD_INPUT, read_file, shown
from elasticjob_operator.model.problems import Problem


def validate(
    files: Annotated[
        list[str],
        typer.Argument(help="Manifests to check; - is standard input.", metavar="FILE"),
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 3 if there are warnings.")
    ] = False,
) -> None:
    """Validate manifests; list every error and warning with file, line and field, and the launch of
    each job.

    Warnings are for templates that are legal and rarely mean what they do. The exit code is 2 if
    there are errors, with --strict 3 if there are only warnings.

    \b
    Examples:
      elasticjob validate job.yaml
      elasticjob validate --strict jobs/*.yaml
      helm template my-chart | elasticjob validate -
    """
    if files.count(STANDARD_INPUT) > 1:
        raise BadInput("- must be given once: standard input can be read only once")
    checked = [read_file(file, check_pods, partial(_warnings, file=file)) for file in files]
    for file, found in zip(files, checked, strict=True):
        for problem in found.problems:
            show_text(str(problem), err=True)
        if found.problems and (hint := script_hint(file)):
            show_text(hint, err=True)
        for warning in (*found.notes, *found.warnings):
            show_text(str(warning), err=True)
        if not found.problems:
            show(f"{shown(file)}: valid")
            for job in found.jobs:
                show(_launch_of(job))
    if any(found.problems for found in checked):
        raise typer.Exit(ExitCode.BAD_INPUT)
    if strict and any(found.warnings for found in checked):
        raise typer.Exit(ExitCode.WARNINGS)


def _warnings(job: ElasticJob, file: str) -> list[Problem]:
    """Return the warnings for a job, and one for a program on this machine that starts a
    launcher."""
    found = nested_launch(job, folder_of(file), container_environment(None))
    several = job.spec.max_nodes > 1
    if found is not None and (reason := trains_besides(found, several)):
        is_checked = CHECK_OPTION in command_for(job).options
        text = f"warning (ProgramStartsLauncher): {reason}"
        return [*warnings(job), *([Problem.at(("spec", "launch"), text)] if is_checked else [])]
    if found is None or found.launcher.joins or not several:
        return warnings(job)  # the pods run it once for each node
    return [
        *warnings(job),
        Problem.at(
            ("spec", "launch"),
            f"warning (ProgramStartsLauncher): {found.place} starts {found.launcher.name}, which "
            f"does not join the job's rendezvous ({found.launcher.own}): the pods refuse it on "
            "several nodes; set spec.maxNodes to 1, or spec.launch to PerWorker if each worker is "
            "to start a job of its own",
        ),
    ]


def _launch_of(job: ElasticJob) -> str:
    """Return a line on the launch of a valid job's command."""
    command = command_for(job)
    return f"  {job.metadata.name}: launch {command.mode} ({command.reason}): {command.message}"
