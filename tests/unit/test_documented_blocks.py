"""Code blocks of the documentation: known commands, valid fields, valid Python, shell that runs."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticjob_cli.convert.documents import convert_document
from elasticjob_operator.model import ElasticJob
from tests import documentation
from tests.documentation import Block, blocks, commands, reasons
from tests.paths import ROOT

ALL = list(commands())
SCRIPTS = [block for block in blocks("bash") if block.page in documentation.SHELL]
BASE: dict[str, Any] = {
    "apiVersion": "elasticjob.dev/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {"name": "documented"},
    "spec": {
        "maxNodes": 4,
        "template": {
            "spec": {"containers": [{"name": "trainer", "image": "i", "command": ["true"]}]}
        },
    },
}
# Blocks that continue a part of the script with names of its earlier parts.
HARNESS = """
set -eu
step=3 saved=2 word= asked= count=0
save() { echo saved >> saves; }
train_step() { count=$((count + 1)); if [ $count -gt 3 ]; then return 1; fi; kill -USR1 $$; }
"""


@pytest.mark.parametrize(
    ("block", "command"), ALL, ids=[f"{b}-{n}" for n, (b, _) in enumerate(ALL)]
)
def test_command_that_is_not_executed_has_one_reason(block: Block, command: str) -> None:
    found = reasons(command)
    assert len(found) == 1, f"{block}: add {command!r} to tests/documentation.py"


def test_no_reason_is_stale() -> None:
    used = {pattern for _, command in ALL for pattern in reasons(command)}
    assert set(documentation.NOT_RUN) - used == set()


def test_commands_of_console_and_continued_lines_are_found() -> None:
    known = {command for _, command in ALL}
    assert "elasticjob logs digits --round 3" in known
    assert any(command.endswith("--rdzv-id=run-18 train.py --epochs 10") for command in known)
    assert not any("round 3 begins" in command for command in known)


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            name: merged(base.get(name), over.get(name)) if name in over else base[name]
            for name in {**base, **over}
        }
    return over


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_fields_of_a_manifest_or_a_part_of_one_are_valid(block: Block) -> None:
    found = yaml.safe_load(block.text)
    if block.page == "docs/registry.md":
        values = yaml.safe_load((ROOT / "charts" / "elasticjob" / "values.yaml").read_text())
        assert found.keys() <= values.keys()
        for part in ("operator", "sidecar", "etcd"):
            assert found[part]["image"].keys() <= values[part]["image"].keys()
        return
    if found.get("kind") == "PyTorchJob":
        assert convert_document(found).jobs
        return
    whole = found if {"spec", "kind"} & found.keys() else {"spec": found}
    job = ElasticJob.model_validate(merged(BASE, whole))
    again = job.model_dump(by_alias=True, mode="json")
    for name in whole["spec"]:
        assert name in again["spec"]


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_block_is_a_program_or_a_part_of_one(block: Block) -> None:
    tree = ast.parse(block.text)
    assert tree.body
    from elasticjob import train

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="train"), attr=name):
                assert hasattr(train, name), f"{block}: train.{name}"


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_shell_block_runs_and_saves_on_request(block: Block, tmp_path: Path) -> None:
    (tmp_path / "request").write_text("checkpoint 7\n")
    env = {f"ELASTICJOB_{name.upper()}_FILE": str(tmp_path / name)
           for name in ("progress", "request", "saved")}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", HARNESS + block.text],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "saves").exists()
    if "progress" in block.text.lower():
        assert (tmp_path / "progress").read_text() == '{"step": 3, "checkpoint": 2}\n'
    if "SAVED" in block.text:
        assert re.fullmatch(r"\d+\n", (tmp_path / "saved").read_text())
