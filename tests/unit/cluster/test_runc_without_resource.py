"""Wrapper of runc for machines without CAP_SYS_RESOURCE."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from scripts.cluster import runc_without_resource as wrapper

BOTH = ["CAP_SYS_RESOURCE", "CAP_KILL"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: found.append(words))
    return found


def test_capability_is_removed_from_every_set_only() -> None:
    process = {"capabilities": {"bounding": BOTH, "effective": BOTH}, "args": ["sh"]}
    assert wrapper.without_resource(process) == {
        "capabilities": {"bounding": ["CAP_KILL"], "effective": ["CAP_KILL"]},
        "oomScoreAdj": 0,
        "args": ["sh"],
    }


@pytest.mark.parametrize(("asked", "given"), [(-999, 0), (None, 0), (500, 500)])
def test_oom_score_is_not_below_own_score(asked: int | None, given: int) -> None:
    assert wrapper.without_resource({"oomScoreAdj": asked})["oomScoreAdj"] == given


@pytest.mark.parametrize("words", [["--bundle", "{}"], ["--bundle={}"], ["-b", "{}"]])
def test_create_edits_the_bundle(tmp_path: Path, ran: list[list[str]], words: list[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"process": {"capabilities": {"bounding": BOTH}}, "root": {}}))
    command = ["--root", "/r", "create", *(word.format(tmp_path) for word in words), "name"]
    wrapper.main(command)
    described = json.loads(config.read_text())
    assert described["process"]["capabilities"] == {"bounding": ["CAP_KILL"]}
    assert described["root"] == {}
    assert ran == [[wrapper.RUNC, *command]]


def test_exec_edits_the_process(tmp_path: Path, ran: list[list[str]]) -> None:
    process = tmp_path / "process.json"
    process.write_text(json.dumps({"capabilities": {"effective": BOTH}}))
    wrapper.main(["exec", "--process", str(process), "name"])
    assert json.loads(process.read_text())["capabilities"] == {"effective": ["CAP_KILL"]}


def test_every_other_command_is_passed_through(ran: list[list[str]]) -> None:
    wrapper.main(["kill", "name", "9"])
    assert ran == [[wrapper.RUNC, "kill", "name", "9"]]
