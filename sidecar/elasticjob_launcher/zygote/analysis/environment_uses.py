"""Static tests of parts of a program: changes of variables, possible errors, other uses of names.

They look at one part alone; `environment_changes` follows a program in execution order.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

CHANGING = frozenset({"setdefault", "update", "pop", "popitem", "clear", "__setitem__"})
DIRECT = frozenset({"putenv", "unsetenv"})
_ENVIRONS = ("environ", "environb")
_NAMESPACES = frozenset({"exec", "globals", "locals", "vars"})
SEEDS = frozenset({"PYTHONHASHSEED", "PL_GLOBAL_SEED"})
"""Variables that functions for seeds set, and that no import reads."""
_READERS = frozenset(
    {
        "dict", "print", "len", "sorted", "list", "set", "iter", "str", "repr", "pprint", "dumps",
        "copy", "deepcopy", "pformat", "debug", "info", "warning", "error", "log", "dump", "type",
        "isinstance", "tuple", "any", "all", "filter", "map", "run",
        "Popen", "call", "check_call", "check_output",
        "bool", "critical", "enumerate", "exception", "format", "format_map", "frozenset",
        "hasattr", "join", "max", "min", "next", "pp", "safe_substitute", "substitute",
        "sum", "write", "zip", "MappingProxyType", "OrderedDict", "create",
        "create_subprocess_exec", "create_subprocess_shell", "execve", "execvpe",
    }
)  # fmt: skip
"""Functions that change no variable of the `os.environ` that they are given."""
_CANNOT_FAIL = (
    *(ast.Expr, ast.Assign, ast.Pass, ast.If, ast.Constant, ast.JoinedStr, ast.FormattedValue),
    *(ast.Dict, ast.Tuple, ast.List, ast.keyword, ast.expr_context, ast.BoolOp, ast.boolop),
    *(ast.UnaryOp, ast.Not, ast.IfExp, ast.Compare, ast.cmpop, ast.FunctionDef),
    *(ast.AsyncFunctionDef, ast.Lambda),
)
"""Statements and expressions that raise no error of their own, apart from those in them."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def nodes(tree: ast.AST, *without: type) -> Iterator[ast.AST]:
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        found = _children(node)
        todo += [each for each in found if not isinstance(each, without)] if without else found


def _children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of all fields but `ctx`, faster than `ast.iter_child_nodes`."""
    found = []
    for field in node._fields:
        value = getattr(node, field, None)
        if type(value) is list:
            found += [each for each in value if isinstance(each, ast.AST)]
        elif field != "ctx" and isinstance(value, ast.AST):
            found.append(value)
    return found


def is_environ(node: Any) -> bool:
    """Return True for `os.environ`, also by `getattr` or in the namespace of `os`."""
    if isinstance(node, ast.Call):
        name = node.args[1] if name_of(node.func) == "getattr" and node.args[1:] else None
        return getattr(name, "value", None) in _ENVIRONS
    if isinstance(node, ast.Subscript):
        owner = getattr(node.value, "func", node.value)
        is_namespace = name_of(owner) in ("__dict__", "vars")
        return is_namespace and getattr(key_of(node), "value", None) in _ENVIRONS
    return name_of(node) in _ENVIRONS


def may_be_environ(node: Any, is_one: Callable[[Any], bool] = is_environ) -> bool:
    """Return True for `os.environ`, and for a choice between it and others."""
    if isinstance(node, ast.BoolOp):
        return any(may_be_environ(each, is_one) for each in node.values)
    if isinstance(node, ast.IfExp):
        return may_be_environ(node.body, is_one) or may_be_environ(node.orelse, is_one)
    if isinstance(node, ast.NamedExpr):
        return may_be_environ(node.value, is_one)
    return is_one(node)


def name_of(node: Any) -> str:
    """Return a name, or the last part of a dotted one; empty for other expressions."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def is_type_checking(test: ast.expr) -> bool:
    """Return True for the condition `TYPE_CHECKING`, which does not hold when a program runs, and
    for those that only hold if it does."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(map(is_type_checking, test.values))
    return name_of(test) == "TYPE_CHECKING"


def key_of(node: ast.Subscript) -> Any:
    """Return the key of a subscript; before Python 3.9 it is in an `ast.Index`."""
    key: Any = node.slice
    return key if isinstance(key, ast.Constant) else getattr(key, "value", key)


def parts_in_order(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the parts of an expression in the order of their evaluation, with True if each of them
    is evaluated whenever the expression is.

    Those of `a and b` and of `a if b else c` depend on values and are not among them.
    """
    if isinstance(node, ast.Lambda):
        defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        yield from ((each, True) for each in defaults)
    elif isinstance(node, _COMPREHENSIONS):
        first, *others = node.generators
        yield first.iter, True
        yield from ((each, False) for each in [*first.ifs, *others])
        yield from ((each, False) for each in _elements(node))
    elif isinstance(node, ast.Compare):
        yield node.left, True
        yield from ((each, i == 0) for i, each in enumerate(node.comparators))
    else:
        yield from ((each, True) for each in _children(node))


