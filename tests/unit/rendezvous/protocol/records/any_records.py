"""Strategies for records: any that a member can write, and any that a stranger can."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from elasticjob_rendezvous.protocol.records.codec import LARGEST, largest
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import Done, Member, Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History

RECORDS = (RendezvousParams, Member, Round, Roster, History, Failure, Done)
_SIZES = ("min_nodes", "max_nodes", "increment", "max_restarts")


def stored_name(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join(part.title() for part in rest)


def any_record(*kinds: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for records with any values in range; text has no lone surrogates."""
    return st.one_of([_record(kind) for kind in kinds or RECORDS])


def _record(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    values = {name: _value(hints[name], name) for name in names}
    if kind is RendezvousParams:
        values |= dict.fromkeys(_SIZES, st.integers(1, LARGEST))
        values |= {name: st.floats(0, 1e9) for name in names if name.endswith("_seconds")}
    return st.builds(kind, **values)


def _value(hint: Any, name: str) -> st.SearchStrategy[Any]:
    origin = get_origin(hint)
    if origin is tuple:
        return st.lists(_value(get_args(hint)[0], name), max_size=3).map(tuple)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_value(arg, name) for arg in get_args(hint)])
    if hint is int:
        # The fields of a row have no stored name.
        most = largest(stored_name(name))
        return st.integers(-most, most)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hasattr(hint, "__dataclass_fields__") or hasattr(hint, "_fields"):
        return _record(hint)
    return st.from_type(hint)


# -- what a stranger can write ------------------------------------------------------

_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "x" * 9000,
            "\U0001f600" * 2500,
            '"\\' * 4500,
            "\u202e" * 3000,
            "job-" + "9" * 5000,
            "line\n" * 2000,
            "a" * 62 + "é",
        ]
    ),
)
_FAR = [2**31, 2**53, 2**63 - 1, 2**63, 10**40, -(10**4000)]
_NUMBERS = st.sampled_from([*range(-2, 8), 1000, LARGEST, -LARGEST] * 4 + _FAR)


def any_document(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for JSON values of a record: mostly of its types, and of any size."""
    hints = get_type_hints(kind)
    if hasattr(kind, "_fields"):
        return st.tuples(*(_document(hints[name]) for name in kind._fields)).map(list)
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    every = {stored_name(name): _document(hints[name]) for name in hints if name in needed}
    some = {stored_name(name): _document(hints[name]) for name in hints if name not in needed}
    return st.fixed_dictionaries(every, optional=some)


def _document(hint: Any) -> st.SearchStrategy[Any]:
    origin = get_origin(hint)
    if origin is tuple:
        kind = get_args(hint)[0]
        item = _document(kind)
        some = st.lists(item, max_size=3)
        return some | item.map(lambda one: [one] * 150) if kind in (str, int) else some
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_document(arg) for arg in get_args(hint)])
    if hasattr(hint, "__dataclass_fields__") or hasattr(hint, "_fields"):
        return any_document(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from([member.value for member in hint])
    if hint is str:
        return _TEXTS
    if hint is int:
        return _NUMBERS
    if hint is float:
        return st.one_of(st.floats(), _NUMBERS)
    return st.none() if hint is type(None) else st.booleans()
