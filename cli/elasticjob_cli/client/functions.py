"""Function jobs of this machine: the pickled call of a run, and its workers' return values."""

from __future__ import annotations

import pickle
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticjob_agent.runtimes.function_entrypoint import CallFolder, FunctionCall
from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.commands.script_job import command_words
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.job_store import JobFolder, make_private
from elasticjob_cli.settings import state_root
from elasticjob_operator import model

ANNOTATION = "elasticjob.dev/function-call"
"""Annotation of a function job: the name of its run's call."""
_TOKEN = re.compile(r"[0-9a-f]{16}")


def with_call(job: ElasticJob, call: FunctionCall, folder: JobFolder) -> ElasticJob:
    """Write the call of a new run to its folder; return the job whose workers make it.

    Raises:
        BadInput: the function or an argument cannot be pickled.
    """
    work = job.folder or folder.functions / "work"
    root = folder.functions
    for made in (state_root(), root.parent.parent, root.parent, root, root / "work"):
        make_private(made)
    for old in root.glob("call-*"):
        shutil.rmtree(old, ignore_errors=True)
    token = secrets.token_hex(8)
    place = _place(folder, token)
    make_private(place.path)
    try:
        inherited = place.write(call, work)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise BadInput(f"the function of job {job.name!r} cannot be pickled: {error}") from error
    if inherited:
        raise BadInput(f"an argument of the function of job {job.name!r} cannot be a pipe or lock")
    _, *words = place.command()
    return _running(job, ["python3", *words], token, work)


def _running(job: ElasticJob, words: Sequence[str], token: str, work: Path) -> ElasticJob:
    document = dict(job.document)
    metadata = dict(document["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), ANNOTATION: token}
    template = document["spec"]["template"]
    (container,) = template["spec"]["containers"]
    containers = [{**container, "command": command_words(words)}]
    template = {**template, "spec": {**template["spec"], "containers": containers}}
    spec = {**document["spec"], "template": template}
    return ElasticJob.from_object({**document, "metadata": metadata, "spec": spec}, work)


def return_values(
    job: model.ElasticJob, folder: JobFolder, rounds: Sequence[Mapping[str, Any]]
) -> dict[int, Any]:
    """Return the values of the last round's workers by rank; none for a job without a function.

    A worker that ended by `sys.exit(0)` has None.
    """
    token = (job.metadata.annotations or {}).get(ANNOTATION, "")
    if not rounds or not _TOKEN.fullmatch(token):
        return {}
    place, last = _place(folder, token), rounds[-1]
    return {rank: place.value(last["round"], rank) for rank in range(last["worldSize"])}


def _place(folder: JobFolder, token: str) -> CallFolder:
    return CallFolder(folder.functions / f"call-{token}")
