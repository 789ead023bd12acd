"""Settings that an import changes, and modules whose changes the workers may inherit."""

from __future__ import annotations

import decimal
import json
import logging
import os
import posix
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticjob_launcher.zygote.effects import process_settings, setting_readers
from elasticjob_launcher.zygote.effects.process_settings import Replacements, Settings
from elasticjob_launcher.zygote.main import Zygote


class Processors:
    """Processors of this process (0) and of its parent, without a change of the real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = {0: {0, 1, 2}, os.getppid(): {0, 1, 2}}
        monkeypatch.setattr(posix, "sched_getaffinity", lambda pid: set(self.of[pid]))
        self.settings = Settings()
        self.settings.begin()

    def change(self, module: str, own: set[int], parent: set[int] | None = None) -> None:
        self.of[0] = own
        self.of[os.getppid()] = parent or self.of[os.getppid()]
        self.settings.module_loaded(module)

    def found(self) -> list[tuple[str, str]]:
        return self.settings.found()


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Processors:
    return Processors(monkeypatch)


def test_change_of_the_processors_by_a_module_is_found(processors: Processors) -> None:
    processors.change("odd_pkg", {0})
    assert processors.found() == [("changes the processors in use when it is imported", "odd_pkg")]


@pytest.mark.parametrize("module", ["torch", "torch._C", "sklearn.utils"])
def test_processors_bound_by_libgomp_of_a_trusted_package_are_ignored(
    processors: Processors, module: str
) -> None:
    processors.change(module, {0})
    assert processors.found() == []


@pytest.mark.parametrize("bound", [False, True])
def test_processors_of_the_launcher_changed_from_outside_are_not_the_modules(
    processors: Processors, bound: bool
) -> None:
    if bound:
        processors.change("torch", {0})
    processors.change("odd_pkg", {1, 2}, parent={1, 2})
    assert processors.found() == []


def test_openblas_loaded_before_the_threads_are_bound_is_recorded(
    processors: Processors, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ["/numpy/libopenblas.so"]
    monkeypatch.setattr(process_settings, "loaded_openblas", lambda: loaded)
    processors.change("numpy", {0, 1, 2})
    assert processors.settings.unbound == set()
    processors.change("torch", {0})
    loaded.append("/scipy/libopenblas.so")
    processors.change("scipy", {0})
    assert processors.settings.unbound == {"/numpy/libopenblas.so"}


@pytest.mark.parametrize(
    ("own", "after", "refused"),
    [({0}, {1, 2}, True), ({0}, {0, 1, 2}, False), ({0, 1, 2}, {1, 2}, False)],
    ids=["bound", "bound, not changed", "not bound"],
)
def test_standby_bound_to_former_processors_of_the_launcher_does_not_fork(
    monkeypatch: pytest.MonkeyPatch, own: set[int], after: set[int], refused: bool
) -> None:
    """libgomp cannot start a thread on a processor that the pod no longer has."""
    of = {0: own, os.getppid(): {0, 1, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(of[pid]))
    zygote = Zygote(cast("Any", None), (), {})
    assert zygote._moved_processors() == ""
    of[os.getppid()] = after
    assert bool(zygote._moved_processors()) is refused


def test_limits_are_named_once_for_all_modules() -> None:
    names: list[str] = []

    class Module(SimpleNamespace):
        def __dir__(self) -> list[str]:
            names.append("RLIMIT_AS")
            return ["RLIMIT_AS"]

    module = Module(RLIMIT_AS=9, getrlimit=lambda kind: (kind, -1))
    setting_readers._LIMITS.clear()
    try:
        assert [setting_readers._limits(module) for _ in range(3)] == [[(9, -1)]] * 3
    finally:
        setting_readers._LIMITS.clear()
    assert len(names) == 1


def test_function_replaced_by_an_equal_object_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies, such as those of wrapt, are equal to the functions that they wrap."""

    class Proxy:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return other is dumps

        def __call__(self) -> None: ...

    replacements, dumps = Replacements(), json.dumps
    replacements.start()
    monkeypatch.setattr(json, "dumps", Proxy())
    assert [reason for reason, _ in replacements.found()] == [
        "replaces json.dumps when it is imported"
    ]


