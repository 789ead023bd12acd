"""Which folders a program puts in front of `sys.path`, as its source says; nothing of it is run.

What they hold goes before installed packages of the same names, which must not be preloaded then.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


@contextmanager
def searching_first(folders: Sequence[str]) -> Iterator[None]:
    """Within this block these folders are searched before all others."""
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)  # the first of that name; packages may have put others


class First(NamedTuple):
    """`folders` in the order in which they are searched; `unread` is the first line of which the
    folder cannot be told without running it, or 0.
    """

    folders: tuple[str, ...]
    unread: int


class _Unknown(Exception):
    """A value that only running the program would give."""


def put_first(tree: ast.Module, path: str) -> First:
    """What the statements that run when this file is run put first."""
    reader = _Reader(os.path.abspath(path))  # noqa: PTH100
    reader.run(tree.body)
    return First(tuple(reader.folders), reader.unread)


class _Reader:
    def __init__(self, path: str) -> None:
        self._names: dict[str, Any] = {"__file__": path}
        self.folders: list[str] = []
        self.unread = 0

    def run(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(node, ast.Assign):
                self._assign(node)
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
            self._name(name, item)
            self.run(node.body)

    def _name(self, name: str, value: ast.expr) -> None:
        try:
            self._names[name] = self._value(value)
        except _Unknown:
            self._names.pop(name, None)

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._name(target.id, node.value)
            elif _is_path(target):
                self._put(_before_the_rest(node.value))
            elif isinstance(target, ast.Subscript) and _is_path(target.value):
                self._put(getattr(node.value, "elts", [node.value]))

    def _call(self, call: ast.Call) -> None:
        if _dotted(call.func) == "sys.path.insert" and len(call.args) == 2:
            self._put(call.args[1:])

    def _put(self, values: Sequence[ast.expr]) -> None:
        found = []
        for value in values:
            try:
                folder = self._value(value)
                found.append(os.path.abspath(os.fspath(folder)))  # noqa: PTH100
            except (_Unknown, TypeError):
                self.unread = self.unread or value.lineno
        self.folders[:0] = found

    def _value(self, node: ast.expr) -> Any:
        """A text or a `Path`."""
        try:
            return self._known(node)
        except (OSError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise _Unknown from error

    def _known(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._names[node.id]
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
        if isinstance(node, ast.Call) and not node.keywords:
            arguments = [self._known(argument) for argument in node.args]
            return self._called(node.func, arguments)
        raise _Unknown

    def _attribute(self, node: ast.Attribute) -> Any:
        named = _CONSTANTS.get(_dotted(node))
        if named is not None:
            return named
        value = self._known(node.value)
        if isinstance(value, Path) and node.attr in ("parent", "parents"):
            return getattr(value, node.attr)
        raise _Unknown

    def _called(self, function: ast.expr, arguments: Sequence[Any]) -> Any:
        known = _FUNCTIONS.get(_dotted(function))
        if known is not None:
            return known(*arguments)
        if isinstance(function, ast.Attribute) and function.attr in _METHODS:
            value = self._known(function.value)
            if isinstance(value, Path):
                return getattr(value, function.attr)(*arguments)
        raise _Unknown


_METHODS = frozenset({"absolute", "as_posix", "expanduser", "joinpath", "resolve"})
_CONSTANTS: dict[str, Any] = {
    "os.environ": os.environ, "os.pardir": os.pardir, "os.curdir": os.curdir, "os.sep": os.sep,
}  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    "str": str, "Path": Path, "pathlib.Path": Path, "Path.cwd": Path.cwd,
    "pathlib.Path.cwd": Path.cwd, "os.getcwd": os.getcwd, "os.fspath": os.fspath,
    "os.getenv": os.environ.get, "os.environ.get": os.environ.get,
}  # fmt: skip
for _name in ("abspath", "dirname", "expanduser", "expandvars", "join", "normpath", "realpath"):
    for _module in ("os.path.", "osp.", "path.", ""):
        _FUNCTIONS[_module + _name] = getattr(os.path, _name)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _is_path(node: ast.expr) -> bool:
    return _dotted(node) == "sys.path"


def _before_the_rest(value: ast.expr) -> Sequence[ast.expr]:
    """Of `[...] + sys.path` and `[..., *sys.path]`, what comes first."""
    if isinstance(value, ast.BinOp) and _is_path(value.right):
        value = value.left
    if isinstance(value, ast.BinOp) and _is_path(value.left):
        return ()
    items = getattr(value, "elts", [value])
    return [item for item in items if not isinstance(item, ast.Starred)]
