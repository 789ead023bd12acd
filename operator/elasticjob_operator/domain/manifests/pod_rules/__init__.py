"""Rules of the API server and the kubelet for a template's pods, beyond the types of its fields.

Those of the API server follow `pkg/apis/core/validation` of Kubernetes; a test compares the
verdicts. The template has passed its schema. Faults that depend on the cluster, such as an absent
priority class or a quota, are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.pod_rules.containers import container_faults
from elasticjob_operator.domain.manifests.pod_rules.fields import Field
from elasticjob_operator.domain.manifests.pod_rules.kubelet import kubelet_faults
from elasticjob_operator.domain.manifests.pod_rules.placement import placement_faults
from elasticjob_operator.domain.manifests.pod_rules.pod_spec import (
    metadata_faults,
    pod_faults,
    preemption_faults,
)
from elasticjob_operator.domain.manifests.pod_rules.volumes import volume_faults
from elasticjob_operator.model.problems import Problem

__all__ = ["metadata_problems", "pod_problems", "preemption_problem"]


def metadata_problems(metadata: Json) -> Iterator[Problem]:
    """Yield the reasons for which the API server would refuse an object's labels or annotations."""
    for location, message in metadata_faults(Field(metadata, ("metadata",))):
        yield Problem.at(location, message)


def pod_problems(template: Json, grace_seconds: int) -> Iterator[Problem]:
    """Yield the reasons for which the API server would refuse the template's pods, or the kubelet
    would not start them.

    Args:
        grace_seconds: termination grace period of the pods.
    """
    pod = Field(template, ("spec", "template"))
    for faults in (
        pod_faults(pod),
        volume_faults(pod.child("spec")),
        container_faults(pod.child("spec"), grace_seconds),
        placement_faults(pod.child("spec")),
        kubelet_faults(pod.child("spec")),
    ):
        for location, message in faults:
            yield Problem.at(location, message)


def preemption_problem(spec: Json) -> Problem | None:
    """Return the problem of a pod spec's preemption policy that the API server has refused."""
    faults = preemption_faults(Field(spec, ("spec", "template", "spec")))
    return next((Problem.at(location, message) for location, message in faults), None)
