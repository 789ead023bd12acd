"""Facts of one file, read in one pass over its tree: what each function changes and calls.

They hold wherever the file runs; `environment_changes` follows it in execution order.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from elasticjob_launcher.zygote.analysis.environment_uses import (
    is_environ,
    is_given,
    may_be_change,
    may_be_environ,
    name_of,
    names_changed,
    passes_environ,
    unnamed_change,
)
from elasticjob_launcher.zygote.search_path import dotted

_FUNCTIONS = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda})
_DEEPEST_BASE = 5


class FunctionUses(NamedTuple):
    """Variables that code itself may change, "" for all; the names that it calls or passes on."""

    changes: frozenset[str]
    calls: frozenset[str]


def with_environ(name: str) -> str:
    """Return the name, among those that a function calls, of a call with `os.environ`."""
    return f"{name}(os.environ)"


class EnvironNames:
    """Names and attributes under which the files of a program have `os.environ`.

    `names` are those at module level, which other files may import.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    @property
    def size(self) -> int:
        return len(self.attributes) + len(self.names)


class _Scope:
    """Function, lambda or module: names that it binds, and nodes that may change variables."""

    __slots__ = ("bound", "calls", "copied", "given", "inner", "parts", "stored")

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.bound: list[tuple[str, ast.AST]] = []
        self.copied: set[str] = set()
        self.parts: list[Any] = []
        self.calls: set[str] = set()
        self.given: list[ast.Call] = []
        self.inner: list[_Scope] = []


