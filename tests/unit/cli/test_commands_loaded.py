"""Commands of `elasticjob`: their listing, and the modules that each of them loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elasticjob_cli.main import COMMANDS

HEAVY = {"grpc", "kopf", "kubernetes", "elasticjob_agent.agent", "elasticjob_cli.local.run"}


def loaded_by(*words: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-m", "elasticjob_cli.main", *words]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"run", "agent"}))
def test_command_loads_neither_the_agent_nor_an_etcd_client(name: str) -> None:
    loaded = loaded_by(name, "--help")
    assert "elasticjob_cli.errors" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_help_lists_all_commands_in_order() -> None:
    command = [sys.executable, "-m", "elasticjob_cli.main", "--help"]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    listing = done.stdout.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in listing if line.strip()] == list(COMMANDS)
