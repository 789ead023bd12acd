"""Build rules for installing missing tools and reusing present ones."""

from __future__ import annotations

import multiprocessing
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import environment, etcd_servers
from scripts.environment import STAMP, is_complete, key, locked, requirements

PROJECT = {
    "name": "thing",
    "dependencies": ["thing[all]", "base>=1"],
    "optional-dependencies": {
        "inner": ["a>=1", "b>=2; python_version < '4'"],
        "outer": ["thing[inner]", "c"],
        "all": ["thing[outer, inner]", "d"],
    },
}


@pytest.mark.parametrize(
    ("extra", "names"), [("inner", "a b"), ("outer", "a b c"), ("all", "a b c d")]
)
def test_extra_includes_the_extras_it_names(extra: str, names: str) -> None:
    found = requirements(PROJECT, extra)
    assert [name[0] for name in found] == names.split()
    assert not any(name.startswith("thing") for name in found)


def test_dev_includes_every_other_extra() -> None:
    project = tomllib.loads((environment.ROOT / "pyproject.toml").read_text())["project"]
    everything = set(requirements(project, "dev"))
    for extra in project["optional-dependencies"]:
        assert set(requirements(project, extra)) <= everything


def test_key_distinguishes_its_inputs() -> None:
    assert key("a", "b") == key("a", "b")
    assert len({key("a", "b"), key("ab"), key("a", "b", ""), key("b", "a")}) == 4


def test_environment_is_complete_only_with_its_stamp_and_its_python(tmp_path: Path) -> None:
    assert not is_complete(tmp_path, "k")
    (tmp_path / STAMP).write_text("k")
    assert not is_complete(tmp_path, "k")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert is_complete(tmp_path, "k")
    assert not is_complete(tmp_path, "another")
    (tmp_path / "bin" / "python").unlink()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    assert not is_complete(tmp_path, "k")


def append_locked(lock: Path, log: Path) -> None:
    for _ in range(50):
        with locked(lock):
            text = log.read_text()
            log.write_text(text + "x")


def test_two_builders_are_serialised(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    spawn = multiprocessing.get_context("spawn")
    builders = [
        spawn.Process(target=append_locked, args=(tmp_path / "sub" / "lock", log)) for _ in range(2)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
        assert builder.exitcode == 0
    assert log.read_text() == "x" * 100


def server(folder: Path, name: str, version: str) -> Path:
    """Make a program that reports to be etcd of this version."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    program.chmod(0o755)
    return program


def test_server_version_is_read(tmp_path: Path) -> None:
    assert etcd_servers.reported_version(server(tmp_path, "etcd", "3.7.3")) == "3.7.3"


def test_packaged_server_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(into: Path) -> None:
        for binary in etcd_servers.BINARIES:
            server(into, binary, "3.5.16")

    monkeypatch.setattr(etcd_servers, "unpack", unpack)
    with pytest.raises(SystemExit, match=r"need etcd 3\.4, .* is etcd 3\.5\.16: put etcd and"):
        etcd_servers.provide(tmp_path, "3.4", "package")
    assert not (tmp_path / "etcd-3.4" / "etcd").exists()


def test_existing_server_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    def unpack(into: Path) -> None:
        unpacked.append(into)
        for binary in etcd_servers.BINARIES:
            server(into, binary, "3.4.23")

    monkeypatch.setattr(etcd_servers, "unpack", unpack)
    for _ in range(2):
        etcd_servers.provide(tmp_path, "3.4", "package")
    assert len(unpacked) == 1
    server(tmp_path / "etcd-3.4", "etcd", "3.3")
    etcd_servers.provide(tmp_path, "3.4", "package")
    assert len(unpacked) == 2
