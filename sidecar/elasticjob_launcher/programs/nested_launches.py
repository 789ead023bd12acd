"""Static analysis of Python programs that start a launcher themselves; the program is not run.

A script such as `subprocess.run(["torchrun", …])` would start the workers once for each worker. The
analysis follows the statements that certainly run: through functions and the user's own modules. A
launch in one branch of a condition, after a statement that may have ended the function or program,
or by one of several values of a name is only possible. Possible launches count in a program that
can only start others, because it imports no package that could train.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from elasticjob_launcher.command_line.launchers import (
    Launcher,
    is_for_any_program,
    launcher_of_function,
    runs_single_itself,
)
from elasticjob_launcher.programs.program_files import (
    AnalysisBudget,
    AnalysisTooLong,
    ProgramFiles,
    imported_names,
)
from elasticjob_launcher.programs.program_functions import ProgramFunctions
from elasticjob_launcher.programs.program_names import FUNCTIONS, Function, Source
from elasticjob_launcher.programs.started_commands import (
    commands_of_call,
    launcher_of_command,
    reference,
)
from elasticjob_launcher.zygote.analysis.environment_uses import nodes
from elasticjob_launcher.zygote.search_path import dotted

_MAX_DEPTH = 12
_CALLING = frozenset(
    {"run", "Fire", "submit", "map", "starmap", "imap", "Thread", "Process"}
    | {"apply", "apply_async", "to_thread", "run_in_executor", "gather"}
)
"""Functions of other packages that call the function they are given."""
_DECORATORS = re.compile(
    r"wrap|command|group|callback|option|argument|pass_\w+|main|record|wraps|no_grad|inference_mode"
    r"|(lru_)?cache|staticmethod|classmethod|property|timer?|profile|hydra_runner|retry|contextmanager"
)
"""Decorators under which a function runs whenever it is called."""
_ABSENCES = frozenset(
    {"KeyError", "LookupError", "IndexError", "ImportError", "ModuleNotFoundError", "NameError"}
    | {"AttributeError", "ValueError", "TypeError"}
)
"""Exceptions by which a program asks for a variable, an argument or a package."""
_SIZES = frozenset({"num_gpus_per_machine", "num_machines"})


class _End(IntEnum):
    """Part of a program that a statement leaves; an error ends what should not have begun."""

    ERROR = -1
    NOTHING = 0
    LOOP = 1
    FUNCTION = 2
    PROGRAM = 3


class NestedLaunch(NamedTuple):
    """Place in a program's file that starts a launcher.

    `alone` is True if the program's files import nothing that trains besides.
    """

    path: str
    line: int
    launcher: Launcher
    alone: bool = False

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.line}"


def find_nested_launch(target: str, is_module: bool, search: Sequence[str]) -> NestedLaunch | None:
    """Return the place where a Python program starts a launcher; None if none is certain.

    Args:
        target: path of a script, or the name of a module as in `python -m`.
        search: folders with the user's own modules, in order.

    Raises:
        AnalysisTooSlow: this machine is too slow for a result.
    """
    program = _Program(search)
    try:
        found = program.run(target, is_module)
    except (RecursionError, AnalysisTooLong):
        return None
    if found is None or found.alone:
        return found
    return found._replace(alone=program.only_starts())


class _Program:
    """Walk through the statements of a program.

    `_doubt` is the reason for which the current statement may not run: the part of the program that
    an earlier statement may have left. Launches in doubt are kept as possible ones.
    """

    def __init__(self, search: Sequence[str]) -> None:
        self._budget = AnalysisBudget()
        self._files = ProgramFiles(search, self._budget)
        self._functions = ProgramFunctions(self._files)
        self._possible: list[NestedLaunch] = []
        self._stack: list[Any] = []
        self._doubt = _End.NOTHING

    def run(self, target: str, is_module: bool) -> NestedLaunch | None:
        source = self._files.load_main(target, is_module)
        if source is None:
            return None
        found, _ = self._block(source.tree.body, source)
        if found is None and self._possible and self._files.only_start():
            return self._possible[0]._replace(alone=True)
        return found

    def only_starts(self) -> bool:
        """Return True if the program can only start others; a longer one may also train."""
        try:
            return self._files.only_start()
        except (RecursionError, AnalysisTooLong):
            return False

    # -- statements ---------------------------------------------------------------------

    def _block(self, body: Sequence[Any], source: Source) -> tuple[NestedLaunch | None, _End]:
        """Return the first launcher that certainly starts if these statements run, and what they
        leave at their end."""
        for index, node in enumerate(body):
            if isinstance(node, ast.If):
                found, end, is_over = self._if(node, body[index + 1 :], source)
                if found is not None or end or is_over:
                    return found, end
                continue
            found, end = self._statement(node, source)
            if found is not None or end:
                return found, end
        return None, _End.NOTHING

    def _branch(
        self, body: Sequence[Any], source: Source, doubt: _End
    ) -> tuple[NestedLaunch | None, _End, _End]:
        """Return the launcher that starts if this branch is taken, what it leaves, and the doubt
        behind it."""
        before, self._doubt = self._doubt, doubt
        found, end = self._block(body, source)
        after, self._doubt = self._doubt, before
        if found is not None:
            end = next(filter(None, map(_end_of, body)), _End.NOTHING)
        return found, end, after

    def _if(
        self, node: ast.If, rest: Sequence[Any], source: Source
    ) -> tuple[NestedLaunch | None, _End, bool]:
        """Return the launcher, what the statement leaves, and True if `rest` was followed too."""
        if "TYPE_CHECKING" in ast.dump(node.test):
            return (*self._block(node.orelse, source), False)
        if (is_main := _main_comparison(node.test)) is not None:
            body = node.body if is_main is source.is_main else node.orelse
            return (*self._block(body, source), False)
        if found := self._expressions(node.test, source):
            return found, _End.NOTHING, False
        first, first_end, first_doubt = self._branch(node.body, source, self._doubt)
        second, second_end, second_doubt = self._branch(node.orelse, source, self._doubt)
        is_over = False
        if first is not None and first_end > 0 and second is None and not second_end:
            second, second_end, second_doubt = self._branch(rest, source, second_doubt)
            is_over = True
        elif second is not None and second_end > 0 and first is None and not first_end:
            first, first_end, first_doubt = self._branch(rest, source, first_doubt)
            is_over = True
        if first is not None and second is not None:
            return first, _End.NOTHING, is_over
        self._possible += [one for one in (first, second) if one is not None]
        ends = (first_end, second_end)
        if all(ends):
            return None, min([end for end in ends if end > 0], default=_End.ERROR), is_over
        doubts = [self._doubt, *(end for end in ends if end > 0)]
        doubts += [first_doubt] * (not first_end) + [second_doubt] * (not second_end)
        self._doubt = max(doubts)
        return None, _End.NOTHING, is_over

    def _statement(self, node: Any, source: Source) -> tuple[NestedLaunch | None, _End]:
        """Return the launcher that a statement certainly starts, and what it leaves."""
        self._budget.spend()
        if isinstance(node, FUNCTIONS):
            return None, _End.NOTHING
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._imports(node, source), _End.NOTHING
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(node, source)
        for name, value in ast.iter_fields(node):
            if name in ("handlers", "orelse", "finalbody", "cases", "body"):
                continue
            for one in value if isinstance(value, list) else [value]:
                found = self._expressions(one, source)
                if found is not None:
                    return found, _End.NOTHING
        if getattr(node, "handlers", None):
            return self._try(node, source)
        body = [*getattr(node, "body", ()), *getattr(node, "finalbody", ())]
        if body:
            return self._block(body, source)
        for case in getattr(node, "cases", ()):
            self._aside(case.body, source)
        return None, _end_of(node)

    def _loop(self, node: Any, source: Source) -> tuple[NestedLaunch | None, _End]:
        is_while = isinstance(node, ast.While)
        found = self._expressions(node.test if is_while else node.iter, source)
        if found is not None:
            return found, _End.NOTHING
        is_certain = not is_while or (isinstance(node.test, ast.Constant) and node.test.value)
        before = self._doubt
        self._doubt = max(before, before if is_certain else _End.LOOP)
        found, end = self._block(node.body, source)
        if found is not None:
            return found, _End.NOTHING
        after = max(self._doubt, end)
        has_break = any(isinstance(one, ast.Break) for one in nodes(node))
        self._doubt = max(
            before, after if after > _End.LOOP else before, _End.LOOP if has_break else before
        )
        found, end = self._block(node.orelse, source)
        self._doubt = max(before, self._doubt if self._doubt > _End.LOOP else before)
        return found, _End.NOTHING if has_break else end

    def _try(self, node: Any, source: Source) -> tuple[NestedLaunch | None, _End]:
        before = self._doubt
        found, end = self._block(node.body[:1], source)
        if any(_catches_absence(one) for one in node.handlers):
            self._doubt = max(self._doubt, _End.LOOP)  # what the first statement lacks may be usual
        if found is None and not end:
            found, end = self._block([*node.body[1:], *node.orelse], source)
        if found is not None:
            return found, _End.NOTHING
        after = [self._doubt if self._doubt > _End.LOOP else before]
        ends = [end, *(self._aside(one.body, source) for one in node.handlers)]
        self._doubt = max(before, *after, *ends)
        found, last = self._block(node.finalbody, source)
        return found, last or (min(ends) if all(one > 0 for one in ends) else _End.NOTHING)

    def _aside(self, body: Sequence[Any], source: Source) -> _End:
        """Follow statements that may run, and return what they leave."""
        found, end, after = self._branch(body, source, self._doubt)
        self._possible += filter(None, [found])
        self._doubt = max(self._doubt, after, end)
        return end

    def _imports(self, node: Any, source: Source) -> NestedLaunch | None:
        for base, members in imported_names(node, source):
            for name in (base, *members):
                parts = name.split(".")
                for end in range(1, len(parts) + 1):
                    self._budget.spend()
                    place = self._files.find(".".join(parts[:end]))
                    if place is None or place[0] in self._files.sources:
                        continue
                    loaded = self._files.load(*place)
                    found = None if loaded is None else self._block(loaded.tree.body, loaded)[0]
                    if found is not None:
                        return found
        return None

    # -- calls --------------------------------------------------------------------------

    def _expressions(self, node: Any, source: Source) -> NestedLaunch | None:
        if not isinstance(node, ast.AST):
            return None
        for call, is_certain in _calls(node, True):
            before = self._doubt
            self._doubt = max(before, before if is_certain else _End.LOOP)
            found = self._call(call, source)
            self._doubt = max(before, self._doubt if self._doubt > _End.LOOP else before)
            if found is not None:
                return found
        return None

    def _call(self, call: ast.Call, source: Source) -> NestedLaunch | None:
        self._budget.spend()
        name = source.full_name(call.func)
        launcher = launcher_of_function(name)
        if launcher is not None and self._starts_workers(launcher, call, source):
            return self._found([NestedLaunch(source.path, call.lineno, launcher)])
        started: list[NestedLaunch | None] = []
        for command in filter(
            lambda one: any(one.words), commands_of_call(name, call, source.names.commands)
        ):
            launcher = launcher_of_command(command)
            line = command.line or call.lineno
            started.append(None if launcher is None else NestedLaunch(source.path, line, launcher))
        if found := self._found(started):
            return found
        callees = self._functions.callees(call, name, source)
        if found := self._one_of(callees, call.args, call.keywords, source):
            return found
        if (name and reference(call.func) in _CALLING) or name == "typer.run":
            return self._passed(call, source)
        return None

    def _found(self, started: Sequence[NestedLaunch | None]) -> NestedLaunch | None:
        """Return the launcher if each of these alternatives is one and nothing is in doubt."""
        found = [one for one in started if one is not None]
        if found and len(found) == len(started) and not self._doubt:
            return found[0]
        self._possible += found
        return None

    def _starts_workers(self, launcher: Launcher, call: ast.Call, source: Source) -> bool:
        """Return True unless a launcher starts something else than workers, or a single one in
        this process."""
        sizes = [call.args[1:3], [one.value for one in call.keywords if one.arg in _SIZES]]
        numbers = [one.value for size in sizes for one in size if isinstance(one, ast.Constant)]
        if runs_single_itself(launcher) and numbers and all(one == 1 for one in numbers):
            return len(numbers) < sum(map(len, sizes))
        if not is_for_any_program(launcher):
            return True
        given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "fn")]
        functions = [one for each in given for one in self._functions.functions(each, source)]
        return any(one is not None and self._functions.forms_group(one, 0) for one in functions)

    def _passed(self, call: ast.Call, source: Source) -> NestedLaunch | None:
        """Follow functions that another package's function is given, with their arguments."""
        given = [*call.args, *(one.value for one in call.keywords if one.arg in ("target", "func"))]
        packed = [one.value for one in call.keywords if one.arg == "args"]
        args = [element for one in packed for element in getattr(one, "elts", ())]
        for index, one in enumerate(given):
            rest = [*given[index + 1 :], *args] if index < len(call.args) else args
            if reference(call.func) in ("map", "starmap", "imap") and rest:
                rest = list(getattr(rest[0], "elts", rest[:1]))[:1]
            found = self._one_of(self._functions.functions(one, source), rest, (), source)
            if found is not None:
                return found
        return None

    def _one_of(
        self,
        functions: Sequence[Function | None],
        args: Sequence[Any],
        keywords: Sequence[Any],
        caller: Source,
    ) -> NestedLaunch | None:
        """Return the launcher if a call of each of these functions certainly starts one."""
        before = after = self._doubt
        started: list[NestedLaunch | None] = []
        for function in functions:
            self._doubt = before
            found = None
            if function is not None:
                found = self._follow(function, args, keywords, caller)
            started.append(found)
            after = max(after, self._doubt)
        self._doubt = before
        certain = self._found(started)
        self._doubt = after
        return certain

    def _follow(
        self, function: Function, args: Sequence[Any], keywords: Sequence[Any], caller: Source
    ) -> NestedLaunch | None:
        """Return the launcher that a call of the user's function certainly starts."""
        node, source = function.node, function.source
        if node in self._stack or len(self._stack) >= _MAX_DEPTH or _is_generator(node):
            return None
        bound = self._functions.arguments(function, args, keywords, caller)
        before = source.bind(node, bound)
        outer = source.scope, source.receiver
        source.scope = node
        if function.owner is not None or not source.is_nested(node):
            source.receiver = function.owner
        self._stack.append(node)
        doubt = self._doubt
        if not all(_DECORATORS.fullmatch(_name_of(one)) for one in node.decorator_list):
            self._doubt = max(doubt, _End.FUNCTION)  # such as for rank 0 alone
        try:
            found, end = self._block(node.body, source)
        finally:
            self._stack.pop()
            source.scope, source.receiver = outer
            source.restore(before)
        self._doubt = max(
            doubt, _End.PROGRAM if _End.PROGRAM in (self._doubt, end) else _End.NOTHING
        )
        return found


