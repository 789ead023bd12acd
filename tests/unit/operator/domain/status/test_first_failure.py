"""First failure in the status when agents took their records with them."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.status.failures import first_failure
from elasticjob_operator.model.status import FirstFailure, Status
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from tests.unit.operator.builders import failure, final_round, history

KILLED = FirstFailure(round=1, pod="job-1", rank=1, signal=9, class_="Signal")


def shown(kind: FailureClass, number: int, cause: str, known: FirstFailure | None) -> str:
    """Return the pod of the shown failure, when job-0 recorded one of that class."""
    rounds = (history(number, "start", 2), history(number + 1, cause, 2))
    first = failure(number, "job-0", kind, exit_code=1)
    view = final_round(2, number + 1, rounds=rounds, first_failure=first)
    found = first_failure(view, "", (), Status(first_failure=known))
    return "" if found is None else found.pod


@pytest.mark.parametrize("kind", [FailureClass.PEER_ABORT, FailureClass.COLLECTIVE_TIMEOUT])
def test_consequence_does_not_replace_known_first_failure(kind: FailureClass) -> None:
    assert shown(kind, 1, "failure", KILLED) == "job-1"
    assert shown(kind, 1, "failure", None) == "job-0"
    assert shown(kind, 2, "failure", KILLED) == "job-0", "of a later round"


@pytest.mark.parametrize("cause", ["leave", "loss"])
def test_consequence_of_a_leave_is_no_failure(cause: str) -> None:
    assert shown(FailureClass.PEER_ABORT, 2, cause, None) == ""
    assert shown(FailureClass.PEER_ABORT, 2, cause, KILLED) == "job-1"
    assert shown(FailureClass.USER_ERROR, 2, cause, KILLED) == "job-0"