def _elements(comprehension: Any) -> list[ast.AST]:
    if isinstance(comprehension, ast.DictComp):
        return [comprehension.key, comprehension.value]
    return [comprehension.elt]


def is_run_later(function: ast.AST) -> bool:
    """Return True for a function whose call may run its body later, otherwise or not at all: a
    coroutine, a generator, a decorated function."""
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    if getattr(function, "decorator_list", None) and not is_static(function):
        return True
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    body: Any = getattr(function, "body", ())
    parts = [body] if isinstance(function, ast.Lambda) else body
    found = (each for part in parts for each in nodes(part, *kinds))
    return any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in found)


def runs_argument(function: Any) -> bool:
    """Return True for a function that calls its first argument itself, as some decorators do."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    if isinstance(function, ast.Lambda) or not function.args.args:
        return False
    first = function.args.args[0].arg
    body = [part for part in function.body if not isinstance(part, kinds)]
    found = (each for part in body for each in nodes(part, *kinds))
    return any(isinstance(each, ast.Call) and name_of(each.func) == first for each in found)


def is_static(function: ast.AST) -> bool:
    """Return True for a function with the decorator `staticmethod` and no other."""
    return [*map(name_of, getattr(function, "decorator_list", ()))] == ["staticmethod"]


def leaves_iterations(loop: ast.AST) -> bool:
    """Return True for a loop with `break` or `continue`."""
    return any(isinstance(each, (ast.Break, ast.Continue)) for each in nodes(loop))


def opens_namespace(node: Any) -> bool:
    """Return True for a call through which a program may rebind any name."""
    name = getattr(getattr(node, "func", None), "id", "")
    return name in _NAMESPACES and (name == "exec" or not node.args)


def continues_after_error(node: ast.AST) -> bool:
    """Return True for a `try` of which a handler lets the program go on, and for `suppress`."""
    for item in getattr(node, "items", ()):
        if name_of(getattr(item.context_expr, "func", None)) == "suppress":
            return True
    for handler in getattr(node, "handlers", ()):
        last = handler.body[-1]
        call = getattr(getattr(last, "value", None), "func", None)
        ends = getattr(call, "attr", getattr(call, "id", "")) in ("exit", "_exit")
        if not (isinstance(last, ast.Raise) or ends):
            return True
    return False


def passes_environ(
    call: ast.Call, own: bool = False, is_one: Callable[[Any], bool] = is_environ
) -> bool:
    """Return True if a function is called with `os.environ` and may change it.

    `f(**os.environ)` passes a copy.
    """
    given = [*call.args, *(word.value for word in call.keywords if word.arg)]
    if not own and name_of(call.func) == "ChainMap":
        given = given[:1]  # the others are only read
    is_patch = _is_patch(call)
    if is_patch and any(getattr(each, "value", None) == "os.environ" for each in given):
        return True
    is_reader = not own and not is_patch and name_of(call.func) in _READERS
    return not is_reader and any(may_be_environ(each, is_one) for each in given)


def _is_patch(call: ast.Call) -> bool:
    """Return True for `patch.dict` of `unittest.mock`, which changes its first argument."""
    owner = getattr(call.func, "value", None)
    return name_of(call.func) == "dict" and owner is not None and name_of(owner) != "builtins"


def is_given(call: ast.Call, is_one: Callable[[Any], bool]) -> bool:
    """Return True if a function that is called by its name alone receives `os.environ`."""
    return isinstance(call.func, ast.Name) and passes_environ(call, True, is_one)


def sets_unseen(call: ast.Call, name: str = "") -> bool:
    """Return True for a function that sets variables to unknown values, or C's `setenv`.

    Methods of that name have other arguments than C's three, whose first is a bytes literal.
    """
    name = name or name_of(call.func)
    args = call.args
    is_of_c = len(args) == 3 or any(
        isinstance(each, ast.Starred) or isinstance(getattr(each, "value", None), bytes)
        for each in args[:1]
    )
    return name == "load_dotenv" or (name == "setenv" and is_of_c)


def is_changing_method(node: ast.AST, is_one: Callable[[Any], bool] = is_environ) -> bool:
    """Return True for a method of `os.environ` that changes it."""
    return name_of(node) in CHANGING and is_one(getattr(node, "value", None))


def may_fail(statement: ast.AST, names: Collection[str]) -> bool:
    """Return True unless a statement only sets variables and names; `names` have a value."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for each in nodes(statement, *functions):
        if isinstance(each, ast.Name):
            bound = each.id in names or each.id in ("os", "environ", "__name__")
            if not bound and isinstance(each.ctx, ast.Load):
                return True
        elif isinstance(each, ast.Call):
            name = getattr(each.func, "attr", "")
            known = name in ("setdefault", "update", "get") or (name == "pop" and each.args[1:])
            if not (known and is_environ(getattr(each.func, "value", None))):
                return True
        elif isinstance(each, ast.Attribute):
            if not (is_environ(each) or is_environ(each.value)):
                return True
        elif isinstance(each, ast.Subscript):
            if not (is_environ(each.value) and isinstance(each.ctx, ast.Store)):
                return True
        elif not (isinstance(each, _CANNOT_FAIL) or type(each).__name__ == "Index"):
            return True
    return False