def _calls(node: Any, is_certain: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls of an expression, inner ones first, without those in lambdas, and True for
    those that certainly run."""
    if isinstance(node, ast.Lambda):
        return
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                chosen = isinstance(node, ast.IfExp) and name != "test"
                skipped = isinstance(node, ast.BoolOp) and index > 0
                filtered = any(one.ifs for one in getattr(node, "generators", ()))
                yield from _calls(child, is_certain and not (chosen or skipped or filtered))
    if isinstance(node, ast.Call):
        yield node, is_certain


def _name_of(node: Any) -> str:
    return reference(getattr(node, "func", node))


def _is_generator(function: Any) -> bool:
    inner = nodes(function, *FUNCTIONS, ast.Lambda)
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in inner)


def _main_comparison(test: Any) -> bool | None:
    """Return True or False for a comparison of `__name__` with "__main__", None for others."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    text = ast.dump(test)
    if "'__name__'" not in text or "'__main__'" not in text:
        return None
    return {ast.Eq: True, ast.NotEq: False}.get(type(test.ops[0]))


def _catches_absence(handler: Any) -> bool:
    caught = getattr(handler.type, "elts", [handler.type])
    return any(reference(one) in _ABSENCES for one in caught)


def _end_of(node: Any) -> _End:
    """Return what a statement leaves."""
    if isinstance(node, (ast.Continue, ast.Break)):
        return _End.LOOP
    if isinstance(node, ast.Return):
        return _End.FUNCTION
    call = node.exc if isinstance(node, ast.Raise) else getattr(node, "value", None)
    func = getattr(call, "func", call)
    name = dotted(func)
    if isinstance(node, ast.Raise):
        if name != "SystemExit":
            return _End.ERROR
    elif not isinstance(node, ast.Expr) or not isinstance(call, ast.Call):
        return _End.NOTHING
    elif name.endswith("parser.error"):
        return _End.ERROR
    elif name.startswith("os.exec"):
        return _End.PROGRAM
    elif name not in ("sys.exit", "exit", "quit", "os._exit"):
        return _End.NOTHING
    code = next(iter(getattr(call, "args", ())), None)
    while isinstance(code, ast.BinOp):
        code = code.left
    is_bad = isinstance(code, ast.Constant) and code.value not in (0, None)
    return _End.ERROR if is_bad or isinstance(code, ast.JoinedStr) else _End.PROGRAM
