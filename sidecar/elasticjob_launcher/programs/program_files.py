"""Files of a Python program and the user's modules that it imports, parsed within bounds."""

from __future__ import annotations

import ast
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from elasticjob_launcher.command_line.launchers import (
    launcher_of_function,
    launcher_of_module,
    trains_by_function,
)
from elasticjob_launcher.programs.program_names import Source
from elasticjob_launcher.programs.started_commands import reference
from elasticjob_launcher.zygote.analysis.environment_uses import nodes
from elasticjob_launcher.zygote.search_path import added_folders, is_python_module

MAX_FILES = 50
MAX_SOURCE_BYTES = 1024 * 1024
MAX_TOTAL_BYTES = 1024 * 1024
MAX_STEPS = 100_000
MAX_SECONDS = 20.0
"""Maximum processor time of the analysis, which its other bounds keep far below."""
_OF_STARTERS = frozenset(
    {"yaml", "click", "typer", "fire", "hydra", "omegaconf", "absl", "tqdm", "rich", "dotenv"}
    | {"loguru", "requests", "toml", "tomli", "wandb", "mlflow", "huggingface_hub", "boto3", "sh"}
    | {"pexpect", "psutil", "pydantic", "jsonargparse", "colorama", "termcolor", "tabulate"}
)
"""Packages besides Python's own that a program without a training of its own may import."""
_RANKS = re.compile(r"((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|TORCHELASTIC_\w+)")
_LOADING = frozenset({"import_module", "__import__", "run_path", "exec_module", "exec"})
"""Functions that run code that cannot be found by its imports."""
_INSTALLED = re.compile(r"(^|/)(site|dist)-packages(/|$)")


class AnalysisTooLong(Exception):
    """Analysis that exceeds a bound which is the same on every machine."""


class AnalysisTooSlow(Exception):
    """Analysis that exceeds its processor time, so that another machine may come to a result."""


class AnalysisBudget:
    """Bound of the steps, of the source and of the processor time of one analysis."""

    def __init__(self) -> None:
        self._steps = 0
        self._bytes = 0
        self._end = time.process_time() + MAX_SECONDS

    def spend(self) -> None:
        """Count a step. Raises AnalysisTooLong and AnalysisTooSlow."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise AnalysisTooLong
        if not self._steps % 256:
            self._check_time()

    def read(self, size: int) -> None:
        """Count the bytes of a file. Raises AnalysisTooLong and AnalysisTooSlow."""
        self._bytes += size
        if self._bytes > MAX_TOTAL_BYTES:
            raise AnalysisTooLong
        self._check_time()

    def _check_time(self) -> None:
        if time.process_time() > self._end:
            raise AnalysisTooSlow


class ProgramFiles:
    """Parsed files of one program, by path.

    Args:
        search: folders with the user's own modules, in order; those of packages do not count.
    """

    def __init__(self, search: Sequence[str], budget: AnalysisBudget) -> None:
        self.sources: dict[str, Source | None] = {}
        self.budget = budget
        self._search = [one for one in search if not _INSTALLED.search(one)]

    def load_main(self, target: str, is_module: bool) -> Source | None:
        """Return the file that Python runs for a script, folder or module; None if unknown."""
        if is_module:
            path, package = self.find(f"{target}.__main__") or self.find(target) or ("", "")
        else:
            path, package = target, ""
            if os.path.isdir(target):  # noqa: PTH112
                path = os.path.join(target, "__main__.py")  # noqa: PTH118
            self._search.insert(0, os.path.dirname(path) or ".")  # noqa: PTH120
        return self.load(path, package, True) if path else None

    def find(self, name: str) -> tuple[str, str] | None:
        """Return file and package of a module of the user's; None for others."""
        relative = name.replace(".", os.sep)
        for folder in self._search:
            base = os.path.join(folder or ".", relative)  # noqa: PTH118
            for path, package in (
                (os.path.join(base, "__init__.py"), name),  # noqa: PTH118
                (f"{base}.py", name.rpartition(".")[0]),
            ):
                if os.path.isfile(path):  # noqa: PTH113
                    return path, package
        return None

    def load(self, path: str, package: str, is_main: bool = False) -> Source | None:
        if path in self.sources:
            return self.sources[path]
        if len(self.sources) >= MAX_FILES:
            return None
        self.sources[path] = None
        try:
            if not os.path.isfile(path):  # noqa: PTH113
                return None  # such as a pipe, whose content is the program's
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read(MAX_SOURCE_BYTES + 1)
            self.budget.read(len(content))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(content, path) if len(content) <= MAX_SOURCE_BYTES else None
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None  # the program itself reports it
        if tree is None:
            return None
        source = self.sources[path] = Source(path, package, tree, is_main, self.budget.spend)
        added = added_folders(tree, path)
        self._search[:0] = [one for one in added.folders if one not in self._search]
        self._search += [one for one in added.last if one not in self._search]
        return source

    def only_start(self) -> bool:
        """Return True if the program's files import nothing that trains and ask for no rank."""
        todo = [source for source in self.sources.values() if source is not None]
        for source in todo:
            stored: set[Any] = set()
            for node in nodes(source.tree):
                self.budget.spend()
                if isinstance(node, ast.Dict):
                    stored.update(node.keys)
                elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    stored.update(nodes(node.slice))
                elif isinstance(node, ast.Constant) and node not in stored:
                    if isinstance(node.value, str) and _RANKS.fullmatch(node.value):
                        return False
                elif "elastic" in reference(node) or reference(node) in _LOADING:
                    return False
                if not all(self._is_known(*names, todo) for names in imported_names(node, source)):
                    return False
        return True

    def _is_known(self, name: str, parts: Sequence[str], todo: list[Source]) -> bool:
        """Return True if an imported module is the user's, which is added to `todo`, or one that
        trains nothing."""
        if self._is_of_starters(name):
            return True
        if parts and all(map(self._starts, parts)):
            return True
        places = [place for place in map(self.find, (name, *parts)) if place is not None]
        for place in places:
            loaded = self.load(*place)
            if loaded is None:
                return False
            if loaded not in todo:
                todo.append(loaded)
        return bool(places)

    def _starts(self, name: str) -> bool:
        """Return True if an imported member is a launcher's module or function."""
        known = launcher_of_module(name, ()) or launcher_of_function(name)
        is_known = known is not None and not trains_by_function(known)
        return is_known and self.find(name.partition(".")[0]) is None

    def _is_of_starters(self, name: str) -> bool:
        top = name.partition(".")[0]
        known = (
            is_python_module(top) or top in _OF_STARTERS or launcher_of_module(name, ()) is not None
        )
        return known and self.find(top) is None


def imported_names(node: Any, source: Source) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules that a node imports, with the full names of their imported members."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom) and (base := source.absolute(node)):
        yield base, [f"{base}.{alias.name}" for alias in node.names]
