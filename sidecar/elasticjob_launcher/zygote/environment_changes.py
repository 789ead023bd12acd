"""Static analysis of the changes that a program makes to its environment around its imports.

C code reads the environment when it is loaded, so it must be loaded in the environment that the
program would have set up by then. The program is not run: a change that is not certain, or to a
value known only at run time, counts as unknown.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from elasticjob_launcher.zygote.search_path import Environ, Unknown, Values, dotted

_DEEPEST = 5
# Functions of packages that set variables from a file.
_FROM_FILES = frozenset({"load_dotenv"})
_CHANGING = frozenset({"setdefault", "update", "pop", "popitem", "clear", "__setitem__"})
_DIRECT = frozenset({"putenv", "unsetenv"})
_NAMESPACES = frozenset({"exec", "globals", "locals", "vars"})
_ENVIRONMENT_NAMES = frozenset({"__name__", "os", "environ", "getenv"})
"""Names in conditions that no other statement rebinds unseen."""
_RUNNERS = {
    "runpy.run_path": False,
    "runpy.run_module": True,
    "run_path": False,
    "run_module": True,
}


class EnvironmentChange(NamedTuple):
    """Change of the variable `name`, or of all if empty; `value` None removes it.

    `where` is file and line. `direct` changes do not show in `os.environ`.
    """

    name: str
    value: str | None
    known: bool
    where: str
    direct: bool = False


class ProgramRun(NamedTuple):
    """Run of a module or else a file by `runpy`; `main` is True if it runs as `__main__`."""

    module: bool
    target: str
    main: bool
    certain: bool


class ChangeAnalyser:
    """Analyser of successive files; `on_change` receives the changes in execution order.

    `on_run` receives each file or module that `runpy` runs.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.environ = Environ(given)
        self.on_change: Callable[[EnvironmentChange], object] = lambda change: None
        self.on_run: Callable[[ProgramRun], object] = lambda run: None
        self.functions: dict[str, list[tuple[_File, Any]]] = {}
        self.without_effect: set[ast.AST] = set()
        """Statements and calls that were evaluated as changing no variable."""

    def file(
        self,
        tree: ast.Module,
        path: str,
        main: bool,
        imports: Callable[[Any, bool | None], object],
        certain: bool,
    ) -> None:
        """Follow the statements that run when the file runs.

        `imports` receives each import with True if it is certain to run, False if it may run and
        None if it does not run.
        """
        file = _File(self, path, imports)
        file.names["__name__"] = "__main__" if main else path
        # A name that a function may rebind has no known value.
        file.hidden = {
            name for node in nodes(tree) if isinstance(node, ast.Global) for name in node.names
        }
        file.run(tree.body, certain)

    def make(self, change: EnvironmentChange) -> None:
        if change.known:
            if not change.direct:
                self.environ.put(change.name, change.value)
        else:
            self.environ.forget(change.name)
        self.on_change(change)


