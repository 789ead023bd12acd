"""Reading of a stored status: another release may have written it, or a client damaged it.

The parts that this release cannot read are ignored, so that the job continues after a rollback, and
the operator writes its own status.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import ErrorDetails

from elasticjob_operator.model.problems import Location
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase

_PASSES = 8
"""Maximum number of attempts to leave out parts: an object without a required field goes next. Then
whole fields of the status are left out."""


def read_status(value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Status:
    """Return the status without the values that are unknown or have a wrong type.

    If the context of the validation is a list, it gets their errors.
    """
    try:
        return _status(validate(value))
    except ValidationError as error:
        found = error.errors(include_url=False)
    if isinstance(info.context, list):
        info.context.extend(found)
    status = _readable(value, found, validate)
    if any(fault["loc"] == ("phase",) for fault in found):
        return status.model_copy(update={"phase": _phase_by_conditions(status)})
    return status


def _status(found: Any) -> Status:
    assert isinstance(found, Status)
    return found


def _readable(
    value: Any, faults: Sequence[ErrorDetails], validate: ValidatorFunctionWrapHandler
) -> Status:
    """Return the status without the parts that have these faults."""
    kept = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else {}
    for _ in range(_PASSES):
        kept = _without(kept, (fault["loc"] for fault in faults))
        try:
            return _status(validate(kept))
        except ValidationError as error:
            faults = error.errors(include_url=False)
    return _status(validate(_without(kept, (fault["loc"][:1] for fault in faults))))


def _without(document: Any, locations: Iterable[Location]) -> Any:
    """Return the document without these parts; instead of a field that is absent, the object that
    lacks it is left out."""
    parts = {_existing(document, location) for location in locations}
    if () in parts:
        return {}
    # Backwards: the indices of earlier items of a list stay.
    for *path, last in sorted(parts, key=_order, reverse=True):
        holder = document
        for step in path:
            holder = holder[step]
        del holder[last]
    return document


def _existing(document: Any, location: Location) -> Location:
    """Return the location, or that of the innermost object on its way which lacks the next step."""
    holder = document
    for depth, step in enumerate(location):
        try:
            holder = holder[step]
        except (KeyError, IndexError, TypeError):
            return location[:depth]
    return location


def _order(location: Location) -> list[tuple[bool, str | int]]:
    return [(isinstance(step, int), step) for step in location]


def _phase_by_conditions(status: Status) -> Phase:
    """Return the phase of a job whose stored phase is unknown: one that has ended must not run
    again."""
    true = {one.type for one in status.conditions if one.status is ConditionStatus.TRUE}
    if ConditionType.SUCCEEDED in true:
        return Phase.SUCCEEDED
    if status.completion_time is not None or true & {ConditionType.FAILED, ConditionType.FINISHED}:
        return Phase.FAILED
    if ConditionType.SUSPENDED in true:
        return Phase.SUSPENDED
    if ConditionType.RESTARTING in true:
        return Phase.RESTARTING
    return Phase.RUNNING if ConditionType.RUNNING in true else Phase.PENDING
