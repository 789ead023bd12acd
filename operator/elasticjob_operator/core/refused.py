"""Error for a template from which no pod can be made."""

from __future__ import annotations

from elasticjob_operator.model.problems import Location, Problem

POD_SPEC: Location = ("spec", "template", "spec")


class TemplateRefused(ValueError):
    """Template from which no pod can be made; the text names the field and the fix."""

    @classmethod
    def at(cls, location: Location, message: str) -> TemplateRefused:
        """Return the error for a field; `location` is relative to the pod's spec."""
        return cls(str(Problem.at((*POD_SPEC, *location), message)))
