"""Labels of a job's pods, and detection of labels that were removed or changed.

Such a pod still belongs to the job by its owner reference, and its workers train on. Index and
incarnation are therefore read from immutable fields: the pod's name and its agent's environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticjob_operator.core.clashes import own_variable
from elasticjob_operator.core.json import Json
from elasticjob_operator.core.mirrored import job_of
from elasticjob_operator.core.names import (
    AGENT_CONTAINER,
    INCARNATION_LABEL,
    pod_labels,
    pod_name,
)
from elasticjob_operator.core.observed import Pod
from elasticjob_operator.core.words import NAMED, listed, named
from elasticjob_operator.model.job import ElasticJob

PREFIX_VARIABLE = own_variable("PREFIX")


def index_in(name: str) -> int | None:
    """Return the index at the end of a pod's name, or None."""
    number = name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


def index_of(job: ElasticJob, name: str) -> int | None:
    """Return the index of the job's pod with this name; None if no pod of the job is so named."""
    index = index_in(name)
    named = index is not None and name == pod_name(job.metadata.name, index)
    return index if named else None


def incarnation_of(raw: Json) -> int:
    """Return the incarnation that a pod's agent joins; 0 if unknown."""
    for container in raw["spec"].get("initContainers") or ():
        if container["name"] == AGENT_CONTAINER:
            for variable in container.get("env") or ():
                if variable["name"] == PREFIX_VARIABLE:
                    found = job_of(variable.get("value") or "")
                    return found[2] if found else 0
    text = (raw["metadata"].get("labels") or {}).get(INCARNATION_LABEL, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def lost_labels(job: ElasticJob, raw: Json) -> tuple[str, ...]:
    """Return the labels that the pod lacks or has with another value, each as `key=value`."""
    metadata = raw["metadata"]
    labels, index = metadata.get("labels") or {}, index_of(job, metadata["name"])
    if index is None:
        return ()
    incarnation = incarnation_of(raw)
    wanted = pod_labels(job, index, incarnation)
    if not incarnation:
        del wanted[INCARNATION_LABEL]
    return tuple(f"{key}={value}" for key, value in wanted.items() if labels.get(key) != value)


def label_words(pods: Iterable[Pod]) -> Iterator[str]:
    """Yield the consequence of lost labels and the commands that restore them."""
    lost = [pod for pod in pods if pod.lost_labels]
    if not lost:
        return
    keys = sorted({label.partition("=")[0] for pod in lost for label in pod.lost_labels})
    what = f"the label{'s' if len(keys) > 1 else ''} {listed(keys)}"
    many = len(lost) > 1
    yield (
        f"{named(pod.name for pod in lost)} {'have' if many else 'has'} lost {what}: the job goes "
        "on, but the operator sees its state late, and the job's Service and PodDisruptionBudget "
        f"may not select {'these pods' if many else 'this pod'}"
    )
    for pod in sorted(lost, key=lambda pod: pod.index)[:NAMED]:
        labels, it = " ".join(pod.lost_labels), "them" if len(pod.lost_labels) > 1 else "it"
        yield f"`kubectl label --overwrite pod {pod.name} {labels}` restores {it}"
