"""Process-wide settings of Python and of common libraries, read without loading any module."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from operator import is_, ne
from typing import Any, NamedTuple


class Setting(NamedTuple):
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
    values = ("dont_write_bytecode", "pycache_prefix", "tracebacklimit")
    return [
        *(getattr(module, name)() for name in names if hasattr(module, name)),
        *(getattr(module, name, None) for name in values),
        *module.path_hooks,
    ]


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
    return _of_context(contextvars.copy_context().run(module.getcontext))


def _of_context(context: Any) -> tuple[Any, ...]:
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    traps = [signal.__name__ for signal, traps in context.traps.items() if traps]
    return (*(getattr(context, name) for name in names), *sorted(traps))


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


def _collection(module: Any) -> list[Any]:
    return [module.isenabled(), module.get_threshold(), module.get_debug(), *module.callbacks]


def _is_not_extended(before: list[str], now: list[str]) -> bool:
    """Return True unless folders were only appended, which the program's own precede."""
    return now[: len(before)] != before


def _priority(module: Any) -> tuple[int, int]:
    return module.getpriority(module.PRIO_PROCESS, 0), module.sched_getscheduler(0)


def _temporary_folder(module: Any) -> tuple[Any, str]:
    """Return the folder set by a program; None for one that Python determines itself."""
    folder = module.tempdir
    places = module._candidate_tempdir_list()
    own = folder is None or folder in [*places, *map(os.path.abspath, places)]
    return None if own else folder, module.template


def _wide_filters(module: Any) -> list[Any]:
    """Return the filters of warnings that apply to all modules and to Python's categories."""
    return [
        (action, category)
        for action, message, category, origin, line in module.filters
        if message is None and origin is None and not line and category.__module__ == "builtins"
    ]


def _loggers(module: Any) -> dict[str, Any]:
    return {
        name: (logger.level, logger.disabled, logger.propagate, len(logger.handlers))
        for name, logger in list(module.root.manager.loggerDict.items())
        if isinstance(logger, module.Logger)
    }


