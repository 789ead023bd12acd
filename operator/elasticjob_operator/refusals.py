"""Mapping of API server refusals to the obstacles a job's status reports."""

from __future__ import annotations

from http import HTTPStatus

from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.dependents import NameTaken
from elasticjob_operator.kube import Forbidden, Invalid, KubeError, QuotaExceeded, Unreachable


def obstacle_of(error: NameTaken | KubeError) -> Obstacle | None:
    """Return the obstacle that an error means for the job; None if only retrying helps.

    The API server responds with status 500 if an admission webhook does not answer.
    """
    match error:
        case NameTaken():
            return Obstacle.NAME_CONFLICT
        case QuotaExceeded():
            return Obstacle.QUOTA
        case Invalid() | Forbidden() | Unreachable(status=HTTPStatus.INTERNAL_SERVER_ERROR):
            return Obstacle.REFUSED
    return None
