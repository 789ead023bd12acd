"""What a refusal of the API server's is to the user whose job it holds up."""

from __future__ import annotations

from http import HTTPStatus

from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.dependents import NameTaken
from elasticjob_operator.kube import Forbidden, Invalid, KubeError, QuotaExceeded, Unreachable


def obstacle_of(error: NameTaken | KubeError) -> Obstacle | None:
    """What it is to the user that this cannot be done; None where trying again is all there is.

    A status of 500 is what the API server says of an admission webhook that nobody answers.
    """
    match error:
        case NameTaken():
            return Obstacle.NAME_CONFLICT
        case QuotaExceeded():
            return Obstacle.QUOTA
        case Invalid() | Forbidden() | Unreachable(status=HTTPStatus.INTERNAL_SERVER_ERROR):
            return Obstacle.REFUSED
    return None