def test_method_of_a_class_from_a_private_part_of_a_module_is_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.13 defines `pathlib.Path` in `pathlib._local`."""
    base = type("PathBase", (), {"__module__": "pathlib._abc", "is_dir": lambda self: True})
    path = type("Path", (base,), {"__module__": "pathlib._local", "exists": lambda self: True})
    other = type("Other", (), {"__module__": "pathlibs", "exists": lambda self: True})
    monkeypatch.setitem(
        sys.modules, "pathlib", cast("Any", SimpleNamespace(Path=path, Other=other))
    )
    replacements = Replacements()
    replacements.start()
    for kind in (path, other):
        monkeypatch.setattr(kind, "exists", lambda self: False)
    monkeypatch.setattr(path, "is_dir", lambda self: False)
    monkeypatch.setattr(path, "is_odd", lambda self: False, raising=False)
    assert sorted(reason for reason, _ in replacements.found()) == [
        "replaces pathlib.Path.exists when it is imported",
        "replaces pathlib.Path.is_dir when it is imported",
    ]


def test_public_value_of_a_library_set_by_another_package_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = SimpleNamespace(MAX_IMAGE_PIXELS=9, _initialized=0, formats=[], core=None)
    monkeypatch.setitem(sys.modules, "PIL.Image", cast("Any", image))
    replacements = Replacements()
    replacements.start()
    image.MAX_IMAGE_PIXELS, image._initialized, image.core = None, 1, object()
    assert replacements.found() == []
    image.MAX_IMAGE_PIXELS = 7
    replacements.start()
    image.MAX_IMAGE_PIXELS = 8
    assert replacements.found(["odd_pkg"]) == [
        ("sets PIL.Image.MAX_IMAGE_PIXELS when it is imported", "")
    ]


def test_large_settings_changed_by_a_package_other_than_their_own_are_found() -> None:
    logger, settings = logging.getLogger("some_pkg.part"), Settings()
    before = logger.level
    try:
        settings.begin()
        logger.setLevel(50)
        logging.getLogger("new_pkg")
        assert settings.found(["some_pkg"]) == settings.found() == []
        assert settings.found(["odd_pkg"]) == [
            ("changes the loggers of others when it is imported", "")
        ]
    finally:
        logger.setLevel(before)


def test_folders_put_before_others_on_the_path_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    settings.begin()
    monkeypatch.setattr(sys, "path", [*sys.path, "/last"])
    settings.module_loaded("odd_pkg")
    assert settings.found() == []
    monkeypatch.setattr(sys, "path", ["/first", *sys.path])
    settings.module_loaded("odd_pkg")
    assert settings.found() == [("changes sys.path when it is imported", "odd_pkg")]


@pytest.mark.parametrize("form", ["{folder}/", "{folder}/../{name}"])
def test_temporary_folder_of_the_environment_is_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Python stores its absolute path."""
    monkeypatch.setenv("TMPDIR", form.format(folder=tmp_path, name=tmp_path.name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    settings = Settings()
    settings.begin()
    assert tempfile.gettempdir() == str(tmp_path)
    assert settings.found() == []
    tempfile.tempdir = "/elsewhere"
    assert settings.found() != []


def test_filter_of_all_warnings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "filters", [])
    settings = Settings()
    settings.begin()
    warnings.filterwarnings("ignore", message="x")
    warnings.filterwarnings("ignore", module="odd_pkg")
    assert settings.found() == []
    warnings.simplefilter("ignore", DeprecationWarning)
    assert settings.found() == [("changes the filters of all warnings when it is imported", "")]


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Change of the recursion limit."""
    before = sys.getrecursionlimit()
    yield lambda more: sys.setrecursionlimit(before + more)
    sys.setrecursionlimit(before)


LIMIT = "changes the recursion limit when it is imported"


def test_change_between_modules_of_neutral_packages_is_attributed_to_the_first(
    limit: Callable[[int], None],
) -> None:
    settings = Settings()
    settings.begin()
    settings.module_begins("torch", lambda: "")
    settings.module_begins("torch.part", lambda: "torch")
    limit(10)
    settings.module_loaded("torch.part")
    settings.module_loaded("torch")
    assert settings.found() == [(LIMIT, "torch")]


def test_change_by_a_package_that_a_neutral_one_imports_is_attributed_to_it(
    limit: Callable[[int], None],
) -> None:
    settings = Settings()
    settings.begin()
    settings.module_begins("torch", lambda: "")
    settings.module_begins("odd_pkg", lambda: "torch")
    settings.module_begins("json", lambda: "odd_pkg")
    settings.module_loaded("json")
    limit(10)
    settings.module_loaded("odd_pkg")
    settings.module_begins("torch.part", lambda: "torch")
    settings.module_loaded("torch.part")
    settings.module_loaded("torch")
    assert settings.found() == [(LIMIT, "odd_pkg")]


def test_change_before_the_import_of_a_neutral_package_is_attributed_to_the_importer(
    limit: Callable[[int], None],
) -> None:
    settings = Settings()
    settings.begin()
    settings.module_begins("odd_pkg", lambda: "")
    limit(10)
    settings.module_begins("torch", lambda: "odd_pkg")
    settings.module_loaded("torch")
    settings.module_loaded("odd_pkg")
    assert settings.found() == [(LIMIT, "odd_pkg")]


def test_module_that_has_a_setting_determines_it_within_neutral_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "decimal")
    settings = Settings()
    settings.begin()
    settings.module_begins("torch", lambda: "")
    settings.module_begins("decimal", lambda: "torch")
    monkeypatch.setitem(sys.modules, "decimal", decimal)
    settings.module_loaded("decimal")
    monkeypatch.setattr(decimal.getcontext(), "prec", 50)
    settings.module_loaded("torch")
    assert settings.found() == [("changes the decimal context when it is imported", "torch")]


def test_openblas_loaded_after_the_threads_are_bound_within_a_neutral_package_is_bound(
    processors: Processors, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(process_settings, "loaded_openblas", lambda: list(loaded))
    processors.settings.module_begins("torch", lambda: "")
    processors.settings.module_begins("torch._C", lambda: "torch")
    processors.change("torch._C", {0})
    processors.settings.module_begins("numpy", lambda: "torch")
    loaded.append("/numpy/libopenblas.so")
    processors.settings.module_loaded("numpy")
    processors.settings.module_loaded("torch")
    assert processors.settings.unbound == set()


def test_failed_import_does_not_hide_a_change_by_a_neutral_package(
    limit: Callable[[int], None],
) -> None:
    settings = Settings()
    settings.begin()
    settings.module_begins("odd_pkg", lambda: "")
    settings.module_begins("json", lambda: "odd_pkg")
    settings.module_failed()
    settings.module_begins("sympy", lambda: "odd_pkg")
    limit(10)
    settings.module_loaded("sympy")
    settings.module_loaded("odd_pkg")
    assert settings.found() == [(LIMIT, "sympy")]
