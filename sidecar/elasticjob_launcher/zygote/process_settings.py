"""Process-wide settings of Python and of common libraries that an import may change.

A module that changes one is left to the workers: the program may change the same setting before
it imports the module, and may not import the module at all.
"""

from __future__ import annotations

import contextvars
import gc
import sys
from collections.abc import Callable, Mapping
from operator import is_, ne
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from elasticjob_launcher.zygote.child_init import loaded_openblas
from elasticjob_launcher.zygote.identifiers import TRUSTED, calling_module
from elasticjob_launcher.zygote.search_path import is_python_module
from elasticjob_launcher.zygote.watched_functions import WatchedFunctions


class _Setting(NamedTuple):
    """Setting that `read` returns while the module `of` is loaded; an import changes it if the
    values before and after it are `changed`. `binds`: True for the processors of this thread.
    """

    of: str
    name: str
    read: Callable[[Any], Any]
    changed: Callable[[Any, Any], bool] = ne
    binds: bool = False


def _hooks(module: Any) -> list[Any]:
    names = ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
    return [*(getattr(module, name) for name in names), module.gettrace(), module.getprofile()]


def _rare_settings(module: Any) -> list[Any]:
    names = (
        *("get_asyncgen_hooks", "get_coroutine_origin_tracking_depth", "get_int_max_str_digits"),
        *("getdlopenflags",),
    )
    return [getattr(module, name)() for name in names if hasattr(module, name)]


def _streams(module: Any) -> list[Any]:
    names = ("encoding", "errors", "line_buffering", "write_through")
    return [
        (id(each), *(getattr(each, name, None) for name in names))
        for each in (module.stdin, module.stdout, module.stderr)
    ]


def _root_logger(module: Any) -> list[Any]:
    root = module.root
    kinds = (module.getLoggerClass(), module.getLogRecordFactory())
    return [*root.handlers, root.level, root.disabled, root.manager.disable, *kinds]


def _loop_policy(module: Any) -> bool:
    """Return True if the event loop policy is asyncio's own, or will be."""
    policy = module._event_loop_policy
    return policy is None or type(policy).__module__.startswith("asyncio")


def _decimal_context(module: Any) -> tuple[Any, ...]:
    """Return the settings of the thread's context, and leave it unmade if the program has none."""
    context = contextvars.copy_context().run(module.getcontext)
    return (context.prec, context.rounding)


def _stack_size(module: Any) -> int:
    size = int(module.stack_size())  # which also sets the default
    if size:
        module.stack_size(size)
    return size


_LIMITS: list[int] = []
"""Kinds of limits, from the first reading on."""


def _limits(module: Any) -> list[Any]:
    if not _LIMITS:
        kinds = [getattr(module, name) for name in dir(module) if name.startswith("RLIMIT_")]
        _LIMITS.extend(kind for kind in dict.fromkeys(kinds) if _is_readable(module, kind))
    return [*map(module.getrlimit, _LIMITS)]


def _is_readable(module: Any, kind: int) -> bool:
    return not isinstance(_result(lambda: module.getrlimit(kind)), type)


class _Processors(NamedTuple):
    """Processors that this process may use, and those of its parent, the launcher."""

    own: set[int]
    of_parent: set[int]


def _processors(module: Any) -> _Processors:
    return _Processors(module.sched_getaffinity(0), module.sched_getaffinity(module.getppid()))


def _changes_processors(before: _Processors, now: _Processors) -> bool:
    """Return True if the processors have changed, unless the launcher's have as well.

    A change from outside, as by a kubelet or `taskset`, is one of the launcher too.
    """
    return before.own != now.own and before.of_parent == now.of_parent


def _torch_flags(module: Any) -> list[Any]:
    names = (
        *("_get_deterministic_algorithms", "_get_float32_matmul_precision", "is_grad_enabled"),
        *("_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32"),
    )
    return [_result(getattr(module._C, name)) for name in names if hasattr(module._C, name)]


