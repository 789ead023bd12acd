"""Cache keys of images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import sources
from tests.cluster.builder import Recipe
from tests.cluster.places import ROOT
from tests.cluster.sources import key_of, visible


@pytest.mark.parametrize(
    ("ignorefile", "paths"),
    [
        ("# ours\n*\n!cli\n!a/b.py\n**/__pycache__\n", ["cli", "a/b.py"]),
        ("*\n", []),
        ("build\n!cli\n", None),
        ("*\n!docs/*.md\n", None),
        ("", None),
    ],
)
def test_paths_visible_through_dockerignore(ignorefile: str, paths: list[str] | None) -> None:
    assert visible(ignorefile) == paths


def test_dockerignore_files_of_repository_resolve() -> None:
    for ignorefile in (ROOT / ".dockerignore", *(ROOT / "tests").rglob("*.dockerignore")):
        paths = visible(ignorefile.read_text())
        assert paths
        assert all((ROOT / path).exists() for path in paths)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / ".dockerignore").write_text("*\n!src\n")
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_text("a = 1")
    (tmp_path / "Dockerfile").write_text("FROM scratch")
    return Recipe("ours:1", tmp_path / "Dockerfile", {"wheels": tmp_path / "wheels"})


@pytest.mark.parametrize("changed", ["src/a.py", "src/b.py", "Dockerfile", ".dockerignore"])
def test_change_of_an_input_changes_the_key(recipe: Recipe, changed: str) -> None:
    before = key_of(recipe)
    (recipe.dockerfile.parent / changed).write_text("*\n!src\n# changed")
    assert key_of(recipe) != before


def test_change_outside_the_inputs_keeps_the_key(recipe: Recipe) -> None:
    before = key_of(recipe)
    (recipe.dockerfile.parent / "notes.md").write_text("changed")
    (recipe.dockerfile.parent / "src" / "__pycache__" / "a.pyc").write_text("changed")
    assert key_of(recipe) == before


def test_other_wheels_or_name_change_the_key(recipe: Recipe) -> None:
    before = key_of(recipe)
    assert key_of(replace(recipe, name="ours:2")) != before
    recipe.contexts["wheels"].mkdir()
    (recipe.contexts["wheels"] / "torch.whl").touch()
    assert key_of(recipe) != before
