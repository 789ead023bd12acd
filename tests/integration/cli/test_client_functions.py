"""Function jobs of the Python client: real runners and workers, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticjob import Client, ElasticJob
from elasticjob_agent.runtimes.function_entrypoint import is_importable
from elasticjob_cli.client import BadInput, JobFailed
from tests.integration.agent_api import functions
from tests.integration.local_rig import LocalRig, rig
from tests.paths import ROOT

__all__ = ["rig"]

WAIT_SECONDS = 120.0


@pytest.fixture
def here(rig: LocalRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRig]:
    """Yield a rig whose jobs this process submits; its folders are those of the rig."""
    for name in ("XDG_STATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, rig.env[name])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([rig.env["PYTHONPATH"], str(ROOT)]))
    monkeypatch.chdir(rig.job)
    yield rig
    rig.nothing_left()


def script(rig: LocalRig, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script, or with `-c` its text without a file."""
    path = rig.job / "script.py"
    path.write_text(text)
    words = ["-c", text] if options == ("-c",) else [str(path)]
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_workers_return_values_by_rank_and_run_in_a_folder_of_their_own(here: LocalRig) -> None:
    job = ElasticJob.from_function(
        functions.environment, args=["hello"], kwargs={"local_rank": "x"}, nodes=2, workers=2
    )
    assert job.name == "environment"
    values = Client().submit(job).result(WAIT_SECONDS).return_values
    assert sorted(values) == [0, 1, 2, 3]
    assert [values[rank]["RANK"] for rank in values] == ["0", "1", "2", "3"]
    assert {one["word"] for one in values.values()} == {"hello"}
    attached = Client().job("environment")
    assert attached.result().return_values[3]["LOCAL_RANK"] == "1"
    assert "hello of x" in [line.text.partition("] ")[2] for line in attached.logs(rank=2)]
    # The standby may still be preloading; the command itself is no reason for a cold start.
    reasons = [reason for one in attached.rounds() if (reason := one.get("coldReason"))]
    assert not [reason for reason in reasons if "the standby is still preloading" not in reason]
    folders = here.state / "elasticjob" / ".functions" / "default" / "environment"
    assert folders.stat().st_mode & 0o777 == 0o700
    attached.delete()
    assert not folders.exists()


def test_working_folder_is_kept_by_the_next_run(here: LocalRig) -> None:
    job = ElasticJob.from_function(Path("step").write_text, args=["1"], name="steps")
    assert Client().submit(job).result(WAIT_SECONDS).return_values == {0: 1}
    again = ElasticJob.from_function(Path("step").read_text, name="steps")
    assert Client().submit(again).result(WAIT_SECONDS).return_values == {0: "1"}
    assert not (here.job / "step").exists()
    chosen = ElasticJob.from_function(os.getcwd, name="chosen", folder=here.job)
    assert Client().submit(chosen).result(WAIT_SECONDS).return_values == {0: str(here.job)}


def test_failing_function_raises_its_traceback(here: LocalRig) -> None:
    job = ElasticJob.from_function(functions.always_fails, max_restarts=0)
    with pytest.raises(JobFailed, match="the loss is not a number") as failed:
        Client().submit(job).result(WAIT_SECONDS)
    assert failed.value.result.return_values == {}


GUARDED = """
from dataclasses import dataclass
from elasticjob import Client, ElasticJob

@dataclass
class Loss:
    value: float

def train(scale):
    return Loss(2 * scale)

if __name__ == "__main__":
    job = ElasticJob.from_function(train, args=[0.5], nodes=2)
    print(Client().submit(job).result(120).return_values)
"""


@pytest.mark.parametrize("way", ["file", "-c"])
def test_function_of_the_main_module_runs(here: LocalRig, way: str) -> None:
    ran = script(here, GUARDED, *([] if way == "file" else ["-c"]))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "{0: Loss(value=1.0), 1: Loss(value=1.0)}\n"


def test_script_without_guard_does_not_submit_again(here: LocalRig) -> None:
    ran = script(here, GUARDED.replace('if __name__ == "__main__"', "if True"))
    assert ran.returncode == 1
    assert "a worker must not submit a job" in ran.stderr


def test_inner_function_runs_by_value(here: LocalRig) -> None:
    factor = 3
    job = ElasticJob.from_function(lambda x: factor * x, args=[2], name="inner")
    assert Client().submit(job).result(WAIT_SECONDS).return_values == {0: 6}


def test_inner_function_without_cloudpickle_is_refused(
    here: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    job = ElasticJob.from_function(lambda: None, name="inner")
    with pytest.raises(BadInput, match="move it into a module, or install cloudpickle"):
        Client().submit(job)


def test_argument_that_cannot_be_pickled_is_refused(here: LocalRig) -> None:
    with (here.job / "file").open("w") as file:
        job = ElasticJob.from_function(print, args=[file])
        with pytest.raises(BadInput, match="cannot be pickled"):
            Client().submit(job)
    with pytest.raises(BadInput, match="function must be callable"):
        ElasticJob.from_function("train")  # type: ignore[arg-type]


def inner() -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("function", "importable"),
    [
        (functions.environment, True),
        (partial(partial(functions.environment, "x"), "y"), True),
        (Path("x").read_text, True),
        (len, True),
        (ElasticJob.from_manifest, True),
        (inner(), False),
        (partial(inner()), False),
    ],
)
def test_importable_function_is_recognised(function: Any, importable: bool) -> None:
    assert is_importable(function) is importable
