"""Static analysis of the folders that a program adds to `sys.path`; the program is not run.

Installed packages find their imports there too. Folders put first take precedence over installed
packages of the same names, which then must not be preloaded.
"""

from __future__ import annotations

import ast
import operator
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob_launcher.zygote.worker_environment import differs_by_worker

_LIBRARY = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib")})


@contextmanager
def searching(first: Sequence[str], last: Sequence[str] = ()) -> Iterator[None]:
    """Search these folders before and after all others within the `with` block."""
    sys.path[:0] = first
    sys.path += last
    try:
        yield
    finally:
        for folder in first:
            sys.path.remove(folder)  # removes the first match; packages may have added others
        for folder in last:
            at = len(sys.path) - 1 - sys.path[::-1].index(folder)
            del sys.path[at]


class AddedFolders(NamedTuple):
    """Folders that a file adds: `folders` in search order before others, `last` after them.

    `unread` and `unread_last` are the first lines with a folder known only at run time, or 0.
    """

    folders: tuple[str, ...]
    unread: int
    last: tuple[str, ...] = ()
    unread_last: int = 0


class Unknown(Exception):
    """Value known only at run time."""


class Environ:
    """Environment of a program: its initial values with the changes made so far.

    Raises Unknown for variables that differ between workers or were set to an unknown value.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = dict(given)
        self._unknown: set[str] = set()

    def __contains__(self, name: str) -> bool:
        if name in self._unknown or "" in self._unknown or differs_by_worker(name):
            raise Unknown
        return name in self._values

    def __getitem__(self, name: str) -> str:
        return self._values[name] if name in self else self._values[""]

    def get(self, name: str, default: Any = None) -> Any:
        return self._values[name] if name in self else default

    def put(self, name: str, value: str | None) -> None:
        self._unknown.discard(name)
        self._values.pop(name, None)
        if value is not None:
            self._values[name] = value

    def forget(self, name: str) -> None:
        """Mark a variable's value as unknown from now on; the empty name marks all."""
        self._unknown.add(name)


def added_folders(tree: ast.Module, path: str) -> AddedFolders:
    """Return the folders that the file's top-level statements add."""
    reader = _Reader(path)
    reader.run(tree.body)
    return AddedFolders(
        tuple(reader.folders), reader.unread, tuple(reader.last), reader.unread_last
    )


