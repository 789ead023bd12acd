"""Commands `elasticjob validate` and `version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import typer

from elasticjob_cli.errors import BadInput, ExitCode
from elasticjob_operator.domain.manifests.job_command import command_for
from elasticjob_operator.domain.manifests.template_rules import TemplateRefused
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.manifest import STANDARD_INPUT, InvalidFile, load_file, shown


def validate(
    files: Annotated[
        list[str],
        typer.Argument(help="Manifests to check; - is standard input.", metavar="FILE"),
    ],
) -> None:
    """Validate manifests; list every error with file, line and field, and the launch of each job.

    The exit code is 2 if there are errors.

    \b
    Examples:
      elasticjob validate job.yaml
      helm template my-chart | elasticjob validate -
    """
    if files.count(STANDARD_INPUT) > 1:
        raise BadInput("- must be given once: standard input can be read only once")
    count = 0
    for file in files:
        launches, problems = _checked(file)
        count += len(problems)
        for problem in problems:
            typer.echo(problem, err=True)
        if not problems:
            typer.echo(f"{shown(file)}: valid")
            for launch in launches:
                typer.echo(launch)
    if count:
        raise typer.Exit(ExitCode.BAD_INPUT)


def _checked(file: str) -> tuple[list[str], list[str]]:
    """Return a line on the launch of each job in a file, and all problems of the file."""
    try:
        jobs = load_file(file)
    except InvalidFile as error:
        return [], [str(problem) for problem in error.problems]
    launches, problems = [], []
    for job in jobs:
        try:
            launches.append(_launch_of(job))
        except TemplateRefused as error:
            problems.append(f"{shown(file)}: {job.metadata.name}: {error}")
    return launches, problems


def _launch_of(job: ElasticJob) -> str:
    """Return a line on the launch of the job's command. Raises `TemplateRefused`."""
    command = command_for(job)
    return f"  {job.metadata.name}: launch {command.mode} ({command.reason}): {command.message}"


def version() -> None:
    """Print the version."""
    try:
        typer.echo(f"elasticjob {installed('elasticjob')}")
    except PackageNotFoundError:
        typer.echo("elasticjob (running from source, not installed)")
