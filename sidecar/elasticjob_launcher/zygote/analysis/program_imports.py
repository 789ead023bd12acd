"""Static analysis of a program's imports; the program is not run.

Runs in the zygote, so that the Python that will run the sources also parses them.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from elasticjob_launcher.zygote.analysis.changes import EnvironmentChange, ProgramRun
from elasticjob_launcher.zygote.analysis.environment_changes import ChangeAnalyser
from elasticjob_launcher.zygote.analysis.file_facts import FileFacts
from elasticjob_launcher.zygote.search_path import added_folders, is_python_module

MAX_FILES = 2000
MAX_SOURCE_BYTES = 1024 * 1024
MAX_PROGRAM_BYTES = 8 * MAX_SOURCE_BYTES
"""Size of all files of a program, whose trees take about thirty times as much memory."""
MAX_PROCESSOR_SECONDS = 20.0
"""Processor time after which a program is not read any further: its workers start cold."""
_TOO_MANY = "your program has more than {} files of its own, too many to read"
_TOO_LONG = "reading your program's {} files takes longer than {:g} s of processor time"
_TOO_LARGE = "{} is larger than {} bytes, too large to read"
_TOO_LARGE_IN_ALL = "your program's own files are larger than {} bytes in all, too large to read"
_LAZY = "torch._dynamo"
"""Module that torch loads on demand when an optimizer is created: 2 to 6 s if cold."""
_OPTIMIZING = frozenset({"DistributedDataParallel", "optim", "Trainer"})
"""Names in programs that create an optimizer, or let one of these packages create it."""
_TRAINING = frozenset({"torch", "accelerate", "lightning", "pytorch_lightning", "transformers"})


class WantedImport(NamedTuple):
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()


class ImportAnalysis(NamedTuple):
    """Result of the analysis: imports in order, and the environment variables that are set.

    `first` and `last` are the folders put before and after `sys.path`; `unread` names a place
    where they cannot be read. `steps` are the imports and environment changes in execution order,
    without imports that may not run if a change follows; `possible` are those of them that may not
    run either. `later` are variables that functions set at an unknown time. `imported` are the
    modules that the program's own imports name. `lines` are the lines of the imports of `__main__`.
    `unchanged` are variables of `sets` of which each change was evaluated as without effect.
    """

    wanted: tuple[WantedImport, ...]
    sets: frozenset[str]
    first: tuple[str, ...] = ()
    unread: str = ""
    last: tuple[str, ...] = ()
    steps: tuple[WantedImport | EnvironmentChange, ...] = ()
    later: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    possible: frozenset[WantedImport] = frozenset()
    imported: frozenset[str] = frozenset()
    lines: Mapping[WantedImport, int] = MappingProxyType({})
    unchanged: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        """Variables whose value at every import is known: reading one is as in the program.

        Includes those that a statement would set, but does not: `setdefault` of one that is there.
        """
        changes = [step for step in self.steps if isinstance(step, EnvironmentChange)]
        unknown = {change.name for change in changes if not change.known}
        changed = {change.name for change in changes}
        unchanged = frozenset() if "" in unknown else self.unchanged
        return (unchanged | changed) - unknown - self.later

    @property
    def import_context(self) -> tuple[object, ...]:
        """Environment changes and search path in which modules are loaded, for comparison."""
        changed = any(isinstance(step, EnvironmentChange) for step in self.steps)
        return (self.steps if changed else (), self.first, self.last, self.unread, self.later)


class Source(NamedTuple):
    """Source file of the user; `package` is the base of its relative imports."""

    path: str
    package: str = ""


def analyse_imports(
    entry: Sequence[Source],
    search: Sequence[str],
    installed: Callable[[Any], bool],
    given: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> ImportAnalysis:
    """Follow the entry's imports through the user's own files, in execution order.

    Args:
        entry: the files that run first; the last one is `__main__`.
        search: the program's `sys.path`.
        installed: predicate for specs of the standard library or installed packages.
        given: the program's initial environment.
        seconds: limit of the processor time, `MAX_PROCESSOR_SECONDS` if it is None.
    """
    changes = ChangeAnalyser(os.environ if given is None else given)
    limit = MAX_PROCESSOR_SECONDS if seconds is None else seconds
    program = _Program(search, installed, changes, limit)
    try:
        for source in entry:
            program.run(source, source is entry[-1])
    except RecursionError:
        program.unread = program.unread or "your program's files import each other too deeply"
    except _Unbounded as error:
        program.unread = program.unread or str(error)
    return program.analysis()


_ADDRESS = frozenset({"MASTER_ADDR", "MASTER_PORT"})
_TCP = "tcp://"
_ENVIRONMENT = "env://"


def may_choose_address(arguments: Sequence[str], reading: ImportAnalysis) -> bool:
    """Return True if ranks of the program may meet at another address than the job's.

    torch then expects rank 0 to serve the store there, unless TORCHELASTIC_USE_AGENT_STORE is True.
    The program sets the variables of the address, or names a URL in an argument or in its source.
    An argument `env://` decides against a URL in the source, such as the default of an option.
    """
    if not _ADDRESS.isdisjoint(reading.sets) or any(_TCP in each for each in arguments):
        return True
    if any(_ENVIRONMENT in each for each in arguments):
        return False
    return any(map(_names_url, reading.files))


def _names_url(path: str) -> bool:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return _TCP.encode() in file.read()
    except OSError:
        return False


class _Unbounded(Exception):
    """Program that exceeds a limit of the analysis."""


class _Program:
    """Analyser that reads each file at its first import."""

    def __init__(
        self,
        search: Sequence[str],
        installed: Callable[[Any], bool],
        changes: ChangeAnalyser,
        seconds: float,
    ) -> None:
        self._search = search
        self._installed = installed
        self._changes = changes
        self._steps: list[WantedImport | EnvironmentChange] = []
        self._possible: list[int] = []
        self._facts: list[FileFacts] = []
        self._seen: set[str] = set()
        self._files: list[str] = []
        self._imported: set[str] = set()
        self._lines: dict[WantedImport, int] = {}
        self._first: list[str] = []
        self._last: list[str] = []
        self._began = time.process_time()
        self.unread = ""
        self._seconds = seconds
        self._bytes = 0
        changes.on_change = self._steps.append
        changes.on_run = self._run_program

    def analysis(self) -> ImportAnalysis:
        wanted = [step for step in self._steps if isinstance(step, WantedImport)]
        over = self._changes.without_effect
        found = [each for facts in self._facts for each in facts.variables()]
        sets = frozenset(name for _, name, _ in found)
        changed = {name for node, name, _ in found if node not in over}
        return ImportAnalysis(
            tuple(dict.fromkeys(wanted)),
            sets,
            tuple(self._first),
            self.unread,
            tuple(self._last),
            tuple(dict.fromkeys(self._in_order())),
            frozenset(name for _, name, is_later in found if is_later),
            tuple(self._files),
            self._only_possible(),
            frozenset(self._imported),
            self._lines,
            sets - changed,
        )

    def _only_possible(self) -> frozenset[WantedImport]:
        """Return the imports of which none is certain to run."""
        certain = {step for i, step in enumerate(self._steps) if i not in self._possible}
        found = {step for step in self._steps if isinstance(step, WantedImport)}
        return frozenset(found - certain - {WantedImport(_LAZY)})

    def _in_order(self) -> list[WantedImport | EnvironmentChange]:
        """Return the steps without imports that may not run before a later change.

        Preloaded there, a module would read the environment before the change. In the program it
        may read the one after it. A doubtful change counts only before a module's first certain
        import.
        """
        changes = [
            i
            for i, step in enumerate(self._steps)
            if isinstance(step, EnvironmentChange) and not step.doubtful
        ]
        certain = list(filter(self._is_certain_import, range(len(self._steps))))
        first = {self._steps[i]: i for i in reversed(certain)}
        left_out = {i for i in self._possible if changes and i < changes[-1]}
        left_out |= {i for i in self._possible if i < first.get(self._steps[i], -1)}
        last = max(first.values(), default=-1)
        return [
            step
            for i, step in enumerate(self._steps)
            if i not in left_out and not (i > last and getattr(step, "doubtful", False))
        ]

    def _is_certain_import(self, index: int) -> bool:
        step = self._steps[index]
        is_installed = isinstance(step, WantedImport) and not is_python_module(step.module)
        return is_installed and index not in self._possible

    def run(self, source: Source, main: bool = False, certain: bool = True) -> None:
        if source.path in self._seen:
            return
        if len(self._seen) >= MAX_FILES:
            raise _Unbounded(_TOO_MANY.format(MAX_FILES))
        if time.process_time() - self._began > self._seconds:
            raise _Unbounded(_TOO_LONG.format(len(self._seen), self._seconds))
        self._seen.add(source.path)
        self._files.append(source.path)
        content = _content(source.path)
        self._bytes += len(content)
        if self._bytes > MAX_PROGRAM_BYTES:
            raise _Unbounded(_TOO_LARGE_IN_ALL.format(MAX_PROGRAM_BYTES))
        tree = _parsed(content, source.path)
        if tree is None:
            return
        names = self._changes.functions.environ_names
        count = names.size
        facts = FileFacts(tree, names)
        self._facts.append(facts)
        self._changes.functions.add_file(facts, names.size > count)
        self._add_folders(tree, source.path)

        def imports(node: ast.Import | ast.ImportFrom, certain: bool | None) -> None:
            for found in _wanted(node, source.package):
                if main:
                    self._lines.setdefault(found, node.lineno)
                self._import(found, certain)

        self._changes.file(tree, facts, source.path, main, imports, certain)
        if _imports(facts, _TRAINING) and _OPTIMIZING & facts.mentioned:
            self._append(WantedImport(_LAZY), False)  # loaded when the optimizer is created

    def _append(self, wanted: WantedImport, certain: bool) -> None:
        if not certain:
            self._possible.append(len(self._steps))
        self._steps.append(wanted)

    def _add_folders(self, tree: ast.Module, path: str) -> None:
        put = added_folders(tree, path)
        self._first[:0] = [folder for folder in put.folders if folder not in self._first]
        self._last += [folder for folder in put.last if folder not in self._last]
        for line, what in ((put.unread, "puts first on"), (put.unread_last, "appends to")):
            if line and not self.unread:
                self.unread = f"{path}, line {line}: what it {what} sys.path cannot be read"

    def _run_program(self, run: ProgramRun) -> None:
        search = [*self._first, *self._search, *self._last]
        sources = module_files(run.target, search) if run.module else [Source(run.target)]
        for source in sources:
            self.run(source, run.main and source is sources[-1], run.certain)

    def _import(self, found: WantedImport, certain: bool | None) -> None:
        """Follow an import of the user's own files; append one of an installed package."""
        spec = _top_spec(found.module, [*self._first, *self._search, *self._last])
        if spec is None:
            return
        if self._installed(spec):
            self._imported.update([found.module, *(f"{found.module}.{n}" for n in found.names)])
            self._append(found, bool(certain))
            return
        if certain is not None:
            for source in _own_files(found, spec):
                self.run(source, certain=certain)


