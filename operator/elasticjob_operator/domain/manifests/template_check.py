"""Check of a job's template: every reason for which its pods could not be made or created.

It builds the pods with the operator's builder, and applies the rules of the API server and the
kubelet to the template.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.manifests.job_command import command_for
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.manifests.pod import PodSettings, pod
from elasticjob_operator.domain.manifests.pod_rules import metadata_problems, pod_problems
from elasticjob_operator.domain.manifests.template_rules import TemplateRefused, conflicts
from elasticjob_operator.domain.plan.backends import STORE_INDEX
from elasticjob_operator.domain.plan.lifecycle import grace_seconds
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.problems import Location, Problem
from elasticjob_rendezvous.protocol.text import echoed

MOST_BYTES = 3 * 512 * 1024
"""Maximum size of a request to etcd by default: 1.5 MiB."""
_SETTINGS = PodSettings("sidecar")
_ACCESS = Access(b"", None, None, None)


def check_pods(job: ElasticJob) -> list[Problem]:
    """Return the problems of the job's pods; the template has passed its schema."""
    document = job.model_dump(by_alias=True, exclude_none=True)
    if unpaired := list(_unpaired(document, ())):
        return unpaired  # such a text can be neither sent nor measured
    template = job.spec.template.model_dump(mode="json", by_alias=True, exclude_none=True)
    policy = job.spec.run_policy.scheduling_policy
    wanted = policy.priority_class if policy is not None else None
    if wanted and not template["spec"].get("priorityClassName"):
        template["spec"]["priorityClassName"] = wanted
    metadata = {"labels": job.metadata.labels, "annotations": job.metadata.annotations}
    found = [
        *_size(job),
        *metadata_problems(metadata),
        *_refusals(job, template["spec"]),
        *pod_problems(template, grace_seconds(job)),
    ]
    return list({problem.location: problem for problem in reversed(found)}.values())[::-1]


def _unpaired(value: object, location: Location) -> Iterator[Problem]:
    """Yield a problem for each text with half of a surrogate pair, which UTF-8 does not encode."""
    if isinstance(value, dict):
        for key, one in value.items():
            if _has_surrogate(key):
                yield Problem.at(
                    location, f"must not have keys with {_UNPAIRED}; got {echoed(key)}"
                )
            else:
                yield from _unpaired(one, (*location, key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _unpaired(one, (*location, index))
    elif _has_surrogate(value):
        yield Problem.at(location, f"must not contain {_UNPAIRED}; got {echoed(value)}")


_UNPAIRED = "an unpaired surrogate"


def _has_surrogate(value: object) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def _size(job: ElasticJob) -> Iterator[Problem]:
    """Yield a problem for a job that is too long for the API server's etcd."""
    size = len(job.model_dump_json(by_alias=True, exclude_none=True).encode())
    if size > MOST_BYTES:
        yield Problem.at(
            (),
            f"must be at most {MOST_BYTES} bytes long as JSON, the limit of the API server's etcd; "
            f"it has {size}: put long texts into a ConfigMap or a volume",
        )


def _refusals(job: ElasticJob, spec: dict[str, object]) -> Iterator[Problem]:
    """Yield the refusals of the builder: all conflicts with its additions, that of the command, and
    the first other."""
    for refused in conflicts(spec, job.trainer().name):
        yield refused.problem
    # The builder stops at its first refusal, which would hide that of the command.
    try:
        command_for(job)
    except TemplateRefused as refused:
        yield refused.problem
    # The two differ where a pod hosts the store of the job.
    for index in (STORE_INDEX, STORE_INDEX + 1):
        try:
            pod(job, index, 0, _SETTINGS, _ACCESS)
        except TemplateRefused as refused:
            yield refused.problem
