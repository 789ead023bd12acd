"""Changes of the environment and runs of other files that the analysis of a program finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NamedTuple

from elasticjob_launcher.zygote.analysis.own_functions import Functions
from elasticjob_launcher.zygote.search_path import Environ


class EnvironmentChange(NamedTuple):
    """Change of the variable `name`, or of all if empty; `value` None removes it.

    `where` is file and line. `direct` changes do not show in `os.environ`. `doubtful` is one by
    code that may run from there on, or never: a function that is passed on, not called.
    """

    name: str
    value: str | None
    known: bool
    where: str
    direct: bool = False
    doubtful: bool = False


class ProgramRun(NamedTuple):
    """Run of a module or else a file by `runpy`; `main` is True if it runs as `__main__`."""

    module: bool
    target: str
    main: bool
    certain: bool


class ChangeRecorder:
    """Environment and functions of a program as far as it has been followed.

    `on_change` receives the changes in execution order, `on_run` each file or module that `runpy`
    runs.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.environ = Environ(given)
        self.on_change: Callable[[EnvironmentChange], object] = lambda change: None
        self.on_run: Callable[[ProgramRun], object] = lambda run: None
        self.functions = Functions()
        self.count = 0
        self.without_effect: set[ast.AST] = set()
        """Statements and calls that were evaluated as changing no variable."""
        self.doubted: set[str] = set()
        """Variables that have been reported as changed by functions that are passed on."""

    def make(self, change: EnvironmentChange) -> None:
        self.count += not change.doubtful
        if change.doubtful:
            pass  # `Functions.doubtful` has it
        elif change.known:
            if not change.direct:
                self.environ.put(change.name, change.value)
        else:
            self.environ.forget(change.name)
        self.on_change(change)
