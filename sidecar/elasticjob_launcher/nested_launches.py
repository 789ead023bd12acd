"""Static analysis of Python programs that start a launcher themselves; the program is not run.

A script such as `subprocess.run(["torchrun", …])` would start the workers once for each worker. The
analysis follows the statements that certainly run: through functions and the user's own modules,
not into branches of conditions. A condition in a program that can only start others, because it
imports no package that could train, counts as fulfilled.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from elasticjob_launcher.launchers import (
    Launcher,
    is_for_any_program,
    launcher_of_function,
    launcher_of_module,
    launcher_of_program,
)
from elasticjob_launcher.started_commands import Names, Written, launcher_of_command, reference
from elasticjob_launcher.zygote.environment_changes import nodes
from elasticjob_launcher.zygote.identifiers import is_python_module
from elasticjob_launcher.zygote.search_path import added_folders

MAX_FILES = 50
MAX_SOURCE_BYTES = 1024 * 1024
_MAX_CALLS = 5000
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
    {"run", "Fire", "submit", "map", "starmap", "imap", "Thread", "Process", "partial"}
    | {"apply", "apply_async", "to_thread", "run_in_executor", "gather"}
)
"""Functions of other packages that call the function they are given."""
_DRIVING = frozenset(
    {"yaml", "click", "typer", "fire", "hydra", "omegaconf", "absl", "tqdm", "rich", "dotenv"}
    | {"loguru", "requests", "toml", "tomli", "wandb", "mlflow", "huggingface_hub", "boto3", "sh"}
    | {"pexpect", "psutil", "pydantic", "jsonargparse", "colorama", "termcolor", "tabulate"}
)
"""Packages besides Python's own that a program without a training of its own may import."""
_RANKS = re.compile(r"'(?:(?:LOCAL_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|TORCHELASTIC\w*)'|elastic")
"""Mention of a worker's rank in the text of a condition."""
_GROUP = frozenset({"init_process_group", "init_distributed", "DistributedDataParallel", "DDP"})


class NestedLaunch(NamedTuple):
    """Place in a program's file that starts a launcher."""

    path: str
    line: int
    launcher: Launcher

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.line}"


class _Assigned(NamedTuple):
    """Value of a name in a function, or None in `scope` if every function sees it."""

    value: Any
    scope: Any


