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


def age(folder: Path, seconds: float) -> None:
    """Set the last use of a part to `seconds` ago."""
    then = time.time() - seconds
    os.utime(folder.with_suffix(".lock"), (then, then))


def test_idle_parts_except_the_newest_are_removed_before_another_is_built(cache: Path) -> None:
    names = ("oldest", "old", "newest", "in use")
    oldest, old, newest, used = (part("thing", (name,), lambda into: None) for name in names)
    other = part("thing-else", (), lambda into: None)
    for number, folder in enumerate((newest, old, oldest, other)):
        age(folder, parts._IDLE_SECONDS + 60 + number)
    age(used, parts._IDLE_SECONDS - 60)
    seen: list[list[bool]] = []

    def look(into: Path) -> None:
        seen.append([folder.exists() for folder in (oldest, old, newest, used, other)])

    part("thing", ("new",), look)
    assert seen == [[False, False, False, True, True]]


def test_newest_part_stays_however_long_it_is_idle(cache: Path) -> None:
    home = part("thing", ("home",), lambda into: None)
    age(home, 100 * parts._IDLE_SECONDS)
    part("thing", ("new",), lambda into: None)
    assert home.exists()


def test_what_an_interrupted_build_left_is_removed(cache: Path) -> None:
    def fail(into: Path) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        part("thing", ("left",), fail)
    (left,) = cache.glob("*.new")
    age(left, 2 * parts._IDLE_SECONDS)
    part("thing", ("new",), lambda into: None)
    assert not left.exists()


def test_part_under_construction_is_not_removed(cache: Path) -> None:
    def build_another(into: Path) -> None:
        age(into, 2 * parts._IDLE_SECONDS)
        part("thing", ("another",), lambda inner: None)
        (into / "file").touch()

    assert (part("thing", ("slow",), build_another) / "file").exists()


def test_part_without_enough_disk_space_is_refused(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"needs 10000000 GB of disk space and .* has [\d.]+ GB"):
        part("thing", (), lambda into: None, gigabytes=10**7)


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
