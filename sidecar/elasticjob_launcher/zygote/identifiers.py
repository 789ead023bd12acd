"""Detection of values drawn by an import that must differ in each worker, and of exit functions.

Covers random numbers, seeds, identifiers, and a process number or time that a module keeps.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from os import getpid
from types import CodeType, ModuleType
from typing import Any

from elasticjob_launcher.zygote.search_path import is_python_module

# Packages whose identifiers and exit functions stay within the process. Their other effects, such
# as files and processes, do count.
TRUSTED = frozenset(
    {
        "torch", "torchgen", "functorch", "numpy", "sympy", "scipy", "sklearn", "joblib",
        "matplotlib", "PIL", "certifi", "fsspec", "huggingface_hub", "transformers", "accelerate",
        "datasets", "filelock", "multiprocess", "dill", "pyarrow", "pandas", "rich",
    }
)  # fmt: skip
# Identifiers that leave the process, redrawn in each worker as texts of 32 hex digits.
REDRAWN = {"transformers.utils.hub": "SESSION_ID", "diffusers.utils.hub_utils": "SESSION_ID"}
_LIGHTNING_RANK = ("rank_zero_only", ("RANK", "LOCAL_RANK"))
RANKED = {
    "lightning.fabric.utilities.rank_zero": _LIGHTNING_RANK,
    "lightning_fabric.utilities.rank_zero": _LIGHTNING_RANK,
    "torchmetrics.utilities.prints": ("rank_zero_only", ("LOCAL_RANK",)),
}
"""Modules that read their worker's rank while imported: the function that keeps it in `rank`, and
the variables, of which the first one set applies. It is set again in each worker."""
GENERATORS = ("random", "numpy.random", "torch")
MOST_VALUES = 200_000
_DRAWS = "draws a random seed or identifier (uuid) when it is imported"
MOST_DRAWN = 1000
_TELLING_BYTES = 4
_NUMBERS = (
    *((os, name) for name in ("getpid", "getpgrp", "getpgid", "getsid")),
    (threading, "get_native_id"),
)
_PROCESSOR_TIMES = ("process_time", "process_time_ns", "thread_time", "thread_time_ns")
_DEEP = 3
_UNITS = (1, 1000, 1_000_000, 1_000_000_000)


class _ReportingFunction:
    """Wrapper around a built-in function that reports each call and passes its result on."""

    def __init__(
        self,
        function: Any,
        report: Callable[[], None],
        keep: Callable[[Any], object] = lambda result: None,
    ) -> None:
        self.function = function
        self._report = report
        self._keep = keep

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._report()
        result = self.function(*args, **options)
        self._keep(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class Identifiers:
    """Observer of successive imports, each from `begin` to `found`, between `start` and `stop`."""

    def __init__(self, exit_functions: bool = True) -> None:
        self._exit_functions = exit_functions
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._states: dict[str, Any] = {}
        self._modules: set[str] = set()
        self._noted: dict[str, str] = {}
        self._numbered: set[str] = set()
        self._began = (0.0, 0.0)
        self._fresh: list[tuple[Any, Any, str]] = []
        self._unseeded: list[Any] = []
        self._last_state: Any = None
        self._drawn: deque[str] = deque(maxlen=MOST_DRAWN)
        self._at_fork: list[dict[str, Any]] = []
        self._times: set[float] = set()

    def start(self) -> None:
        for name in GENERATORS:
            self.loaded(name)
        self._last_state = _generator("random")
        for holder, name in (
            (os, "urandom"), (os, "getrandom"), (random, "_urandom"), (uuid, "uuid1"),
        ):  # fmt: skip
            function = _ReportingFunction(getattr(holder, name), self._draws, self._keep)
            self._put(holder, name, function)
        for holder, name in _NUMBERS:
            self._put(holder, name, _ReportingFunction(getattr(holder, name), self._numbers))
        for name in _PROCESSOR_TIMES:
            function = _ReportingFunction(getattr(time, name), lambda: None, self._times.add)
            self._put(time, name, function)
        if self._exit_functions:
            self._put(atexit, "register", _ReportingFunction(atexit.register, self._registers))
        self._put(os, "register_at_fork", self._deferring(os.register_at_fork))
        seed, fresh = random.Random.seed, self._fresh

        def seed_and_record(self: Any, a: Any = None, *args: Any, **options: Any) -> None:
            seed(self, a, *args, **options)
            if a is None:
                fresh.append((self, self.getstate(), calling_module("tempfile")))

        self._put(random.Random, "seed", seed_and_record)

    def stop(self) -> None:
        for holder, name, before, _ in self._replaced:
            setattr(holder, name, before)
        functions = {id(put): before for _, _, before, put in self._replaced}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if isinstance(names, dict):
                for name in [n for n, value in list(names.items()) if id(value) in functions]:
                    names[name] = functions[id(names[name])]
        self._replaced = []

    def _put(self, holder: Any, name: str, function: Any) -> None:
        self._replaced.append((holder, name, getattr(holder, name), function))
        setattr(holder, name, function)

    def loaded(self, name: str) -> None:
        """Record the current state of that module's generator as the baseline."""
        state = _generator(name)
        if state is not None:
            self._states[name] = state

    def attribute(self, module: Callable[[], str]) -> None:
        """Attribute draws from Python's own generator since the last call to a module.

        Those of a trusted package, which seeds nothing, do not count: Python seeds this generator
        in each fork.
        """
        state, last = _generator("random"), self._last_state
        if state == last:
            return
        self._last_state = state
        if self._states.get("random") == last and module().partition(".")[0] in TRUSTED:
            self._states["random"] = state

    def begin(self) -> None:
        self._noted = {}
        self._fresh.clear()
        self._numbered = set()
        self._times.clear()
        self._modules = set(sys.modules)
        self._began = (time.time(), time.monotonic())

    def found(self) -> list[tuple[str, str]]:
        """Return the reasons not to share the loaded modules, each with its module if known."""
        found = []
        for name, before in list(self._states.items()):
            self.loaded(name)
            if self._states[name] != before:
                found.append((f"seeds or uses the random numbers of {name}", ""))
        for generator, state, module in self._fresh:
            if module and generator.getstate() != state:
                self._noted.setdefault(module, _DRAWS)
        self._unseeded += [generator for generator, _, _ in self._fresh]
        found += [(reason, module) for module, reason in self._noted.items()]
        return found + self._kept()

    def set_new_values(self) -> None:
        """Set again, in a worker, what imports took from entropy or from the worker's rank.

        Register what packages registered for forks: the worker's own forks run it, the fork that
        made the worker has not.
        """
        for options in self._at_fork:
            os.register_at_fork(**options)
        for generator in self._unseeded:
            generator.seed()
        for name, identifier in REDRAWN.items():
            if hasattr(sys.modules.get(name), identifier):
                setattr(sys.modules[name], identifier, uuid.uuid4().hex)
        for name, (function, variables) in RANKED.items():
            keeper: Any = getattr(sys.modules.get(name), function, None)
            if hasattr(keeper, "rank"):
                ranks = (os.environ[variable] for variable in variables if variable in os.environ)
                keeper.rank = int(next(ranks, 0))

    def names_draw(self, path: str) -> bool:
        """Return True if a file's name has an identifier drawn here."""
        digits = os.path.basename(path).replace("-", "").lower()  # noqa: PTH119
        return any(each in digits for each in self._drawn)

    def names_process(self, path: str, module: str) -> bool:
        """Return True if a file's name has the process number, which the module's package has read.

        In a container that number is small, so a fixed name may have it by chance.
        """
        name = os.path.basename(path)  # noqa: PTH119
        has_number = re.search(rf"(?<![0-9A-Za-z.]){getpid()}(?!\d)", name)
        return bool(has_number) and module.partition(".")[0] in self._numbered

    # --- calls

    def _deferring(self, register: Callable[..., None]) -> Callable[..., None]:
        """Return `os.register_at_fork` for preloading: packages register in the workers.

        Trusted ones, such as torch, recognise then that a fork cannot use their accelerator.
        """

        def register_at_fork(**options: Any) -> None:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            is_known = is_python_module(caller) and not caller.startswith("importlib.")  # C code
            is_known = is_known or caller.partition(".")[0] in TRUSTED
            if is_known or not (
                self._replaced and options and all(map(callable, options.values()))
            ):
                register(**options)
            else:
                self._at_fork.append(options)

        return register_at_fork

    def _keep(self, drawn: Any) -> None:
        """Record the digits with which a name made of these bytes, or of this UUID, begins."""
        data = drawn if isinstance(drawn, bytes) else getattr(drawn, "bytes", b"")
        if len(data) >= _TELLING_BYTES:
            self._drawn.append(data[:_TELLING_BYTES].hex())

    def _draws(self) -> None:
        self._note(_DRAWS, unless="tempfile")

    def _registers(self) -> None:
        self._note("registers a function for the end of the program (atexit)", unless="weakref")

    def _numbers(self) -> None:
        package = calling_module().partition(".")[0]
        if package:
            self._numbered.add(package)

    def _note(self, reason: str, unless: str) -> None:
        module = calling_module(unless)
        if module:
            self._noted.setdefault(module, reason)

    # --- kept values

    def _kept(self) -> list[tuple[str, str]]:
        """Return the newly loaded modules that keep the time or the process number."""
        new = sorted(
            name
            for name in set(sys.modules) - self._modules
            if name.partition(".")[0] not in TRUSTED and not is_python_module(name)
        )
        if not new:
            return []
        drawn = _DrawnValues(self._began, getpid() if self._numbered else 0, self._times)
        literals = _Literals(new)
        found = []
        for name in new:
            for value in _values(sys.modules[name], name):
                what = drawn.is_one(value)
                if what and (drawn.is_process(value) or not literals.include(value, name)):
                    found.append((f"keeps {what} (module {name})", name))
                    break
        return found


class _DrawnValues:
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


class _Literals:
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


def _values(module: Any, name: str) -> Iterator[Any]:
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


def calling_module(unless: str = "") -> str:
    """Return the module that makes a call; empty for Python and trusted packages."""
    frame: Any = sys._getframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None and not _is_ours(frame):
        name = str(frame.f_globals.get("__name__", ""))
        if not is_python_module(name):
            return "" if name.partition(".")[0] in TRUSTED or name in REDRAWN else name
        if name == unless or frame.f_code.co_name == "<module>":
            return ""
        frame = frame.f_back
    return ""


def _is_ours(frame: Any) -> bool:
    return bool(frame.f_globals.get("__package__") == __package__)


def _generator(name: str) -> Any:
    """Return the state of a module's own generator, or None if it has none yet."""
    module: Any = sys.modules.get(name)
    try:
        if name == "random":
            return module.getstate()
        if name == "torch":
            return module.default_generator.get_state().tolist()
        state = module.get_state()
        return (state[1].tobytes(), *state[2:])
    except (AttributeError, TypeError, IndexError):
        return None
