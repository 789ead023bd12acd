"""Manifest with one job, as `elasticjob run` and the Python client read it."""

from __future__ import annotations

from pathlib import Path

from elasticjob_cli.errors import BadInput
from elasticjob_operator.domain.manifests.template_warnings import warnings_of
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.manifest import STANDARD_INPUT, InvalidFile, read_file, shown
from elasticjob_operator.model.problems import Problem
from elasticjob_rendezvous.protocol.text import bounded


def manifest_job(file: str, hint: str = "") -> tuple[ElasticJob, list[str]]:
    """Return the only job of a manifest, the notes on objects beside it, and the warnings for it.

    Args:
        hint: remedy that follows the problems of an invalid file.

    Raises:
        BadInput: the file is not valid, or does not have exactly one job that may run.
    """
    found = read_file(file, warnings_of=warnings)
    if found.problems:
        error = InvalidFile(found.problems)
        was_read = all(problem.line for problem in error.problems)
        raise BadInput(f"{shown(file)} is not valid:\n{error}{hint}" if was_read else str(error))
    jobs = found.jobs
    if len(jobs) > 1:
        names = ", ".join(job.metadata.name for job in jobs)
        raise BadInput(f"{shown(file)} must hold one ElasticJob; it has {len(jobs)}: {names}")
    if jobs[0].spec.run_policy.suspend:
        raise BadInput(f"{shown(file)}: spec.runPolicy.suspend must be false for the job to run")
    return jobs[0], [str(one) for one in (*found.notes, *found.warnings)]


def script_hint(file: str) -> str:
    """Return the remedy if a script was given in place of a manifest, else an empty text."""
    if not file.endswith(".py"):
        return ""
    name = bounded(shown(file))
    return f"{name} is a script: `elasticjob init {name}` writes its manifest"


def warnings(job: ElasticJob) -> list[Problem]:
    """Return the warnings for a job's template."""
    return [
        Problem.at(warning.location, f"warning ({warning.kind}): {warning.message}")
        for warning in warnings_of(job)
    ]


def folder_of(file: str) -> Path:
    """Return the command's working folder: the manifest's, or the current one for a pipe."""
    path = Path(file)
    return path.resolve().parent if file != STANDARD_INPUT and path.is_file() else Path.cwd()
