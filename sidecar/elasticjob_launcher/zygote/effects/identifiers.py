"""Detection of values drawn by an import that must differ in each worker, and of exit functions.

Covers random numbers, seeds, identifiers, and a process number or time that a module keeps.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import re
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import getpid
from typing import Any

from elasticjob_launcher.zygote.effects.kept_values import DrawnValues, Literals, module_values
from elasticjob_launcher.zygote.effects.watched_functions import WatchedFunctions
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
_DRAWS = "draws a random seed or identifier (uuid) when it is imported"
MOST_DRAWN = 1000
MOST_TIMES = 10_000
_ZYGOTE = (__package__, str(__package__).rpartition(".")[0])
"""Packages whose frames belong to the zygote: this one and that of the guarded imports."""
_TELLING_BYTES = 4
_NUMBERS = (
    *((os, name) for name in ("getpid", "getpgrp", "getpgid", "getsid")),
    (threading, "get_native_id"),
)
_CLOCKS = {
    **dict.fromkeys(
        ("process_time", "process_time_ns", "thread_time", "thread_time_ns"), "its processor time"
    ),
    **dict.fromkeys(
        ("monotonic_ns", "perf_counter_ns", "clock_gettime", "clock_gettime_ns"),
        "the time of its import",
    ),
}
"""Functions of `time` whose results are recorded, with their meaning: small numbers, or integers
as they are also calculated."""


class Identifiers:
    """Observer of successive imports, each from `begin` to `found`, between `start` and `stop`."""

    def __init__(self, exit_functions: bool = True) -> None:
        self._exit_functions = exit_functions
        self._watched = WatchedFunctions()
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
        self._times: dict[float, str] = {}

    def start(self) -> None:
        for name in GENERATORS:
            self.loaded(name)
        self._last_state = _generator("random")
        report = self._watched.report
        for holder, name in (
            (os, "urandom"), (os, "getrandom"), (random, "_urandom"), (uuid, "uuid1"),
        ):  # fmt: skip
            report(holder, name, self._draws, self._keep)
        for holder, name in _NUMBERS:
            report(holder, name, self.numbered)
        for name, meaning in _CLOCKS.items():
            report(time, name, keep=functools.partial(self._keep_time, meaning))
        if self._exit_functions:
            report(atexit, "register", self._registers)
        self._watched.put(os, "register_at_fork", self._deferring(os.register_at_fork))
        seed, fresh = random.Random.seed, self._fresh

        def seed_and_record(self: Any, a: Any = None, *args: Any, **options: Any) -> None:
            seed(self, a, *args, **options)
            if a is None:
                fresh.append((self, self.getstate(), calling_module("tempfile")))

        self._watched.put(random.Random, "seed", seed_and_record)

    def stop(self) -> None:
        self._watched.restore()
        self._times.clear()

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
        made the worker has not. Call only functions that reseed a generator, such as the one of
        uuid_utils: others may mark the process as a child that must not use the package.
        """
        for options in self._at_fork:
            os.register_at_fork(**options)
            if _only_reseeds(options):
                with suppress(Exception):  # after a fork Python ignores its errors as well
                    options["after_in_child"]()
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
            if is_known or not (self._watched and options and all(map(callable, options.values()))):
                register(**options)
            else:
                self._at_fork.append(options)

        return register_at_fork

    def _keep(self, drawn: Any) -> None:
        """Record the digits with which a name made of these bytes, or of this UUID, begins."""
        data = drawn if isinstance(drawn, bytes) else getattr(drawn, "bytes", b"")
        if len(data) >= _TELLING_BYTES:
            self._drawn.append(data[:_TELLING_BYTES].hex())

    def _keep_time(self, meaning: str, read: float) -> None:
        if len(self._times) < MOST_TIMES:
            self._times[read] = meaning

    def _draws(self, *args: Any, **options: Any) -> None:
        self._note(_DRAWS, unless="tempfile")

    def _registers(self, *args: Any, **options: Any) -> None:
        self._note("registers a function for the end of the program (atexit)", unless="weakref")

    def numbered(self, *args: Any, **options: Any) -> None:
        """Record that a package may have read the process number."""
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
        drawn = DrawnValues(self._began, getpid() if self._numbered else 0, self._times)
        literals = Literals(new)
        found = []
        for name in new:
            for value in module_values(sys.modules[name], name):
                what = drawn.is_one(value)
                if what and (drawn.is_process(value) or not literals.include(value, name)):
                    found.append((f"keeps {what} (module {name})", name))
                    break
        return found


def _only_reseeds(options: Mapping[str, Any]) -> bool:
    """Return True for one function that a fork runs in the child, with `seed` in its name."""
    name = getattr(options.get("after_in_child"), "__name__", "")
    return len(options) == 1 and "seed" in str(name).lower()


def calling_module(unless: str = "", beyond: str = "") -> str:
    """Return the module that makes a call; empty for Python and trusted packages.

    With `beyond`, a package whose function it is, the module that calls that package; empty while
    the package itself is imported.
    """
    frame: Any = sys._getframe()
    while frame is not None and is_of_zygote(frame):
        frame = frame.f_back
    while frame is not None and not is_of_zygote(frame):
        name = str(frame.f_globals.get("__name__", ""))
        passed_over = bool(beyond) and name.partition(".")[0] == beyond
        if not (passed_over or is_python_module(name)):
            return "" if name.partition(".")[0] in TRUSTED or name in REDRAWN else name
        if name == unless or frame.f_code.co_name == "<module>":
            return ""
        frame = frame.f_back
    return ""


def is_of_zygote(frame: Any) -> bool:
    return frame.f_globals.get("__package__") in _ZYGOTE


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