def _is_of_others(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if a logger has changed, or a new one of another package has been set up."""
    new = {name.partition(".")[0] for name, state in now.items() if state != (0, False, True, 0)}
    known = {name.partition(".")[0] for name in before}
    return _differ_in_common(before, now) or any(map(_is_importable, new - known))


def _is_importable(name: str) -> bool:
    try:
        return name in sys.modules or PathFinder.find_spec(name) is not None
    except Exception:  # raised by a user's path hook
        return False


def _pandas_options(module: Any) -> dict[str, Any]:
    """Return the options by their names; parts of pandas that are loaded later add others."""
    todo, found = [("", module._config.config._global_config)], {}
    while todo:
        prefix, options = todo.pop()
        for name, value in options.items():
            if isinstance(value, dict):
                todo.append((f"{prefix}{name}.", value))
            else:
                found[f"{prefix}{name}"] = value
    return found


def _program_names(module: Any) -> list[Any]:
    return [(name, id(value)) for name, value in vars(module).items() if name != "__file__"]


def _differ_in_common(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if a value that was there before has changed."""
    return any(name in now and now[name] != value for name, value in before.items())


def _overrides(module: Any) -> dict[str, Any]:
    """Return the settings of one of torch's configurations that are not their defaults."""
    found = {}
    for name, entry in module._config.items():
        value, default = entry.user_override, entry.default
        value = value.get() if hasattr(value, "get") and hasattr(value, "reset") else value
        if type(value) is not object and repr(value) != repr(default):  # of object: not set
            found[name] = repr(value)
    return found


_TORCH_FLAGS = (
    *("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
    *("_get_deterministic_fill_uninitialized_memory", "_get_float32_matmul_precision"),
    *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
    *("_get_cudnn_allow_tf32", "_get_cudnn_sdp_enabled", "_get_flash_sdp_enabled"),
    *("_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cublas_allow_tf32"),
    *("_get_cublas_allow_fp16_reduced_precision_reduction", "_get_qengine", "_get_warnAlways"),
    *("_get_cublas_allow_bf16_reduced_precision_reduction", "_get_linalg_preferred_backend"),
    *("_get_mkldnn_enabled", "_get_mkldnn_deterministic", "_get_nnpack_enabled"),
    *("_get_onednn_allow_tf32", "_is_multithreading_enabled", "_is_torch_function_enabled"),
    *("_len_torch_function_stack", "_len_torch_dispatch_stack", "is_anomaly_enabled"),
    *("is_autocast_cache_enabled", "is_grad_enabled"),
    *("is_inference_mode_enabled", "_get_default_device", "_get_graph_executor_optimize"),
)
"""Functions of `torch._C` without arguments that return a mode or flag."""


def _torch_flags(module: Any) -> list[Any]:
    functions = (getattr(module._C, name, None) for name in _TORCH_FLAGS)
    return [_result(function) for function in functions if function is not None]


def _result(function: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of its error: torch's flags may contradict."""
    try:
        return function()
    except Exception as error:
        return type(error)


def _differ(before: list[Any], now: list[Any]) -> bool:
    """Return True unless the lists hold the same objects; equal ones may be different."""
    return len(before) != len(now) or not all(map(is_, before, now))


SETTINGS = (
    Setting("sys", "a hook of sys", _hooks),
    Setting("sys", "sys.argv", lambda module: list(module.argv)),
    Setting("sys", "the recursion limit", lambda module: module.getrecursionlimit()),
    Setting("sys", "the switch interval", lambda module: module.getswitchinterval()),
    Setting("sys", "sys.path", lambda module: list(module.path), _is_not_extended),
    Setting("gc", "garbage collection", _collection),
    Setting("sys", "a standard stream", _streams),
    Setting("builtins", "the names in builtins", lambda module: [*vars(module).values()], _differ),
    Setting(
        "ssl",
        "the verification of certificates",
        lambda module: module._create_default_https_context,
    ),
    Setting("_thread", "the stack size of threads", _stack_size),
    Setting("tracemalloc", "tracemalloc", lambda module: module.is_tracing()),
    Setting("faulthandler", "the faulthandler", lambda module: module.is_enabled()),
    Setting("resource", "a limit of resources", _limits),
    Setting("posix", "the priority", _priority),
    Setting("posix", "the processors in use", _processors, _changes_processors, binds=True),
    Setting("time", "the time zone", lambda module: module.tzname),
    Setting("_locale", "the locale", lambda module: module.setlocale(module.LC_ALL)),
    Setting("sys", "a hook or limit of sys", _rare_settings),
    Setting("threading", "threading.excepthook", lambda module: module.excepthook),
    Setting(
        "threading",
        "the trace or profile function of threads",
        lambda module: (module._trace_hook, module._profile_hook),
    ),
    Setting("logging", "the root logger", _root_logger),
    Setting(
        "logging",
        "the names of levels",
        lambda module: dict(module._levelToName),
        _differ_in_common,
    ),
    Setting("csv", "the size of fields in csv files", lambda module: module.field_size_limit()),
    Setting(
        "warnings",
        "the display of warnings",
        lambda module: (module.showwarning, module.formatwarning),
    ),
    Setting(
        "multiprocessing.context",
        "the start method of multiprocessing",
        lambda module: module._default_context._actual_context,
    ),
    Setting("socket", "the default timeout of sockets", lambda module: module.getdefaulttimeout()),
    Setting("asyncio.events", "the event loop policy", _loop_policy),
    Setting("decimal", "the decimal context", _decimal_context),
    Setting(
        "decimal",
        "the default decimal context",
        lambda module: _of_context(module.DefaultContext),
    ),
    Setting("tempfile", "the folder of temporary files", _temporary_folder),
    Setting("urllib.request", "the opener of URLs", lambda module: module._opener),
    Setting("warnings", "the filters of all warnings", _wide_filters),
    Setting(
        "numpy",
        "numpy's treatment of errors",
        lambda module: (module.geterr(), module.geterrcall(), module.getbufsize()),
    ),
    Setting("numpy", "numpy's print options", lambda module: str(module.get_printoptions())),
    Setting("torch", "torch's default dtype", lambda module: module.get_default_dtype()),
    Setting("torch", "a mode or flag of torch", _torch_flags),
    Setting(
        "torch._tensor_str", "torch's print options", lambda module: vars(module.PRINT_OPTS).copy()
    ),
    Setting(
        "torch.multiprocessing",
        "torch's sharing of memory",
        lambda module: module.get_sharing_strategy(),
    ),
    Setting(
        "numba.np.ufunc.parallel", "the threads of numba", lambda module: module._is_initialized
    ),
)
LARGE_SETTINGS = (
    Setting("logging", "the loggers of others", _loggers, _is_of_others),
    Setting("__main__", "the names of the program", _program_names),
    Setting("pandas", "pandas' options", _pandas_options, _differ_in_common),
    Setting(
        "matplotlib", "matplotlib's parameters", lambda module: dict(dict.items(module.rcParams))
    ),
    Setting("torch.hub", "the folder of torch.hub", lambda module: module._hub_dir),
    Setting("torch._dynamo.config", "the settings of torch._dynamo", _overrides),
    Setting("torch._inductor.config", "the settings of torch._inductor", _overrides),
)
"""Settings that take long to read: read once per import, and attributed to its first module."""
