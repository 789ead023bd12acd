"""Phrases for deletions, causes, offences of machines and obstacles, with remedies. Tables only.

`core.words` builds sentences from them; `core.classes` has the failure classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_rendezvous.core.failures import FailureClass
from elasticjob_rendezvous.core.records import ABORTED

DELETED: Mapping[DeleteReason, str] = {
    DeleteReason.SURPLUS_PENDING: "more than wanted; had not started",
    DeleteReason.SURPLUS_NODE_CORDONED: "more than wanted; its node is cordoned",
    DeleteReason.SURPLUS_NODE_TAINTED: "more than wanted; its node is tainted",
    DeleteReason.SURPLUS_NOT_IN_ROUND: "more than wanted; was not in the round",
    DeleteReason.SURPLUS_NODE_AVOIDED: "more than wanted; its node failed the job before",
    DeleteReason.SURPLUS_STRAGGLER: "more than wanted; was slower than its peers",
    DeleteReason.SURPLUS_HIGHEST_RANK: "more than wanted; had the highest rank",
    DeleteReason.MARKED: "was chosen to leave before",
    DeleteReason.REPLACED: "failed before and was replaced",
    DeleteReason.SUSPENDED: "the job is suspended",
    DeleteReason.DEADLINE_EXCEEDED: "the job was active for too long",
    DeleteReason.JOB_DELETED: "the job is deleted",
    DeleteReason.JOB_FINISHED: "the job has finished (cleanPodPolicy)",
}
DETAILS = {reason.value: text for reason, text in DELETED.items()} | {
    "SIGTERM": "it was told to end",
    "Terminating": "its pod is deleted",
    "EvictionByEvictionAPI": "its node was drained",
    "PreemptionByScheduler": "for a pod of higher priority",
    "TerminationByKubelet": "by its node",
    "DeletionByTaintManager": "its node was tainted",
    "DeletionByPodGC": "its node is gone",
    ABORTED: "its peers' collectives broke",
}
"""Phrases for the reasons of a cause with one member."""
DETAILS_OF_MANY = {
    "SIGTERM": "they were told to end",
    "Terminating": "their pods are deleted",
    "EvictionByEvictionAPI": "their nodes were drained",
    "PreemptionByScheduler": "for pods of higher priority",
    "TerminationByKubelet": "by their nodes",
    "DeletionByTaintManager": "their nodes were tainted",
    "DeletionByPodGC": "their nodes are gone",
    ABORTED: "their peers' collectives broke",
}
"""Phrases for the reasons of a cause with several members."""

OFFENDED: Mapping[str, str] = {
    FailureClass.NODE_LOST: "it was lost",
    FailureClass.SIGNAL: "a signal ended a worker",
    FailureClass.HANG: "a worker hung",
    FailureClass.HOST_OUT_OF_MEMORY: "its memory ran out",
}
"""Phrases for offences of machines."""


class Words(NamedTuple):
    """Meaning and remedy, both without a full stop."""

    meaning: str
    remedy: str


OBSTACLES: Mapping[Obstacle, Words] = {
    Obstacle.UNSCHEDULABLE: Words(
        "Pending", "Free or add machines that fit, or reduce the template's requests"
    ),
    Obstacle.IMAGE: Words(
        "without its image", "Correct the image's name, or add the pull secret it needs"
    ),
    Obstacle.CONFIG: Words(
        "not startable", "Correct what the template names: a ConfigMap, a Secret or a volume"
    ),
    Obstacle.INIT: Words("blocked by an init container", "See that init container's log"),
    Obstacle.QUOTA: Words("", "Raise the namespace's quota, or reduce the template's requests"),
    Obstacle.REFUSED: Words("", "Change the rejected field, or ask the owner of the policy"),
    Obstacle.NAME_CONFLICT: Words("", "Delete the object of that name, or rename the job"),
    Obstacle.TEMPLATE_INVALID: Words("", "Suspend the job, correct spec.template and resume it"),
    Obstacle.ENDPOINT: Words(
        "", "Allow the endpoint in the operator's chart, or leave rendezvous.endpoints empty"
    ),
    Obstacle.BACKEND: Words("", "Use another rendezvous.backend"),
    Obstacle.ANOTHERS_ETCD: Words(
        "", "Give this cluster an etcd of its own, or free that one if the other cluster is gone"
    ),
}
