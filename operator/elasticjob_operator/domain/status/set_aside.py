"""Status of a job that the operator has set aside: it does nothing about the job until its spec
changes.

Computed from the stored object, which the operator may be unable to parse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.plan.lifecycle import FINISHED
from elasticjob_operator.domain.status.readiness import stalled
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import MAX_SENTENCES, Condition
from elasticjob_operator.model.types import ConditionStatus, ConditionType

MAX_MESSAGE = 1024
"""Maximum length of the message, in characters."""


class SetAsideReason(StrEnum):
    """Reason for which a job is set aside. Printed as a condition's and an event's reason."""

    INVALID_JOB = "InvalidJob"
    RECONCILE_FAILED = "ReconcileFailed"
    RECONCILE_TOO_LONG = "ReconcileTooLong"
    RECONCILE_TOO_LARGE = "ReconcileTooLarge"


@dataclass(frozen=True, slots=True)
class SetAside:
    """Decision to set a job aside."""

    reason: SetAsideReason
    message: str

    @property
    def text(self) -> str:
        """Message of at most `MAX_MESSAGE` characters."""
        if len(self.message) <= MAX_MESSAGE:
            return self.message
        return self.message[: MAX_MESSAGE - 1] + "…"


def set_aside_sentence(message: str) -> str:
    """Return the sentence of the explanation, without a full stop."""
    return f"The operator does nothing about the job until its spec changes: {message}"


def set_aside_message(job: ElasticJob) -> str:
    """Return the message of a job that is set aside; empty for another one."""
    found = stalled(job)
    return found.message if found is not None and found.reason in set(SetAsideReason) else ""


def is_set_aside(raw: Json) -> bool:
    """Return True if the status of a stored object has set aside its present generation."""
    found = _condition(_conditions(raw), ConditionType.STALLED)
    return (
        found.get("status") == ConditionStatus.TRUE
        and found.get("reason") in set(SetAsideReason)
        and found.get("observedGeneration") == raw["metadata"].get("generation", 0)
    )


def set_aside_status(raw: Json, aside: SetAside, now: datetime) -> Json:
    """Return the status of a stored object that is set aside at `now` (UTC).

    Ready, Reconciling, Stalled and the explanation change; the rest remains as it was last
    observed. The status of a finished job is final.
    """
    before = _mapping(raw.get("status"))
    if before.get("phase") in FINISHED:
        return dict(before)
    generation, known = raw["metadata"].get("generation", 0), _conditions(raw)
    conditions = (
        (ConditionType.READY, ConditionStatus.FALSE, aside.text),
        (ConditionType.RECONCILING, ConditionStatus.FALSE, ""),
        (ConditionType.STALLED, ConditionStatus.TRUE, aside.text),
    )
    changed = []
    for kind, status, message in conditions:
        old = _condition(known, kind)
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        condition = Condition(
            type=kind,
            status=status,
            reason=aside.reason.value,
            message=message,
            observed_generation=generation,
            last_transition_time=now,
        )
        document = condition.model_dump(mode="json", by_alias=True)
        changed.append({**document, "lastTransitionTime": since} if since else document)
    types = {kind.value for kind, *_ in conditions}
    others = [one for one in known if one.get("type") not in types]
    sentence = set_aside_sentence(aside.text) + "."
    sentences = before.get("explanation")
    rest = [one for one in sentences if one != sentence] if isinstance(sentences, list) else []
    return {
        **before,
        "conditions": [*changed, *others],
        "explanation": [sentence, *rest][:MAX_SENTENCES],
        "observedGeneration": generation,
    }


def _conditions(raw: Json) -> list[Json]:
    found = _mapping(raw.get("status")).get("conditions")
    return (
        [condition for condition in found if isinstance(condition, dict)]
        if isinstance(found, list)
        else []
    )


def _condition(conditions: list[Json], kind: ConditionType) -> Json:
    return next((condition for condition in conditions if condition.get("type") == kind.value), {})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
