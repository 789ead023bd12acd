"""Sentences on pods whose labels or owner references were changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from elasticjob_operator.domain.explain.phrases import MAX_NAMES, listed, named
from elasticjob_operator.domain.manifests.owned_objects import owner_reference
from elasticjob_operator.domain.observed.state import Pod
from elasticjob_operator.model.job import ElasticJob


def lost_label_sentences(pods: Iterable[Pod]) -> Iterator[str]:
    """Yield the consequence of lost labels and the commands that restore them."""
    lost = [pod for pod in pods if pod.lost_labels]
    if not lost:
        return
    keys = sorted({label.partition("=")[0] for pod in lost for label in pod.lost_labels})
    text = f"the label{'s' if len(keys) > 1 else ''} {listed(keys)}"
    many = len(lost) > 1
    yield (
        f"{named(pod.name for pod in lost)} {'have' if many else 'has'} lost {text}: the job goes "
        "on, but the operator sees its state late, and the job's Service and PodDisruptionBudget "
        f"may not select {'these pods' if many else 'this pod'}"
    )
    for pod in sorted(lost, key=lambda pod: pod.index)[:MAX_NAMES]:
        labels, it = " ".join(pod.lost_labels), "them" if len(pod.lost_labels) > 1 else "it"
        yield f"`kubectl label --overwrite pod {pod.name} {labels}` restores {it}"


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
