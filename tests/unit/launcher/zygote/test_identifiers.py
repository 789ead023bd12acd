"""Random identifiers drawn by an import, found by the standby in the loaded modules."""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elasticjob_launcher.zygote.effects.identifiers import Identifiers
from elasticjob_launcher.zygote.search_path import is_python_module


def found(monkeypatch: pytest.MonkeyPatch, value: Any) -> list[str]:
    """Return the refusal of a package that keeps this value."""
    module = ModuleType("some_pkg")
    identifiers = Identifiers()
    identifiers.begin()
    monkeypatch.setitem(sys.modules, "some_pkg", module)
    module.value = value() if callable(value) else value  # type: ignore[attr-defined]
    return [reason for reason, _ in identifiers.found()]


@pytest.mark.parametrize(
    "value",
    [datetime.datetime.min, datetime.datetime.max, 10**400, float("inf"), float("nan"), -1],
    ids=lambda value: repr(value)[:20],
)
def test_value_of_no_clock_is_ignored(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    assert found(monkeypatch, value) == []


@pytest.mark.parametrize("clock", [time.time, time.monotonic, time.time_ns, datetime.datetime.now])
def test_value_of_a_clock_is_recognised(monkeypatch: pytest.MonkeyPatch, clock: object) -> None:
    assert found(monkeypatch, clock) == ["keeps the time of its import (module some_pkg)"]


def imported(monkeypatch: pytest.MonkeyPatch, folder: Path, **sources: str) -> list[str]:
    """Return the refusals of a package with these modules, on a machine that runs since 35 s."""
    package = folder / "some_pkg"
    package.mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    clock = itertools.chain([35.25], itertools.count(36.123456789))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    identifiers, before = Identifiers(), set(sys.modules)
    identifiers.start()
    identifiers.begin()
    try:
        for name in sources:
            importlib.import_module(f"some_pkg.{name}")
        return [reason for reason, _ in identifiers.found()]
    finally:
        identifiers.stop()
        for name in set(sys.modules) - before:
            del sys.modules[name]


@pytest.mark.parametrize(
    "source",
    ["ZERO = 35.586178159", "ZEROS = [14.1, 35.586178159, 36.01]", "AT = {'x': (35.5, -1)}",
     "class Zeta:\n    zeros = (35.586178159,)"],
)  # fmt: skip
def test_literal_that_equals_the_clock_by_chance_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    assert imported(monkeypatch, tmp_path, zeta=source) == []


def test_literal_of_another_module_of_the_package_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = imported(
        monkeypatch, tmp_path, zeta="ZERO = 35.586178159", names="from some_pkg.zeta import ZERO"
    )
    assert found == []


def test_clock_that_is_read_beside_literals_is_recognised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "import time\nZERO = 35.586178159\nBEGAN = time.monotonic()"
    found = imported(monkeypatch, tmp_path, clock=source)
    assert found == ["keeps the time of its import (module some_pkg.clock)"]


@pytest.mark.parametrize("kept", ["os.getpid()", "f'{os.getpid()}'", "[('x', os.getpid())]"])
def test_process_number_that_equals_a_literal_by_chance_is_recognised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: str
) -> None:
    literal = f"def limit():\n    return {os.getpid()}, '{os.getpid()}'"
    found = imported(monkeypatch, tmp_path, own=f"import os\nKEPT = {kept}\n{literal}")
    assert found == ["keeps the process number (module some_pkg.own)"]
    (tmp_path / "other").mkdir()
    assert imported(monkeypatch, tmp_path / "other", own=f"import os\n{literal}") == []


@pytest.mark.parametrize(
    "kept",
    [
        "time.strftime('%b%d_%H-%M-%S')",
        "time.ctime()",
        "f'{datetime.date.today():run_%Y-%m-%d}'",
        "datetime.date.today()",
        "time.perf_counter_ns()",
        "{'at': time.clock_gettime(time.CLOCK_BOOTTIME)}",
    ],
)
def test_date_or_time_in_a_form_of_its_own_is_recognised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: str
) -> None:
    found = imported(monkeypatch, tmp_path, own=f"import datetime, time\nKEPT = {kept}\n")
    assert len(found) == 1
    assert re.fullmatch(r"keeps the (time|date) of its import \(module some_pkg.own\)", found[0])


@pytest.mark.parametrize("kept", ["'1.2.3-4-5'", "'2020-01-02'", "'12:34'", "2 ** 34", "'#172000'"])
def test_text_or_number_with_digits_is_not_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: str
) -> None:
    assert imported(monkeypatch, tmp_path, own=f"import time\nKEPT = str({kept}) * 1\n") == []


KEEPER = "import time\ndef keeps(timer=time.thread_time):\n    return timer()\n"


def test_wrapper_kept_by_a_package_records_only_between_start_and_stop() -> None:
    names: dict[str, Any] = {"__name__": "some_pkg"}
    identifiers = Identifiers()
    identifiers.start()
    identifiers.begin()
    exec(KEEPER, names)
    for number in (1, 1, 0, 1, 0):
        if number and not identifiers._watched:
            identifiers.start()
        if not number:
            identifiers.stop()
        before = len(identifiers._times)
        assert names["keeps"]() > 0
        assert len(identifiers._times) == before + number


def test_recorded_processor_times_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticjob_launcher.zygote.effects.identifiers.MOST_TIMES", 3)
    numbers = itertools.count()
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(numbers))
    identifiers = Identifiers()
    identifiers.start()
    try:
        for _ in range(9):
            time.thread_time_ns()
        assert [*identifiers._times] == [0, 1, 2]
    finally:
        identifiers.stop()


FOR_FORKS = """
import os
def reseed_rng():
    called.append("reseed_rng")
def reseed_and_fail():
    called.append("reseed_and_fail")
    raise OSError
def disable():
    called.append("disable")
def before():
    called.append("before")
os.register_at_fork(after_in_child=disable)
os.register_at_fork(after_in_child=reseed_and_fail)
os.register_at_fork(before=before, after_in_child=reseed_rng)
os.register_at_fork(after_in_child=reseed_rng)
"""


def test_function_for_forks_is_called_in_a_worker_only_to_reseed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **options: registered.append(options))
    called: list[str] = []
    identifiers = Identifiers()
    identifiers.start()
    try:
        exec(FOR_FORKS, {"__name__": "some_pkg", "called": called})
    finally:
        identifiers.stop()
    assert (registered, called) == ([], [])
    identifiers.set_new_values()
    assert len(registered) == 4
    assert called == ["reseed_and_fail", "reseed_rng"]


@pytest.mark.parametrize("uptime", [15, 35, 60, 110, 190])
def test_mpmath_is_preloaded_on_a_machine_that_has_just_started(
    monkeypatch: pytest.MonkeyPatch, uptime: int
) -> None:
    importlib.import_module("mpmath.functions.zeta")
    identifiers = Identifiers()
    clock = iter([float(uptime), float(uptime + 5)])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    identifiers.begin()
    identifiers._modules -= {name for name in sys.modules if name.startswith("mpmath")}
    assert identifiers.found() == []


@pytest.mark.parametrize(
    ("name", "is_python"),
    [("wave", True), ("sys", True), ("xml.dom", True), ("my_training", False), ("my.part", False)],
)
def test_modules_that_are_not_loaded_are_classified_without_a_list_of_names(
    monkeypatch: pytest.MonkeyPatch, name: str, is_python: bool
) -> None:
    monkeypatch.delattr(sys, "stdlib_module_names")  # as in Python 3.8 and 3.9
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert is_python_module(name) is is_python
