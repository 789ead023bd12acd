"""Commands `elasticjob validate` and `version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import typer

from elasticjob_cli.errors import BadInput, ExitCode
from elasticjob_operator.domain.manifests.template_check import check_pods
from elasticjob_operator.model.manifest import STANDARD_INPUT, check_file, shown


def validate(
    files: Annotated[
        list[str],
        typer.Argument(help="Manifests to check; - is standard input.", metavar="FILE"),
    ],
) -> None:
    """Validate manifests; list every error with file, line and field.

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
        problems = check_file(file, check_pods)
        count += len(problems)
        for problem in problems:
            typer.echo(str(problem), err=True)
        if not problems:
            typer.echo(f"{shown(file)}: valid")
    if count:
        raise typer.Exit(ExitCode.BAD_INPUT)


def version() -> None:
    """Print the version."""
    try:
        typer.echo(f"elasticjob {installed('elasticjob')}")
    except PackageNotFoundError:
        typer.echo("elasticjob (running from source, not installed)")
