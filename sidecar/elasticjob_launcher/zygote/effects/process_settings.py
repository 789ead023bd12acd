"""Process-wide settings of Python and of common libraries that an import may change.

A module that changes one is left to the workers: the program may change the same setting before
it imports the module, and may not import the module at all.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from types import FunctionType, MethodType
from typing import Any

from elasticjob_launcher.zygote.child_init import loaded_openblas
from elasticjob_launcher.zygote.effects.identifiers import TRUSTED
from elasticjob_launcher.zygote.effects.setting_readers import LARGE_SETTINGS, SETTINGS, Setting
from elasticjob_launcher.zygote.effects.watched_functions import names_of
from elasticjob_launcher.zygote.search_path import is_python_module

_MODULES = frozenset(setting.of for setting in SETTINGS)
_LARGE_MODULES = frozenset(setting.of for setting in LARGE_SETTINGS)
_BY_NAME = {setting.name: setting for setting in (*SETTINGS, *LARGE_SETTINGS)}
_BINDING = tuple(setting for setting in SETTINGS if setting.binds)
_ACCEPTED = frozenset(
    {
        "lightning.fabric.utilities.warnings", "lightning_fabric.utilities.warnings",
        "lightning.fabric.wrappers", "lightning_fabric.wrappers",
    }
)  # fmt: skip
"""Modules of a framework that change only the format of warnings, and that record the arguments of
`torch.compile`."""
_NEUTRAL = frozenset({"torch", "torchgen", "functorch", "numpy", "sympy", "mpmath"})
"""Packages, beside Python's, that are not expected to change a setting when they are imported."""
_LIBRARIES = frozenset(
    {
        "torch", "torch.nn.functional", "torch.nn.init", "torch.nn.modules.module",
        "torch.nn.modules.linear", "torch.optim.optimizer", "torch.utils.data.dataloader",
        "torch.utils.checkpoint", "torch.serialization", "torch.distributed", "torch.cuda",
        "torch.distributed.distributed_c10d", "torch.hub", "numpy", "pandas", "cv2", "joblib",
        "PIL.Image", "PIL.ImageFile", "tqdm", "tqdm.std", "tqdm.auto", "yaml", "datasets",
        "requests", "requests.api", "requests.sessions", "urllib3", "urllib3.connectionpool",
        "matplotlib.pyplot", "transformers.trainer", "transformers.modeling_utils",
        "accelerate.accelerator", "lightning.pytorch.trainer.trainer",
    }
)  # fmt: skip
"""Modules of libraries whose functions and methods packages replace, beside all of Python's. For
the hooks of `sys` and `warnings` there are settings."""
_SET_BY_OTHERS = _LIBRARIES | {"http.client", "logging", "shutil", "socket", "subprocess"}
"""Modules whose public values, and those of their classes, packages set."""
_VALUES = (bool, int, float, str, type(None))
_PRIVATE = frozenset({"typing", "multiprocessing", "importlib", "ctypes", "abc", "inspect"})
"""Packages of Python whose private functions others replace by better ones of the same effect, as
typing_extensions and joblib do."""
_OWN_VALUES = frozenset({"tempdir", "monitor"})
"""Public values that the functions of their module set."""
_HEAP_TYPE = 1 << 9
"""Flag of a class whose attributes can be set."""
_PAUSED = (1 << 31) - 1
"""First threshold of garbage collection, which no import reaches."""


def pause_collection() -> Callable[[], None]:
    """Pause garbage collection, unseen by `gc.isenabled`; return a function that resumes it.

    A package may disable collection itself, or change its thresholds.
    """
    before = gc.get_threshold()
    gc.set_threshold(_PAUSED, *before[1:])

    def resume() -> None:
        if gc.get_threshold()[0] == _PAUSED:
            gc.set_threshold(*before)

    return resume


