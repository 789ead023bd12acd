"""Commands of `elasticjob`: their listing, and the modules that each of them loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticjob_cli.errors import ExitCode
from elasticjob_cli.main import COMMANDS
from tests.unit.operator.builders import job

HEAVY = {"grpc", "kopf", "kubernetes", "elasticjob_agent.agent", "elasticjob_cli.local.run"}


def loaded_by(*words: str, status: int = 0, **environment: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-m", "elasticjob_cli.main", *words]
    env = {**os.environ, **environment}
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=env)
    assert done.returncode == status, done.stderr[-2000:]
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"run", "agent"}))
def test_command_loads_neither_the_agent_nor_an_etcd_client(name: str) -> None:
    loaded = loaded_by(name, "--help")
    assert "elasticjob_cli.errors" in loaded
    assert loaded.isdisjoint(HEAVY)


LISTING = HEAVY | {"pydantic", "yaml", "rich", "elasticjob_operator", "elasticjob_cli.commands"}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"]])
def test_listing_loads_no_command(words: list[str]) -> None:
    loaded = loaded_by(*words)
    assert "elasticjob_cli.errors" in loaded
    of_version = {"elasticjob_cli.commands", "pydantic"}  # typer loads pydantic for any command
    unwanted = LISTING - (of_version if words == ["--version"] else set())
    assert loaded.isdisjoint(unwanted)


def test_help_lists_all_commands_in_order() -> None:
    command = [sys.executable, "-m", "elasticjob_cli.main", "--help"]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    listing = done.stdout.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in listing if line.strip()] == list(COMMANDS)


MODELS = HEAVY | {"torch", "yaml", "rich", "asyncio", "elasticjob_operator.model"}
"""Modules that take longer to load than the rest of the program; typer loads pydantic itself."""


@pytest.mark.parametrize(
    "words",
    [["get"], ["get", "-o", "wide"], ["get", "-A"], ["get", "job"], ["get", "job", "-o", "json"],
     ["rounds", "job"], ["logs", "job"]],
    ids=" ".join,
)  # fmt: skip
def test_listing_of_local_jobs_loads_no_models(tmp_path: Path, words: list[str]) -> None:
    """Also of a job with conditions, whose runner is gone."""
    store_job(tmp_path)
    loaded = loaded_by(*words, XDG_STATE_HOME=str(tmp_path))
    assert "elasticjob_cli.local.job_store" in loaded
    assert loaded.isdisjoint(MODELS)


def store_job(state: Path) -> None:
    """Store a local job whose runner is gone."""
    folder = state / "elasticjob" / "default" / "job"
    folder.mkdir(parents=True)
    condition = {"type": "RendezvousUnavailable", "status": "False", "reason": "JobRunning"}
    status = {"phase": "Running", "conditions": [{**condition, "message": ""}]}
    (folder / "status.json").write_text(json.dumps({**job().manifest(), "status": status}))


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["scale", "job", "--nodes", "2"], ExitCode.BAD_INPUT),
        (["fault", "drain", "job", "job-0"], ExitCode.BAD_INPUT),
        (["suspend", "job"], ExitCode.BAD_INPUT),
        (["delete", "--finished"], ExitCode.SUCCEEDED),
        (["delete", "job"], ExitCode.SUCCEEDED),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_change_of_a_local_job_loads_no_models(
    tmp_path: Path, words: list[str], status: ExitCode
) -> None:
    store_job(tmp_path)
    loaded = loaded_by(*words, status=status, XDG_STATE_HOME=str(tmp_path))
    assert "elasticjob_cli.local.control_client" in loaded
    assert loaded.isdisjoint(MODELS)


def test_damaged_job_loads_the_models_that_name_its_field(tmp_path: Path) -> None:
    folder = tmp_path / "elasticjob" / "default" / "job"
    folder.mkdir(parents=True)
    document = {**job().manifest(), "status": {"phase": "Failed", "restarts": "x"}}
    (folder / "status.json").write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-m", "elasticjob_cli.main", "get"],
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.stdout.splitlines()[1].split()[:2] == ["job", "Failed"]
    assert "<invalid>" in done.stdout
    assert "status.restarts: must be an integer; got 'x'" in done.stderr
    assert done.returncode == 1
