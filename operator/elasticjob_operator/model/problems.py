"""Problems of a manifest: location and expected value; messages for values of a wrong type and for
unknown fields, with a hint at the right one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.protocol.text import bounded, echoed

Location = tuple[str | int, ...]
"""Keys and indices from the document's root, e.g. ("spec", "containers", 0)."""
_MOST_LISTED = 40
"""Maximum number of known fields in a message."""
_INTEGER = re.compile(r"-?[0-9]+")


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


def got(value: Any) -> str:
    """Return the clause that repeats a value, or names its type if it is a collection."""
    if isinstance(value, Mapping | list):
        return f"got a {_type(value)}"
    if value is None:
        return "got null"
    if isinstance(value, bool):
        return f"got {str(value).lower()}"
    return f"got {echoed(value)}"


def _type(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping) else "list"


def not_of_type(expected: str, value: Any) -> str:
    return f"must be {expected}; {got(value)}"


def not_a_string(value: Any) -> str:
    quoted = not isinstance(value, Mapping | list) and value is not None
    return f"must be a string; {got(value)}" + (": put it in quotes" if quoted else "")


def not_an_integer(value: Any) -> str:
    unquoted = isinstance(value, str) and _INTEGER.fullmatch(value.strip()) is not None
    return f"must be an integer; {got(value)}" + (": leave out the quotes" if unquoted else "")


def not_one_of(words: Sequence[str], value: Any) -> str:
    message = f"must be {words[0]}" if len(words) == 1 else f"must be one of {', '.join(words)}"
    if value is False and "Never" in words:
        return f"{message}; {got(value)}, as YAML reads Off and No: write Never"
    close = difflib.get_close_matches(str(value).lower(), [word.lower() for word in words], n=1)
    hint = next((word for word in words if close and word.lower() == close[0]), None)
    return f"{message}; {got(value)}" + (f", did you mean {hint}?" if hint else "")


def unknown_field(name: str, known: Sequence[str], elsewhere: str = "") -> str:
    """Return the message for an unknown field; `elsewhere` is a place that has a field of this
    name."""
    message = "must not be set: there is no such field"
    if near := near_field(name, known):
        return f"{message}; did you mean {near}?"
    if elsewhere:
        return f"{message} here; it belongs to {elsewhere}"
    if len(known) > _MOST_LISTED:
        return message
    return f"{message}; known fields are {', '.join(known)}"


def near_field(name: str, known: Sequence[str]) -> str | None:
    """Return the known field that this name resembles."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    folded = {field.lower().replace("_", ""): field for field in known}
    return folded.get(name.lower().replace("_", "")) or (close[0] if close else None)