class FileFacts:
    """Facts of a file; `names` are those of `os.environ` in all files of the program.

    `rebound` are the names that functions bind in outer scopes, `mentioned` all names and
    attributes, and `kept` the assignments of `os.environ` to attributes that only files of the
    program use.
    """

    def __init__(self, tree: ast.Module, names: EnvironNames) -> None:
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.rebound: set[str] = set()
        self.mentioned: set[str] = set()
        self.kept: set[ast.AST] = set()
        self._program = names
        self._imported: dict[str, str] = {}
        self._has_star = False
        self._assigned: list[tuple[Any, ast.ClassDef | None]] = []
        self._classes: dict[str, ast.ClassDef] = {}
        self._module = _Scope()
        self._functions: dict[ast.AST, _Scope] = {}
        self._names: frozenset[str] = frozenset()
        self._read(tree)
        self._keep_attributes()
        self.find_names()
        bound = {name for name, _ in self._module.bound} | self.rebound
        names.names |= (self._names & bound) - {"environ", "environb"}

    @property
    def functions(self) -> Iterator[ast.AST]:
        return iter(self._functions)

    def environs(self, function: ast.AST | None) -> Environs:
        """Return the predicate for `os.environ` in that function, or at module level."""
        scope = self._module if function is None else self._functions.get(function, self._module)
        return self._environs(scope)

    def uses(self, function: ast.AST) -> FunctionUses:
        """Return the changes and calls of a function, with those of the functions in it."""
        changes: set[str] = set()
        calls: set[str] = set()
        todo = [self._functions[function]] if function in self._functions else []
        while todo:
            scope = todo.pop()
            todo += scope.inner
            calls |= scope.calls
            environs = self._environs(scope)
            for node in scope.parts:
                if node not in self.kept:
                    changes.update(names_changed(node, environs))
                    if unnamed_change(node, environs):
                        changes.add("")
            for call in scope.given:
                if passes_environ(call, is_one=environs):
                    changes.add("")
                elif is_given(call, environs):
                    calls.add(with_environ(name_of(call.func)))
        calls.update(self._imported[name] for name in calls & self._imported.keys())
        return FunctionUses(frozenset(changes), frozenset(calls - {""}))

    def variables(self) -> Iterator[tuple[ast.AST, str, bool]]:
        """Yield each node that changes a named variable, the name, and True if it is in a
        function."""
        for scope in (self._module, *self._functions.values()):
            environs = self._environs(scope)
            for node in scope.parts:
                for name in names_changed(node, environs):
                    yield node, name, scope is not self._module

    # --- the pass over the tree

    def _read(self, tree: ast.Module) -> None:
        todo: list[tuple[Any, _Scope, ast.ClassDef | None]] = [(tree, self._module, None)]
        while todo:
            node, scope, owner = todo.pop()
            kind = type(node)
            if kind is ast.Name:
                self.mentioned.add(node.id)
                if type(node.ctx) is not ast.Load:
                    scope.stored.add(node.id)
                continue
            if kind in _FUNCTIONS:
                scope = self._enter(node, scope)
            elif kind is ast.ClassDef:
                owner = self._classes[node.name] = node
                self.mentioned.add(node.name)
            elif kind in _HANDLERS:
                _HANDLERS[kind](self, node, scope, owner)
            for field in node._fields:
                value = getattr(node, field, None)
                if type(value) is list:
                    todo += [(e, scope, owner) for e in value if type(e) not in _LEAVES]
                elif type(value) not in _LEAVES and isinstance(value, ast.AST):
                    todo.append((value, scope, owner))

    def _enter(self, node: Any, outer: _Scope) -> _Scope:
        scope = self._functions[node] = _Scope()
        outer.inner.append(scope)
        self.mentioned.add(getattr(node, "name", ""))
        found = node.args
        names = [each.arg for each in [*getattr(found, "posonlyargs", ()), *found.args]]
        scope.bound += zip(reversed(names), reversed(found.defaults))
        pairs = zip(found.kwonlyargs, found.kw_defaults)
        scope.bound += [(each.arg, default) for each, default in pairs if default is not None]
        others = [*found.kwonlyargs, found.vararg, found.kwarg]
        scope.stored.update(names, (each.arg for each in others if each is not None))
        return scope

    def _attribute(self, node: ast.Attribute, scope: _Scope, owner: Any) -> None:
        self.mentioned.add(node.attr)

    def _subscript(self, node: ast.Subscript, scope: _Scope, owner: Any) -> None:
        if type(node.ctx) is not ast.Load:
            scope.parts.append(node)

    def _call(self, node: ast.Call, scope: _Scope, owner: Any) -> None:
        scope.calls.add(name_of(node.func))
        given = [*node.args, *(word.value for word in node.keywords)]
        scope.calls.update(each.id for each in given if type(each) is ast.Name)
        if may_be_change(node):
            scope.parts.append(node)
        if given:
            scope.given.append(node)

    def _assignment(self, node: Any, scope: _Scope, owner: Any) -> None:
        if _is_copy(node.value):
            targets = getattr(node, "targets", None) or [node.target]
            scope.copied.update(each.id for each in targets if isinstance(each, ast.Name))
        if type(node.value) in _VALUES:
            scope.parts.append(node)
            scope.calls.add(getattr(node.value, "id", ""))
            for target in getattr(node, "targets", None) or [node.target]:
                self._bind(node, target, node.value, scope, owner)

    def _bind(self, node: Any, target: Any, value: Any, scope: _Scope, owner: Any) -> None:
        if isinstance(target, ast.Name):
            scope.bound.append((target.id, value))
        elif isinstance(target, ast.Attribute):
            self._assigned.append((node, owner))
        elif type(value) in (ast.Tuple, ast.List):
            for each, inner in zip(getattr(target, "elts", ()), value.elts):
                self._bind(node, each, inner, scope, owner)

    def _part(self, node: Any, scope: _Scope, owner: Any) -> None:
        scope.parts.append(node)

    def _loop(self, node: Any, scope: _Scope, owner: Any) -> None:
        if isinstance(node.target, ast.Name):
            scope.bound += [(node.target.id, each) for each in getattr(node.iter, "elts", ())]

    def _outer(self, node: ast.Global | ast.Nonlocal, scope: _Scope, owner: Any) -> None:
        self.rebound.update(node.names)

    def _import(self, node: Any, scope: _Scope, owner: Any) -> None:
        self.imports.append(node)
        module = (getattr(node, "module", None) or "").rpartition(".")[2]
        self.mentioned.update((getattr(node, "module", None) or "").split("."))
        for alias in node.names:
            self.mentioned.update(alias.name.split("."))
            name = alias.asname or alias.name.partition(".")[0]
            self._has_star = self._has_star or name == "*"
            if module == "os" and alias.name in ("environ", "environb"):
                scope.bound.append((name, ast.Name(alias.name, ast.Load())))
            elif isinstance(node, ast.ImportFrom):
                self._imported[name] = alias.name
            else:
                self._imported.setdefault(name, "")

    # --- names of `os.environ`

    def _environs(self, scope: _Scope) -> Environs:
        bound = {name for name, value in scope.bound if may_be_environ(value, self._any)}
        bound -= scope.copied  # `env = env.copy()`: what follows changes the copy
        names = (self._names - scope.stored) | bound | (self.rebound & self._names)
        if self._has_star:
            names |= self._program.names - scope.stored
        return Environs(frozenset(names), self._program, self._imported, scope.stored)

    @property
    def _any(self) -> Environs:
        return Environs(self._names, self._program, self._imported)

    def find_names(self) -> None:
        """Find the names that any scope binds to `os.environ`, also by way of other names.

        Call it again when other files have bound more of them.
        """
        pairs = [pair for s in (self._module, *self._functions.values()) for pair in s.bound]
        bound_by: dict[str, list[tuple[str, ast.AST]]] = {}
        for pair in pairs:
            for name in _possible_names(pair[1]):
                bound_by.setdefault(name, []).append(pair)
        found: set[str] = set()
        environs = Environs(found, self._program, self._imported)
        while pairs:
            name, value = pairs.pop()
            if name not in found and may_be_environ(value, environs):
                found.add(name)
                pairs += bound_by.get(name, ())
        self._names = frozenset(found)

    def _keep_attributes(self) -> None:
        """Find the attributes `self.name` that hold `os.environ` and that only own code can use."""
        for node, owner in self._assigned:
            targets = getattr(node, "targets", None) or [node.target]
            if (
                may_be_environ(node.value)
                and owner is not None
                and self._is_own(owner)
                and all(map(_is_of_self, targets))
            ):
                self._program.attributes.update(each.attr for each in targets)
                self.kept.add(node)

    def _is_own(self, node: ast.ClassDef, depth: int = 0) -> bool:
        """Return True for a class whose bases all are classes of this file."""
        names = [name_of(base) for base in node.bases]
        return depth < _DEEPEST_BASE and all(
            name in ("object", "ABC")
            or (name in self._classes and self._is_own(self._classes[name], depth + 1))
            for name in names
        )


