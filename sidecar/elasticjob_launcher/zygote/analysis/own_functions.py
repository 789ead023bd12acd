"""Functions and classes of the files of a program, and what a call of each may change. No I/O."""

from __future__ import annotations

import ast
from collections.abc import Set
from typing import Any

from elasticjob_launcher.zygote.analysis.environment_uses import (
    is_environ,
    is_static,
    name_of,
    nodes,
)
from elasticjob_launcher.zygote.analysis.file_facts import (
    EnvironNames,
    FileFacts,
    FunctionUses,
    with_environ,
)

CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
"""Methods that a call of their class runs."""
SIGNALLERS = ("raise_signal", "kill", "killpg", "pthread_kill", "alarm", "setitimer")
"""Functions of `signal` and `os` through which a program may run its own signal handlers."""
_DEEPEST_CLASS = 5
_MOST_CALLS = 2000
_NO_USES = FunctionUses(frozenset(), frozenset())


class Functions:
    """Functions of all files of a program, by name, each with its file.

    `methods` are those of classes, each with its class, whose first argument is not in the call.
    `doubtful` are the variables, all if one is empty, that functions may change unseen from now on.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[Any, Any]]] = {}
        self.methods: dict[ast.AST, str] = {}
        self.classes: dict[str, tuple[Any, list[str]]] = {}
        """Classes of all files, each with its file and the names of its bases."""
        self.unsure: set[str] = set()
        """Classes that may have another constructor than the one they inherit in the program."""
        self.handlers: set[ast.AST] = set()
        """Handlers of signals, which a signal to the process itself runs."""
        self.doubtful: set[str] = set()
        self.followed = 0
        self.environ_names = EnvironNames()
        self._files: list[FileFacts] = []
        self._facts: dict[ast.AST, FileFacts] = {}
        self._uses: dict[ast.AST, FunctionUses] = {}
        self._added: list[tuple[str, ast.AST]] = []
        self._effects: dict[str, set[str]] = {}
        self._callers: dict[str, set[str]] = {}

    @property
    def are_many(self) -> bool:
        """True if no more calls are followed; their functions may run from then on."""
        return self.followed >= _MOST_CALLS

    def add_file(self, facts: FileFacts, are_more_names: bool) -> None:
        """Add the facts of a file; with `are_more_names`, it gives `os.environ` to others."""
        self._files.append(facts)
        self._facts.update(dict.fromkeys(facts.functions, facts))
        if are_more_names:
            for each in self._files:
                each.find_names()
            self._uses.clear()
            self._added = [(name, body) for name, found in self.of.items() for _, body in found]

    def add(self, name: str, file: Any, function: ast.AST) -> None:
        self.of.setdefault(name, []).append((file, function))
        self._added.append((name, function))

    def add_handler(self, file: Any, function: ast.AST) -> None:
        """Add a handler of a signal."""
        if function not in self.handlers:
            self.handlers.add(function)
            for name in SIGNALLERS:
                self.add(name, file, function)

    def add_class(self, node: ast.ClassDef, file: Any) -> None:
        """Add a class, whose methods have been added, with the methods that Python itself calls."""
        bases = [file.called_name(base) for base in node.bases]
        self.classes[node.name] = (file, bases)
        own = [e for e in node.body if isinstance(e, (ast.FunctionDef, ast.AsyncFunctionDef))]
        named = {each.name for each in own}
        self.methods.update(dict.fromkeys(own, node.name))
        found = {each: file for each in own if each.name.startswith("__")}
        for base in bases:
            inherited = [
                (of, each)
                for of, each in self.of.get(base, ())
                if each in self.methods and each.name.startswith("__") and each.name not in named
            ]
            found.update((each, of) for of, each in inherited)
            # A later base may inherit from a base of this one, and precede it.
            named |= {each.name for _, each in inherited if self.methods[each] == base}
            if any(self.is_unsure(each, base) for _, each in inherited):
                self.unsure.add(node.name)
        within = list(nodes(node))
        mentioned = {e.id for e in within if isinstance(e, ast.Name)}
        defined = {e.name for e in within if isinstance(e, ast.FunctionDef)}
        if (
            node.decorator_list
            or not all(self._is_own_base(file, *each) for each in zip(bases, node.bases))
            or (mentioned | defined) & CONSTRUCTORS
        ):
            self.unsure.add(node.name)
        for _, each in self.of.get(node.name, ()):
            found.pop(each, None)  # of a base of the same name
        for each, of in found.items():
            self.add(node.name, of, each)

    def _is_own_base(self, file: Any, name: str, base: ast.expr) -> bool:
        """Return True for a base class of the program, or one without a constructor."""
        own = name in self.classes and file.is_from(base, self.classes[name][0])
        return own or name in ("object", "ABC")

    def is_unsure(self, function: ast.AST, name: str) -> bool:
        """Return True for an inherited constructor that the class of that name may replace."""
        return name in self.unsure and self.methods.get(function, name) != name

    def is_implicit(self, function: Any, name: str) -> bool:
        """Return True for a function that a call of that name may not run: a method of a class that
        is not a constructor, a handler of a signal."""
        if function in self.handlers and name in SIGNALLERS:
            return True
        of = self.methods.get(function)
        return of is not None and self.is_a(name, of) and function.name not in CONSTRUCTORS

    def is_a(self, name: str, base: str, depth: int = 0) -> bool:
        """Return True if a class is that class or inherits from it."""
        bases = self.classes[name][1] if name in self.classes and depth < _DEEPEST_CLASS else []
        return name == base or any(self.is_a(each, base, depth + 1) for each in bases)

    def is_static_of(self, name: str, owner: str) -> bool:
        """Return True if each own function of that name is a static method or one of another class.

        A class method may create objects of its class.
        """
        found = [body for _, body in self.of.get(name, ())] if owner else []
        of_class = [body for body in found if self.is_a(owner, self.methods.get(body, ""))]
        return bool(of_class) and all(map(is_static, of_class))

    def doubt(self, function: ast.AST) -> frozenset[str]:
        """Assume from now on that this function may run at any time; return what it may change."""
        found = self.changes(function)
        self.doubtful.update(found)
        return found

    def changes(self, function: ast.AST) -> frozenset[str]:
        """Return the variables, "" for all, that a call may change, directly or indirectly."""
        self._settle()
        changes, calls = self._uses_of(function)
        return changes.union(*(self._effects.get(name, ()) for name in calls))

    def effects(self, name: str) -> Set[str]:
        """Return the variables, "" for all, that functions of that name may change."""
        self._settle()
        return self._effects.get(name, frozenset())

    def _uses_of(self, function: ast.AST) -> FunctionUses:
        if function not in self._facts:
            return _NO_USES
        if function not in self._uses:
            self._uses[function] = self._facts[function].uses(function)
        return self._uses[function]

    def _settle(self) -> None:
        """Add the effects of the functions that have been added since the last call."""
        added, self._added = self._added, []
        for name, function in added:
            changes, calls = self._uses_of(function)
            for called in calls:
                self._callers.setdefault(called, set()).add(name)
            self._spread(name, changes.union(*(self._effects.get(each, ()) for each in calls)))
            self._spread(with_environ(name), frozenset({""}))

    def _spread(self, name: str, found: frozenset[str]) -> None:
        """Add effects to a name, and to the names of the functions that call it."""
        todo = [(name, found)]
        while todo:
            each, effects = todo.pop()
            known = self._effects.setdefault(each, set())
            fresh = effects - known
            if fresh:
                known |= fresh
                todo += [(caller, fresh) for caller in self._callers.get(each, ())]

    def are_doubtful(self, expression: ast.AST) -> bool:
        """Return True if an expression reads a variable that a function may change unseen."""
        found = list(nodes(expression)) if self.doubtful else []
        reads = any(is_environ(each) or name_of(each) == "getenv" for each in found)
        texts = {each.value for each in found if isinstance(each, ast.Constant)}
        return reads and ("" in self.doubtful or bool(texts & self.doubtful))
