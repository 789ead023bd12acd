"""Lock files: complete, consistent with their inputs, and enforced by pip."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import links, lock
from scripts.environment import LOCKS, ROOT, install_locked, unlocked
from scripts.lock import LockError, Pin, parse

HASH = "sha256:" + "0" * 64
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt") if path != lock.OTHER)


def test_every_list_of_requirements_has_a_lock() -> None:
    assert sorted([*lock.inputs(), "cuda"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_locked_packages_have_exact_versions_and_hashes(name: str) -> None:
    for package, pin in lock.read(LOCKS / f"{name}.txt").items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", pin.version), package
        assert pin.hashes


def test_locks_agree_with_their_inputs_and_each_other() -> None:
    assert lock.check() == []


def test_changed_input_makes_the_lock_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = lock.inputs()
    wanted["operator"] = [*wanted["operator"], "another>=1"]
    monkeypatch.setattr(lock, "inputs", lambda: wanted)
    assert lock.check() == ["requirements/operator.txt is out of date: run `make lock`"]


def test_images_have_no_development_package() -> None:
    images = {
        name for image in ("operator", "sidecar") for name in lock.read(LOCKS / f"{image}.txt")
    }
    assert not images & {"pip", "pytest", "setuptools", "torch", "uv"}
    assert images <= lock.read(LOCKS / "dev.txt").keys()


def test_other_builds_of_locked_versions_are_accepted() -> None:
    locked = lock.read(LOCKS / "dev.txt")
    for name, pin in lock.other_hashes().items():
        assert locked[name].version == pin.version
        assert pin.hashes <= locked[name].hashes


def test_line_with_marker_and_hashes_is_parsed() -> None:
    text = f"# head\na-b==1.0 ; python_version < '4' \\\n    --hash={HASH}\nc==2  # why\n"
    assert parse(text, "f") == {
        "a-b": Pin("1.0", "python_version < '4'", {HASH}),
        "c": Pin("2"),
    }


@pytest.mark.parametrize("line", ["a>=1", "a", "a==1,<2", "-e .", "a @ https://a.example/a.whl"])
def test_requirement_without_exact_version_is_refused(line: str) -> None:
    with pytest.raises(LockError, match="f: not an exact version: "):
        parse(f"{line}\n", "f")


def test_package_locked_twice_is_refused() -> None:
    with pytest.raises(LockError, match="f: a is there twice"):
        parse("a==1\na==2\n", "f")


def make_wheel(folder: Path, version: str) -> None:
    info = f"thing-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"thing-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with one wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "1.0")
    return folder


@pytest.mark.parametrize(("upgrade", "version"), [((), "1.0"), (("--upgrade",), "2.0")])
def test_package_of_one_lock_alone_keeps_its_version_unless_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upgrade: tuple[str, ...], version: str
) -> None:
    for name in ("1.0", "2.0"):
        make_wheel(tmp_path, name)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    monkeypatch.setattr(lock, "other_hashes", dict)
    monkeypatch.setattr(lock, "inputs", lambda: {"dev": [], "docs": ["thing"]})
    (tmp_path / "docs.txt").write_text(f"thing==1.0 --hash={HASH}\n")
    lock.write([*upgrade])
    assert lock.read(tmp_path / "docs.txt")["thing"].version == version


def install(wheels: Path, line: str, into: Path) -> None:
    file = into / "lock.txt"
    file.write_text(line)
    options = ("--no-index", "--find-links", wheels, "--target", into / "packages")
    install_locked([sys.executable, "-m", "pip"], file, *options)


def test_locked_wheel_is_installed(wheels: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "hash", *wheels.iterdir()],
        capture_output=True,
        text=True,
        check=True,
    )
    install(wheels, f"thing==1.0 {done.stdout.split()[-1]}\n", tmp_path)
    assert (tmp_path / "packages" / "thing.py").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"thing==1.0 --hash={HASH}\n", "DO NOT MATCH THE HASHES"),
        ("thing==1.0\n", "Hashes are required"),
    ],
)
def test_wheel_with_another_hash_is_refused(
    wheels: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        install(wheels, line, tmp_path)
    assert said in capfd.readouterr().err
    assert not (tmp_path / "packages").exists()


@pytest.mark.parametrize(
    "file",
    ["Dockerfile.operator", "Dockerfile.sidecar", "tests/cluster/Dockerfile.trainer"],
)
def test_images_install_only_hashed_packages(file: str) -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / file).read_text())
    found = re.findall(r"pip (?:wheel|install) (?:(?!&&|;|\n).)*", text)
    assert found
    for command in found:
        # What is built here, and what the hashed command has brought.
        local = "--no-index" in command or "--wheel-dir /wheel ." in command
        assert local or "--require-hashes" in command, command


def test_page_of_wheels_prefers_a_build_whose_hash_is_locked(wheels: Path, tmp_path: Path) -> None:
    """Without the page pip prefers the index's file of a version to another build in a folder."""
    (wheel,) = wheels.iterdir()
    text = links.page(links.wheels(wheels, tmp_path))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f'<a href="{wheel.as_uri()}#sha256={digest}">{wheel.name}</a>' in text
    page = tmp_path / "links.html"
    page.write_text(text)
    file = tmp_path / "lock.txt"
    file.write_text(f"thing==1.0 --hash=sha256:{digest}\n")
    options = ("--no-index", "--find-links", page, "--target", tmp_path / "packages")
    install_locked([sys.executable, "-m", "pip"], file, *options)
    assert (tmp_path / "packages" / "thing.py").exists()


def test_preferred_wheel_of_a_locked_package_with_another_hash_is_reported() -> None:
    found = {Path(name): HASH[7:] for name in ("a_b-1-x.whl", "c-1-x.whl")}
    assert unlocked(found, "a-b==1 \\\n    --hash=sha256:1\n") == [Path("a_b-1-x.whl")]
    assert unlocked(found, f"a-b==1 --hash={HASH}\n") == []
