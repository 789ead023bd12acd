"""Reader of pickles of plain values, nodes and times, without executing any code.

Python's own unpickler calls the functions that a pickle names, and even with all names forbidden
a corrupt or hostile pickle can exhaust memory or never end. This reader interprets the opcodes
itself, accepts only known types, and needs time and memory proportional to the pickle's size.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

_MARK = object()
_CONSTANTS: Mapping[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
}
_ARGUMENTS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
    }
)
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_SET": set,
    "EMPTY_TUPLE": tuple,
}
_TUPLES: Mapping[str, int] = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARKED = frozenset({"SETITEMS", "APPENDS", "ADDITEMS", "FROZENSET", "TUPLE"})
_TIMES: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("datetime", "datetime"): datetime,
    ("datetime", "timedelta"): timedelta,
    ("datetime", "timezone"): timezone,
}
_SHAREABLE = (str, bytes, int, float, datetime, timedelta, timezone)


@dataclass(frozen=True, slots=True)
class Name:
    """Class that a pickle refers to."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Draft:
    """Object of a named class, with its attributes; `made` is the resulting value."""

    name: Name
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    made: Any = None


Make = Callable[[Draft], Any]


def load(data: bytes, make: Mapping[Name, Make]) -> Any:
    """Return the value of the pickle; `make` converts objects of its classes.

    Raises:
        ValueError, TypeError, LookupError: the pickle contains other types, or is corrupt.
    """
    reader = _Reader(make)
    for opcode, argument, _ in pickletools.genops(data):
        reader.step(opcode.name, argument)
    return reader.result()


class _Reader:
    def __init__(self, make: Mapping[Name, Make]) -> None:
        self._make = make
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise ValueError(f"{len(self._stack)} values instead of one")
        return self._finished(self._stack[0])

    def step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _ARGUMENTS:
            stack.append(argument)
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode == "MARK":
            stack.append(_MARK)
        elif opcode == "MEMOIZE":
            self._memo.append(stack[-1])
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._shared(argument))
        elif opcode in _TUPLES:
            stack.append(tuple(self._take(_TUPLES[opcode])))
        elif opcode == "STACK_GLOBAL":
            stack.append(self._named(*self._take(2)))
        elif opcode in ("REDUCE", "NEWOBJ", "BUILD"):
            subject, argument = self._raw(2)  # the subject's attributes may follow later
            self._object(opcode, subject, self._finished(argument))
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            self._container(opcode)

    def _container(self, opcode: str) -> None:
        if opcode == "SETITEM":
            self._set_items(self._take(2))
        elif opcode == "APPEND":
            self._append(self._take(1))
        elif opcode not in _MARKED:
            raise ValueError(f"the opcode {opcode}, which no state contains")
        else:
            items = self._since_mark()
            match opcode:
                case "SETITEMS":
                    self._set_items(items)
                case "APPENDS":
                    self._append(items)
                case "ADDITEMS":
                    self._top(set).update(map(_key, items))
                case "FROZENSET":
                    self._stack.append(frozenset(map(_key, items)))
                case "TUPLE":
                    self._stack.append(tuple(items))

    def _set_items(self, items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        self._top(dict).update(zip(map(_key, keys), values, strict=True))

    def _append(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def _object(self, opcode: str, subject: Any, argument: Any) -> None:
        if opcode == "BUILD":
            if not isinstance(subject, Draft) or subject.made or not isinstance(argument, dict):
                raise TypeError("attributes for a value that takes none")
            subject.attributes = argument
            self._stack.append(subject)
        elif not isinstance(subject, Name) or not isinstance(argument, tuple):
            raise TypeError("a call of a value that is not a class")
        elif (subject.module, subject.name) in _TIMES:
            self._stack.append(_TIMES[subject.module, subject.name](*argument))
        else:
            self._stack.append(Draft(subject, argument))

    def _named(self, module: Any, name: Any) -> Name:
        found = Name(module, name)
        if found not in self._make and (module, name) not in _TIMES:
            raise ValueError(f"reference to {module}.{name}, which no state contains")
        return found

    def _shared(self, place: int) -> Any:
        value = self._memo[place]
        # A shared container could contain itself, or grow exponentially with the pickle.
        if not isinstance(value, (*_SHAREABLE, Name, Draft)):
            raise TypeError(f"second reference to a {type(value).__name__}")
        return value

    def _take(self, count: int) -> list[Any]:
        return [self._finished(value) for value in self._raw(count)]

    def _raw(self, count: int) -> list[Any]:
        taken = self._stack[-count:]
        if len(taken) < count or any(value is _MARK for value in taken):
            raise ValueError("a value is missing")
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(self._finished(value))
        items.reverse()
        return items

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise TypeError(f"items for a {type(top).__name__}")
        return top

    def _finished(self, value: Any) -> Any:
        """Return a value for use; convert a draft to its object."""
        if isinstance(value, Name):
            raise TypeError(f"{value.name} itself as a value")
        if not isinstance(value, Draft):
            return value
        if value.made is None:
            value.made = self._make[value.name](value)
        return value.made


def _key(value: Any) -> Any:
    # The hash of deeply nested containers can take forever.
    if isinstance(value, tuple | frozenset):
        raise TypeError(f"a {type(value).__name__} as a key")
    return value
