"""Wrappers of functions that report their calls while imports are observed."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import sys
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elasticjob_launcher.zygote.import_effects import Effects
from elasticjob_launcher.zygote.process_settings import ThreadCounts
from elasticjob_launcher.zygote.watched_functions import ReportingFunction, WatchedFunctions


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


def test_functions_that_compilers_keep_by_identity_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = {}
    for name in ("torch", "numba"):
        functions[name] = SimpleNamespace(set_num_threads=print)
        monkeypatch.setitem(sys.modules, name, functions[name])
    watched = WatchedFunctions()
    ThreadCounts(watched).start()
    found = [each.set_num_threads for each in functions.values()]
    watched.restore()
    assert found == [print, print]


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