class _Module:
    """One file: its tree, the full names of its imports, its functions and assigned values."""

    def __init__(self, path: str, package: str, tree: Any, main: bool) -> None:
        self.path = path
        self.package = package
        self.tree = tree
        self.main = main
        self.aliases: dict[str, str] = {}
        self.functions: dict[str, Any] = {}
        self.methods: dict[str, Any] = {}
        self.commands: dict[str, list[Any]] = {}
        self.assigned: dict[str, list[_Assigned]] = {}
        self.scope: Any = None
        self.names = Names(self.values)
        self._read(tree, None)
        for function in self.functions.values():
            self._returns(function)

    def values(self, name: str) -> list[Any]:
        """Return the values that a name may have in the function that is followed."""
        found = self.assigned.get(name, ())
        inner = [one.value for one in found if one.scope is self.scope and self.scope]
        return inner or [one.value for one in found if one.scope is None]

    def _read(self, parent: Any, scope: Any) -> None:
        for node in ast.iter_child_nodes(parent):
            self._index(node, scope)
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            self._read(node, node if is_function else scope)

    def _index(self, node: Any, scope: Any) -> None:
        if isinstance(node, ast.ClassDef):
            self.methods.update(
                (one.name, one) for one in node.body if isinstance(one, ast.FunctionDef)
            )
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions.setdefault(node.name, node)
            for one in node.decorator_list:
                func: Any = getattr(one, "func", one)
                if getattr(func, "attr", "") == "command" and reference(func.value):
                    self.commands.setdefault(reference(func.value), []).append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self.aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = self.absolute(node)
            for alias in node.names:
                self.aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, scope)

    def _returns(self, function: Any) -> None:
        """Keep the values that a function returns, under its name with parentheses."""
        for node in nodes(function):
            if not isinstance(node, ast.Return) or node.value is None:
                continue
            own = self.assigned.get(reference(node.value), ())
            local = [one.value for one in own if one.scope is function]
            found = self.assigned.setdefault(f"{function.name}()", [])
            found += [_Assigned(value, None) for value in local or [node.value]]

    def _assign(self, target: Any, value: Any, scope: Any) -> None:
        if name := reference(target):
            known = _Assigned(value, scope if isinstance(target, ast.Name) else None)
            self.assigned.setdefault(name, []).append(known)

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module that a `from` statement names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".") if self.package else []
        base = ".".join(parts[: len(parts) - node.level + 1])
        return ".".join(part for part in (base, node.module) if part)

    def full_name(self, node: Any) -> str:
        """Return the full name of an imported object; empty for others."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""


class _Function(NamedTuple):
    module: _Module
    node: Any


def find_nested_launch(target: str, is_module: bool, search: Sequence[str]) -> NestedLaunch | None:
    """Return the place where a Python program starts a launcher; None if none is certain.

    Args:
        target: path of a script, or the name of a module as in `python -m`.
        search: folders with the user's own modules, in order.
    """
    program = _Program(search)
    try:
        return program.run(target, is_module)
    except RecursionError:
        return None


class _Program:
    def __init__(self, search: Sequence[str]) -> None:
        self._search = list(search)
        self._modules: dict[str, _Module] = {}
        self._possible: list[NestedLaunch] = []
        self._calls = 0
        self._stack: list[Any] = []

    def run(self, target: str, is_module: bool) -> NestedLaunch | None:
        if is_module:
            path, package = self._file_of(f"{target}.__main__") or self._file_of(target) or ("", "")
        else:
            path, package = target, ""
            if os.path.isdir(target):  # noqa: PTH112
                path = os.path.join(target, "__main__.py")  # noqa: PTH118
            self._search.insert(0, os.path.dirname(path) or ".")  # noqa: PTH120
        module = self._load(path, package, True) if path else None
        if module is None:
            return None
        found = self._block(module.tree.body, module)
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

    def _load(self, path: str, package: str, main: bool = False) -> _Module | None:
        if path in self._modules:
            return self._modules[path]
        if len(self._modules) >= MAX_FILES:
            return None
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read(MAX_SOURCE_BYTES + 1)
            tree = ast.parse(content, path) if len(content) <= MAX_SOURCE_BYTES else None
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None  # the program itself reports it
        if tree is None:
            return None
        module = self._modules[path] = _Module(path, package, tree, main)
        added = added_folders(tree, path)
        self._search[:0] = [one for one in added.folders if one not in self._search]
        self._search += [one for one in added.last if one not in self._search]
        return module

    def _only_starts(self) -> bool:
        """Return True if the program's files import nothing that trains and ask for no rank."""
        for module in self._modules.values():
            for node in nodes(module.tree):
                test = getattr(node, "test", None)
                if test is not None and _RANKS.search(ast.dump(test)):
                    return False
                imported = (
                    [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                )
                if isinstance(node, ast.ImportFrom) and not node.level:
                    imported.append(node.module or "")
                for name in imported:
                    top = name.partition(".")[0]
                    known = is_python_module(top) or top in _DRIVING or launcher_of_module(name, ())
                    if not (known or self._file_of(top) or self._is_folder(top)):
                        return False
        return True

    def _is_folder(self, name: str) -> bool:
        return any(os.path.isdir(os.path.join(one or ".", name)) for one in self._search)  # noqa: PTH112, PTH118

    # -- statements ---------------------------------------------------------------------

    def _block(self, body: Sequence[Any], module: _Module) -> NestedLaunch | None:
        """Return the first launcher that certainly starts if these statements run."""
        for index, node in enumerate(body):
            if isinstance(node, ast.If):
                found, over = self._if(node, body[index + 1 :], module)
                if found is not None or over:
                    return found
                continue
            found = self._statement(node, module)
            if found is not None:
                return found
            if _ends(node):
                return None
        return None

    def _if(
        self, node: ast.If, rest: Sequence[Any], module: _Module
    ) -> tuple[NestedLaunch | None, bool]:
        """Return the launcher, and True if `rest` was followed too."""
        test = ast.dump(node.test)
        if "TYPE_CHECKING" in test:
            return self._block(node.orelse, module), False
        if "'__name__'" in test and "'__main__'" in test:
            return (self._block(node.body, module) if module.main else None), False
        if found := self._expressions(node.test, module):
            return found, False
        first, second = self._block(node.body, module), self._block(node.orelse, module)
        over = False
        if any(_ends(one, True) for one in node.body) and second is None:
            second, over = self._block(rest, module), True
        elif any(_ends(one, True) for one in node.orelse) and first is None:
            first, over = self._block(rest, module), True
        if first is not None and second is not None:
            return first, over
        self._possible += [one for one in (first, second) if one is not None]
        return None, over

    def _statement(self, node: Any, module: _Module) -> NestedLaunch | None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        if isinstance(node, ast.ClassDef):
            return self._block(node.body, module)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._imports(node, module)
        for name, value in ast.iter_fields(node):
            if name in ("handlers", "orelse", "cases"):
                continue
            if name in ("body", "finalbody"):
                found = self._block(value, module)
            else:
                values = value if isinstance(value, list) else [value]
                found = next(filter(None, (self._expressions(one, module) for one in values)), None)
            if found is not None:
                return found
        for each in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self._possible += filter(None, [self._block(each.body, module)])
        return self._block(getattr(node, "orelse", ()), module)

    def _imports(self, node: Any, module: _Module) -> NestedLaunch | None:
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = module.absolute(node)
            names = [base, *(f"{base}.{name}" for name in names)]
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                place = self._file_of(".".join(parts[:end]))
                if place is None or place[0] in self._modules:
                    continue
                loaded = self._load(*place)
                found = None if loaded is None else self._block(loaded.tree.body, loaded)
                if found is not None:
                    return found
        return None

    # -- calls --------------------------------------------------------------------------

    def _expressions(self, node: Any, module: _Module) -> NestedLaunch | None:
        if not isinstance(node, ast.AST):
            return None
        for call in _calls(node):
            found = self._call(call, module)
            if found is not None:
                return found
        return None

    def _call(self, call: ast.Call, module: _Module) -> NestedLaunch | None:
        self._calls += 1
        if self._calls > _MAX_CALLS:
            return None
        name = module.full_name(call.func)
        launcher = launcher_of_function(name)
        if launcher is not None and self._starts_workers(launcher, call, module):
            return NestedLaunch(module.path, call.lineno, launcher)
        for command in self._started(name, call, module):
            launcher = launcher_of_command(command)
            if launcher is not None:
                return NestedLaunch(module.path, command.line or call.lineno, launcher)
        for function in self._callees(call, name, module):
            found = self._follow(function, call.args, call.keywords, module)
            if found is not None:
                return found
        if (name and reference(call.func) in _CALLING) or name == "typer.run":
            return self._passed(call, module)
        return None

    def _started(self, name: str, call: ast.Call, module: _Module) -> Iterator[Written]:
        """Yield the commands that a call of this function starts."""
        if name.startswith("sh.") and launcher_of_program(name[len("sh.") :], ("run", "launch")):
            yield Written((name[len("sh.") :], *_constants(call.args)), call.lineno)
        elif name == "runpy.run_module" and call.args:
            yield Written(("python", "-m", *_constants(call.args[:1])), call.lineno)
        elif name in _LISTED:
            words = ast.Tuple(elts=call.args[_LISTED[name] :], ctx=ast.Load())
            words.lineno = call.lineno
            yield from module.names.commands(words)
        elif name in _STARTERS:
            at = _STARTERS[name]
            given = [one.value for one in call.keywords if one.arg in ("args", "cmd", "command")]
            if len(call.args) > at:
                given.insert(0, call.args[at])
            yield from module.names.commands(given[0] if given else None)

    def _starts_workers(self, launcher: Launcher, call: ast.Call, module: _Module) -> bool:
        """Return True unless a launcher for any program starts something else than workers."""
        if not is_for_any_program(launcher):
            return True
        given = [one.value for one in call.keywords if one.arg == "fn"]
        given = [*call.args[:1], *given]
        return any(
            self._mentions_group(function, 0)
            for one in given
            for function in self._functions(one, module)
        )

    def _mentions_group(self, function: _Function, depth: int) -> bool:
        for node in nodes(function.node):
            if reference(node) in _GROUP:
                return True
            if isinstance(node, ast.Call) and depth < 4:
                name = function.module.full_name(node.func)
                callees = self._callees(node, name, function.module)
                if any(self._mentions_group(one, depth + 1) for one in callees):
                    return True
        return False

    def _callees(self, call: ast.Call, name: str, module: _Module) -> list[_Function]:
        """Return the user's functions that a call runs."""
        func = call.func
        if isinstance(func, ast.Attribute) and not name:
            found = module.methods.get(func.attr)
            if found is not None:
                return [_Function(module, found)]
            others = [one for one in self._modules.values() if func.attr in one.methods]
            return [_Function(one, one.methods[func.attr]) for one in others[:1]]
        if isinstance(func, ast.Name) and func.id in module.commands:
            functions = module.commands[func.id]
            return [_Function(module, one) for one in functions] if len(functions) == 1 else []
        return self._functions(func, module)

    def _functions(self, node: Any, module: _Module, depth: int = 0) -> list[_Function]:
        """Return the user's functions that an expression may be."""
        if isinstance(node, _Function):
            return [node]
        if depth > 4 or not isinstance(node, (ast.Name, ast.Attribute)):
            return []
        if isinstance(node, ast.Name) and node.id in module.functions:
            return [_Function(module, module.functions[node.id])]
        if name := module.full_name(node):
            return self._named(name, depth)
        return [
            function
            for value in module.values(reference(node))
            for function in self._functions(value, module, depth + 1)
        ]

    def _named(self, name: str, depth: int = 0) -> list[_Function]:
        """Return the user's function with this full name."""
        base, _, last = name.rpartition(".")
        place = self._file_of(base) if base else None
        owner = self._modules.get(place[0]) if place else None
        if owner is None or depth > 4:
            return []
        if last in owner.functions:
            return [_Function(owner, owner.functions[last])]
        again = owner.aliases.get(last, "")
        return self._named(again, depth + 1) if again and again != name else []

    def _passed(self, call: ast.Call, module: _Module) -> NestedLaunch | None:
        """Follow functions that another package's function is given, with their arguments."""
        given = [*call.args, *(one.value for one in call.keywords if one.arg in ("target", "func"))]
        packed = [one.value for one in call.keywords if one.arg == "args"]
        args = [element for one in packed for element in getattr(one, "elts", ())]
        for index, one in enumerate(given):
            for function in self._functions(one, module):
                rest = [*given[index + 1 :], *args] if index < len(call.args) else args
                if reference(call.func) in ("map", "starmap", "imap") and rest:
                    rest = list(getattr(rest[0], "elts", rest[:1]))[:1]
                found = self._follow(function, rest, (), module)
                if found is not None:
                    return found
        return None

    def _follow(
        self, function: _Function, args: Sequence[Any], keywords: Sequence[Any], caller: _Module
    ) -> NestedLaunch | None:
        """Return the launcher that a call of the user's function certainly starts."""
        node = function.node
        if node in self._stack or len(self._stack) >= _MAX_DEPTH:
            return None
        names = [one.arg for one in (*getattr(node.args, "posonlyargs", ()), *node.args.args)]
        if names[:1] in (["self"], ["cls"]):
            del names[0]
        if node.args.vararg is not None and len(args) > len(names):
            words = ast.Tuple(elts=list(args[len(names) :]), ctx=ast.Load())
            words.lineno = getattr(args[0], "lineno", 0)
            names, args = [*names, node.args.vararg.arg], [*args[: len(names)], words]
        given = [*zip(names, args), *((one.arg, one.value) for one in keywords if one.arg)]
        module = function.module
        bound = [
            (name, _Assigned(one, node))
            for name, value in given
            for one in (*self._functions(value, caller), *caller.names.commands(value))
        ]
        before = {name: module.assigned.get(name, []) for name, _ in bound}
        for name, one in bound:
            module.assigned[name] = [one, *module.assigned.get(name, [])]
        outer, module.scope = module.scope, node
        self._stack.append(node)
        try:
            return self._block(node.body, module)
        finally:
            self._stack.pop()
            module.scope = outer
            module.assigned.update(before)


def _calls(node: Any) -> Iterator[ast.Call]:
    """Yield the calls of an expression, inner ones first, without those in lambdas."""
    if isinstance(node, ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def _constants(nodes: Sequence[Any]) -> Iterator[str]:
    for node in nodes:
        yield str(node.value) if isinstance(node, ast.Constant) else ""


def _ends(node: Any, with_success: bool = False) -> bool:
    """Return True if a statement ends its function or the program, `with_success` without an
    error."""
    if isinstance(node, (ast.Return, ast.Continue, ast.Break)):
        return True
    if isinstance(node, ast.Raise):
        return not with_success
    call = getattr(node, "value", None)
    if not isinstance(node, ast.Expr) or not isinstance(call, ast.Call):
        return False
    func = call.func
    name = f"{reference(getattr(func, 'value', None))}.{reference(func)}".lstrip(".")
    if name not in ("sys.exit", "exit", "quit", "os._exit"):
        return False
    if not with_success:
        return True
    code = call.args[0] if call.args else None
    return not (isinstance(code, ast.Constant) and code.value not in (0, None))