class Settings:
    """Observer of successive imports, each from `begin` to `found`.

    `unbound` are the OpenBLAS libraries that were loaded before another library bound this thread
    to some of its processors.
    """

    def __init__(self) -> None:
        self.unbound: set[str] = set()
        self._before: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._changers: dict[str, list[str]] = {}
        self._large: dict[str, Any] = {}
        self._are_neutral: list[bool] = []

    def begin(self) -> None:
        self._are_neutral.clear()
        self._large = _read(LARGE_SETTINGS)
        self._last = _read()
        self._before = dict(self._last)
        self._changers = {}

    def module_begins(self, name: str, importer: Callable[[], str]) -> None:
        """Attribute the settings changed so far to the module that imports this one.

        Between modules of neutral packages only the processors are read: another change is
        attributed to the first of these modules. Most modules are theirs, and to read all settings
        around each takes a fifth of the processor time of its import.
        """
        is_neutral = name.partition(".")[0] in _NEUTRAL or is_python_module(name)
        self._attribute(importer, self._settings_at(name, is_neutral))
        self._are_neutral.append(is_neutral)

    def module_failed(self) -> None:
        """Remove the module that began last: its code has raised an error."""
        if self._are_neutral:
            self._are_neutral.pop()

    def _settings_at(self, name: str, is_neutral: bool) -> Sequence[Setting]:
        """Return the settings to read before or after the code of a module."""
        is_within = is_neutral and bool(self._are_neutral) and self._are_neutral[-1]
        return _BINDING if is_within and name not in _MODULES else SETTINGS

    def _attribute(self, module: Callable[[], str], settings: Sequence[Setting]) -> dict[str, Any]:
        """Attribute the settings changed since the last call to a module; return those settings."""
        now = _read(settings)
        before = self._last
        if settings is not SETTINGS:
            before = {key: before[key] for key in now if key in before}
        for key in _changed(before, now):
            if _BY_NAME[key].binds:
                self.unbound.update(loaded_openblas())
            if key in now and now[key] == self._before.get(key, self):
                self._changers.pop(key, None)  # restored
            else:
                self._changers.setdefault(key, []).append(module())
        self._last = now if settings is SETTINGS else {**self._last, **now}
        return now

    def module_loaded(self, name: str) -> None:
        """Attribute changed settings to this module; modules below it came first."""
        is_neutral = self._are_neutral.pop() if self._are_neutral else False
        now = self._attribute(lambda: name, self._settings_at(name, is_neutral))
        if name in _MODULES:  # its own import determines the initial values
            own = {setting.name for setting in SETTINGS if setting.of == name}
            self._before.update((key, now[key]) for key in own if key in now)
        if name in _LARGE_MODULES:
            self._large.update(_read(each for each in LARGE_SETTINGS if each.of == name))

    def found(self, packages: Collection[str] = ()) -> list[tuple[str, str]]:
        """Return the settings that the import has changed, each with a module that did it.

        `packages` are those of which it has loaded modules.
        """
        large = _read(LARGE_SETTINGS) if not TRUSTED.issuperset(packages) else {}
        return [
            (f"changes {name} when it is imported", "")
            for name in _changed(_without(self._large, packages), _without(large, packages))
            if name in large
        ] + [
            (f"changes {name} when it is imported", module)
            for name in _changed(self._before, _read())
            for module in self._changers.get(name) or ("",)
            if not _is_accepted(_BY_NAME[name], module)
        ]


def _is_accepted(setting: Setting, module: str) -> bool:
    """Return True if the workers may inherit the setting that the module has changed.

    With OMP_PROC_BIND or GOMP_CPU_AFFINITY, libgomp binds the thread that loads it to the first of
    its places, in a cold worker as in this process.
    """
    binds = setting.binds and module.partition(".")[0] in TRUSTED
    return binds or module in _ACCEPTED