class _File(Values):
    def __init__(
        self, changes: ChangeAnalyser, path: str, imports: Callable[[Any, bool | None], object]
    ) -> None:
        super().__init__(path, changes.environ)
        self._changes = changes
        self._imports = imports
        self._path = path
        self._deep = 0
        self._ended = False
        self.hidden: set[str] = set()

    def run(self, body: Iterable[ast.stmt], certain: bool) -> None:
        for node in body:
            self._statement(node, certain and not self._ended)

    def _statement(self, node: Any, certain: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._changes.functions.setdefault(node.name, []).append((self, node))
            self.names.pop(node.name, None)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, certain)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
            self._assign(node, certain)
        elif isinstance(node, ast.If):
            self._if(node, certain)
        elif isinstance(node, ast.ClassDef):
            before = dict(self.names)
            self.run(node.body, certain)
            self.names = before
        elif isinstance(node, ast.Return):
            self._ended = self._ended or bool(self._deep)
        else:
            self._block(node, certain)

    def _block(self, node: Any, certain: bool) -> None:
        """Follow any other statement, with or without nested statements."""
        loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        for field in ("test", "iter", "value", "exc", "subject", "items"):
            self._expression(getattr(node, field, None), certain)
        for target in (getattr(node, "target", None), getattr(node, "items", None)):
            self._forget_names(target)
        if isinstance(node, (ast.For, ast.AsyncFor)) and isinstance(node.target, ast.Name):
            items = getattr(node.iter, "elts", None)
            for item in items or ():
                self.name(node.target.id, item)
                self.run(node.body, certain)
            if items is not None:
                self.run(node.orelse, False)
                return
        caught = _continues_after_error(node)
        failed, known = False, set(self._changes.without_effect)
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            for each in getattr(node, field, ()):
                sure = certain and not loop and field not in ("handlers", "cases")
                if isinstance(each, ast.stmt):
                    passed_over = failed and field != "finalbody"
                    self._statement(each, sure and not self._ended and not passed_over)
                    failed = failed or (caught and _may_fail(each))
                else:
                    self.run(each.body, False)
        if loop:  # a further iteration may find other variables
            self._changes.without_effect &= known

    def _import(self, node: Any, certain: bool) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if name == "*":
                self._forget_all()
            self.names.pop(name, None)
            if isinstance(node, ast.ImportFrom) and (node.module, alias.name) == ("os", "environ"):
                self.names[name] = self.environ
        if not self._deep:
            self._imports(node, certain)

    def _if(self, node: ast.If, certain: bool) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            self.run(node.orelse, certain)
            return
        self._expression(node.test, certain)
        try:
            holds = bool(self.value(node.test))
        except Unknown:
            self.run(node.body, False)
            self.run(node.orelse, False)
        else:
            over = node.orelse if holds else node.body
            names = {each.id for each in nodes(node.test) if isinstance(each, ast.Name)}
            if names <= _ENVIRONMENT_NAMES:
                self._changes.without_effect.update(inner for each in over for inner in nodes(each))
            self._passed_over(over)
            self.run(node.body if holds else node.orelse, certain)

    def _passed_over(self, body: Iterable[ast.stmt]) -> None:
        """Report only the imports of statements that do not run; they may run another time."""
        if not self._deep:
            for node in body:
                for each in nodes(node, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda):
                    if isinstance(each, (ast.Import, ast.ImportFrom)):
                        self._imports(each, None)

    # --- names and variables

    def name(self, name: str, value: ast.expr) -> None:
        super().name(name, value)
        if name in self.hidden:
            self.names.pop(name, None)

    def _forget_names(self, node: Any) -> None:
        for each in node if isinstance(node, list) else [node]:
            if isinstance(each, ast.AST):
                for inner in nodes(each):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        self.names.pop(inner.id, None)

    def _forget_all(self) -> None:
        """Remove the values of names that other code may set, as an import of `*` does."""
        kept = ("__name__", "__file__")
        self.names = {name: self.names[name] for name in kept if name in self.names}

    def _assign(self, node: Any, certain: bool) -> None:
        value = getattr(node, "value", None)
        self._expression(value, certain)
        for target in getattr(node, "targets", None) or [node.target]:
            if isinstance(target, ast.Subscript) and self._is_environ(target.value):
                key = getattr(target.slice, "value", target.slice)
                key = target.slice if isinstance(target.slice, ast.Constant) else key
                removed = isinstance(node, ast.Delete)
                value = None if isinstance(node, ast.AugAssign) else value
                self._put(node, key, None if removed else value, certain, removed)
            elif self._is_environ(target) and not isinstance(target, ast.Name):
                items = [value] if isinstance(node, ast.AugAssign) else [None]
                self._update(node, items, [], certain)
            elif isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
                if certain and value is not None:
                    self.name(target.id, value)
                else:
                    self.names.pop(target.id, None)
            elif self._is_environ(target):
                self._update(node, [value], [], certain)
            else:
                self._forget_names(target)
                if isinstance(target, ast.Name):
                    self.names.pop(target.id, None)
                elif any(map(_opens_namespace, nodes(target))):
                    self._forget_all()

    def _is_environ(self, node: Any) -> bool:
        known = isinstance(node, ast.Name) and isinstance(self.names.get(node.id), Environ)
        return known or is_environ(node)

    def _put(
        self,
        node: Any,
        key: Any,
        value: Any,
        certain: bool,
        removed: bool = False,
        direct: bool = False,
    ) -> None:
        try:
            name = self.value(key)
        except Unknown:
            name = ""
        text: Any = None
        known = certain and isinstance(name, str) and bool(name)
        if not removed:
            try:
                text = self.value(value) if value is not None else None
            except Unknown:
                text = None
            known = known and isinstance(text, str)
        where = f"{self._path}, line {node.lineno}"
        self._changes.make(
            EnvironmentChange(str(name), text if known else None, known, where, direct)
        )

    def _update(
        self, node: Any, items: Sequence[Any], words: Sequence[ast.keyword], certain: bool
    ) -> None:
        for item in items:
            keys = getattr(item, "keys", None)
            if isinstance(item, ast.Dict) and None not in item.keys:
                for key, value in zip(item.keys, item.values):
                    self._put(node, key, value, certain)
            elif not isinstance(item, ast.Dict) or keys is not None:
                self._put(node, None, None, False)
        for word in words:
            key = ast.Constant(word.arg) if word.arg else None
            self._put(node, key, word.value, certain)

    # --- calls

    def _expression(self, node: Any, certain: bool) -> None:
        for each in node if isinstance(node, list) else [node]:
            if isinstance(each, ast.AST):
                # Inner calls run first.
                found: list[ast.AST] = list(nodes(each, ast.Lambda))
                for inner in reversed(found):
                    if isinstance(inner, ast.Call):
                        self._call(inner, certain)
                    elif isinstance(inner, ast.NamedExpr):
                        self.names.pop(inner.target.id, None)

    def _call(self, call: ast.Call, certain: bool) -> None:
        function: Any = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        if _opens_namespace(call):
            self._forget_all()
        elif name in _FROM_FILES:
            self._put(call, None, None, False)
        elif name in _DIRECT and call.args:
            self._put(call, call.args[0], call.args[-1], certain, name == "unsetenv", True)
        elif isinstance(function, ast.Attribute) and self._is_environ(function.value):
            self._of_environ(call, name, certain)
        elif dotted(function) in _RUNNERS and call.args and not self._deep:
            self._run_program(call, _RUNNERS[dotted(function)], certain)
        elif name in self._changes.functions and self._deep < _DEEPEST:
            known = self._changes.functions[name]
            for file, body in known:
                if changes_variables(body, self._changes.functions):
                    file.call(body, call, self, certain and len(known) == 1)

    def _run_program(self, call: ast.Call, module: bool, certain: bool) -> None:
        names = [word.value for word in call.keywords if word.arg == "run_name"]
        try:
            target = os.fspath(self.value(call.args[0]))
            main = any(self.value(name) == "__main__" for name in names)
        except (Unknown, TypeError):
            return
        self._changes.on_run(ProgramRun(module, target, main, certain))

    def _of_environ(self, call: ast.Call, name: str, certain: bool) -> None:
        if name in ("setdefault", "__setitem__") and len(call.args) == 2:
            if name == "setdefault":
                try:
                    if self.value(call.args[0]) in self.environ:
                        self._changes.without_effect.add(call)
                        return
                except Unknown:
                    certain = False
            self._put(call, call.args[0], call.args[1], certain)
        elif name == "pop" and call.args:
            self._put(call, call.args[0], None, certain, True)
        elif name == "update":
            self._update(call, call.args, call.keywords, certain)
        elif name in _CHANGING:
            self._put(call, None, None, False)

    def call(self, function: Any, call: ast.Call, caller: _File, certain: bool) -> None:
        """Follow a call of a function of this file."""
        before, ended = dict(self.names), self._ended
        arguments = function.args
        names = [each.arg for each in [*getattr(arguments, "posonlyargs", ()), *arguments.args]]
        defaults = dict(zip(reversed(names), reversed(arguments.defaults)))
        given = {**defaults, **dict(zip(names, call.args))}
        given.update((word.arg, word.value) for word in call.keywords if word.arg)
        values = {}
        for name, value in given.items():
            try:
                values[name] = (self if value is defaults.get(name) else caller).value(value)
            except Unknown:
                continue
        for each in [*names, *(each.arg for each in arguments.kwonlyargs)]:
            self.names.pop(each, None)
        self.names.update(values)
        self._deep, self._ended = caller._deep + 1, False
        self.run(function.body, certain)
        self._deep, self._ended = self._deep - 1, ended
        self.names = before


