"""Reader of a foreign manifest that tracks the fields used and collects remarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from elasticjob_operator.model.problems import Location
from elasticjob_rendezvous.protocol.text import echoed

T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remark:
    """Note on the conversion of one field of the source, with the remedy."""

    location: Location
    text: str


class Unconvertible(ValueError):
    """Document that cannot be converted; `problems` give the locations, reasons and remedies."""

    def __init__(self, *problems: Remark) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


class Part:
    """Mapping of the source that records which keys were read."""

    def __init__(self, value: Mapping[str, Any], location: Location, remarks: list[Remark]) -> None:
        self._value = value
        self._taken: set[str] = set()
        self.location = location
        self.remarks = remarks

    def __bool__(self) -> bool:
        return bool(self._value)

    @property
    def value(self) -> Mapping[str, Any]:
        return self._value

    def part(self, key: str) -> Part:
        """Return a nested mapping; an empty one if it is absent."""
        value = self._take(key, dict, "a mapping")
        return Part(value or {}, (*self.location, key), self.remarks)

    def items(self, key: str) -> list[Any]:
        return self._take(key, list, "a list") or []

    def text(self, key: str) -> str | None:
        value = self._value.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            self._taken.add(key)
            return str(value)
        return self._take(key, str, "a string")

    def flag(self, key: str) -> bool | None:
        return self._take(key, bool, "true or false")

    def count(self, key: str) -> int | None:
        value = self._take(key, int, "a whole number of at least 0")
        if isinstance(value, bool) or (value is not None and value < 0):
            raise self.refused(key, f"must be a whole number of at least 0, got {echoed(value)}")
        return value

    def note(self, key: str, text: str) -> None:
        """Add a remark on a field."""
        self._taken.add(key)
        self.remarks.append(Remark((*self.location, key), text))

    def note_rest(self, *known: str) -> None:
        """Add a remark for each field that was not read; skip `known`."""
        for key in self._value:
            if key not in self._taken and key not in known and self._value[key] is not None:
                self.note(key, "has no counterpart in an ElasticJob: left out")

    def refused(self, key: str, text: str) -> Unconvertible:
        return Unconvertible(Remark((*self.location, key), text))

    def _take(self, key: str, kind: type[T], what: str) -> T | None:
        self._taken.add(key)
        value = self._value.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise self.refused(key, f"must be {what}, got {echoed(value)}")
