"""Fields of a template with their locations, and formats of names and quantities."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from elasticjob_operator.model.problems import Location
from elasticjob_rendezvous.protocol.text import echoed

Fault = tuple[Location, str]


@dataclass(frozen=True, slots=True)
class Field:
    """Value at a location; None if the field is absent."""

    value: Any
    location: Location

    def child(self, *names: str) -> Field:
        """Return the field below this one, also if an object on the way is absent."""
        value = self.value
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return Field(value, (*self.location, *names))

    def items(self, *names: str) -> list[Field]:
        """Return the items of the list below this field."""
        holder = self.child(*names)
        values = holder.value or ()
        return [Field(value, (*holder.location, index)) for index, value in enumerate(values)]

    def entries(self, *names: str) -> list[tuple[str, Field]]:
        """Return keys and values of the mapping below this field."""
        holder = self.child(*names)
        found = (holder.value or {}).items()
        return [(key, Field(value, (*holder.location, key))) for key, value in found]

    @property
    def present(self) -> bool:
        return self.value is not None

    @property
    def text(self) -> str:
        """Text of the value; empty if absent."""
        return str(self.value) if self.value is not None else ""

    def fault(self, message: str) -> Fault:
        return self.location, message


def must_be_set(field: Field) -> Iterator[Fault]:
    """Yield a fault if the field is absent or empty."""
    if not field.value:
        yield field.fault("must be set")


def in_range(field: Field, least: int, most: int) -> Iterator[Fault]:
    """Yield a fault if the field is present and out of range."""
    if field.present and not least <= field.value <= most:
        yield field.fault(f"must be from {least} to {most}; got {field.value}")


def not_negative(field: Field) -> Iterator[Fault]:
    if field.present and field.value < 0:
        yield field.fault(f"must be at least 0; got {field.value}")


def unique(fields: list[Field]) -> Iterator[Fault]:
    """Yield the fields whose value an earlier one has; empty ones are left out."""
    seen: set[str] = set()
    for field in fields:
        if field.text and field.text in seen:
            yield field.fault(f"must be unique; {echoed(field.text)} is used before")
        seen.add(field.text)


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a string: its pattern, its maximum length and its description."""

    pattern: re.Pattern[str]
    most: int
    description: str

    def faults(self, field: Field, text: str | None = None) -> Iterator[Fault]:
        """Yield a fault if the field, or this part of it, does not have the format."""
        checked = field.text if text is None else text
        if not self.fits(checked):
            yield field.fault(f"must be {self.description}; got {echoed(checked)}")

    def fits(self, text: str) -> bool:
        return len(text) <= self.most and self.pattern.fullmatch(text) is not None


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
DNS_LABEL = Format(
    re.compile(_LABEL),
    63,
    "a DNS label: lower-case letters, digits and '-', no '-' first or last, at most 63 characters",
)
DNS_SUBDOMAIN = Format(
    re.compile(rf"{_LABEL}(\.{_LABEL})*"),
    253,
    "a DNS subdomain: lower-case letters, digits, '-' and '.', at most 253 characters",
)
DNS_SEARCH = Format(
    re.compile(r"\.|[a-z0-9_]([-a-z0-9_]*[a-z0-9_])?(\.[a-z0-9_]([-a-z0-9_]*[a-z0-9_])?)*\.?"),
    254,
    "a DNS domain",
)
QUALIFIED_NAME = Format(
    re.compile(rf"({_LABEL}(\.{_LABEL})*/)?(?=[^/]{{1,63}}$){_NAME}"),
    317,
    "a name such as team or example.com/team, of letters, digits, '-', '_' and '.', at most 63 "
    "characters after the '/'",
)
LABEL_VALUE = Format(
    re.compile(f"({_NAME})?"),
    63,
    "a label value: letters, digits, '-', '_' and '.', at most 63 characters",
)
VARIABLE = Format(re.compile(r"[ -<>-~]+"), 1 << 20, "printable ASCII characters without '='")
CONFIG_KEY = Format(
    re.compile(r"(?!\.\.?$)(?!\.\.)[-._a-zA-Z0-9]+"),
    253,
    "a key of letters, digits, '-', '_' and '.', at most 253 characters",
)
PORT_NAME = Format(
    re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?"),
    15,
    "a port name: lower-case letters, digits and single '-', one letter at least, at most 15 "
    "characters",
)
HEADER_NAME = Format(re.compile(r"[-A-Za-z0-9]+"), 1 << 20, "a HTTP header name")
SYSCTL = Format(
    re.compile(r"[a-z0-9]([-_a-z0-9]*[a-z0-9])?([./][a-z0-9]([-_a-z0-9]*[a-z0-9])?)*"),
    253,
    "the name of a sysctl",
)
MOST_PORT = 65535
MOST_ID = 2**31 - 1


def relative_path_faults(field: Field) -> Iterator[Fault]:
    """Yield a fault if a path is absolute or leaves its folder."""
    if field.text.startswith("/"):
        yield field.fault(f"must be a relative path; got {echoed(field.text)}")
    yield from backstep_faults(field)


def backstep_faults(field: Field) -> Iterator[Fault]:
    if ".." in field.text.split("/"):
        yield field.fault(f"must not contain '..'; got {echoed(field.text)}")


def port_faults(field: Field) -> Iterator[Fault]:
    """Yield a fault if a port's number or name is invalid."""
    if isinstance(field.value, str):
        yield from PORT_NAME.faults(field)
    else:
        yield from in_range(field, 1, MOST_PORT)


def exactly_one(
    holder: Field, kinds: tuple[str, ...], faults_of: Callable[[Field], Iterator[Fault]]
) -> Iterator[Fault]:
    """Yield a fault for each further kind that is present, and those of the first."""
    given = [holder.child(kind) for kind in kinds if holder.child(kind).present]
    for other in given[1:]:
        yield other.fault(f"must be absent: {given[0].location[-1]} is set, and only one may be")
    if given:
        yield from faults_of(given[0])


_SUFFIXES = {
    **{
        name: Decimal(1000) ** power
        for power, name in enumerate(("", "k", "M", "G", "T", "P", "E"))
    },
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate(" KMGTPE") if power},
    "m": Decimal("1e-3"),
    "u": Decimal("1e-6"),
    "n": Decimal("1e-9"),
}
_MOST_EXPONENT = 1000
_QUANTITY = re.compile(r"([+-]?[0-9.]+)(?:([eE][+-]?[0-9.]+)|([A-Za-z]*))")


def quantity(value: object) -> Decimal:
    """Return the amount of a valid quantity such as 500m, 4Gi or 1e3."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity")
    number, exponent, suffix = match.groups()
    if exponent:
        power = max(-_MOST_EXPONENT, min(int(Decimal(exponent[1:])), _MOST_EXPONENT))
        return Decimal(number).scaleb(power)
    return Decimal(number) * _SUFFIXES[suffix]
