"""Functions of modules that are replaced, while imports are observed, by ones that report calls."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MethodType
from typing import Any


class ReportingFunction:
    """Wrapper around a function that reports each call and passes its result on.

    `report` is called with the arguments, `keep` with the result. Packages may keep the wrapper, as
    in a default argument: `end` ends its reports, and `begin` begins them again. A copy of it is
    the function.
    """

    def __init__(
        self,
        function: Any,
        report: Callable[..., object],
        keep: Callable[[Any], object] = lambda result: None,
    ) -> None:
        self.function = function
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", None)  # type: ignore[assignment]
        self.begin(report, keep)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.ended:
            return self.function(*args, **options)
        with suppress(Exception):  # as for wrong arguments: the function itself raises the error
            self._report(*args, **options)
        result = self.function(*args, **options)
        with suppress(Exception):
            self._keep(result)
        return result

    def begin(self, report: Callable[..., object], keep: Callable[[Any], object]) -> None:
        self._report, self._keep = report, keep
        self.ended = False

    def end(self) -> None:
        self.ended = True

    def __get__(self, holder: Any, kind: Any = None) -> Any:
        """Bind to an object as the function does: one in Python does, one in C does not."""
        is_bound = holder is not None and hasattr(type(self.function), "__get__")
        return MethodType(self, holder) if is_bound else self

    def __eq__(self, other: object) -> bool:
        """Return True for the function too: packages keep tables of functions, as torch does."""
        return self is other or other is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # of an object that is being made
            raise AttributeError(name)
        return getattr(self.function, name)

    def __copy__(self) -> Any:
        return self.function

    def __deepcopy__(self, memo: Any) -> Any:
        return self.function

    def __reduce__(self) -> Any:
        name = getattr(self.function, "__name__", "")
        if names_of(sys.modules.get(self.__module__)).get(name) is self:
            return name
        return copy.copy, (self.function,)


class WatchedFunctions:
    """Replaced attributes of modules and classes, from `put` to `restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._wrappers: dict[tuple[int, str], tuple[Any, ReportingFunction]] = {}

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def put(self, holder: Any, name: str, function: Any) -> None:
        """Replace an attribute until `restore`."""
        self._replaced.append((holder, name, getattr(holder, name), function))
        setattr(holder, name, function)

    def report(
        self,
        holder: Any,
        name: str,
        report: Callable[..., object] = lambda *args, **options: None,
        keep: Callable[[Any], object] = lambda result: None,
    ) -> None:
        """Report the calls of a function, if the holder has it and no call of it is reported.

        Calls of an earlier wrapper that a package has kept are reported as well.
        """
        function = names_of(holder).get(name)
        if isinstance(function, ReportingFunction):
            if not function.ended:
                return
            function = function.function  # put back by a package
        if function is None:
            return
        _, wrapper = self._wrappers.get((id(holder), name), (None, None))
        if wrapper is None or wrapper.function is not function:
            wrapper = ReportingFunction(function, report, keep)
            self._wrappers[id(holder), name] = (holder, wrapper)
        wrapper.begin(report, keep)
        self._replaced.append((holder, name, function, wrapper))
        setattr(holder, name, wrapper)

    def restore(self) -> None:
        """Put the functions back, also where modules have imported the new ones.

        A function by which a package has replaced the new one remains.
        """
        for holder, name, before, put in reversed(self._replaced):
            if names_of(holder).get(name) is put:
                setattr(holder, name, before)
            if isinstance(put, ReportingFunction):
                put.end()
        functions = {id(put): before for _, _, before, put in self._replaced}
        for module in list(sys.modules.values()):
            names = names_of(module)
            if isinstance(names, dict):
                for name in [n for n, value in list(names.items()) if id(value) in functions]:
                    names[name] = functions[id(names[name])]
        self._replaced = []


def names_of(holder: Any) -> Mapping[str, Any]:
    """Return the attributes of a module or class itself; a lazy module is not loaded by this."""
    try:
        names = object.__getattribute__(holder, "__dict__")
    except Exception:  # no such attribute, or one that is calculated
        return {}
    return names if isinstance(names, Mapping) else {}
