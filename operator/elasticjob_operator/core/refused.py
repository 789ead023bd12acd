"""A template that cannot be made a pod."""

from __future__ import annotations

from elasticjob_operator.model.problems import Location, Problem

POD_SPEC: Location = ("spec", "template", "spec")


class TemplateRefused(ValueError):
    """Names the field, says what it must be, and how to put it right."""

    @classmethod
    def at(cls, location: Location, message: str) -> TemplateRefused:
        """`location` counts from the pod's spec."""
        return cls(str(Problem.at((*POD_SPEC, *location), message)))
