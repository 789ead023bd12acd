"""Owns the question whether an image must be built again: what goes into it, in the tree."""

from __future__ import annotations

from pathlib import Path

from scripts.environment import key
from tests.cluster.builder import Recipe
from tests.cluster.parts import content
from tests.cluster.places import ROOT


def visible(ignorefile: str) -> list[str] | None:
    """The paths that this .dockerignore leaves; None if it does not begin with ignoring all."""
    lines = [line.strip() for line in ignorefile.splitlines()]
    rules = [line for line in lines if line and not line.startswith("#")]
    allowed = [rule.removeprefix("!") for rule in rules[1:] if rule.startswith("!")]
    if rules[:1] != ["*"] or any("*" in path for path in allowed):
        return None
    return allowed


def key_of(recipe: Recipe) -> str:
    """A short name for all that goes into the image and is in the tree.

    Where the .dockerignore says too little, that is the whole tree, and it is built more often.
    """
    special = recipe.dockerfile.with_name(f"{recipe.dockerfile.name}.dockerignore")
    ignorefile = special if special.exists() else ROOT / ".dockerignore"
    paths = visible(ignorefile.read_text()) if ignorefile.exists() else None
    seen = [ROOT / path for path in paths] if paths is not None else [ROOT]
    folders = [path.name for folder in recipe.contexts.values() for path in _listing(folder)]
    return key(recipe.name, content(recipe.dockerfile, ignorefile, *seen), *folders)


def _listing(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
