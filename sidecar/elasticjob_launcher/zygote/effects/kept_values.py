"""Values in loaded modules that were taken from the clock or from the process during an import."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

MOST_VALUES = 200_000
UNKNOWN_RANK = "elasticjob: rank of a worker"
"""Value of the ranks in a copy of the whole environment that a package makes during its import."""
_DEEP = 3
_UNKNOWN_RANKS: dict[type, Any] = {str: UNKNOWN_RANK, bytes: UNKNOWN_RANK.encode()}
_FEWEST_DIGITS = 6
_CLOCK = re.compile(r"(?=(\d\d[-_:.h]\d\d[-_:.m]\d\d))")
_DATE = re.compile(r"(?<!\d)\d{4}[-_./]?\d\d[-_./]?\d\d(?!\d)")
_TICK_SECONDS = 0.02
_UNITS = (1, 1000, 1_000_000, 1_000_000_000)


def is_unknown_rank(value: Any) -> bool:
    """Compare values of one type: with -bb Python refuses to compare texts with bytes."""
    kind = type(value)
    return kind in _UNKNOWN_RANKS and bool(value == _UNKNOWN_RANKS[kind])


class DrawnValues:
    """Recogniser of values taken from the clock during an import, or from the process number.

    `times` are the times that were read from clocks without a known range, with their names.
    """

    def __init__(
        self,
        began: tuple[float, float],
        pid: int,
        times: Mapping[float, str] = MappingProxyType({}),
    ) -> None:
        self._times = times
        self._wall = (began[0] - 0.001, time.time() + 0.001)
        self._monotonic = (began[1], time.monotonic())
        self._pid = pid
        self._own_start = _own_start()
        self._in_proc = re.compile(rf"^/proc/{os.getpid()}(?!\d)")
        self._number = re.compile(rf"(?<!\d){pid}(?!\d)") if pid else None
        self._texts = set()
        self._clocks: set[str] = set()
        self._days: set[str] = set()
        for second in range(
            int(self._wall[0]), min(int(self._wall[1]), int(self._wall[0]) + 99) + 1
        ):
            self._texts.add(str(second))
            for moment in (time.localtime(second), time.gmtime(second)):
                self._texts.add(time.strftime("%Y%m%d%H%M", moment))
                self._texts.add(time.strftime("%m%d%H%M%S", moment))
                self._clocks.add(time.strftime("%H%M%S", moment))
                self._days.add(time.strftime("%Y%m%d", moment))

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
        if is_unknown_rank(value):
            return "a copy of the environment"
        if kind is float and self._own_start and abs(value - self._own_start) < _TICK_SECONDS:
            return "the start of the process"
        if kind is str and self._in_proc.match(value):
            return "the process number"
        if kind in (float, int) and value in self._times:
            return self._times[value]
        if kind is float:
            low, high = self._monotonic
            known = self._in(value) or (low <= value <= high and value != int(value))
            return "the time of its import" if known else ""
        if kind is int:
            return "the time of its import" if any(self._in(value / u) for u in _UNITS) else ""
        if kind is str and len(value) <= 400:
            return "the time of its import" if self._is_written(value) else ""
        if kind is time.struct_time:
            return "the time of its import" if self._in(time.mktime(value)) else ""
        if kind.__name__ == "date" and kind.__module__ == "datetime":
            return "the date of its import" if value.strftime("%Y%m%d") in self._days else ""
        if kind.__name__ == "datetime" and kind.__module__ == "datetime":
            moments = (value, value.replace(tzinfo=_utc()))
            known = any(self._in(moment.timestamp()) for moment in moments)
            return "the time of its import" if known else ""
        return ""

    def _is_written(self, text: str) -> bool:
        """Return True if a text has the date, or the time of day in one of the usual forms."""
        digits = re.sub(r"\D", "", text)
        if len(digits) < _FEWEST_DIGITS:
            return False
        if len(digits) >= 10 and any(each in digits for each in self._texts):
            return True
        for pattern, known in ((_CLOCK, self._clocks), (_DATE, self._days)):
            if any(re.sub(r"\D", "", each) in known for each in pattern.findall(text)):
                return True
        return False

    def _in(self, seconds: float) -> bool:
        low, high = self._wall
        return low - 1 <= seconds <= high and (seconds >= low or seconds == int(seconds))


def _own_start() -> float:
    """Return the time at which the kernel has started this process; 0.0 if it cannot be read."""
    try:
        with open("/proc/self/stat", "rb") as stat, open("/proc/stat", "rb") as system:  # noqa: PTH123
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
            booted = next(int(line.split()[1]) for line in system if line.startswith(b"btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0.0
    return booted + ticks / os.sysconf("SC_CLK_TCK")


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
            if kind in (str, int, float, bytes):
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
