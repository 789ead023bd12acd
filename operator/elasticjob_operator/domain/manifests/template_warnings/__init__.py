"""Warnings for pod templates that are legal and rarely mean what they do.

One list for `elasticjob validate`, `elasticjob run` and the operator: docs/pod.md has the table.
A warning never keeps a job from running. The rules read any template that parses: a field of an
unexpected type, which the API server refuses, yields no warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.domain.manifests.template_rules import POD_SPEC
from elasticjob_operator.domain.manifests.template_warnings import containers, pod
from elasticjob_operator.domain.manifests.template_warnings.template import (
    Rule,
    Template,
    WarningKind,
    mapping,
)
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.problems import Location, Problem

__all__ = ["TemplateWarning", "WarningKind", "warnings_of"]


_RULES: tuple[Rule, ...] = (
    pod.scheduler,
    pod.host_ipc,
    pod.grace,
    pod.pod_deadline,
    pod.readiness_gates,
    pod.labels,
    pod.selectors,
    containers.fractional_bytes,
    containers.probes,
    containers.pre_stop,
    containers.accelerators,
    containers.variables,
    containers.environment,
    containers.images,
    containers.capabilities,
    containers.host_ports,
    containers.volumes,
    containers.snapshots,
)


@dataclass(frozen=True, slots=True)
class TemplateWarning:
    """One warning. `location` counts from the document's root; the message has the effect and the
    remedy."""

    kind: WarningKind
    location: Location
    message: str

    @property
    def problem(self) -> Problem:
        """Warning in the form of an error; its text begins with the kind."""
        return Problem.at(self.location, f"{self.kind}: {self.message}")


def warnings_of(job: ElasticJob) -> tuple[TemplateWarning, ...]:
    """Return all warnings for a job; those of one kind are in order of the template's fields."""
    document = job.spec.template.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = document["spec"]
    index = job.spec.template.spec.containers.index(job.trainer())
    template = Template(
        job,
        mapping(document.get("metadata")),
        spec,
        spec["containers"][index],
        ("containers", index),
    )
    return tuple(
        TemplateWarning(kind, _absolute(location), message)
        for rule in _RULES
        for kind, location, message in rule(template)
    )


def _absolute(location: Location) -> Location:
    """Return a location from the document's root; `..` leads out of the pod's spec."""
    return (*POD_SPEC[:-1], *location[1:]) if location[0] == ".." else (*POD_SPEC, *location)
