"""Random identifiers drawn by an import, found by the standby in the loaded modules."""

from __future__ import annotations

import datetime
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from elasticjob_launcher.zygote.identifiers import Identifiers


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
