"""Cache keys of images: a hash of the source files that go into each image."""

from __future__ import annotations

from pathlib import Path

from scripts.environment import key
from tests.cluster.builder import Recipe
from tests.cluster.parts import content
from tests.cluster.places import ROOT


def visible(ignorefile: str) -> list[str] | None:
    """Return the paths this .dockerignore lets in; None unless it begins by ignoring all."""
    lines = [line.strip() for line in ignorefile.splitlines()]
    rules = [line for line in lines if line and not line.startswith("#")]
    allowed = [rule.removeprefix("!") for rule in rules[1:] if rule.startswith("!")]
    if rules[:1] != ["*"] or any("*" in path for path in allowed):
        return None
    return allowed


def key_of(recipe: Recipe) -> str:
    """Return a short hash of all files of the tree that go into the image.

    Without a .dockerignore of the expected form that is the whole tree: the image is rebuilt more
    often.
    """
    special = recipe.dockerfile.with_name(f"{recipe.dockerfile.name}.dockerignore")
    ignorefile = special if special.exists() else ROOT / ".dockerignore"
    paths = visible(ignorefile.read_text()) if ignorefile.exists() else None
    seen = [ROOT / path for path in paths] if paths is not None else [ROOT]
    folders = [path.name for folder in recipe.contexts.values() for path in _listing(folder)]
    return key(recipe.name, content(recipe.dockerfile, ignorefile, *seen), *folders)


def _listing(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
