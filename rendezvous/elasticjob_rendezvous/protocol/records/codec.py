"""JSON encoding of the records stored in etcd.

JSON objects with camelCase names. Fields at their default are left out and unknown fields are
ignored, so that an older and a newer release can share a job. A named tuple is stored as an array
of its fields in order: shorter, and much faster to read in large numbers. Texts are made printable
when read: a client of etcd controls no terminal and no log. Owns the format, not the records.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from elasticjob_rendezvous.protocol.text import one_line, printable

Record = TypeVar("Record")
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_PLAIN = (str, int, float, bool)
_IN_LINES = frozenset({"detail", "message", "traceback"})
"""Stored names of texts of several lines; names and reasons have one."""
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
            f"the record at {key!r} is malformed ({fault}); "
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
        document = json.loads(text)
        if "\\ud" in text.lower():  # a lone surrogate can be read, but not written again
            _ENCODER.encode(document).encode()
        if "\\" in text or not (text.isascii() and text.isprintable()):
            document = printable_values(document)
        read: Callable[[Any], Any] = _reader(kind)  # type: ignore[arg-type]
        return typing.cast(Record, read(document))
    except MalformedRecord:
        raise
    except _UNREADABLE as error:
        raise MalformedRecord(key, f"{type(error).__name__}: {error}") from error


def printable_values(value: Any, in_lines: bool = False) -> Any:
    """Return parsed JSON with printable texts; only those of `_IN_LINES` keep newlines."""
    if isinstance(value, str):
        return printable(value) if in_lines else one_line(value)
    if isinstance(value, dict):
        return {
            one_line(name): printable_values(item, name in _IN_LINES)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [printable_values(item, in_lines) for item in value]
    return value


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
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that turns parsed JSON into `kind`, built once per type."""
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple_reader(get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        given: Any = next(arg for arg in get_args(kind) if arg is not type(None))
        inner: Callable[[Any], Any] = _reader(given)
        return lambda item: None if item is None else inner(item)
    if hasattr(kind, "__dataclass_fields__"):
        return _dataclass_reader(kind)
    if _is_row(kind):
        return _row_reader(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if kind is float:
        return lambda item: float(_as((int, float), item))
    if kind is bool:
        return lambda item: _as(bool, item)
    return lambda item: _as(kind, item)


def _tuple_reader(kind: Any) -> Callable[[Any], Any]:
    element = _reader(kind)
    plain = {kind} if kind in (str, int) else set()

    def read(items: Any) -> Any:
        items = _as(list, items)
        if plain.issuperset(map(type, items)):  # a round may name a thousand members
            return tuple(items)
        return tuple(element(item) for item in items)

    return read


def _row_reader(kind: Any) -> Callable[[Any], Any]:
    """Return a reader of named tuples: extra fields are ignored, missing ones are defaults."""
    hints = get_type_hints(kind)
    expected = tuple(hints[attribute] for attribute in kind._fields)
    most = len(expected)
    make = tuple.__new__  # skips the named tuple's own, which counts the fields again

    def read(row: Any) -> Any:
        if type(row) is list and tuple(map(type, row)) == expected:
            return make(kind, row)
        row = _as(list, row)[:most]
        given = tuple(map(type, row))
        if given != expected[: len(given)]:
            raise TypeError(f"{row!r:.80} is not a row of {kind.__name__}")
        return kind(*row)

    return read


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    plan = [
        (attribute, name, hints[attribute], _reader(hints[attribute]), default)
        for attribute, name, default in _names(kind)
    ]

    def read(document: Any) -> Any:
        document = _as(dict, document)
        values = {}
        for attribute, name, hint, reader, default in plan:
            if name in document:
                value = document[name]
                # Values of plain types, the majority, need no conversion.
                values[attribute] = value if type(value) is hint else reader(value)
            elif default is MISSING:
                raise KeyError(f"{name} is missing")
        return kind(**values)

    return read


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.40} is not a {getattr(kind, '__name__', kind)}")
    return value
