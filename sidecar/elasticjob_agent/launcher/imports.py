"""What a program imports, read from its sources and never run.

Runs in the standby interpreter, so that sources are parsed by the Python that will run them.
"""

from __future__ import annotations

import ast
import importlib.machinery
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .searchpath import put_first

MAX_FILES = 100
MAX_SOURCE_BYTES = 1024 * 1024
# Loaded by torch only when it is needed, which is in every run of who mentions it: 2 s cold.
_IMPLIED = {"DistributedDataParallel": "torch._dynamo"}


class Wanted(NamedTuple):
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()


class Reading(NamedTuple):
    """What was read: imports in their order, and the environment variables that are set.

    `first` are the folders put in front of `sys.path`; `unread` says where that cannot be read.
    """

    wanted: tuple[Wanted, ...]
    sets: frozenset[str]
    first: tuple[str, ...] = ()
    unread: str = ""


class Source(NamedTuple):
    """A file of the user's: `package` is what its relative imports are relative to."""

    path: str
    package: str = ""


def read(
    entry: Sequence[Source],
    search: Sequence[str],
    installed: Callable[[Any], bool],
) -> Reading:
    """Follow the entry's imports through the user's own files.

    Args:
        entry: the files that run first.
        search: where modules are looked for, `sys.path` of the program.
        installed: whether a spec is of the standard library or of installed packages.
    """
    wanted: list[Wanted] = []
    sets: set[str] = set()
    seen: set[str] = set()
    first: list[str] = []
    unread = ""
    todo = deque(entry)
    while todo and len(seen) < MAX_FILES:
        source = todo.popleft()
        if source.path in seen:
            continue
        seen.add(source.path)
        tree = _parsed(source.path)
        if tree is None:
            continue
        sets.update(_variables_set(tree))
        put = put_first(tree, source.path)
        first[:0] = [folder for folder in put.folders if folder not in first]
        if put.unread:
            unread = unread or f"{source.path}, line {put.unread}"
        folders = [*first, *search]
        for found in _imports(tree.body, source.package):
            spec = _top_spec(found.module, folders)
            if spec is None:
                continue
            if installed(spec):
                wanted.append(found)
            else:
                todo.extend(_own_files(found, spec))
        wanted += [Wanted(module) for name, module in _IMPLIED.items() if _mentions(tree, name)]
    return Reading(tuple(dict.fromkeys(wanted)), frozenset(sets), tuple(first), unread)


def module_files(name: str, search: Sequence[str]) -> list[Source]:
    """The files that `python -m name` runs, its packages first; none that are installed count."""
    spec = _top_spec(name, search)
    if spec is None:
        return []
    files = list(_own_files(Wanted(name), spec))
    main = list(_own_files(Wanted(f"{name}.__main__"), spec))
    return files + [source for source in main if source not in files]


def _parsed(path: str) -> ast.Module | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            content = file.read(MAX_SOURCE_BYTES + 1)
        return ast.parse(content, path) if len(content) <= MAX_SOURCE_BYTES else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the program itself will say so


def _imports(body: Sequence[ast.stmt], package: str) -> Iterator[Wanted]:
    """Of statements that run when the file runs: none inside functions, or for type checkers."""
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Wanted(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            if module:
                yield Wanted(module, names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _imports(node.orelse, package)
        else:
            for name in ("body", "handlers", "orelse", "finalbody"):
                yield from _imports(getattr(node, name, ()), package)


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
    except Exception:  # a hook of the user's for strange path entries
        return None


def _own_files(found: Wanted, top: Any) -> Iterator[Source]:
    """The user's files that this import runs, as far as they are to be found."""
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


def _variables_set(tree: ast.Module) -> Iterator[str]:
    """Names of environment variables that the file sets anywhere: what it loads may read them."""
    for node in _nodes(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _texts([getattr(target.slice, "value", target.slice)])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            if name == "putenv" or (name == "setdefault" and _is_environ(owner)):
                yield from _texts(node.args[:1])
            elif name == "update" and _is_environ(owner):
                yield from (word.arg for word in node.keywords if word.arg)
                for arg in node.args:
                    if isinstance(arg, ast.Dict):
                        yield from _texts(arg.keys)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(ast.iter_child_nodes(node))


def _is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _texts(nodes: Sequence[Any]) -> Iterator[str]:
    for node in nodes:
        value = node if isinstance(node, str) else getattr(node, "value", None)
        if isinstance(value, str):
            yield value


def _mentions(tree: ast.Module, name: str) -> bool:
    return any(
        name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
        for node in _nodes(tree)
    )