class Values:
    """Evaluator of a file's expressions, as far as known without running it."""

    def __init__(self, path: str, environ: Environ) -> None:
        self.names: dict[str, Any] = {"__file__": os.path.abspath(path)}  # noqa: PTH100
        self.environ = environ

    def name(self, name: str, value: ast.expr) -> None:
        """Record the value of a name; drop one that is known only at run time."""
        try:
            self.names[name] = self.value(value)
        except Unknown:
            self.names.pop(name, None)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raise Unknown if it is known only at run time."""
        try:
            return self._known(node)
        except (OSError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise Unknown from error

    def _known(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names[node.id]
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", part) for part in node.values)
            return "".join(str(p if isinstance(p, str) else self._known(p)) for p in parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
            left, right = self._known(node.left), self._known(node.right)
            return left / right if isinstance(node.op, ast.Div) else left + right
        if isinstance(node, ast.Subscript):
            index: Any = node.slice
            if type(index).__name__ == "Index":  # before Python 3.9
                index = index.value
            return self._known(node.value)[self._known(index)]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._known(node.operand)
        if isinstance(node, ast.BoolOp):
            return self._either(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            compare = _COMPARES.get(type(node.ops[0]))
            if compare is not None:
                return compare(self._known(node.left), self._known(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            return self._known(node.body if self._known(node.test) else node.orelse)
        if isinstance(node, ast.Call) and not node.keywords:
            arguments = [self._known(argument) for argument in node.args]
            return self._called(node.func, arguments)
        raise Unknown

    def _either(self, node: ast.BoolOp) -> Any:
        ends = isinstance(node.op, ast.Or)
        value: Any = None
        for each in node.values:
            value = self._known(each)
            if bool(value) == ends:
                break
        return value

    def _attribute(self, node: ast.Attribute) -> Any:
        if dotted(node) == "os.environ":
            return self.environ
        named = _CONSTANTS.get(dotted(node))
        if named is not None:
            return named
        value = self._known(node.value)
        if isinstance(value, Path) and node.attr in ("parent", "parents"):
            return getattr(value, node.attr)
        raise Unknown

    def _called(self, function: ast.expr, arguments: Sequence[Any]) -> Any:
        if dotted(function) in ("os.getenv", "getenv"):
            return self.environ.get(*arguments)
        known = _FUNCTIONS.get(dotted(function))
        if known is not None:
            return known(*arguments)
        if isinstance(function, ast.Attribute) and function.attr in _METHODS:
            value = self._known(function.value)
            if isinstance(value, Path):
                return getattr(value, function.attr)(*arguments)
        if isinstance(function, ast.Attribute) and function.attr == "get":
            owner = self._known(function.value)
            if isinstance(owner, Environ):
                return owner.get(*arguments)
        raise Unknown


class _Reader(Values):
    """Reader of the statements that change `sys.path`; those in functions are ignored."""

    def __init__(self, path: str) -> None:
        super().__init__(path, Environ(os.environ))
        self.folders: list[str] = []
        self.last: list[str] = []
        self.unread_last = 0
        self.unread = 0

    def run(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(node, ast.Assign):
                self._assign(node)
            elif isinstance(node, ast.AugAssign) and _is_path(node.target):
                self._append([node.value])
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._call(node.value)
            elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                self._each(node, node.target.id)
            else:
                for name in ("body", "handlers", "orelse", "finalbody"):
                    self.run(getattr(node, name, ()))

    def _each(self, node: ast.For, name: str) -> None:
        items = node.iter.elts if isinstance(node.iter, (ast.List, ast.Tuple)) else [node.iter]
        for item in items:
            self.name(name, item)
            self.run(node.body)

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.name(target.id, node.value)
            elif _is_path(target):
                self._put(_before_the_rest(node.value))
                self._append(_after_the_rest(node.value))
            elif isinstance(target, ast.Subscript) and _is_path(target.value):
                self._put(getattr(node.value, "elts", [node.value]))

    def _call(self, call: ast.Call) -> None:
        if dotted(call.func) == "sys.path.insert" and len(call.args) == 2:
            self._put(call.args[1:])
        elif dotted(call.func) in _APPENDS and call.args:
            self._append(call.args[:1])

    def _put(self, values: Sequence[ast.expr]) -> None:
        found, unread = self._read(values)
        self.folders[:0] = found
        self.unread = self.unread or unread

    def _append(self, values: Sequence[ast.expr]) -> None:
        for value in values:
            found, unread = self._read(getattr(value, "elts", [value]))
            self.last += found
            self.unread_last = self.unread_last or unread

    def _read(self, values: Sequence[ast.expr]) -> tuple[list[str], int]:
        """Return the folders, and the first line with an unknown folder or 0."""
        found, unread = [], 0
        for value in values:
            try:
                folder = self.value(value)
                found.append(os.path.abspath(os.fspath(folder)))  # noqa: PTH100
            except (Unknown, TypeError):
                unread = unread or value.lineno
        return found, unread


_COMPARES: dict[Any, Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip
_APPENDS = frozenset({"sys.path.append", "sys.path.extend", "site.addsitedir", "addsitedir"})
_METHODS = frozenset({"absolute", "as_posix", "expanduser", "joinpath", "resolve"})
_CONSTANTS: dict[str, Any] = {
    "os.pardir": os.pardir, "os.curdir": os.curdir, "os.sep": os.sep,
}  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    "str": str, "Path": Path, "pathlib.Path": Path, "Path.cwd": Path.cwd,
    "pathlib.Path.cwd": Path.cwd, "os.getcwd": os.getcwd, "os.fspath": os.fspath,
}  # fmt: skip
for _name in ("abspath", "dirname", "expanduser", "expandvars", "join", "normpath", "realpath"):
    for _module in ("os.path.", "osp.", "path.", ""):
        _FUNCTIONS[_module + _name] = getattr(os.path, _name)


def dotted(node: Any) -> str:
    """Return a name such as `cmd` or `self.cmd` as text; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _is_path(node: ast.expr) -> bool:
    return dotted(node) == "sys.path"


def _before_the_rest(value: ast.expr) -> Sequence[ast.expr]:
    """Return the items before `sys.path` in `[...] + sys.path` and `[..., *sys.path]`."""
    if isinstance(value, ast.BinOp) and _is_path(value.right):
        value = value.left
    if isinstance(value, ast.BinOp) and _is_path(value.left):
        return ()
    items = getattr(value, "elts", [value])
    starred = [number for number, item in enumerate(items) if isinstance(item, ast.Starred)]
    return items[: starred[0]] if starred else items


def _after_the_rest(value: ast.expr) -> Sequence[ast.expr]:
    """Return the items after `sys.path` in `sys.path + [...]` and `[*sys.path, ...]`."""
    if isinstance(value, ast.BinOp) and _is_path(value.left):
        return [value.right]
    items = getattr(value, "elts", [])
    starred = [number for number, item in enumerate(items) if isinstance(item, ast.Starred)]
    return items[starred[-1] + 1 :] if starred else []


def is_python_module(name: str) -> bool:
    known: Any = getattr(sys, "stdlib_module_names", None)
    top = name.partition(".")[0]
    if known is not None:
        return top in known
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is not None:
        return bool(file.startswith(_LIBRARY) and "-packages/" not in file)
    folders = [*_LIBRARY, *(f"{folder}lib-dynload" for folder in _LIBRARY)]
    return top in sys.builtin_module_names or PathFinder.find_spec(top, folders) is not None
