"""Static analysis of Python programs that start a launcher themselves; the program is not run.

A script such as `subprocess.run(["torchrun", …])` would start the workers once for each worker. The
analysis follows the statements that certainly run: through functions and the user's own modules. A
launch in one branch of a condition, after a statement that may have ended the function or program,
or by one of several values of a name is only possible. Possible launches count in a program that
can only start others, because it imports no package that could train.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from elasticjob_launcher.launchers import (
    Launcher,
    is_for_any_program,
    launcher_of_function,
    launcher_of_module,
    launcher_of_program,
    runs_single_itself,
)
from elasticjob_launcher.program_names import (
    FUNCTIONS,
    UNKNOWN_VALUE,
    Class,
    Function,
    Imported,
    Source,
)
from elasticjob_launcher.started_commands import Written, launcher_of_command, reference
from elasticjob_launcher.zygote.environment_changes import nodes
from elasticjob_launcher.zygote.search_path import added_folders, dotted

MAX_FILES = 50
MAX_SOURCE_BYTES = 1024 * 1024
MAX_STEPS = 300_000
MAX_SECONDS = 1.0
"""Maximum processor time of the analysis."""
_MAX_DEPTH = 12
_FIRST = ("run", "call", "check_call", "check_output", "Popen", "getoutput", "getstatusoutput")
_STARTERS: Mapping[str, int] = {
    **{f"subprocess.{name}": 0 for name in _FIRST},
    **{f"os.{name}": 0 for name in ("system", "popen")},
    **{f"os.{name}": 1 for name in ("execv", "execve", "execvp", "execvpe")},
    **{f"os.{name}": 1 for name in ("posix_spawn", "posix_spawnp")},
    **{f"os.{name}": 2 for name in ("spawnv", "spawnve", "spawnvp", "spawnvpe")},
    "asyncio.create_subprocess_shell": 0,
    "pexpect.spawn": 0,
    "pexpect.run": 0,
    "pty.spawn": 0,
}
"""Functions that start a process, with the index of the argument that is the command."""
_LISTED: Mapping[str, int] = {
    **{f"os.{name}": 1 for name in ("execl", "execle", "execlp", "execlpe")},
    **{f"os.{name}": 2 for name in ("spawnl", "spawnle", "spawnlp", "spawnlpe")},
    "asyncio.create_subprocess_exec": 0,
}
"""Functions whose arguments from this index on are the words of the command."""
_CALLING = frozenset(
    {"run", "Fire", "submit", "map", "starmap", "imap", "Thread", "Process"}
    | {"apply", "apply_async", "to_thread", "run_in_executor", "gather"}
)
"""Functions of other packages that call the function they are given."""
_DRIVING = frozenset(
    {"yaml", "click", "typer", "fire", "hydra", "omegaconf", "absl", "tqdm", "rich", "dotenv"}
    | {"loguru", "requests", "toml", "tomli", "wandb", "mlflow", "huggingface_hub", "boto3", "sh"}
    | {"pexpect", "psutil", "pydantic", "jsonargparse", "colorama", "termcolor", "tabulate"}
)
"""Packages besides Python's own that a program without a training of its own may import."""
_RANKS = re.compile(r"((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|TORCHELASTIC_\w+)")
_LOADING = frozenset({"import_module", "__import__", "run_path", "exec_module", "exec"})
"""Functions that run code that cannot be found by its imports."""
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
_INSTALLED = re.compile(r"(^|/)(site|dist)-packages(/|$)")
_ERROR, _LOOP, _FUNCTION, _PROGRAM = -1, 1, 2, 3
"""Parts of a program that a statement leaves; an error ends what should not have begun."""
_GROUP = frozenset({"init_process_group", "init_distributed", "DistributedDataParallel", "DDP"})


class NestedLaunch(NamedTuple):
    """Place in a program's file that starts a launcher."""

    path: str
    line: int
    launcher: Launcher

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.line}"


class _TooLong(Exception):
    """Analysis that exceeds its bounds."""


