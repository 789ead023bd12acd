"""JSON encoding of the records stored in etcd.

JSON objects with camelCase names. Fields at their default are left out and unknown fields are
ignored, so that an older and a newer release can share a job. A named tuple is stored as an array
of its fields in order: shorter, and much faster to read in large numbers. Owns the format, not the
records.

Values are untrusted: any process with the job's etcd user can write them. Texts are made printable
and clipped when read (`longest`), and a number that Kubernetes cannot store is malformed
(`largest`): no record controls a terminal or a log, or makes a status too large.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from elasticjob_rendezvous.protocol.text import clipped, one_line, printable, shortened

Record = TypeVar("Record")
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_PLAIN = (str, int, float, bool)
_IN_LINES = frozenset({"detail", "message", "traceback"})
"""Stored names of texts of several lines; names and reasons have one."""
LONGEST_NAME = 63
LONGEST_TEXT = 253
"""Maximum bytes of a text without a limit of its own: as of a DNS name."""
LONGEST_DETAIL = 1024
LONGEST_MESSAGE = 8 * 1024
_LONGEST = {
    **dict.fromkeys(("name", "members", "unsaved", "masterName"), LONGEST_NAME),
    **dict.fromkeys(
        ("detail", "reason", "reasons", "cold", "coldReason", "launch", "saveError", "error"),
        LONGEST_DETAIL,
    ),
    **dict.fromkeys(("message", "traceback"), LONGEST_MESSAGE),
}
_KEEPS_END = frozenset({"traceback"})
_LONG_TEXT = re.compile(f'[^"]{{{LONGEST_NAME + 1}}}')
LARGEST = 2**31 - 1
"""Maximum of a number without a limit of its own, as in the schema of the status."""
LARGEST_MS = 2**53
"""Maximum number of milliseconds; their sums fit into 64 bits."""
_WIDE = frozenset(
    {"lease", "confirmed", "step", "checkpointStep", "passed", "point", "maxRestarts"}
    | {"stored", "replicated", "restored", "lostSteps", "bytes", "limit", "endedStep"}
)
"""Numbers of 64 bits: those of etcd, steps, which a script may count in tokens, sizes in bytes, and
a limit that users of torchrun choose."""
_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class MalformedRecord(ValueError):
    """Stored value that does not match the record of its key; names the key and the fault."""

    def __init__(self, key: str, fault: str) -> None:
        super().__init__(
            f"the record at {shortened(key, LONGEST_TEXT)!r} is malformed "
            f"({shortened(fault, LONGEST_TEXT)}); "
            "another program may be writing under this job's prefix"
        )
        self.key = key


def encode(record: object) -> bytes:
    """Return the stored form of a record dataclass."""
    return _ENCODER.encode(_plain(record)).encode()


def decode(kind: type[Record], key: str, value: bytes) -> Record:
    """Read a record of `kind` from the bytes stored at `key`; raises `MalformedRecord`."""
    try:
        text = value.decode()
        document = _DECODER.decode(text)
        if "\\ud" in text.lower():  # a lone surrogate can be read, but not written again
            _ENCODER.encode(document).encode()
        plain = text.isascii() and text.isprintable() and "\\" not in text
        if not plain or _LONG_TEXT.search(text):
            document = _bounded(document, "")
        read: Callable[[Any], Any] = _reader(kind)  # type: ignore[arg-type]
        return typing.cast(Record, read(document))
    except MalformedRecord:
        raise
    except _UNREADABLE as error:
        raise MalformedRecord(key, f"{type(error).__name__}: {error}") from error


def longest(name: str) -> int:
    """Return the maximum number of bytes of a text with this stored name."""
    return _LONGEST.get(name, LONGEST_TEXT)


def largest(name: str) -> int:
    """Return the maximum of a number with this stored name, positive or negative."""
    if name in _WIDE:
        return 2**63 - 1
    return LARGEST_MS if name.endswith("Ms") else LARGEST


def bounded_text(text: str, name: str = "") -> str:
    """Return a text with this stored name: printable, and clipped to `longest`.

    Only texts of `_IN_LINES` keep newlines; a traceback keeps its end.
    """
    most, keeps_end = longest(name), name in _KEEPS_END
    some = text[-most - 1 :] if keeps_end else text[: most + 1]  # escapes are longer
    shown = printable(some) if name in _IN_LINES else one_line(some)
    return clipped(shown, most, keeps_end)


def _bounded(value: Any, name: str) -> Any:
    """Return parsed JSON with bounded texts; `name` is that of the field or of its list."""
    if isinstance(value, str):
        return bounded_text(value, name)
    if isinstance(value, dict):
        return {field: _bounded(item, field) for field, item in value.items()}
    if isinstance(value, list):
        return [_bounded(item, name) for item in value]
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def prepare(*kinds: type) -> None:
    """Build the readers and writers of these records now, before a process forks."""
    for kind in kinds:
        _reader(kind)
        _names(kind)


@cache
def _names(kind: Any) -> tuple[tuple[str, str, object], ...]:
    """Return (attribute, stored name, default) of each field."""
    found = []
    for field in fields(kind):
        head, *rest = field.name.split("_")
        name = head + "".join(part.title() for part in rest)
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        found.append((field.name, name, default))
    return tuple(found)


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if hasattr(value, "__dataclass_fields__"):
        return {
            name: item if type(item) in _PLAIN else _plain(item)
            for attribute, name, default in _names(kind)
            if (item := getattr(value, attribute)) is not default and item != default
        }
    if _is_row(kind):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _is_row(kind: Any) -> bool:
    """Return True for a named tuple, whose fields are of plain types."""
    return hasattr(kind, "_fields")


@cache
def _reader(kind: Any, name: str = "") -> Callable[[Any], Any]:
    """Return the function that turns parsed JSON into `kind`, built once per type and name."""
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple_reader(get_args(kind)[0], name)
    if origin in (typing.Union, types.UnionType):
        given: Any = next(arg for arg in get_args(kind) if arg is not type(None))
        inner: Callable[[Any], Any] = _reader(given, name)
        return lambda item: None if item is None else inner(item)
    if hasattr(kind, "__dataclass_fields__"):
        return _dataclass_reader(kind)
    if _is_row(kind):
        return _row_reader(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if kind is float:
        return _finite
    if kind is bool:
        return lambda item: _as(bool, item)
    if kind is int:
        most = largest(name)
        return lambda item: _within(_as(int, item), most)
    return lambda item: _as(kind, item)


def _tuple_reader(kind: Any, name: str) -> Callable[[Any], Any]:
    element = _reader(kind, name)
    plain = {str} if kind is str else set()

    def read(items: Any) -> Any:
        items = _as(list, items)
        if plain.issuperset(map(type, items)):  # a round may name a thousand members
            return tuple(items)
        return tuple(element(item) for item in items)

    return read


def _row_reader(kind: Any) -> Callable[[Any], Any]:
    """Return a reader of named tuples: extra fields are ignored, missing ones are defaults.

    Their names are not stored, so texts and numbers are bounded here.
    """
    hints = get_type_hints(kind)
    expected = tuple(hints[attribute] for attribute in kind._fields)
    most = len(expected)
    make = tuple.__new__  # skips the named tuple's own, which counts the fields again
    numbers = [at for at, hint in enumerate(expected) if hint is int]
    names = [at for at, attribute in enumerate(kind._fields) if attribute in _LONGEST]

    def bounded(row: list[Any]) -> list[Any]:
        for at in numbers:
            if at < len(row):
                _within(row[at], LARGEST)
        for at in names:
            if at < len(row) and not (row[at].isascii() and len(row[at]) <= LONGEST_NAME):
                row[at] = bounded_text(row[at], kind._fields[at])
        return row

    def read(row: Any) -> Any:
        if type(row) is list and tuple(map(type, row)) == expected:
            return make(kind, bounded(row))
        row = _as(list, row)[:most]
        given = tuple(map(type, row))
        if given != expected[: len(given)]:
            raise TypeError(f"{row!r:.80} is not a row of {kind.__name__}")
        return kind(*bounded(row))

    return read


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    plan = [
        (attribute, name, _plain_type(hints[attribute]), _reader(hints[attribute], name), default)
        for attribute, name, default in _names(kind)
    ]

    def read(document: Any) -> Any:
        document = _as(dict, document)
        values = {}
        for attribute, name, plain, reader, default in plan:
            if name in document:
                value = document[name]
                # Texts, most of the values, need no conversion, and small numbers no check.
                if type(value) is plain and (plain is not int or -LARGEST <= value <= LARGEST):
                    values[attribute] = value
                else:
                    values[attribute] = reader(value)
            elif default is MISSING:
                raise KeyError(f"{name} is missing")
        return kind(**values)

    return read


def _plain_type(hint: Any) -> Any:
    return hint if hint in (str, bool, int) else None


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.40} is not a {getattr(kind, '__name__', kind)}")
    return value


def _within(value: int, most: int) -> int:
    if not -most <= value <= most:
        raise ValueError(f"{value} is out of range")
    return value


def _finite(value: Any) -> float:
    number = float(_as((int, float), value))
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
