"""Sentences on pods whose owner references were removed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from elasticjob_operator.domain.explain.phrases import MAX_NAMES, named
from elasticjob_operator.domain.manifests.owned_objects import owner_reference
from elasticjob_operator.domain.observed.state import Pod
from elasticjob_operator.model.job import ElasticJob


def unowned_text(pods: Iterable[Pod]) -> str:
    """Return the consequence of removed owner references; empty if no pod has lost them."""
    lost = [pod.name for pod in pods if pod.lost_owner]
    if not lost:
        return ""
    have, these = ("have", "these pods") if len(lost) > 1 else ("has", "this pod")
    return (
        f"{named(lost)} {have} lost the job's entry in metadata.ownerReferences: the job goes on, "
        f"but the operator deletes {these} with it, not Kubernetes; "
        "exclude pods with the label elasticjob.dev/job-uid from the controller that removes it"
    )


def unowned_sentences(job: ElasticJob, pods: Iterable[Pod]) -> Iterator[str]:
    """Yield the consequence of removed owner references, and the commands that restore them."""
    lost = sorted((pod for pod in pods if pod.lost_owner), key=lambda pod: pod.index)
    if not lost:
        return
    yield unowned_text(lost)
    patch = json.dumps({"metadata": {"ownerReferences": [owner_reference(job)]}})
    for pod in lost[:MAX_NAMES]:
        yield f"`kubectl patch pod {pod.name} --type merge --patch '{patch}'` restores it"