class _Budget:
    """Bound of the steps and of the processor time of one analysis."""

    def __init__(self) -> None:
        self._steps = 0
        self._end = time.process_time() + MAX_SECONDS

    def spend(self) -> None:
        """Count a step. Raises _TooLong."""
        self._steps += 1
        if self._steps > MAX_STEPS or (not self._steps % 256 and self.is_late()):
            raise _TooLong

    def is_late(self) -> bool:
        return time.process_time() > self._end


def find_nested_launch(target: str, is_module: bool, search: Sequence[str]) -> NestedLaunch | None:
    """Return the place where a Python program starts a launcher; None if none is certain.

    Args:
        target: path of a script, or the name of a module as in `python -m`.
        search: folders with the user's own modules, in order.
    """
    program = _Program(search)
    try:
        return program.run(target, is_module)
    except (RecursionError, _TooLong):
        return None


class _Program:
    """Walk through the statements of a program.

    `_doubt` is the reason for which the current statement may not run: 0 for none, `_LOOP` or
    `_FUNCTION` if an earlier statement may have left the loop or function, `_PROGRAM` if one may
    have ended the program. Launches in doubt are kept as possible ones.
    """

    def __init__(self, search: Sequence[str]) -> None:
        self._search = [one for one in search if not _INSTALLED.search(one)]
        self._sources: dict[str, Source | None] = {}
        self._possible: list[NestedLaunch] = []
        self._budget = _Budget()
        self._stack: list[Any] = []
        self._doubt = 0

    def run(self, target: str, is_module: bool) -> NestedLaunch | None:
        if is_module:
            path, package = self._file_of(f"{target}.__main__") or self._file_of(target) or ("", "")
        else:
            path, package = target, ""
            if os.path.isdir(target):  # noqa: PTH112
                path = os.path.join(target, "__main__.py")  # noqa: PTH118
            self._search.insert(0, os.path.dirname(path) or ".")  # noqa: PTH120
        source = self._load(path, package, True) if path else None
        if source is None:
            return None
        found, _ = self._block(source.tree.body, source)
        if found is None and self._possible and self._only_starts():
            return self._possible[0]
        return found

    # -- files --------------------------------------------------------------------------

    def _file_of(self, name: str) -> tuple[str, str] | None:
        """Return file and package of a module of the user's; None for others."""
        relative = name.replace(".", os.sep)
        for folder in self._search:
            base = os.path.join(folder or ".", relative)  # noqa: PTH118
            for path, package in (
                (os.path.join(base, "__init__.py"), name),  # noqa: PTH118
                (f"{base}.py", name.rpartition(".")[0]),
            ):
                if os.path.isfile(path):  # noqa: PTH113
                    return path, package
        return None

    def _load(self, path: str, package: str, is_main: bool = False) -> Source | None:
        if path in self._sources:
            return self._sources[path]
        if self._budget.is_late():
            raise _TooLong
        if len(self._sources) >= MAX_FILES:
            return None
        self._sources[path] = None
        try:
            if not os.path.isfile(path):  # noqa: PTH113
                return None  # such as a pipe, whose content is the program's
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read(MAX_SOURCE_BYTES + 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(content, path) if len(content) <= MAX_SOURCE_BYTES else None
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None  # the program itself reports it
        if tree is None:
            return None
        source = self._sources[path] = Source(path, package, tree, is_main, self._budget.spend)
        added = added_folders(tree, path)
        self._search[:0] = [one for one in added.folders if one not in self._search]
        self._search += [one for one in added.last if one not in self._search]
        return source

    def _only_starts(self) -> bool:
        """Return True if the program's files import nothing that trains and ask for no rank."""
        todo = [source for source in self._sources.values() if source is not None]
        for source in todo:
            stored: set[Any] = set()
            for node in nodes(source.tree):
                self._budget.spend()
                if isinstance(node, ast.Dict):
                    stored.update(node.keys)
                elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    stored.update(nodes(node.slice))
                elif isinstance(node, ast.Constant) and node not in stored:
                    if isinstance(node.value, str) and _RANKS.fullmatch(node.value):
                        return False
                elif "elastic" in reference(node) or reference(node) in _LOADING:
                    return False
                if not all(self._is_known(*names, todo) for names in _imported(node, source)):
                    return False
        return True

    def _is_known(self, name: str, parts: Sequence[str], todo: list[Source]) -> bool:
        """Return True if an imported module is the user's, which is added to `todo`, or one that
        trains nothing."""
        if self._is_driving(name):
            return True
        places = [place for place in map(self._file_of, (name, *parts)) if place is not None]
        for place in places:
            loaded = self._load(*place)
            if loaded is None:
                return False
            if loaded not in todo:
                todo.append(loaded)
        return bool(places)

    def _is_driving(self, name: str) -> bool:
        top = name.partition(".")[0]
        known = _is_of_python(top) or top in _DRIVING or launcher_of_module(name, ()) is not None
        return known and self._file_of(top) is None

    # -- statements ---------------------------------------------------------------------

    def _block(self, body: Sequence[Any], source: Source) -> tuple[NestedLaunch | None, int]:
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
        return None, 0

    def _branch(
        self, body: Sequence[Any], source: Source, doubt: int
    ) -> tuple[NestedLaunch | None, int, int]:
        """Return the launcher that starts if this branch is taken, what it leaves, and the doubt
        behind it."""
        before, self._doubt = self._doubt, doubt
        found, end = self._block(body, source)
        after, self._doubt = self._doubt, before
        if found is not None:
            end = next(filter(None, map(_end_of, body)), 0)
        return found, end, after

    def _if(
        self, node: ast.If, rest: Sequence[Any], source: Source
    ) -> tuple[NestedLaunch | None, int, bool]:
        """Return the launcher, what the statement leaves, and True if `rest` was followed too."""
        if "TYPE_CHECKING" in ast.dump(node.test):
            return (*self._block(node.orelse, source), False)
        if (is_main := _asks_main(node.test)) is not None:
            body = node.body if is_main is source.is_main else node.orelse
            return (*self._block(body, source), False)
        if found := self._expressions(node.test, source):
            return found, 0, False
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
            return first, 0, is_over
        self._possible += [one for one in (first, second) if one is not None]
        ends = (first_end, second_end)
        if all(ends):
            return None, min([end for end in ends if end > 0], default=_ERROR), is_over
        doubts = [self._doubt, *(end for end in ends if end > 0)]
        doubts += [first_doubt] * (not first_end) + [second_doubt] * (not second_end)
        self._doubt = max(doubts)
        return None, 0, is_over

    def _statement(self, node: Any, source: Source) -> tuple[NestedLaunch | None, int]:
        """Return the launcher that a statement certainly starts, and what it leaves."""
        self._budget.spend()
        if isinstance(node, FUNCTIONS):
            return None, 0
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._imports(node, source), 0
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(node, source)
        for name, value in ast.iter_fields(node):
            if name in ("handlers", "orelse", "finalbody", "cases", "body"):
                continue
            for one in value if isinstance(value, list) else [value]:
                found = self._expressions(one, source)
                if found is not None:
                    return found, 0
        if getattr(node, "handlers", None):
            return self._try(node, source)
        body = [*getattr(node, "body", ()), *getattr(node, "finalbody", ())]
        if body:
            return self._block(body, source)
        for case in getattr(node, "cases", ()):
            self._aside(case.body, source)
        return None, _end_of(node)

    def _loop(self, node: Any, source: Source) -> tuple[NestedLaunch | None, int]:
        is_while = isinstance(node, ast.While)
        found = self._expressions(node.test if is_while else node.iter, source)
        if found is not None:
            return found, 0
        is_certain = not is_while or (isinstance(node.test, ast.Constant) and node.test.value)
        before = self._doubt
        self._doubt = max(before, 0 if is_certain else _LOOP)
        found, end = self._block(node.body, source)
        if found is not None:
            return found, 0
        after = max(self._doubt, end)
        has_break = any(isinstance(one, ast.Break) for one in nodes(node))
        self._doubt = max(before, after if after > _LOOP else 0, _LOOP if has_break else 0)
        found, end = self._block(node.orelse, source)
        self._doubt = max(before, self._doubt if self._doubt > _LOOP else 0)
        return found, 0 if has_break else end

    def _try(self, node: Any, source: Source) -> tuple[NestedLaunch | None, int]:
        before = self._doubt
        found, end = self._block(node.body[:1], source)
        if any(_catches_absence(one) for one in node.handlers):
            self._doubt = max(self._doubt, _LOOP)  # what the first statement lacks may be usual
        if found is None and not end:
            found, end = self._block([*node.body[1:], *node.orelse], source)
        if found is not None:
            return found, 0
        after = [self._doubt if self._doubt > _LOOP else before]
        ends = [end, *(self._aside(one.body, source) for one in node.handlers)]
        self._doubt = max(before, *after, *ends)
        found, last = self._block(node.finalbody, source)
        return found, last or (min(ends) if all(one > 0 for one in ends) else 0)

    def _aside(self, body: Sequence[Any], source: Source) -> int:
        """Follow statements that may run, and return what they leave."""
        found, end, after = self._branch(body, source, self._doubt)
        self._possible += filter(None, [found])
        self._doubt = max(self._doubt, after, end)
        return end

    def _imports(self, node: Any, source: Source) -> NestedLaunch | None:
        for base, members in _imported(node, source):
            for name in (base, *members):
                parts = name.split(".")
                for end in range(1, len(parts) + 1):
                    self._budget.spend()
                    place = self._file_of(".".join(parts[:end]))
                    if place is None or place[0] in self._sources:
                        continue
                    loaded = self._load(*place)
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
            self._doubt = max(before, 0 if is_certain else _LOOP)
            found = self._call(call, source)
            self._doubt = max(before, self._doubt if self._doubt > _LOOP else 0)
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
        for command in filter(lambda one: any(one.words), self._started(name, call, source)):
            launcher = launcher_of_command(command)
            line = command.line or call.lineno
            started.append(None if launcher is None else NestedLaunch(source.path, line, launcher))
        if found := self._found(started):
            return found
        callees = self._callees(call, name, source)
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

    def _started(self, name: str, call: ast.Call, source: Source) -> Iterator[Written]:
        """Yield the commands that a call of this function may start, one of which is certain."""
        if name.startswith("sh.") and launcher_of_program(name[len("sh.") :], ("run", "launch")):
            yield Written((name[len("sh.") :], *_constants(call.args)), call.lineno)
        elif name == "runpy.run_module" and call.args:
            yield Written(("python", "-m", *_constants(call.args[:1])), call.lineno)
        elif name in _LISTED:
            words = ast.Tuple(elts=call.args[_LISTED[name] :], ctx=ast.Load())
            words.lineno = call.lineno
            yield from source.names.commands(words)
        elif name in _STARTERS:
            at = _STARTERS[name]
            given = [one.value for one in call.keywords if one.arg in ("args", "cmd", "command")]
            if len(call.args) > at:
                given.insert(0, call.args[at])
            yield from source.names.commands(given[0] if given else None)

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
        functions = [one for each in given for one in self._functions(each, source)]
        return any(one is not None and self._mentions_group(one, 0) for one in functions)

    def _mentions_group(self, function: Function, depth: int) -> bool:
        for node in nodes(function.node):
            self._budget.spend()
            if reference(node) in _GROUP:
                return True
            if isinstance(node, ast.Call) and depth < 4:
                name = function.source.full_name(node.func)
                callees = self._callees(node, name, function.source)
                if any(one is not None and self._mentions_group(one, depth + 1) for one in callees):
                    return True
        return False

    def _callees(self, call: ast.Call, name: str, source: Source) -> list[Function | None]:
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
        return self._functions(func, source)

    def _functions(self, node: Any, source: Source, depth: int = 0) -> list[Function | None]:
        """Return the user's functions that an expression may be; None for an unknown one."""
        self._budget.spend()
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
            for function in self._functions(value, source, depth + 1)
        ]

    def _named(self, name: str, depth: int = 0) -> Function | Class | None:
        """Return the user's function or class with this full name."""
        base, _, last = name.rpartition(".")
        place = self._file_of(base) if base else None
        owner = self._sources.get(place[0]) if place else None
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
        self._budget.spend()
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

    def _passed(self, call: ast.Call, source: Source) -> NestedLaunch | None:
        """Follow functions that another package's function is given, with their arguments."""
        given = [*call.args, *(one.value for one in call.keywords if one.arg in ("target", "func"))]
        packed = [one.value for one in call.keywords if one.arg == "args"]
        args = [element for one in packed for element in getattr(one, "elts", ())]
        for index, one in enumerate(given):
            rest = [*given[index + 1 :], *args] if index < len(call.args) else args
            if reference(call.func) in ("map", "starmap", "imap") and rest:
                rest = list(getattr(rest[0], "elts", rest[:1]))[:1]
            found = self._one_of(self._functions(one, source), rest, (), source)
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
        bound = self._arguments(function, args, keywords, caller)
        before = source.bind(node, bound)
        outer = source.scope, source.receiver
        source.scope = node
        if function.owner is not None or not source.is_nested(node):
            source.receiver = function.owner
        self._stack.append(node)
        doubt = self._doubt
        if not all(_DECORATORS.fullmatch(_name_of(one)) for one in node.decorator_list):
            self._doubt = max(doubt, _FUNCTION)  # such as for rank 0 alone
        try:
            found, end = self._block(node.body, source)
        finally:
            self._stack.pop()
            source.scope, source.receiver = outer
            source.restore(before)
        self._doubt = max(doubt, _PROGRAM if _PROGRAM in (self._doubt, end) else 0)
        return found

    def _arguments(
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
                functions = [one for one in self._functions(value, caller) if one is not None]
                found = [*functions, *caller.names.commands(value)]
                bound[name] = found or [UNKNOWN_VALUE]
        return bound


def _imported(node: Any, source: Source) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules that a node imports, with the full names of their imported members."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom) and (base := source.absolute(node)):
        yield base, [f"{base}.{alias.name}" for alias in node.names]


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


def _constants(nodes: Sequence[Any]) -> Iterator[str]:
    for node in nodes:
        yield str(node.value) if isinstance(node, ast.Constant) else ""


def _is_of_python(name: str) -> bool:
    """Return True for a module of Python's own library, loaded or not."""
    known: Any = getattr(sys, "stdlib_module_names", None)
    if known is not None:
        return name in known
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")]
    folders += [f"{folder}/lib-dynload" for folder in folders]
    is_built_in = name in sys.builtin_module_names
    return is_built_in or PathFinder.find_spec(name, folders) is not None


def _name_of(node: Any) -> str:
    return reference(getattr(node, "func", node))


def _is_super(node: Any) -> bool:
    return isinstance(node, ast.Call) and reference(node.func) == "super"


def _is_generator(function: Any) -> bool:
    inner = nodes(function, *FUNCTIONS, ast.Lambda)
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in inner)


def _asks_main(test: Any) -> bool | None:
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


def _end_of(node: Any) -> int:
    """Return what a statement leaves: `_LOOP`, `_FUNCTION`, `_PROGRAM`, `_ERROR` or 0 for
    nothing."""
    if isinstance(node, (ast.Continue, ast.Break)):
        return _LOOP
    if isinstance(node, ast.Return):
        return _FUNCTION
    call = node.exc if isinstance(node, ast.Raise) else getattr(node, "value", None)
    func = getattr(call, "func", call)
    name = dotted(func)
    if isinstance(node, ast.Raise):
        if name != "SystemExit":
            return _ERROR
    elif not isinstance(node, ast.Expr) or not isinstance(call, ast.Call):
        return 0
    elif name.endswith("parser.error"):
        return _ERROR
    elif name.startswith("os.exec"):
        return _PROGRAM
    elif name not in ("sys.exit", "exit", "quit", "os._exit"):
        return 0
    code = next(iter(getattr(call, "args", ())), None)
    while isinstance(code, ast.BinOp):
        code = code.left
    is_bad = isinstance(code, ast.Constant) and code.value not in (0, None)
    return _ERROR if is_bad or isinstance(code, ast.JoinedStr) else _PROGRAM
