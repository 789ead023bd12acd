"""Command of a job's trainer container, and its launch in the status."""

from __future__ import annotations

import json
from hashlib import sha256

from elasticjob_operator.domain.launch.misplaced import misplaced
from elasticjob_operator.domain.launch.variables import expanded
from elasticjob_operator.domain.manifests.resources import requests_devices
from elasticjob_operator.domain.manifests.template_rules import TemplateRefused
from elasticjob_operator.domain.manifests.torchrun import CannotUnwrap
from elasticjob_operator.domain.manifests.trainer_command import (
    LaunchSpec,
    TrainerCommand,
    trainer_command,
)
from elasticjob_operator.model.job import NESTED_ANNOTATION, Container, ElasticJob
from elasticjob_operator.model.problems import Problem
from elasticjob_operator.model.status import LaunchStatus
from elasticjob_operator.model.types import Launch, LaunchReason
from elasticjob_rendezvous.protocol.text import bounded


def command_for(job: ElasticJob) -> TrainerCommand:
    """Return the command of the trainer container.

    Raises:
        TemplateRefused: no way of launching the command is safe.
    """
    container, spec = job.trainer(), job.spec
    if reason := misplaced(spec.setup):
        raise TemplateRefused(Problem.at(("spec", "setup"), reason))
    launch = LaunchSpec(
        spec.launch,
        tuple(spec.setup),
        spec.max_nodes,
        not requests_devices(container.model_dump(by_alias=True, include={"resources"})),
        _known_values(container),
        (job.metadata.annotations or {}).get(NESTED_ANNOTATION, ""),
    )
    try:
        return trainer_command(
            container.command or spec.entrypoint,
            container.args or (),
            spec.nproc_per_node,
            launch,
        )
    except CannotUnwrap as error:
        at = spec.template.spec.containers.index(container)
        field = "command" if container.command else "args"
        raise TemplateRefused.at(("containers", at, field), str(error)) from error


def decided_launch(job: ElasticJob) -> LaunchStatus | None:
    """Return the operator's launch of the job's command; None if it cannot be launched."""
    try:
        command = command_for(job)
    except TemplateRefused:
        return None
    message = bounded(command.message)  # words of the command may have any length
    return LaunchStatus(mode=command.mode, reason=command.reason, message=message)


def is_decided_by_pods(job: ElasticJob) -> bool:
    """Return True if the launcher in each pod reads the files of the job's program, and then
    decides about the launch."""
    try:
        return command_for(job).is_checked
    except TemplateRefused:
        return False


def found_launch(job: ElasticJob, message: str) -> LaunchStatus:
    """Return the launch of a program in whose files the pods found a launcher; `message` names it.

    It has the digest of the program, so that it is known no more after an edit.
    """
    return LaunchStatus(
        mode=Launch.PER_NODE,
        reason=LaunchReason.LAUNCHER_FOUND,
        message=message,
        program=program_digest(job),
    )


def program_digest(job: ElasticJob) -> str:
    """Return a digest of the fields that select the program and its launch.

    Kueue changes other fields of the template, such as the node selector, in each suspension.
    """
    pod = job.spec.template.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    fields = {
        "pod": {name: pod.get(name) for name in ("containers", "initContainers", "volumes")},
        **{name: getattr(job.spec, name) for name in ("launch", "setup", "entrypoint", "trainer")},
    }
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _known_values(container: Container) -> dict[str, str]:
    """Return the container's variables with literal values, expanded as the kubelet does."""
    values: dict[str, str] = {}
    for variable in container.env or ():
        if variable.value is not None:
            values[variable.name] = expanded(variable.value, values)
        else:
            values.pop(variable.name, None)
    return values
