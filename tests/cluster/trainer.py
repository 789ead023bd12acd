"""Trainers' image: PyTorch and the example. It is big and seldom changes."""

from __future__ import annotations

from pathlib import Path

from scripts.environment import LOCKS, key
from tests.cluster import builder, debian
from tests.cluster.builder import Recipe
from tests.cluster.parts import content, part
from tests.cluster.places import ROOT, WHEELS

_DOCKERFILE = Path(__file__).parent / "Dockerfile.trainer"
_LOCKS = tuple(LOCKS / f"{name}.txt" for name in ("trainer", "cuda"))
_LINKS = ROOT / "scripts" / "links.py"
_GIGABYTES = 16  # its layers and its archive
_SOURCES = (_DOCKERFILE, _LINKS, *_LOCKS, ROOT / "examples" / "digits" / "train.py")


def _wheels() -> list[str]:
    return sorted(wheel.name for wheel in WHEELS.glob("*.whl"))


def _key() -> str:
    return key(content(*_SOURCES), debian.SUITE, *_wheels())


def recipe() -> Recipe:
    """Return the build recipe; the tag is a hash of the ingredients."""
    return Recipe(f"elasticjob-test/trainer:{_key()}", _DOCKERFILE, {"wheels": WHEELS})


def image() -> Path:
    """Return the archive of the image, built without a registry."""

    def make(into: Path) -> None:
        builder.save(recipe(), builder.build(recipe()), into / "image.tar")

    return part("trainer", (_key(), debian.python_tree().name), make, _GIGABYTES) / "image.tar"