def _opens_namespace(node: Any) -> bool:
    """Return True for a call through which a program may rebind any name."""
    name = getattr(getattr(node, "func", None), "id", "")
    return name in _NAMESPACES and (name == "exec" or not node.args)


def _continues_after_error(node: ast.AST) -> bool:
    """Return True for a `try` of which a handler lets the program go on."""
    for handler in getattr(node, "handlers", ()):
        last = handler.body[-1]
        call = getattr(getattr(last, "value", None), "func", None)
        ends = getattr(call, "attr", getattr(call, "id", "")) in ("exit", "_exit")
        if not (isinstance(last, ast.Raise) or ends):
            return True
    return False


def _may_fail(node: ast.AST) -> bool:
    """Return True if a statement imports or calls something, other than a method of `environ`."""
    for each in nodes(node, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda):
        if isinstance(each, (ast.Import, ast.ImportFrom)):
            return True
        if isinstance(each, ast.Call) and not is_environ(getattr(each.func, "value", None)):
            return True
    return False


def changes_variables(node: ast.AST, functions: Mapping[str, Sequence[Any]]) -> bool:
    """Return True if a call of this function may change a variable, directly or indirectly."""
    todo, seen = [node], set()
    while todo:
        for each in nodes(todo.pop()):
            if isinstance(each, ast.Subscript) and not isinstance(each.ctx, ast.Load):
                if is_environ(each.value):
                    return True
            elif isinstance(each, ast.AugAssign) and is_environ(each.target):
                return True
            elif isinstance(each, ast.Call):
                owner: Any = each.func
                name = getattr(owner, "attr", getattr(owner, "id", ""))
                if name in _FROM_FILES | _DIRECT:
                    return True
                if name in _CHANGING and is_environ(getattr(owner, "value", None)):
                    return True
                if name in functions and name not in seen:
                    seen.add(name)
                    todo += [body for _, body in functions[name]]
    return False


