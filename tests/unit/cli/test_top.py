"""Rates of steps in `elasticjob top`."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_cli.commands.top import Rates, Reading, _here
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.job_store import JobFolder


def reading(at: float, step: int | None, name: str = "job") -> Reading:
    return Reading({"metadata": {"namespace": "default", "name": name}}, at, step)


def rates(*readings: tuple[float, int | None]) -> list[float | None]:
    taken = Rates()
    return [taken.take(reading(at, step)) for at, step in readings]


def test_rate_is_that_between_two_changes_of_the_step() -> None:
    assert rates((0, 10), (2, 30)) == [None, 10]
    assert rates((0, 10), (2, 10), (4, 10), (60, 130)) == [None, None, None, 2]
    assert rates((0, 10), (2, 30), (4, 30)) == [None, 10, 10]


def test_rate_is_unknown_after_a_return_to_a_checkpoint_and_without_steps() -> None:
    assert rates((0, 10), (2, 30), (4, 20), (6, 24)) == [None, 10, None, 2]
    assert rates((0, None), (2, 5), (4, 9)) == [None, None, 2]
    assert rates((0, 5), (2, 9), (4, None), (6, 30)) == [None, 2, None, None]


def test_rates_of_jobs_are_separate() -> None:
    taken = Rates()
    for name, step in (("a", 10), ("b", 100)):
        assert taken.take(reading(0, step, name)) is None
    assert taken.take(reading(1, 20, "a")) == pytest.approx(10)
    assert taken.take(reading(2, 102, "b")) == pytest.approx(1)


def test_named_job_with_a_damaged_status_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = JobFolder("default", "a")
    folder.path.mkdir(parents=True)
    folder.status_file.write_text("{")
    with pytest.raises(CommandError, match=r"the status of local job .a. cannot be read"):
        list(_here("default", "a", everywhere=False))
    assert not list(_here("default", None, everywhere=False))
