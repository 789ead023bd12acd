"""Cached parts of the cluster, and pinned versions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cluster import parts
from tests.cluster.parts import content, part
from tests.cluster.places import PINS, pinned
from tests.cluster.programs import MODULES


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parts, "CACHE", tmp_path)
    return tmp_path


def test_part_is_built_once(cache: Path) -> None:
    made: list[Path] = []

    def make(into: Path) -> None:
        made.append(into)
        (into / "file").touch()

    home = part("thing", ("a", 1), make)
    assert (home / "file").exists()
    assert part("thing", ("a", 1), make) == home
    assert len(made) == 1
    assert part("thing", ("a", 2), make) != home


def test_request_for_part_does_not_change_it(cache: Path) -> None:
    home = part("thing", (), lambda into: None)
    os.utime(home, (1, 1))
    assert part("thing", (), lambda into: None).stat().st_mtime == 1


def test_failed_part_is_built_again_from_nothing(cache: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        part("thing", (), fail)
    home = part("thing", (), lambda into: (into / "whole").touch())
    assert [file.name for file in home.iterdir()] == ["whole"]


def test_unused_part_is_removed_when_another_is_built(cache: Path) -> None:
    old, fresh = (part("thing", (name,), lambda into: None) for name in ("old", "fresh"))
    long_ago = time.time() - parts._KEPT_SECONDS - 60
    for folder in (old, fresh):
        os.utime(folder.with_suffix(".lock"), (long_ago, long_ago))
    part("thing", ("fresh",), lambda into: None)
    other = part("thing-else", (), lambda into: None)
    os.utime(other.with_suffix(".lock"), (long_ago, long_ago))
    part("thing", ("new",), lambda into: None)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_content_hash_covers_names_and_bytes_but_no_paths(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "in").mkdir(parents=True)
        (tmp_path / folder / "in" / "a").write_text("a")
    assert content(tmp_path / "one" / "in") == content(tmp_path / "two" / "in")
    (tmp_path / "two" / "in" / "a").rename(tmp_path / "two" / "in" / "b")
    assert content(tmp_path / "one" / "in") != content(tmp_path / "two" / "in")


@pytest.mark.parametrize("name", sorted(name for name, module in MODULES.items() if module.path))
def test_every_program_is_pinned_with_its_checksum(name: str) -> None:
    path = MODULES[name].path
    version = pinned(name, path)
    assert f"{path} {version} h1:" in (PINS / name / "go.sum").read_text()


def test_every_pinned_program_is_built() -> None:
    assert {pins.parent.name for pins in PINS.glob("*/go.mod")} == set(MODULES)
