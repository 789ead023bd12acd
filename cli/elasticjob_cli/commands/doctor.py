"""Command `elasticjob doctor`: checks of this machine, or of a cluster and its operator."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from elasticjob_cli.commands.options import Place, as_json, placed, until_interrupted
from elasticjob_cli.doctor.findings import Finding, as_document, finding_lines, has_failed
from elasticjob_cli.errors import ExitCode
from elasticjob_cli.kubectl import Kubectl
from elasticjob_cli.output import show, show_text

SHM = Path("/dev/shm")


class Output(StrEnum):
    """Output formats of findings; the default is text."""

    JSON = "json"


@placed
def doctor(
    place: Place,
    output: Annotated[
        Output | None,
        typer.Option("--output", "-o", help="Output format. Default: text.", show_default=False),
    ] = None,
    shm: Annotated[
        Path, typer.Option("--shm", help="Folder of shared memory.", metavar="DIR")
    ] = SHM,
) -> None:
    """Check this machine, or a cluster and its operator, for the requirements of jobs.

    Each line has the result of one check: ok, warn or fail, the observation, and the remedy. The
    exit code is 1 if a check fails. Nothing on the cluster is changed.

    \b
    Examples:
      elasticjob doctor
      elasticjob doctor --cluster -n team-a
    """
    there = place.kubectl
    with until_interrupted():
        findings = _local(shm) if there is None else _cluster(there)
    if output is Output.JSON:
        where = "this machine" if there is None else "a cluster"
        show_text(as_json(as_document(where, findings)))
    else:
        show(*finding_lines(findings))
    if has_failed(findings):
        raise typer.Exit(int(ExitCode.FAILED))


def _local(shm: Path) -> list[Finding]:
    from elasticjob_cli.doctor.local_checks import local_findings
    from elasticjob_cli.doctor.local_facts import gather_local

    return local_findings(gather_local(shm))


def _cluster(there: Kubectl) -> list[Finding]:
    from elasticjob_cli.doctor.cluster_checks import cluster_findings
    from elasticjob_cli.doctor.cluster_facts import gather_cluster

    return cluster_findings(gather_cluster(there))
