"""Problems of a manifest: location and expected value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.text import bounded

Location = tuple[str | int, ...]
"""Keys and indices from the document's root, e.g. ("spec", "containers", 0)."""


def field_path(location: Location) -> str:
    """Return a location as text: `spec.template.spec.containers[0].command`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif "." in step or "/" in step:
            path += f'["{step}"]'
        else:
            path += f".{step}" if path else step
    return path


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a manifest. `message` states the requirement on the field at `path`."""

    path: str
    message: str
    location: Location = ()

    @classmethod
    def at(cls, location: Location, message: str) -> Problem:
        return cls(bounded(field_path(location)), bounded(message), location)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidManifest(ValueError):
    """Error for a document that is not a valid ElasticJob; holds all problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
