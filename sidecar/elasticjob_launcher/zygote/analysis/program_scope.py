"""Names of a program's file: their values, and the modules from which they are imported. No I/O."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from elasticjob_launcher.zygote.analysis.environment_uses import (
    is_environ,
    is_run_later,
    is_static,
    name_of,
    nodes,
    runs_argument,
)
from elasticjob_launcher.zygote.analysis.file_facts import Environs
from elasticjob_launcher.zygote.analysis.own_functions import CONSTRUCTORS, Functions
from elasticjob_launcher.zygote.search_path import Environ, Unknown, Values, dotted

IMPORTERS = frozenset({"import_module", "__import__"})
_GENERICS = frozenset({"dict", "frozenset", "list", "set", "tuple", "type"})
"""Classes of Python whose subscripts are annotations."""
_HANDLERS = {"atexit.register": 0, "signal.signal": 1}
"""Functions that register a handler, each with the place of its argument."""


class Scope(Values):
    """Names of one file. `hidden` are those that a function may rebind: their value is unknown."""

    def __init__(self, path: str, environ: Environ, functions: Functions) -> None:
        super().__init__(path, environ)
        self.path = path
        self.functions = functions
        self.hidden: set[str] = set()
        self.environs: Environs | None = None
        """Predicate for `os.environ` in the function that is followed, or at module level."""
        self._imported: dict[str, tuple[str, str]] = {}
        self.modules: set[str] = set()
        """Names that have been bound to modules."""
        self.classes: dict[str, str] = {}
        """Names of objects, each with its class in a file of the program."""

    def name(self, name: str, value: ast.expr) -> None:
        made = self.class_of(value)
        super().name(name, value)
        self._imported.pop(name, None)
        self.classes.pop(name, None)
        if name in self.hidden or self.functions.are_doubtful(value):
            self.names.pop(name, None)
        elif made:
            self.classes[name] = made

    def class_of(self, node: Any) -> str:
        """Return the program's class of which an expression is an object; empty if unknown."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id, "")
        if not isinstance(node, ast.Call):
            return ""
        name = self.called_name(node.func)
        if name == "super":
            return self.classes.get("super()", "")
        if name == "parse_args" and not self.class_of(getattr(node.func, "value", None)):
            return "" if name in self.functions.of else "Namespace"
        known = self.functions.classes.get(name)
        return name if known is not None and self.is_from(node.func, known[0]) else ""

    def forget(self, name: Any) -> None:
        """Drop the value, the import and the class of a rebound name."""
        self.names.pop(name, None)
        self._imported.pop(name, None)
        self.classes.pop(name, None)

    def forget_all(self) -> None:
        """Remove the values of names that other code may set, as an import of `*` does."""
        kept = ("__name__", "__file__")
        self.classes = {}
        self.names = {name: self.names[name] for name in kept if name in self.names}

    def bind_imports(self, node: Any) -> None:
        """Record the names of an import statement."""
        module = (getattr(node, "module", None) or "").rpartition(".")[2]
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.modules.add(name)
            if name == "*":
                self.forget_all()
            self.forget(name)
            if isinstance(node, ast.ImportFrom):
                self._imported[name] = (module, alias.name)
                if (node.module, alias.name) == ("os", "environ"):
                    self.names[name] = self.environ
            else:
                self._imported[name] = (alias.name.rpartition(".")[2] if alias.asname else name, "")

    def is_environ(self, node: Any) -> bool:
        """Return True for an expression that is, or may be, `os.environ`."""
        return self.is_surely_environ(node) or (self.environs is not None and self.environs(node))

    def is_surely_environ(self, node: Any) -> bool:
        """Return False for a name or attribute that may be another object."""
        if isinstance(node, ast.Name) and isinstance(self.names.get(node.id), Environ):
            return True
        return is_environ(node)

    def called_name(self, node: Any) -> str:
        """Return the name that a function has in its own file."""
        imported = self._imported.get(getattr(node, "id", ""), ("", ""))
        return imported[1] or name_of(node)

    def calls(self, called: Any, file: Scope, function: ast.AST) -> bool:
        """Return True if a call by that expression runs this function of a file at once.

        Other objects may have a method, and other packages a function, of the same name.
        """
        if is_run_later(function) or not self.is_from(called, file):
            return False
        if self.functions.is_unsure(function, self.called_name(called)):
            return False
        owner = getattr(called, "value", None)
        if self._is_imported(called):
            return True
        method_of = self.functions.methods.get(function)
        if method_of is not None and is_static(function) and self.own_class(owner):
            return self.functions.is_a(self.own_class(owner), method_of)
        if owner is None:
            return method_of is None or getattr(function, "name", "") in CONSTRUCTORS
        return method_of is not None and self.functions.is_a(self.class_of(owner), method_of)

    def may_run(self, called: Any, file: Scope, function: Any) -> bool:
        """Return False for a call that by its form cannot be one of this function of a file."""
        is_method = function in self.functions.methods and function.name not in CONSTRUCTORS
        return self.is_from(called, file) and not (is_method and isinstance(called, ast.Name))

    def own_class(self, node: Any) -> str:
        """Return the name of the class of the program that an expression is; empty otherwise."""
        name = self.called_name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        known = self.functions.classes.get(name)
        return name if known is not None and self.is_from(node, known[0]) else ""

    def note_modules(self, assignment: Any) -> None:
        """Record the targets of an assignment of an imported module."""
        value = getattr(assignment, "value", None)
        if isinstance(value, ast.Call) and self.called_name(value.func) in IMPORTERS:
            targets = getattr(assignment, "targets", ())
            self.modules.update(each.id for each in targets if isinstance(each, ast.Name))

    def may_be(self, passed: ast.expr, function: ast.AST) -> bool:
        """Return False for an attribute of an object that has no such method."""
        owner = getattr(passed, "value", None)
        first = dotted(passed).partition(".")[0]
        if owner is None or self._is_imported(passed) or first in self.modules:
            return True
        method_of, made = self.functions.methods.get(function), self.class_of(owner)
        is_a = self.functions.is_a
        return method_of is not None and (
            not made or is_a(made, method_of) or is_a(method_of, made)
        )

    def _is_imported(self, called: Any) -> bool:
        return dotted(called).partition(".")[0] in self._imported

    def is_from(self, called: Any, file: Scope) -> bool:
        """Return False for a name that is imported from another module than that file."""
        if not self._is_imported(called):
            return True
        module, name = self._imported[dotted(called).partition(".")[0]]
        owner = getattr(called, "value", None)
        if owner is not None:
            module = getattr(owner, "attr", name or module)
        return not module or module in PurePath(file.path).with_suffix("").parts

    def runs_decorated(self, decorator: ast.expr) -> bool:
        """Return True for a decorator of the program that calls the function it is given."""
        found = self.functions.of.get(self.called_name(decorator), ())
        return any(self.is_from(decorator, file) and runs_argument(body) for file, body in found)

    def is_only_named(self, part: ast.AST, of: Any) -> bool:
        """Return True for a class or function that an expression neither calls nor passes on."""
        if isinstance(of, ast.Attribute):
            return isinstance(part, ast.Name) and (
                of.attr not in self.functions.of
                or self.functions.is_static_of(of.attr, self.own_class(part))
            )
        if isinstance(of, ast.Call):
            tests = name_of(of.func) in ("isinstance", "issubclass")
            return tests and part in of.args and are_names(part)
        if isinstance(of, ast.BinOp) and isinstance(of.op, ast.BitOr):
            return bool(self.own_class(part)) and "__or__" not in self.functions.of
        if isinstance(of, ast.Subscript) and part is of.slice:
            return self._is_generic(of.value) and not any(
                isinstance(each, ast.Call) for each in nodes(part)
            )
        return False

    def _is_generic(self, node: ast.expr) -> bool:
        """Return True for a name of `typing` or `collections.abc`, and for `list`, `dict`, …"""
        first = dotted(node).partition(".")[0]
        if first in self._imported:
            return self._imported[first][0] in ("typing", "abc", "typing_extensions")
        return dotted(node) in _GENERICS and first not in self.names

    def handler_of(self, node: Any) -> ast.AST | None:
        """Return the function that a call registers for a signal or the end of the process."""
        if not isinstance(node, ast.Call):
            return None
        function = dotted(node.func)
        first, _, rest = function.partition(".")
        module, name = self._imported.get(first, ("", ""))
        place = _HANDLERS.get(f"{module}.{name or rest}")
        found = node.args[place] if place is not None and len(node.args) > place else None
        return found if isinstance(found, (ast.Name, ast.Attribute, ast.Lambda)) else None

    def doubt_handler(self, handler: ast.AST, is_of_signal: bool) -> None:
        """Make conditions on what a handler changes unknown; imports usually precede its call.

        The program may send the signal to itself.
        """
        found = self.functions.of.get(self.called_name(handler), ())
        for file, function in [(self, handler)] if isinstance(handler, ast.Lambda) else [*found]:
            self.functions.doubt(function)
            if is_of_signal:
                self.functions.add_handler(file, function)

    def bind_receiver(self, function: Any) -> None:
        """Record the class of a method's first argument, for the time of its call."""
        owner = None if is_static(function) else self.functions.methods.get(function)
        names = parameter_names(function)
        for name in names:
            self.classes.pop(name, None)
        if owner is not None and names:
            self.classes.update({names[0]: owner, "super()": owner})

    def arguments(self, function: Any, call: ast.Call, caller: Scope) -> Mapping[str, Any]:
        """Return the known values of a function's parameters in that call."""
        parameters = function.args
        names = [each.arg for each in [*getattr(parameters, "posonlyargs", ()), *parameters.args]]
        defaults = dict(zip(reversed(names), reversed(parameters.defaults)))
        given: dict[str, Any] = {}
        if all(word.arg for word in call.keywords) and not _is_any_starred(call.args):
            is_method = function in self.functions.methods and not is_static(function)
            given = {**defaults, **dict(zip(names[is_method:], call.args))}
        given.update((word.arg, word.value) for word in call.keywords if word.arg)
        values = {}
        for name, value in given.items():
            try:
                values[name] = (self if value is defaults.get(name) else caller).value(value)
            except Unknown:
                continue
        return values


def parameter_names(function: Any) -> list[str]:
    found = function.args
    positional = [*getattr(found, "posonlyargs", ()), *found.args, *found.kwonlyargs]
    return [each.arg for each in [*positional, found.vararg, found.kwarg] if each]


def are_names(node: Any) -> bool:
    """Return True for a name, also a dotted one, and for several in a tuple."""
    return all(map(dotted, getattr(node, "elts", [node])))


def paired(target: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return the targets of an assignment with their values, None for one that is not known."""
    items, values = getattr(target, "elts", ()), getattr(value, "elts", ())
    if not items or len(items) != len(values) or _is_any_starred([*items, *values]):
        return [(target, value)]
    # Of the others, an earlier target may change the value.
    constants = (
        each if isinstance(each, ast.Constant) or is_environ(each) else None for each in values
    )
    return list(zip(items, constants))


def _is_any_starred(found: Sequence[Any]) -> bool:
    return any(isinstance(each, ast.Starred) for each in found)
