"""Functions of modules that are replaced, while imports are observed, by ones that report calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class ReportingFunction:
    """Wrapper around a function that reports each call and passes its result on.

    `report` is called with the arguments, `keep` with the result. Packages may keep the wrapper, as
    in a default argument: `end` ends its reports.
    """

    def __init__(
        self,
        function: Any,
        report: Callable[..., object],
        keep: Callable[[Any], object] = lambda result: None,
    ) -> None:
        self.function = function
        self._report = report
        self._keep = keep
        self._ended = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._ended:
            return self.function(*args, **options)
        self._report(*args, **options)
        result = self.function(*args, **options)
        self._keep(result)
        return result

    def end(self) -> None:
        self._ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class WatchedFunctions:
    """Replaced attributes of modules and classes, from `put` to `restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

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
        """Report the calls of a function, if the holder has it and no call of it is reported."""
        function = getattr(holder, name, None)
        if function is not None and not isinstance(function, ReportingFunction):
            self.put(holder, name, ReportingFunction(function, report, keep))

    def restore(self) -> None:
        """Put the functions back, also where modules have imported the new ones."""
        for holder, name, before, put in reversed(self._replaced):
            setattr(holder, name, before)
            if isinstance(put, ReportingFunction):
                put.end()
        functions = {id(put): before for _, _, before, put in self._replaced}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if isinstance(names, dict):
                for name in [n for n, value in list(names.items()) if id(value) in functions]:
                    names[name] = functions[id(names[name])]
        self._replaced = []
