"""Functions and classes of the user that an expression of a program may be; the code is not run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from elasticjob_launcher.programs.program_files import ProgramFiles
from elasticjob_launcher.programs.program_names import (
    FUNCTIONS,
    UNKNOWN_VALUE,
    Class,
    Function,
    Imported,
    Source,
)
from elasticjob_launcher.programs.started_commands import reference
from elasticjob_launcher.zygote.analysis.environment_uses import nodes

_GROUP = frozenset({"init_process_group", "init_distributed", "DistributedDataParallel", "DDP"})


class ProgramFunctions:
    """Functions and classes in the files of one program."""

    def __init__(self, files: ProgramFiles) -> None:
        self._files = files

    def callees(self, call: ast.Call, name: str, source: Source) -> list[Function | None]:
        """Return the user's functions that a call may run; None for an unknown one."""
        func = call.func
        if isinstance(func, ast.Attribute) and not name:
            owner = self._class(func.value, source)
            method = None if owner is None else self._method(owner, func.attr)
            if method is None:
                return []
            return [method._replace(owner=source.receiver if _is_super(func.value) else owner)]
        if isinstance(func, ast.Name) and source.has_commands(func.id):
            return [Function(source, one) for one in source.command(func.id)]
        return self.functions(func, source)

    def functions(self, node: Any, source: Source, depth: int = 0) -> list[Function | None]:
        """Return the user's functions that an expression may be; None for an unknown one."""
        self._files.budget.spend()
        if isinstance(node, Function):
            return [node]
        if isinstance(node, FUNCTIONS):
            return [Function(source, node)]
        if depth > 4 or not isinstance(node, (ast.Name, ast.Attribute)):
            return [None]
        if name := source.full_name(node):
            found = self._named(name)
            return [found] if isinstance(found, Function) else [None]
        return [
            function
            for value in source.values(node)
            for function in self.functions(value, source, depth + 1)
        ]

    def _named(self, name: str, depth: int = 0) -> Function | Class | None:
        """Return the user's function or class with this full name."""
        base, _, last = name.rpartition(".")
        place = self._files.find(base) if base else None
        owner = self._files.sources.get(place[0]) if place else None
        found = owner.global_name(last) if owner is not None else []
        if owner is None or len(found) != 1 or depth > 4:
            return None
        if isinstance(found[0], FUNCTIONS):
            return Function(owner, found[0])
        if isinstance(found[0], ast.ClassDef):
            return Class(owner, found[0])
        again = found[0].name if isinstance(found[0], Imported) else ""
        return self._named(again, depth + 1) if again and again != name else None

    def _class(self, node: Any, source: Source, depth: int = 0) -> Class | None:
        """Return the user's class that an expression is, or is an object of."""
        self._files.budget.spend()
        if depth > 4:
            return None
        if _is_super(node):
            owner = source.class_of_scope()
            bases = () if owner is None else owner.bases
            found = [self._class(base, source, depth + 1) for base in bases]
            return next(filter(None, found), None)
        if isinstance(node, ast.ClassDef):
            return Class(source, node)
        if isinstance(node, ast.Call):
            return self._class(node.func, source, depth + 1)
        if isinstance(node, ast.Name) and node.id in ("self", "cls"):
            return source.receiver
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return None
        if name := source.full_name(node):
            named = self._named(name)
            return named if isinstance(named, Class) else None
        values = source.values(node)
        return self._class(values[0], source, depth + 1) if len(values) == 1 else None

    def _method(self, owner: Class, name: str, depth: int = 0) -> Function | None:
        found = owner.source.own_attribute(owner.node, name)
        if found or depth > 4:
            known = len(found) == 1 and isinstance(found[0], FUNCTIONS)
            return Function(owner.source, found[0], owner) if known else None
        bases = [self._class(base, owner.source) for base in owner.node.bases]
        if None in bases and "object" not in map(reference, owner.node.bases):
            return None  # another package's class may have the method
        methods = [self._method(base, name, depth + 1) for base in bases if base is not None]
        return next(filter(None, methods), None)

    def forms_group(self, function: Function, depth: int) -> bool:
        for node in nodes(function.node):
            self._files.budget.spend()
            if reference(node) in _GROUP:
                return True
            if isinstance(node, ast.Call) and depth < 4:
                name = function.source.full_name(node.func)
                callees = self.callees(node, name, function.source)
                if any(one is not None and self.forms_group(one, depth + 1) for one in callees):
                    return True
        return False

    def arguments(
        self, function: Function, args: Sequence[Any], keywords: Sequence[Any], caller: Source
    ) -> dict[str, list[Any]]:
        """Return the functions, objects and commands that the parameters of a call may be."""
        given = function.node.args
        parameters = [*getattr(given, "posonlyargs", ()), *given.args]
        names = [one.arg for one in parameters]
        defaults = dict(zip(reversed(names), reversed(given.defaults)))
        bound: dict[str, list[Any]] = {name: [value] for name, value in defaults.items()}
        if names[:1] in (["self"], ["cls"]):
            del names[0]
        if given.vararg is not None and len(args) > len(names):
            words = ast.Tuple(elts=list(args[len(names) :]), ctx=ast.Load())
            words.lineno = getattr(args[0], "lineno", 0)
            names, args = [*names, given.vararg.arg], [*args[: len(names)], words]
        for name, value in (*zip(names, args), *((one.arg, one.value) for one in keywords)):
            if name:
                functions = [one for one in self.functions(value, caller) if one is not None]
                found = [*functions, *caller.names.commands(value)]
                bound[name] = found or [UNKNOWN_VALUE]
        return bound


def _is_super(node: Any) -> bool:
    return isinstance(node, ast.Call) and reference(node.func) == "super"
