"""Release: sections of the changelog, workflows whose actions are pinned, community files."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.changelog import PAGE, ChangelogError, cut, notes
from scripts.dist import version
from tests.paths import ROOT

DAY = datetime.date(2026, 11, 24)
TEXT = "# Changelog\n\n## Unreleased\n\n### Added\n\n- One.\n\n## 0.0.9 - 2026-01-02\n\n- Zero.\n"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


def test_cut_gives_the_unreleased_changes_a_version_and_a_date() -> None:
    made = cut(TEXT, "0.1.0", DAY)
    assert made == TEXT.replace("## Unreleased\n", "## Unreleased\n\n## 0.1.0 - 2026-11-24\n")
    assert notes(made, "0.1.0") == "### Added\n\n- One.\n"
    assert notes(made, "0.0.9") == "- Zero.\n"


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        (cut(TEXT, "0.1.0", DAY), "0.2.0", "no unreleased changes"),
        (TEXT, "0.0.9", "has a section of 0.0.9 already"),
        ("# Changelog\n", "0.1.0", "no unreleased changes"),
    ],
)
def test_cut_without_changes_or_of_a_known_version_is_refused(
    text: str, wanted: str, message: str
) -> None:
    with pytest.raises(ChangelogError, match=message):
        cut(text, wanted, DAY)


def test_notes_of_an_absent_version_name_the_remedy() -> None:
    with pytest.raises(ChangelogError, match=r"has no section of 9\.9\.9: run `python -m"):
        notes(TEXT, "9.9.9")


def test_another_version_than_the_products_is_refused() -> None:
    command = [sys.executable, "-m", "scripts.changelog", "cut", "99.0.0"]
    before = PAGE.read_bytes()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1, f"pyproject.toml has version {version()}, not 99.0.0\n"
    )  # fmt: skip
    assert PAGE.read_bytes() == before


def check_releasable(text: str) -> None:
    """Fail unless a changelog has changes to cut, or was cut for the product's version."""
    try:
        assert notes(cut(text, "99.0.0", DAY), "99.0.0")
    except ChangelogError:
        assert notes(text, version())


def test_changelog_has_changes_to_cut_or_was_cut_for_this_version() -> None:
    text = PAGE.read_text()
    check_releasable(text)
    if version() not in re.findall(r"^## (\S+) - ", text, re.M):
        check_releasable(cut(text, version(), DAY))  # the commit that is tagged
    with pytest.raises(ChangelogError):
        check_releasable("# Changelog\n\n## Unreleased\n\n")


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", ())]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_the_release_in_a_comment(workflow: Path) -> None:
    used = re.findall(r"uses: (.+)$", workflow.read_text(), re.M)
    assert used
    for action in used:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_keeps_no_credentials_and_can_only_read_by_default(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


def test_workflows_run_commands_and_targets_that_exist() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = "\n".join(step.get("run", "") for path in WORKFLOWS for step in steps(path))
    for words in re.findall(r"^\s*make ([a-z -]+)", commands, re.M):
        assert set(words.split()) <= set(targets)
    for module in re.findall(r"-m (scripts\.\w+)", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    for script in re.findall(r"^\.ci/\w+", commands, re.M):
        assert (ROOT / script).exists()


def test_supported_pythons_are_those_of_the_matrix() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text())
    assert ci["jobs"]["check"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("form", ["bug.yaml", "feature.yaml"])
def test_issue_form_has_the_fields_that_the_forge_requires(form: str) -> None:
    found = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text())
    assert {"name", "description", "body"} <= found.keys()
    for part in found["body"]:
        assert part["type"] in ("textarea", "input")
        assert part["attributes"]["label"]
    assert len({part["id"] for part in found["body"]}) == len(found["body"])


def test_release_has_images_of_both_architectures_under_one_tag() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())["jobs"]
    machines = jobs["images"]["strategy"]["matrix"]["include"]
    architectures = {one["architecture"] for one in machines}
    assert architectures == {"amd64", "arm64"}
    assert len({one["machine"] for one in machines}) == 2
    [join] = [step["run"] for step in jobs["index"]["steps"] if "imagetools" in step.get("run", "")]
    assert all(f'"$image-{one}"' in join for one in architectures)
    assert jobs["index"]["needs"] == ["build", "images"]
    assert jobs["publish"]["needs"] == ["build", "index"]


@pytest.mark.parametrize("lock", ["operator", "sidecar"])
def test_packages_of_an_image_are_locked_for_both_architectures(lock: str) -> None:
    """Compiled packages have wheels of both, or are built from their sources."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    assert "platform_machine" not in text