def may_be_change(call: ast.Call) -> bool:
    """Return True for a call that by its name may change variables."""
    name = name_of(call.func)
    return name in CHANGING or name in DIRECT or sets_unseen(call)


def unnamed_change(node: Any, is_one: Callable[[Any], bool]) -> bool:
    """Return True if this node may change variables other than those of `names_changed`."""
    return _is_change(node, is_one) and (
        _has_unknown_names(node) or not any(names_changed(node, is_one))
    )


def _has_unknown_names(node: Any) -> bool:
    """Return True for an update, some of whose names are not literals."""
    if isinstance(node, ast.AugAssign):
        given = [node.value]
    elif name_of(getattr(node, "func", None)) == "update":
        given = list(node.args)
        if not all(word.arg for word in node.keywords):
            return True
    else:
        return False
    keys = [key for each in given for key in getattr(each, "keys", [None])]
    return not all(isinstance(getattr(key, "value", None), str) for key in keys)


def _is_change(node: ast.AST, is_one: Callable[[Any], bool]) -> bool:
    if isinstance(node, ast.Subscript):
        return is_one(node.value) and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):
        return is_one(node.target)
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        # Others may change an `os.environ` that they find in an attribute or result.
        names = [each for target in targets for each in getattr(target, "elts", [target])]
        values = getattr(node.value, "elts", [node.value])
        return not all(isinstance(each, ast.Name) for each in names) and any(
            may_be_environ(each, is_one) for each in values
        )
    return isinstance(node, ast.Call) and (
        sets_unseen(node) or name_of(node.func) in DIRECT or is_changing_method(node.func, is_one)
    )


def names_changed(node: ast.AST, is_one: Callable[[Any], bool]) -> Iterator[str]:
    """Yield the variables that this node changes, as far as literals name them."""
    if isinstance(node, ast.Subscript):
        if is_one(node.value) and not isinstance(node.ctx, ast.Load):
            yield from _texts([key_of(node)])
    elif isinstance(node, ast.AugAssign) and is_one(node.target):
        yield from _texts(getattr(node.value, "keys", ()))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = node.func.value, node.func.attr
        if name in DIRECT or (name in CHANGING and is_one(owner)):
            yield from _texts(node.args[:1])
        if name == "update" and is_one(owner):
            yield from (word.arg for word in node.keywords if word.arg)
            for arg in node.args:
                if isinstance(arg, ast.Dict):
                    yield from _texts(arg.keys)


def _texts(found: Sequence[Any]) -> Iterator[str]:
    for node in found:
        value = node if isinstance(node, str) else getattr(node, "value", None)
        if isinstance(value, str):
            yield value
