"""Values in loaded modules that were taken from the clock or from the process during an import."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

MOST_VALUES = 200_000
_DEEP = 3
_UNITS = (1, 1000, 1_000_000, 1_000_000_000)


class DrawnValues:
    """Recogniser of values taken from the clock during an import, or from the process number.

    `times` are the processor times that were read.
    """

    def __init__(self, began: tuple[float, float], pid: int, times: Collection[float] = ()) -> None:
        self._times = times
        self._wall = (began[0] - 0.001, time.time() + 0.001)
        self._monotonic = (began[1], time.monotonic())
        self._pid = pid
        self._number = re.compile(rf"(?<!\d){pid}(?!\d)") if pid else None
        self._texts = set()
        for second in range(
            int(self._wall[0]), min(int(self._wall[1]), int(self._wall[0]) + 99) + 1
        ):
            self._texts.add(str(second))
            for moment in (time.localtime(second), time.gmtime(second)):
                self._texts.add(time.strftime("%Y%m%d%H%M", moment))
                self._texts.add(time.strftime("%m%d%H%M%S", moment))

    def is_one(self, value: Any) -> str:
        """Return a description of a drawn value; empty for any other value."""
        try:
            return self._is_one(value)
        except (ArithmeticError, ValueError, OSError):  # a number or date out of any clock's range
            return ""

    def is_process(self, value: Any) -> bool:
        """Return True if the value is the process number, or a text that contains it."""
        if self._number is None:
            return False
        if type(value) is str:
            return len(value) <= 400 and bool(self._number.search(value))
        return type(value) is int and value == self._pid

    def _is_one(self, value: Any) -> str:
        if self.is_process(value):
            return "the process number"
        kind = type(value)
        if kind in (float, int) and value in self._times:
            return "its processor time"
        if kind is float:
            low, high = self._monotonic
            known = self._in(value) or (low <= value <= high and value != int(value))
            return "the time of its import" if known else ""
        if kind is int:
            return "the time of its import" if any(self._in(value / u) for u in _UNITS) else ""
        if kind is str and len(value) <= 400:
            digits = re.sub(r"\D", "", value)
            if len(digits) >= 10 and any(text in digits for text in self._texts):
                return "the time of its import"
        elif kind is time.struct_time:
            return "the time of its import" if self._in(time.mktime(value)) else ""
        elif kind.__name__ == "datetime" and kind.__module__ == "datetime":
            moments = (value, value.replace(tzinfo=_utc()))
            known = any(self._in(moment.timestamp()) for moment in moments)
            return "the time of its import" if known else ""
        return ""

    def _in(self, seconds: float) -> bool:
        low, high = self._wall
        return low - 1 <= seconds <= high and (seconds >= low or seconds == int(seconds))


class Literals:
    """Literals in the source of these modules, which may equal the time by chance: on a machine
    that has just started, `time.monotonic` is a small number.

    For the process number there is no exception: it is a small number in every container, so a
    literal may equal one that the module does keep.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._of: dict[str, frozenset[tuple[type, Any]]] = {}

    def include(self, value: Any, module: str) -> bool:
        """Return True if the module, or a module of its package, has the value as a literal."""
        key = (type(value), value)
        if key[0] not in (int, float, str):
            return False
        package = module.partition(".")[0]
        rest = (name for name in self._modules if name.partition(".")[0] == package)
        return any(key in self._literals(name) for name in (module, *rest))

    def _literals(self, module: str) -> frozenset[tuple[type, Any]]:
        if module not in self._of:
            self._of[module] = frozenset(_literals(module))
        return self._of[module]


def _literals(module: str) -> Iterator[tuple[type, Any]]:
    """Yield the numbers and texts in a module's Python code, with their types."""
    loader: Any = getattr(getattr(sys.modules[module], "__spec__", None), "loader", None)
    try:
        todo = [loader.get_code(module)]
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind is CodeType:
            todo += value.co_consts
        elif kind in (tuple, frozenset):
            todo += value
        elif kind in (int, float, str):
            yield kind, value


def _utc() -> Any:
    return sys.modules["datetime"].timezone.utc


def module_values(module: Any, name: str) -> Iterator[Any]:
    """Yield the values that a module holds, including its containers, classes and objects."""
    todo: list[tuple[Any, int]] = [(_names(module), 0)]
    seen: set[int] = set()
    count = 0
    while todo and count < MOST_VALUES:
        holder, deep = todo.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for value in list(holder.values() if isinstance(holder, dict) else holder):
            count += 1
            kind = type(value)
            if kind in (str, int, float):
                yield value
            elif kind in (dict, list, tuple, set):
                if deep < _DEEP and len(value) <= 1000:
                    todo.append((value, deep + 1))
            elif _module_of(kind) in ("datetime", "time"):
                yield value
            elif deep < _DEEP:
                own = (
                    _module_of(value) == name
                    if issubclass(kind, type)
                    else _module_of(kind) == name
                )
                if own:
                    todo.append((_names(value), deep + 1))
                elif not issubclass(kind, (type, ModuleType)):
                    yield from _process_numbers(value)


def _process_numbers(value: Any) -> Iterator[int]:
    """Yield the attributes of another module's object that hold a process number by their name."""
    for name, each in _names(value).items():
        if type(each) is int and "pid" in name:
            yield each


def _names(value: Any) -> dict[str, Any]:
    """Return an object's attributes without running any of its code."""
    look = type.__getattribute__ if issubclass(type(value), type) else object.__getattribute__
    try:
        return dict(look(value, "__dict__"))
    except Exception:
        return {}


def _module_of(kind: Any) -> str:
    """Return the module name of a class."""
    try:
        return str(type.__getattribute__(kind, "__module__"))
    except Exception:
        return ""
