"""Meaning of the API server's errors for a job: obstacles to its pods, and refused requests."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TypeGuard

from elasticjob_operator.domain.manifests.pod_rules import preemption_problem
from elasticjob_operator.domain.manifests.resource_refusals import refuses_added_resources
from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.etcd_tls.job_users import SecretMissing
from elasticjob_operator.kubernetes.client import (
    Forbidden,
    Invalid,
    Json,
    KubeError,
    QuotaExceeded,
    Unreachable,
)
from elasticjob_operator.reconcile.cluster import NameTaken, OwnerRemoved
from elasticjob_operator.reconcile.owned_objects import NotServed

_ENDING = "NamespaceTerminating"
"""Reason of a cause of an error: the namespace is being deleted."""
_PREEMPTION = "value of PreemptionPolicy"
"""Part of the message with which the API server's admission refuses `preemptionPolicy`."""
_DENIAL = re.compile(r'admission webhook "|pods "[^"]*" is forbidden: ValidatingAdmissionPolicy ')
"""Beginning of the message of a webhook or policy that denies a pod. Without a code of its own a
webhook's denial has status 400, and without a reason a policy's has 422, as invalid objects do."""


def obstacle_of(error: NameTaken | KubeError) -> Obstacle | None:
    """Return the obstacle that an error means for the job; None if only retrying helps.

    The API server responds with status 500 if an admission webhook does not answer.
    """
    match error:
        case OwnerRemoved():
            return Obstacle.OWNER_REMOVED
        case NameTaken():
            return Obstacle.NAME_CONFLICT
        case NotServed():
            return Obstacle.NOT_SERVED
        case SecretMissing():
            return Obstacle.SECRET
        case QuotaExceeded():
            return Obstacle.QUOTA
        case Forbidden() if any(cause.reason == _ENDING for cause in error.causes):
            return Obstacle.NAMESPACE_ENDS
        case Invalid() | Forbidden() | Unreachable(status=HTTPStatus.INTERNAL_SERVER_ERROR):
            return Obstacle.REFUSED
    return None


def is_refusal(error: Exception) -> TypeGuard[KubeError]:
    """Return True if a quota, policy, webhook or role refuses a request to the API server.

    A response with status 500 that names no webhook may be a passing failure of the server's etcd.
    """
    if not isinstance(error, KubeError):
        return False
    if error.status == HTTPStatus.INTERNAL_SERVER_ERROR and "webhook" not in error.message:
        return False
    return obstacle_of(error) in (Obstacle.REFUSED, Obstacle.QUOTA)


def refusal_of_pod(error: KubeError, body: Json) -> tuple[Obstacle | None, str]:
    """Return the obstacle that an error at the creation of this pod means, as `obstacle_of`, and
    its message."""
    if isinstance(error, Invalid | Forbidden) and not isinstance(error, QuotaExceeded):
        fields = [cause.field for cause in error.causes]
        if refuses_added_resources(body, error.message, fields):
            return Obstacle.AGENT_RESOURCES, error.message
        problem = preemption_problem(body["spec"]) if _PREEMPTION in error.message else None
        if problem is not None:
            return Obstacle.TEMPLATE_INVALID, str(problem)
    if isinstance(error, Invalid) and not _DENIAL.match(error.message):
        return Obstacle.TEMPLATE_INVALID, error.message
    return obstacle_of(error), error.message