def variables_set(tree: ast.AST, without: Collection[ast.AST] = ()) -> Iterator[str]:
    """Yield the names of variables changed anywhere in a file; imported modules may read them.

    Changes by the nodes `without` do not count.
    """
    for node in nodes(tree):
        if node in without:
            continue
        if isinstance(node, (ast.Assign, ast.Delete, ast.AugAssign)):
            for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
                if isinstance(target, ast.Subscript) and is_environ(target.value):
                    yield from _texts([getattr(target.slice, "value", target.slice)])
            if isinstance(node, ast.AugAssign) and is_environ(node.target):
                yield from _texts(getattr(node.value, "keys", ()))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = node.func.value, node.func.attr
            if name in _DIRECT or (name in _CHANGING and is_environ(owner)):
                yield from _texts(node.args[:1])
            if name == "update" and is_environ(owner):
                yield from (word.arg for word in node.keywords if word.arg)
                for arg in node.args:
                    if isinstance(arg, ast.Dict):
                        yield from _texts(arg.keys)


def nodes(tree: ast.AST, *without: type) -> Iterator[ast.AST]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, without))


def is_environ(node: Any) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _texts(found: Sequence[Any]) -> Iterator[str]:
    for node in found:
        value = node if isinstance(node, str) else getattr(node, "value", None)
        if isinstance(value, str):
            yield value