def _result(function: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of its error: torch's flags may contradict."""
    try:
        return function()
    except Exception as error:
        return type(error)


def _differ(before: list[Any], now: list[Any]) -> bool:
    """Return True unless the lists hold the same objects; equal ones may be different."""
    return len(before) != len(now) or not all(map(is_, before, now))


_SETTINGS = (
    _Setting("sys", "a hook of sys", _hooks),
    _Setting("sys", "sys.argv", lambda module: list(module.argv)),
    _Setting("sys", "the recursion limit", lambda module: module.getrecursionlimit()),
    _Setting("sys", "the switch interval", lambda module: module.getswitchinterval()),
    _Setting(
        "gc", "garbage collection", lambda module: (module.isenabled(), module.get_threshold())
    ),
    _Setting("sys", "a standard stream", _streams),
    _Setting("builtins", "the names in builtins", lambda module: [*vars(module).values()], _differ),
    _Setting(
        "ssl",
        "the verification of certificates",
        lambda module: module._create_default_https_context,
    ),
    _Setting("_thread", "the stack size of threads", _stack_size),
    _Setting("tracemalloc", "tracemalloc", lambda module: module.is_tracing()),
    _Setting("faulthandler", "the faulthandler", lambda module: module.is_enabled()),
    _Setting("resource", "a limit of resources", _limits),
    _Setting("posix", "the priority", lambda module: module.getpriority(module.PRIO_PROCESS, 0)),
    _Setting("posix", "the processors in use", _processors, _changes_processors, binds=True),
    _Setting("time", "the time zone", lambda module: module.tzname),
    _Setting("_locale", "the locale", lambda module: module.setlocale(module.LC_ALL)),
    _Setting("sys", "a hook or limit of sys", _rare_settings),
    _Setting("threading", "threading.excepthook", lambda module: module.excepthook),
    _Setting(
        "threading",
        "the trace or profile function of threads",
        lambda module: (module._trace_hook, module._profile_hook),
    ),
    _Setting("logging", "the root logger", _root_logger),
    _Setting(
        "warnings",
        "the display of warnings",
        lambda module: (module.showwarning, module.formatwarning),
    ),
    _Setting(
        "multiprocessing.context",
        "the start method of multiprocessing",
        lambda module: module._default_context._actual_context,
    ),
    _Setting("socket", "the default timeout of sockets", lambda module: module.getdefaulttimeout()),
    _Setting("asyncio.events", "the event loop policy", _loop_policy),
    _Setting("decimal", "the decimal context", _decimal_context),
    _Setting(
        "decimal",
        "the default decimal context",
        lambda module: (module.DefaultContext.prec, module.DefaultContext.rounding),
    ),
    _Setting("numpy", "numpy's treatment of errors", lambda module: module.geterr()),
    _Setting("numpy", "numpy's print options", lambda module: str(module.get_printoptions())),
    _Setting("torch", "torch's default dtype", lambda module: module.get_default_dtype()),
    _Setting("torch", "a mode or flag of torch", _torch_flags),
)
_MODULES = frozenset(setting.of for setting in _SETTINGS)
_BY_NAME = {setting.name: setting for setting in _SETTINGS}
_ACCEPTED = frozenset(
    {"lightning.fabric.utilities.warnings", "lightning_fabric.utilities.warnings"}
)
"""Modules of a framework that change only the format of warnings."""
PATCHED = frozenset(
    {
        "os", "posix", "time", "random", "uuid", "signal", "atexit", "gc", "io", "shutil",
        "threading", "_thread", "queue", "subprocess", "socket", "ssl", "select", "selectors",
        "multiprocessing.context", "multiprocessing.process", "multiprocessing.popen_fork",
        "multiprocessing.reduction", "multiprocessing.util", "concurrent.futures.thread",
        "concurrent.futures.process", "asyncio.events", "asyncio.base_events", "asyncio.runners",
        "json", "json.encoder", "json.decoder", "pickle", "copy", "pathlib", "tempfile", "logging",
        "importlib", "http.client", "urllib.request", "datetime", "math",
    }
)  # fmt: skip
"""Modules of Python whose functions and methods packages replace; for the hooks of `sys` and
`warnings` there are settings."""
_THREAD_SETTERS = {
    "cv2": ("setNumThreads",),
    "numexpr": ("set_num_threads",),
    "numexpr.utils": ("set_num_threads",),
    "mkl": ("set_num_threads", "set_num_threads_local", "domain_set_num_threads"),
    "faiss": ("omp_set_num_threads",),
    "pyarrow": ("set_cpu_count", "set_io_thread_count"),
}
"""Functions, by module, that set the number of threads of its library in C.

Those of torch and numba are not observed: their compilers keep tables of functions by identity.
"""
_HEAP_TYPE = 1 << 9
"""Flag of a class whose attributes can be set."""
_PAUSED = (1 << 31) - 1
"""First threshold of garbage collection, which no import reaches."""


def pause_collection() -> Callable[[], None]:
    """Pause garbage collection, unseen by `gc.isenabled`; return a function that resumes it.

    A package may disable collection itself, or change its thresholds.
    """
    before = gc.get_threshold()
    gc.set_threshold(_PAUSED, *before[1:])

    def resume() -> None:
        if gc.get_threshold()[0] == _PAUSED:
            gc.set_threshold(*before)

    return resume


class Settings:
    """Observer of successive imports, each from `begin` to `found`.

    `unbound` are the OpenBLAS libraries that were loaded before another library bound this thread
    to some of its processors.
    """

    def __init__(self) -> None:
        self.unbound: set[str] = set()
        self._before: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._changers: dict[str, list[str]] = {}

    def begin(self) -> None:
        self._last = _read()
        self._before = dict(self._last)
        self._changers = {}

    def attribute(self, module: Callable[[], str]) -> dict[str, Any]:
        """Attribute the settings changed since the last call to a module; return all settings."""
        now = _read()
        for key in _changed(self._last, now):
            if _BY_NAME[key].binds:
                self.unbound.update(loaded_openblas())
            if key in now and now[key] == self._before.get(key, self):
                self._changers.pop(key, None)  # restored
            else:
                self._changers.setdefault(key, []).append(module())
        self._last = now
        return now

    def module_loaded(self, name: str) -> None:
        """Attribute changed settings to this module; modules below it came first."""
        now = self.attribute(lambda: name)
        if name in _MODULES:  # its own import determines the initial values
            own = {setting.name for setting in _SETTINGS if setting.of == name}
            self._before.update((key, now[key]) for key in own if key in now)

    def found(self) -> list[tuple[str, str]]:
        """Return the settings that the import has changed, each with a module that did it."""
        return [
            (f"changes {name} when it is imported", module)
            for name in _changed(self._before, _read())
            for module in self._changers.get(name) or ("",)
            if not _is_accepted(_BY_NAME[name], module)
        ]


def _is_accepted(setting: _Setting, module: str) -> bool:
    """Return True if the workers may inherit the setting that the module has changed.

    With OMP_PROC_BIND or GOMP_CPU_AFFINITY, libgomp binds the thread that loads it to the first of
    its places, in a cold worker as in this process.
    """
    binds = setting.binds and module.partition(".")[0] in TRUSTED
    return binds or module in _ACCEPTED


class Replacements:
    """Observer of the functions and methods of Python's modules over successive imports."""

    def __init__(self) -> None:
        self._holders: dict[str, list[tuple[str, Any, dict[str, Any]]]] = {}

    def start(self) -> None:
        self._holders = {}
        for name in PATCHED:
            self.loaded(name)

    def loaded(self, name: str) -> None:
        """Record the functions of that module, which its own import determines."""
        if name in PATCHED and name in sys.modules:
            module: Any = sys.modules[name]
            self._holders[name] = [(name, module, dict(vars(module)))]
            for key, kind in list(vars(module).items()):
                own = isinstance(kind, type) and kind.__module__ == name
                if own and kind.__flags__ & _HEAP_TYPE:
                    self._holders[name].append((f"{name}.{key}", kind, dict(vars(kind))))

    def found(self) -> list[tuple[str, str]]:
        """Return the replaced functions, each with the module that has the new one.

        Replacements by trusted packages do not count.
        """
        found = []
        for name, holders in list(self._holders.items()):
            changed = [_replaced(*each) for each in holders]
            if any(changed):
                self.loaded(name)
            for key, function in (each for replaced in changed for each in replaced):
                maker = _maker(function)
                if maker.partition(".")[0] not in TRUSTED:
                    maker = "" if is_python_module(maker) else maker
                    found.append((f"replaces {key} when it is imported", maker))
        return found


class ThreadCounts:
    """Observer of the calls that set the number of threads of a library in C.

    Reading that number may itself set it, as in torch.
    """

    def __init__(self, watched: WatchedFunctions) -> None:
        self._watched = watched
        self._noted: dict[str, str] = {}

    def start(self) -> None:
        for name in _THREAD_SETTERS:
            self.loaded(name)

    def loaded(self, name: str) -> None:
        """Report calls of that module's functions from now on, except those of its own package."""
        module = sys.modules.get(name)
        package = name.partition(".")[0]
        for function in _THREAD_SETTERS.get(name, ()) if module is not None else ():

            def report(*args: Any, _called: str = f"{package}.{function}", **options: Any) -> None:
                caller = calling_module()
                if caller and caller.partition(".")[0] != _called.partition(".")[0]:
                    self._noted.setdefault(caller, _called)

            self._watched.report(module, function, report)

    def begin(self) -> None:
        self._noted = {}

    def found(self) -> list[tuple[str, str]]:
        """Return the calls, each with the module that made it."""
        return [
            (f"sets a number of threads ({called}) when it is imported", module)
            for module, called in self._noted.items()
        ]


def _replaced(place: str, holder: Any, before: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the new functions in place of those that the module or class had."""
    now = vars(holder)
    if all(map(is_, now.values(), before.values())):  # in the same order
        return []
    return [
        (f"{place}.{name}", now[name])
        for name, value in before.items()
        if callable(value) and name in now and now[name] is not value
    ]


def _maker(function: Any) -> str:
    """Return the name of the module whose code the function or class is; empty if unknown."""
    kind = type(function)
    if kind is MethodType:
        return _maker(function.__func__)
    if kind is FunctionType:
        return str(function.__globals__.get("__name__", ""))
    return str(function.__module__) if issubclass(kind, type) else ""


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, and those that can no longer be read."""
    return [
        name
        for name, value in before.items()
        if name not in now or _BY_NAME[name].changed(value, now[name])
    ]


def _read() -> dict[str, Any]:
    """Return the settings of the loaded modules by name; a module may be half-loaded."""
    found = {}
    for setting in _SETTINGS:
        module = sys.modules.get(setting.of)
        if module is not None:
            try:
                found[setting.name] = setting.read(module)
            except Exception:
                continue
    return found
