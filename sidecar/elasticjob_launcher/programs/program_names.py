"""Names in a Python file, with the values that each may have, by scope; the code is not run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from elasticjob_launcher.programs.started_commands import UNKNOWN, Names, Written, reference
from elasticjob_launcher.zygote.analysis.environment_uses import nodes
from elasticjob_launcher.zygote.search_path import dotted

UNKNOWN_VALUE = Written((UNKNOWN,), 0)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Imported(NamedTuple):
    """Full name of an imported module or object."""

    name: str


class Class(NamedTuple):
    """Class of the user's with its file."""

    source: Source
    node: Any


class Function(NamedTuple):
    """Function of the user's with its file; `owner` is the class of a method's object."""

    source: Source
    node: Any
    owner: Class | None = None


class Source:
    """One file of a program.

    `scope` is the function that is followed, `receiver` the class of its `self`. A name has the
    values that are assigned to it anywhere in its scope.
    """

    def __init__(
        self, path: str, package: str, tree: Any, is_main: bool, spend: Callable[[], object]
    ) -> None:
        self.path = path
        self.tree = tree
        self.is_main = is_main
        self.scope: Any = None
        self.receiver: Class | None = None
        self.names = Names(self.values, self._returned, spend)
        self._package = package
        self._spend = spend
        self._commands: dict[str, list[Any]] = {}
        self._extended: set[str] = set()
        self._bound: dict[tuple[Any, str], list[Any]] = {}
        self._attributes: dict[tuple[Any, str], list[Any]] = {}
        self._outer: dict[Any, Any] = {}
        self._owners: dict[Any, Any] = {}
        self._globals: dict[Any, set[str]] = {}
        self._read(tree, None, None)

    # -- names --------------------------------------------------------------------------

    def bound(self, name: str) -> list[Any]:
        """Return the functions, classes, imports and values of a name in the current scope."""
        scope = self.scope
        while scope is not None and (scope, name) not in self._bound:
            scope = self._outer[scope]
        return self._bound.get((scope, name), [])

    def global_name(self, name: str) -> list[Any]:
        """Return what a name of the module is bound to."""
        return self._bound.get((None, name), [])

    def values(self, node: Any) -> list[Any]:
        """Return the values of a name such as `cmd` or `self.cmd`, without those made from it."""
        name = dotted(node)
        first, _, rest = name.partition(".")
        if rest and first in ("self", "cls"):
            found = (
                [] if self.receiver is None else self.receiver.source._fields(self.receiver, rest)
            )
        else:
            found = self.bound(name) if name else []
        if len(found) < 2:
            return found
        return [one for one in found if not self._mentions(one, name)] or found[:1]

    def full_name(self, node: Any) -> str:
        """Return the full name of an imported object; empty for others."""
        if isinstance(node, ast.Name):
            found = self.bound(node.id)[-1:]
            return found[0].name if found and isinstance(found[0], Imported) else ""
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module that a `from` statement names."""
        if not node.level:
            return node.module or ""
        parts = self._package.split(".") if self._package else []
        base = ".".join(parts[: len(parts) - node.level + 1])
        return ".".join(part for part in (base, node.module) if part)

    def command(self, group: str) -> list[Any]:
        """Return the only command of an object of click or typer; empty if there may be more."""
        found = self._commands.get(group, [])
        return found if len(found) == 1 and group not in self._extended else []

    def has_commands(self, group: str) -> bool:
        return group in self._commands

    def bind(self, scope: Any, values: dict[str, list[Any]]) -> dict[tuple[Any, str], list[Any]]:
        """Add values of a function's parameters, and return what to give to `restore`."""
        before = {(scope, name): self._bound.get((scope, name), []) for name in values}
        for name, found in values.items():
            self._bound[scope, name] = [*found, *before[scope, name]]
        return before

    def restore(self, before: dict[tuple[Any, str], list[Any]]) -> None:
        self._bound.update(before)

    def class_of_scope(self) -> Any:
        """Return the class of the method that is followed; None in other functions."""
        return self._owners.get(self.scope)

    def is_nested(self, function: Any) -> bool:
        """Return True for a function in another function."""
        return self._outer.get(function) is not None

    # -- reading ------------------------------------------------------------------------

    def _read(self, parent: Any, scope: Any, owner: Any) -> None:
        """Bind the names in a node; `owner` is the class of its methods and attributes."""
        for node in ast.iter_child_nodes(parent):
            in_class = isinstance(parent, ast.ClassDef)
            self._index(node, scope, owner, in_class)
            if isinstance(node, FUNCTIONS):
                self._outer[node] = scope
                self._owners[node] = owner
                self._parameters(node)
                self._read(node, node, owner)
            elif isinstance(node, ast.ClassDef):
                self._read(node, scope, node)
            else:
                self._read(node, scope, owner)

    def _parameters(self, node: Any) -> None:
        given = node.args
        names = [*getattr(given, "posonlyargs", ()), *given.args, *given.kwonlyargs]
        for one in (*names, given.vararg, given.kwarg):
            if one is not None:
                self._bound[node, one.arg] = []

    def _index(self, node: Any, scope: Any, owner: Any, in_class: bool) -> None:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            if in_class:
                self._attributes.setdefault((owner, node.name), []).append(node)
            else:
                self._bind(node.name, node, scope)
            for one in node.decorator_list:
                func: Any = getattr(one, "func", one)
                if getattr(func, "attr", "") == "command" and reference(func.value):
                    self._commands.setdefault(reference(func.value), []).append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                full = alias.name if alias.asname else top
                self._bind(alias.asname or top, Imported(full), scope)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{self.absolute(node)}.{alias.name}"
                self._bind(alias.asname or alias.name, Imported(full), scope)
        elif isinstance(node, ast.Global):
            self._globals.setdefault(scope, set()).update(node.names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, scope, owner, in_class)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._assign(node.target, node.value, scope, owner, in_class)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._assign(node.target, UNKNOWN_VALUE, scope, owner, in_class)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, UNKNOWN_VALUE, scope, owner, in_class)
        elif isinstance(node, ast.Call) and reference(node.func) in ("add_command", "add_typer"):
            self._extended.add(reference(getattr(node.func, "value", None)))

    def _assign(self, target: Any, value: Any, scope: Any, owner: Any, in_class: bool) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._assign(one, UNKNOWN_VALUE, scope, owner, in_class)
            return
        name = dotted(target)
        first, _, rest = name.partition(".")
        if in_class:
            self._attributes.setdefault((owner, name), []).append(value)
        elif rest and first in ("self", "cls"):
            self._attributes.setdefault((owner, rest), []).append(value)
        elif name:
            self._bind(name, value, None if rest else scope)

    def _bind(self, name: str, value: Any, scope: Any) -> None:
        if name in self._globals.get(scope, ()):
            scope = None
        self._bound.setdefault((scope, name), []).append(value)

    # -- values -------------------------------------------------------------------------

    def _fields(self, owner: Class, name: str, depth: int = 0) -> list[Any]:
        """Return what a class and its bases in this file assign to an attribute."""
        found = self._attributes.get((owner.node, name))
        if found is not None or depth > 4:
            return found or []
        bases = [one for base in owner.node.bases for one in self.global_name(dotted(base))]
        known = [one for one in bases if isinstance(one, ast.ClassDef) and one is not owner.node]
        inherited = (self._fields(Class(self, one), name, depth + 1) for one in known)
        return next(filter(None, inherited), [])

    def own_attribute(self, owner: Any, name: str) -> list[Any]:
        """Return what a class itself assigns to an attribute or method."""
        return self._attributes.get((owner, name), [])

    def _mentions(self, value: Any, name: str) -> bool:
        if not isinstance(value, ast.AST):
            return False
        for node in nodes(value):
            self._spend()
            if dotted(node) == name:
                return True
        return False

    def _returned(self, call: ast.Call, depth: int) -> Sequence[Written]:
        """Return the commands that a call of a function in this file returns."""
        found = [one for one in self.values(call.func) if isinstance(one, FUNCTIONS)]
        if len(found) != 1:
            return []
        outer, self.scope = self.scope, found[0]
        try:
            return [
                command
                for value in _results(found[0])
                for command in self._or_unknown(value, depth)
            ]
        finally:
            self.scope = outer

    def _or_unknown(self, value: Any, depth: int) -> Sequence[Written]:
        return list(self.names.commands(value, depth + 1)) or [UNKNOWN_VALUE]


def _results(function: Any) -> Iterator[Any]:
    for node in nodes(function, *FUNCTIONS, ast.Lambda):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