class Replacements:
    """Observer of the functions and methods of Python's modules over successive imports."""

    def __init__(self) -> None:
        self._holders: dict[str, list[tuple[str, Any, dict[str, Any]]]] = {}

    def start(self) -> None:
        self._holders = {}
        for name in list(sys.modules):
            self.loaded(name)

    def loaded(self, name: str) -> None:
        """Record the functions of that module, which its own import determines."""
        if name not in sys.modules or name in ("sys", "warnings", "__main__"):
            return
        if not (name in _LIBRARIES or is_python_module(name)):
            return
        if name.partition(".")[0] == "distutils":  # setuptools', which replaces its classes
            return
        module: Any = sys.modules[name]
        names = dict(names_of(module))
        self._holders[name] = [(name, module, names)]
        for key, kind in names.items():
            if issubclass(type(kind), type) and kind.__flags__ & _HEAP_TYPE:
                own = names_of(kind)
                of = str(own.get("__module__"))
                if of == name or of.startswith(f"{name}._"):  # as in Python 3.13
                    self._holders[name].append((f"{name}.{key}", kind, dict(own)))

    def found(self, packages: Collection[str] = ()) -> list[tuple[str, str]]:
        """Return the replaced functions, each with the module that has the new one, and values.

        Replacements by trusted packages do not count; `packages` are those of which modules have
        been loaded.
        """
        found = []
        for name, holders in list(self._holders.items()):
            changed = [_replaced(*each) for each in holders]
            if any(changed):
                self.loaded(name)
            for key, function in (each for replaced in changed for each in replaced):
                if type(function) in _VALUES:
                    if not TRUSTED.issuperset(packages):
                        found.append((f"sets {key} when it is imported", ""))
                    continue
                maker = _maker(function)
                if maker.partition(".")[0] not in TRUSTED and maker not in _ACCEPTED:
                    maker = "" if is_python_module(maker) else maker
                    found.append((f"replaces {key} when it is imported", maker))
        return found


def _replaced(place: str, holder: Any, before: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the new functions in place of those that the module or class had or inherited."""
    now = names_of(holder)
    same = all(map(is_, now.values(), before.values()))  # in the same order
    if same and (len(now) == len(before) or not issubclass(type(holder), type)):
        return []
    inherited = _inherited(holder) if len(now) > len(before) else {}
    return [
        (f"{place}.{name}", now[name])
        for name in list(now)
        if name not in before and name in inherited and callable(now[name])
    ] + [
        (f"{place}.{name}", now[name])
        for name, value in before.items()
        if name in now
        and now[name] is not value
        and _is_replaced(f"{place}.{name}", value, now[name])
    ]


def _inherited(holder: Any) -> dict[str, Any]:
    """Return the methods that a class inherits; nothing for a module."""
    bases = type.mro(holder)[1:-1] if issubclass(type(holder), type) else []
    found = {}
    for base in bases:
        found.update({name: each for name, each in names_of(base).items() if callable(each)})
    return found


def _is_replaced(name: str, before: Any, now: Any) -> bool:
    """Return True for a function, and for a public value that its module does not set itself."""
    place, _, key = name.rpartition(".")
    if type(before) not in _VALUES:
        private = key.startswith("_") and not key.endswith("__")
        seldom = private and place.partition(".")[0] in _PRIVATE
        return callable(before) and not seldom
    of = place if place in _SET_BY_OTHERS else place.rpartition(".")[0]
    if of not in _SET_BY_OTHERS or key.startswith("_") or key in _OWN_VALUES:
        return False
    return type(now) in _VALUES and bool(now != before)


def _maker(function: Any) -> str:
    """Return the name of the module whose code the function or class is; empty if unknown."""
    kind = type(function)
    if kind in (MethodType, staticmethod, classmethod):
        return _maker(function.__func__)
    if kind is FunctionType:
        return str(function.__globals__.get("__name__", ""))
    return str(function.__module__) if issubclass(kind, type) else ""


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, and those that can no longer be read."""
    return [
        name
        for name, value in before.items()
        if name not in now or _BY_NAME[name].changed(value, now[name])
    ]


def _without(settings: Mapping[str, Any], packages: Collection[str]) -> dict[str, Any]:
    """Return settings without the entries, such as loggers, that these packages have in them."""
    return {
        name: {key: each for key, each in value.items() if key.partition(".")[0] not in packages}
        if isinstance(value, dict)
        else value
        for name, value in settings.items()
    }


def _read(settings: Iterable[Setting] = SETTINGS) -> dict[str, Any]:
    """Return the settings of the loaded modules by name; a module may be half-loaded."""
    found = {}
    for setting in settings:
        module = sys.modules.get(setting.of)
        if module is not None:
            try:
                found[setting.name] = setting.read(module)
            except Exception:
                continue
    return found