def module_files(name: str, search: Sequence[str]) -> list[Source]:
    """Return the user's files that `python -m name` runs, its packages first."""
    spec = _top_spec(name, search)
    if spec is None:
        return []
    files = list(_own_files(WantedImport(name), spec))
    main = list(_own_files(WantedImport(f"{name}.__main__"), spec))
    return files + [source for source in main if source not in files]


def _content(path: str) -> bytes:
    """Return the content of a file, empty if it cannot be read: the program itself reports it."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            content = file.read(MAX_SOURCE_BYTES + 1)
    except OSError:
        return b""
    if len(content) > MAX_SOURCE_BYTES:
        raise _Unbounded(_TOO_LARGE.format(path, MAX_SOURCE_BYTES))
    return content


def _parsed(content: bytes, path: str) -> ast.Module | None:
    try:
        return ast.parse(content, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the program itself reports it


def _wanted(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[WantedImport]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield WantedImport(alias.name)
    else:
        module = _absolute(node, package)
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        if module:
            yield WantedImport(module, names)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if len(parts) < node.level:
        return ""
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def _top_spec(name: str, search: Sequence[str]) -> Any:
    top = name.partition(".")[0]
    for finder in (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter):
        spec = finder.find_spec(top)
        if spec is not None:
            return spec
    return _found(top, search)


def _found(name: str, search: Sequence[str]) -> Any:
    try:
        return importlib.machinery.PathFinder.find_spec(name, list(search))
    except Exception:  # raised by a user's path hook for unusual path entries
        return None


def _own_files(found: WantedImport, top: Any) -> Iterator[Source]:
    """Yield the user's files that this import runs, as far as they can be found."""
    parts = found.module.split(".")
    spec, name = top, parts[0]
    yield from _file_of(spec, name)
    for part in parts[1:]:
        spec = _found(f"{name}.{part}", _locations(spec))
        if spec is None:
            return
        name = f"{name}.{part}"
        yield from _file_of(spec, name)
    for each in found.names:
        inner = _found(f"{name}.{each}", _locations(spec))
        if inner is not None:
            yield from _file_of(inner, f"{name}.{each}")


def _file_of(spec: Any, name: str) -> Iterator[Source]:
    if spec.origin and spec.has_location and spec.origin.endswith(".py"):
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        yield Source(spec.origin, package)


def _locations(spec: Any) -> list[str]:
    return list(spec.submodule_search_locations or ())


def _imports(facts: FileFacts, packages: Collection[str]) -> bool:
    """Return True if the file imports one of these packages or a part of it."""
    return any(
        found.module.partition(".")[0] in packages
        for node in facts.imports
        for found in _wanted(node, "")
    )
