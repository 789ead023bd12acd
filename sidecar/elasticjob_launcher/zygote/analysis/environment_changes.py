"""Static analysis of the changes that a program makes to its environment around its imports.

C code reads the environment when it is loaded, so it must be loaded in the environment that the
program would have set up by then. The program is not run: a change that is not certain, or to a
value known only at run time, counts as unknown.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from elasticjob_launcher.zygote.analysis.changes import (
    ChangeRecorder,
    EnvironmentChange,
    ProgramRun,
)
from elasticjob_launcher.zygote.analysis.environment_uses import (
    CHANGING,
    DIRECT,
    SEEDS,
    continues_after_error,
    is_changing_method,
    is_type_checking,
    key_of,
    leaves_iterations,
    may_be_environ,
    may_fail,
    name_of,
    nodes,
    opens_namespace,
    parts_in_order,
    passes_environ,
    sets_unseen,
)
from elasticjob_launcher.zygote.analysis.file_facts import FileFacts
from elasticjob_launcher.zygote.analysis.program_scope import (
    IMPORTERS,
    Scope,
    are_names,
    paired,
    parameter_names,
)
from elasticjob_launcher.zygote.search_path import Environ, Unknown, dotted
from elasticjob_launcher.zygote.worker_environment import differs_by_worker

_DEEPEST = 5
_ENVIRONMENT_NAMES = frozenset({"__name__", "os", "environ", "getenv"})
"""Names in conditions that no other statement rebinds unseen."""
_RUNNERS = {
    "runpy.run_path": False,
    "runpy.run_module": True,
    "run_path": False,
    "run_module": True,
}


class ChangeAnalyser(ChangeRecorder):
    """Analyser of successive files."""

    def file(
        self,
        tree: ast.Module,
        facts: FileFacts,
        path: str,
        main: bool,
        imports: Callable[[Any, bool | None], object],
        certain: bool,
    ) -> None:
        """Follow the statements that run when the file runs.

        `imports` receives each import with True if it is certain to run, False if it may run and
        None if it does not run.
        """
        file = _File(self, path, facts, imports)
        file.names["__name__"] = "__main__" if main else path
        # A name that a function may rebind has no known value.
        file.hidden = facts.rebound
        file.run(tree.body, certain)


class _File(Scope):
    def __init__(
        self,
        changes: ChangeRecorder,
        path: str,
        facts: FileFacts,
        imports: Callable[[Any, bool | None], object],
    ) -> None:
        super().__init__(path, changes.environ, changes.functions)
        self._facts = facts
        self.environs = facts.environs(None)
        self._changes = changes
        self._imports = imports
        self._deep = 0
        self._ended = False

    def run(self, body: Iterable[ast.stmt], certain: bool) -> None:
        for node in body:
            self._statement(node, certain and not self._ended)

    def _statement(self, node: Any, certain: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node, certain)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, certain)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
            self._assign(node, certain)
        elif isinstance(node, ast.If):
            self._if(node, certain)
        elif isinstance(node, ast.ClassDef):
            self._class(node, certain)
        elif isinstance(node, ast.Return):
            self._expression(node.value, certain)
            if may_be_environ(node.value, self.is_environ):
                self._doubt_variables({""}, node)
            self._ended = self._ended or bool(self._deep)
        else:
            self._block(node, certain)

    def _function(self, node: Any, certain: bool) -> None:
        self._expression([*node.args.defaults, *node.args.kw_defaults], certain)
        self.functions.add(node.name, self, node)
        self.forget(node.name)
        for decorator in reversed(node.decorator_list):
            if isinstance(decorator, ast.Call):
                self._expression(decorator, certain)
            else:
                self._expression(getattr(decorator, "value", None), certain)
                self._call(ast.copy_location(ast.Call(decorator, [], []), node), certain)
        if any(map(self.runs_decorated, node.decorator_list)):
            self._doubt(node, node)
        elif node.decorator_list:
            self.functions.doubt(node)

    def _class(self, node: ast.ClassDef, certain: bool) -> None:
        words = [word.value for word in node.keywords]
        names = [base for base in node.bases if are_names(base)]
        others = [base for base in node.bases if base not in names]
        self._expression([*node.decorator_list, *others, *words], certain)
        for base in names:
            self._doubt_functions(base, is_base=True)
        before, classes = dict(self.names), dict(self.classes)
        self.run(node.body, certain)
        if any(isinstance(self.names[name], Environ) for name in self.names.keys() - before):
            self._doubt_variables({""}, node)
        self.names, self.classes = before, classes
        self.forget(node.name)
        self.functions.add_class(node, self)

    def _block(self, node: Any, certain: bool) -> None:
        """Follow any other statement, with or without nested statements."""
        loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        runs = not (isinstance(node, ast.Assert) and sys.flags.optimize)
        for field in ("test", "iter", "value", "exc", "cause", "subject", "items"):
            self._expression(getattr(node, field, None), certain and runs)
        self._expression(getattr(node, "msg", None), False)
        for target in (getattr(node, "target", None), getattr(node, "items", None)):
            self._forget_names(target)
        if isinstance(node, (ast.For, ast.AsyncFor)) and isinstance(node.target, ast.Name):
            items = getattr(node.iter, "elts", None)
            for item in items or ():
                self.name(node.target.id, item)
                self.run(node.body, certain and not leaves_iterations(node))
            if items is not None:
                self.run(node.orelse, False)
                return
        if loop:  # a further iteration finds the names that this one binds
            for inner in nodes(node, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    self.forget(inner.id)
        caught = continues_after_error(node)
        failed, known = False, set(self._changes.without_effect)
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            for each in getattr(node, field, ()):
                sure = certain and not loop and field not in ("handlers", "cases")
                if isinstance(each, ast.stmt):
                    passed_over = failed and field != "finalbody"
                    self._statement(each, sure and not self._ended and not passed_over)
                    failed = failed or (caught and may_fail(each, self.names))
                else:
                    self._alternative(each)
        if loop:  # a further iteration may find other variables
            self._changes.without_effect &= known

    def _alternative(self, each: Any) -> None:
        """Follow a handler of an exception or a case of a `match`, which may not run."""
        for part in (getattr(each, "type", None), getattr(each, "guard", None)):
            self._expression(None if are_names(part) else part, False)
        pattern = getattr(each, "pattern", None)
        for inner in [each] if pattern is None else nodes(pattern):
            for field in ("name", "rest"):
                self.forget(getattr(inner, field, None))
        self.run(each.body, False)

    def _import(self, node: Any, certain: bool) -> None:
        if not self._deep:
            self._imports(node, certain)
        self.bind_imports(node)
        if not self._deep:
            self.environs = self._facts.environs(None)  # of the files that it runs, too

    def _if(self, node: ast.If, certain: bool) -> None:
        test = node.test
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if is_type_checking(getattr(test, "operand", test) if negated else test):
            self.run(node.body if negated else node.orelse, certain)
            return
        holds = self._truth(node.test, certain)
        if holds is None:
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

    def _forget_names(self, node: Any) -> None:
        """Drop the values of names and variables to which a statement assigns unknown ones."""
        for each in node if isinstance(node, list) else [node]:
            for inner in nodes(each) if isinstance(each, ast.AST) else ():
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    self.forget(inner.id)
                elif (
                    isinstance(inner, ast.Subscript)
                    and not isinstance(inner.ctx, ast.Load)
                    and self.is_environ(inner.value)
                ):
                    self._put(inner, key_of(inner), None, False)

    def _assign(self, node: Any, certain: bool) -> None:
        value = getattr(node, "value", None)
        self._expression(value, certain)
        self.note_modules(node)
        for target in getattr(node, "targets", None) or [node.target]:
            for each, constant in paired(target, value):
                self._assign_to(node, each, constant, certain)

    def _assign_to(self, node: Any, target: Any, value: Any, certain: bool) -> None:
        removed = isinstance(node, ast.Delete)
        if isinstance(target, ast.Subscript) and self.is_environ(target.value):
            self._expression(target.slice, certain)
            value = None if isinstance(node, ast.AugAssign) else value
            certain = certain and self.is_surely_environ(target.value)
            self._put(node, key_of(target), None if removed else value, certain, removed)
        elif self.is_environ(target) and not isinstance(target, ast.Name):
            items = [value] if isinstance(node, ast.AugAssign) else [None]
            self._update(node, items, [], certain)
        elif isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            if certain and value is not None:
                self.name(target.id, value)
            else:
                self.forget(target.id)
        elif self.is_environ(target):
            self._update(node, [value], [], certain and self.is_surely_environ(target))
        else:
            self._expression(getattr(target, "value", None), certain)
            is_kept = value is None or node in self._facts.kept
            if not is_kept and may_be_environ(value, self.is_environ):
                self._doubt_variables({""}, node)
            self._forget_names(target)
            if isinstance(target, ast.Name):
                self.forget(target.id)
            elif any(map(opens_namespace, nodes(target))):
                self.forget_all()

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
        name = os.fsdecode(name) if isinstance(name, bytes) else name
        text: Any = None
        known = certain and isinstance(name, str) and bool(name)
        if not removed:
            try:
                text = self.value(value) if value is not None else None
            except Unknown:
                text = None
            known = known and isinstance(text, str)
        where = f"{self.path}, line {node.lineno}"
        self._changes.make(
            EnvironmentChange(str(name), text if known else None, known, where, direct)
        )

    def _update(
        self, node: Any, items: Sequence[Any], words: Sequence[ast.keyword], certain: bool
    ) -> None:
        for item in items:
            if isinstance(item, ast.Dict) and None not in item.keys:
                for key, value in zip(item.keys, item.values):
                    self._put(node, key, value, certain)
            else:
                self._put(node, None, None, False)
        for word in words:
            key = ast.Constant(word.arg) if word.arg else None
            self._put(node, key, word.value, certain)

    # --- calls

    def _expression(self, node: Any, certain: bool) -> None:
        """Follow the calls in an expression, in the order in which they run."""
        for each in node if isinstance(node, list) else [node]:
            if isinstance(each, ast.BoolOp):
                self._operands(each, certain)
            elif isinstance(each, ast.IfExp):
                holds = self._truth(each.test, certain)
                for branch, chosen in ((each.body, True), (each.orelse, False)):
                    if holds in (None, chosen):
                        self._expression(branch, certain and holds is chosen)
            elif isinstance(each, ast.AST):
                called, handler = getattr(each, "func", None), self.handler_of(each)
                first = getattr(each, "args", None)
                for part, always in parts_in_order(each):
                    followed: Any = None if self.is_only_named(part, each) else part
                    if part is called and isinstance(part, (ast.Name, ast.Attribute)):
                        followed = getattr(part, "value", None)  # no function that is passed on
                        if self.functions.is_static_of(name_of(part), self.own_class(followed)):
                            followed = None
                    elif part is handler:
                        self.doubt_handler(part, first is not None and part is not first[0])
                        followed = None
                    self._expression(followed, certain and always)
                self._after_parts(each, certain)

    def _operands(self, node: ast.BoolOp, certain: bool) -> None:
        for each in node.values:
            holds = self._truth(each, certain)
            if holds is isinstance(node.op, ast.Or):
                return
            certain = certain and holds is not None

    def _after_parts(self, node: ast.AST, certain: bool) -> None:
        """Follow an expression whose parts have been evaluated."""
        if isinstance(node, ast.Call):
            called = node.func
            self._expression(getattr(called, "body", None), certain)  # of a lambda
            self._call(node, certain)
        elif isinstance(node, ast.NamedExpr):
            self.forget(getattr(node.target, "id", ""))
        elif isinstance(node, ast.Lambda):
            self._doubt(node, node)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            self._doubt_functions(node)
            if is_changing_method(node, self.is_environ):
                self.functions.doubtful.add("")
                self._doubt_variables({""}, node)

    def _doubt_functions(self, node: ast.expr, is_base: bool = False) -> None:
        """Report what the functions of that name may change, now that they are passed on.

        Of a class, these are its constructors and the methods that Python calls; of the base of
        another, that which its definition calls.
        """
        name = self.called_name(node)
        found = self.functions.of.get(name, ())
        if not found or self.functions.effects(name) <= self._changes.doubted:
            return
        for file, function in found:
            passed = self.is_from(node, file) and self.may_be(node, function)
            if passed and (not is_base or function.name == "__init_subclass__"):
                self._doubt(function, node)

    def _doubt(self, function: ast.AST, node: Any) -> None:
        """Report what a function may change from now on."""
        names = self.functions.doubt(function)
        self._doubt_variables(names, node)
        self._changes.doubted |= names

    def _doubt_variables(self, names: Iterable[str], node: Any) -> None:
        where = f"{self.path}, line {node.lineno}"
        for name in sorted(n for n in {*names} - SEEDS if not differs_by_worker(n)):
            self._changes.make(EnvironmentChange(name, None, False, where, doubtful=True))

    def _truth(self, node: ast.expr, certain: bool) -> bool | None:
        """Follow an expression; return its truth if that is known, and if it changes nothing."""
        truth: bool | None = None
        with suppress(Unknown):
            truth = bool(self.value(node))
        count = self._changes.count
        self._expression(node, certain)
        return None if self._changes.count > count or self.functions.are_doubtful(node) else truth

    def _call(self, call: ast.Call, certain: bool) -> None:
        function: Any = call.func
        name = self.called_name(function)
        found = self.functions.of.get(name, ())
        own = bool(found)
        passed = passes_environ(call, True, self.is_environ) and (
            any(self.may_run(function, *each) for each in found)
            or passes_environ(call, False, self.is_environ)
        )
        if passed:
            self.functions.doubtful.add("")
        is_exec = name == "exec" and opens_namespace(call)
        followed = own and self._deep < _DEEPEST and not self.functions.are_many
        if is_exec or (passed and not followed):
            self._doubt_variables({""}, call)
        if opens_namespace(call):
            self.forget_all()
        elif name in IMPORTERS and not own and len(call.args) == 1:
            self._import_by_name(call, certain)
        elif sets_unseen(call, name) and not own:
            self._put(call, None, None, False)
        elif name in DIRECT and call.args:
            self._put(call, call.args[0], call.args[-1], certain, name == "unsetenv", True)
        elif isinstance(function, ast.Attribute) and self.is_environ(function.value):
            self._of_environ(call, name, certain and self.is_surely_environ(function.value))
        elif dotted(function) in _RUNNERS and call.args and not self._deep:
            self._run_program(call, _RUNNERS[dotted(function)], certain)
        elif followed:
            known = [each for each in found if not self.functions.is_implicit(each[1], name)]
            may_change = passed or self.functions.effects(name)
            for file, body in found if may_change else ():
                changes = bool(self.functions.changes(body))
                if changes and (file, body) not in known:
                    self._doubt(body, call)
                elif (changes or passed) and not isinstance(body, ast.Lambda):
                    sure = certain and len(known) == 1 and self.calls(function, file, body)
                    file.call(body, call, self, sure)
        elif own:
            self._doubt_functions(function)

    def _import_by_name(self, call: ast.Call, certain: bool) -> None:
        with suppress(Unknown):
            target = self.value(call.args[0])
            if isinstance(target, str) and not target.startswith("."):
                names = [ast.alias(name=target, asname="")]
                self._import(ast.copy_location(ast.Import(names=names), call), certain)

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
        elif name in CHANGING:
            self._put(call, None, None, False)

    def call(self, function: Any, call: ast.Call, caller: _File, certain: bool) -> None:
        """Follow a call of a function of this file."""
        self.functions.followed += 1
        before, classes, ended = dict(self.names), dict(self.classes), self._ended
        values = self.arguments(function, call, caller)
        self.bind_receiver(function)
        for name in parameter_names(function):
            self.names.pop(name, None)
        self.names.update(values)
        deep, environs = self._deep, self.environs
        self._deep, self._ended = caller._deep + 1, False
        self.environs = self._facts.environs(function)
        self.run(function.body, certain)
        self._deep, self._ended, self.environs = deep, ended, environs
        self.names, self.classes = before, classes
