"""Wrappers of functions that report their calls while imports are observed."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elasticjob_launcher.zygote.effects.import_effects import Effects
from elasticjob_launcher.zygote.effects.thread_counts import ThreadCounts
from elasticjob_launcher.zygote.effects.watched_functions import ReportingFunction, WatchedFunctions


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("cv2")
    module.setNumThreads = lambda number: number
    monkeypatch.setitem(sys.modules, "cv2", module)
    return module


@pytest.mark.parametrize("fails", [False, True])
def test_lazy_module_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    (tmp_path / "lazy_pkg.py").write_text("1 / 0\n" * fails)
    spec = importlib.util.spec_from_file_location("lazy_pkg", tmp_path / "lazy_pkg.py")
    assert spec
    assert spec.loader
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_pkg", module)
    spec.loader.exec_module(module)
    watched = WatchedFunctions()
    watched.report(module, "function")
    watched.report(os, "nice")
    watched.restore()
    assert type(module) is not ModuleType, "it is lazy still"


def test_function_by_which_a_package_has_replaced_the_wrapper_remains(library: Any) -> None:
    watched = WatchedFunctions()
    watched.report(library, "setNumThreads")
    wrapper = library.setNumThreads
    own = library.setNumThreads = lambda number: wrapper(number) + 1
    watched.restore()
    assert library.setNumThreads is own
    assert library.setNumThreads(2) == 3


@pytest.mark.parametrize("function", [os.getpid, uuid.uuid1])
@pytest.mark.parametrize("ended", [False, True])
def test_copy_of_kept_wrapper_is_the_function(function: Any, ended: bool) -> None:
    holder = {os.getpid: os, uuid.uuid1: uuid}[function]
    watched = WatchedFunctions()
    watched.report(holder, function.__name__)
    try:
        kept: Any = getattr(holder, function.__name__)
        if ended:
            watched.restore()
        assert isinstance(kept, ReportingFunction)
        assert copy.copy(kept) is copy.deepcopy([kept])[0] is function
        data = pickle.dumps(kept)
        assert (kept.__module__, kept.__doc__) == (function.__module__, function.__doc__)
    finally:
        watched.restore()
    assert pickle.loads(data) is function


def test_error_of_an_observer_does_not_reach_the_caller(library: Any) -> None:
    def fails(*args: Any) -> None:
        raise OSError("no such descriptor")

    watched = WatchedFunctions()
    watched.report(library, "setNumThreads", fails, fails)
    assert library.setNumThreads(2) == 2
    with pytest.raises(TypeError):
        library.setNumThreads()
    watched.restore()


def test_kept_wrapper_reports_again_after_the_next_start(library: Any) -> None:
    calls: list[Any] = []
    watched = WatchedFunctions()
    watched.report(library, "setNumThreads")
    kept = library.setNumThreads
    watched.restore()
    kept(1)
    watched.report(library, "setNumThreads", calls.append)
    assert library.setNumThreads is kept
    kept(2)
    watched.restore()
    kept(3)
    assert calls == [2]


def test_wrapper_put_back_by_a_package_reports_again(library: Any) -> None:
    calls: list[Any] = []
    function, watched = library.setNumThreads, WatchedFunctions()
    watched.report(library, "setNumThreads")
    kept = library.setNumThreads
    watched.restore()
    library.setNumThreads = kept
    watched.report(library, "setNumThreads", calls.append)
    library.setNumThreads(2)
    watched.restore()
    assert calls == [2]
    assert library.setNumThreads is function


def test_number_of_threads_set_by_another_package_is_found(library: Any) -> None:
    watched = WatchedFunctions()
    counts = ThreadCounts(watched)
    counts.start()
    counts.begin()
    exec("f(1)", {"__name__": "odd_pkg", "f": library.setNumThreads})
    watched.restore()
    assert [module for _, module in counts.found()] == ["odd_pkg"]


def test_number_of_threads_set_through_a_limiter_is_of_the_module_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Classes such as those of threadpoolctl; the limiter itself is no reason."""
    limiter: Any = ModuleType("threadpoolctl")
    exec(
        "class Library:\n    def set_num_threads(self, number):\n        self.number = number\n"
        "def limit(library, number):\n    library.set_num_threads(number)\n",
        vars(limiter),
    )
    monkeypatch.setitem(sys.modules, "threadpoolctl", limiter)
    watched, library = WatchedFunctions(), limiter.Library()
    counts = ThreadCounts(watched)
    counts.start()
    counts.begin()
    exec("f(l, 3)", {"__name__": "odd_pkg", "f": limiter.limit, "l": library})
    exec("f(l, 4)", {"__name__": "threadpoolctl", "f": limiter.limit, "l": library})
    watched.restore()
    assert library.number == 4
    assert counts.found() == [
        (
            "sets a number of threads or a mode in C (threadpoolctl.set_num_threads) "
            "when it is imported",
            "odd_pkg",
        )
    ]


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        ("omp_set_num_threads", True),
        ("openblas_set_num_threads64_", True),
        ("MKL_Set_Num_Threads", True),
        ("omp_get_max_threads", False),
        ("getpid", False),
        (3, False),
    ],
)
def test_function_in_c_that_sets_a_number_of_threads_is_found(symbol: object, found: bool) -> None:
    counts = ThreadCounts(WatchedFunctions())
    counts.begin()
    for module in ("odd_pkg", "threadpoolctl", "numpy"):
        names = {"__name__": module, "f": counts.symbol, "s": symbol}
        exec("f(None, s)", names)
    assert [module for _, module in counts.found()] == ["odd_pkg"] * found


def test_wrapper_is_found_in_a_table_of_functions_and_binds_as_the_function(library: Any) -> None:
    """Packages such as torch make tables, with the wrapper or with the function."""
    function, watched = library.setNumThreads, WatchedFunctions()
    watched.report(library, "setNumThreads")
    wrapper = library.setNumThreads
    table = {wrapper: 1}
    holder: Any = type(
        "Holder", (), {"python": wrapper, "built_in": ReportingFunction(len, print)}
    )()
    watched.restore()
    assert (table[function], {function: 2}[wrapper]) == (1, 2)
    assert wrapper != print
    assert holder.python() is holder
    assert holder.built_in([1]) == 1


@pytest.mark.parametrize(("active", "own"), [(False, True), (True, False), (True, True)])
def test_functions_are_replaced_by_the_observing_process_alone(
    library: Any, active: bool, own: bool
) -> None:
    function, effects = library.setNumThreads, Effects(print)
    effects._active, effects._pid = active, os.getpid() if own else 1
    effects.module_loaded("cv2")
    assert (library.setNumThreads is function) == (not (active and own))


@pytest.mark.parametrize(
    ("result", "ended"),
    [((0, 0), 0), ((0, 0, None), 0), ((9, 0), 1), ((9, 0, None), 1), (0, 1)],
)
def test_files_are_compared_once_a_process_has_ended(
    monkeypatch: pytest.MonkeyPatch, result: Any, ended: int
) -> None:
    compared: list[Any] = []
    effects = Effects(print)
    effects._active = effects._spawned = True
    effects._pid = os.getpid()
    monkeypatch.setattr(effects._child_files, "ended", lambda *args: compared.append(args))
    effects._reaps(result)
    assert len(compared) == ended