class Environs:
    """Predicate for expressions that are, or may be, `os.environ` in one scope."""

    def __init__(
        self,
        names: Collection[str],
        program: EnvironNames,
        imported: Mapping[str, str],
        stored: Collection[str] = (),
    ) -> None:
        self.names = names
        self._stored = stored
        self._program = program
        self._imported = imported

    def __call__(self, node: Any) -> bool:
        if isinstance(node, ast.Name):
            if node.id in self.names or is_environ(node):
                return True
            original = self._imported.get(node.id)
            return original in self._program.names and node.id not in self._stored
        if isinstance(node, ast.Attribute):
            is_of_module = dotted(node).partition(".")[0] in self._imported
            return (
                node.attr in self._program.attributes
                or (is_of_module and node.attr in self._program.names)
                or is_environ(node)
            )
        return is_environ(node)


def _possible_names(node: Any) -> Iterator[str]:
    """Yield the names of which an expression, or a choice between some, may be the value."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.NamedExpr):
        yield from _possible_names(node.value)
    elif isinstance(node, (ast.BoolOp, ast.IfExp)):
        for each in getattr(node, "values", None) or [node.body, node.orelse]:  # type: ignore[union-attr]
            yield from _possible_names(each)


def _is_copy(value: Any) -> bool:
    """Return True for a copy of a mapping: `x.copy()`, `dict(x)`, `deepcopy(x)`, `{**x}`."""
    if isinstance(value, ast.Dict):
        return None in value.keys
    return isinstance(value, ast.Call) and name_of(value.func) in ("copy", "dict", "deepcopy")


def _is_of_self(target: Any) -> bool:
    return isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"


_LEAVES = frozenset({ast.Constant, ast.Load, ast.Store, ast.Del, str, int, type(None), bool})
_VALUES = (ast.Name, ast.Attribute, ast.Call, ast.BoolOp, ast.IfExp, ast.Subscript, ast.Tuple,
           ast.List, ast.NamedExpr)  # fmt: skip
_HANDLERS: dict[Any, Any] = {
    ast.Attribute: FileFacts._attribute, ast.Subscript: FileFacts._subscript,
    ast.Call: FileFacts._call, ast.Assign: FileFacts._assignment,
    ast.AnnAssign: FileFacts._assignment, ast.NamedExpr: FileFacts._assignment,
    ast.AugAssign: FileFacts._part, ast.Return: FileFacts._part, ast.Global: FileFacts._outer,
    ast.Nonlocal: FileFacts._outer,
    ast.Import: FileFacts._import, ast.ImportFrom: FileFacts._import, ast.For: FileFacts._loop,
    ast.AsyncFor: FileFacts._loop,
}  # fmt: skip
