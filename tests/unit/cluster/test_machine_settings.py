"""Restoration of the machine's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import machine
from tests.cluster.machine import CGROUP, _groups


@pytest.fixture
def machine_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    settings = tmp_path / "sys"
    for name in machine._CHANGED:
        (settings / name).parent.mkdir(parents=True, exist_ok=True)
        (settings / name).write_text("100\n")
    monkeypatch.setattr(machine, "_SYSCTL", settings)
    monkeypatch.setattr(machine, "_BEFORE", tmp_path / "before.json")
    monkeypatch.setattr(machine, "_groups", lambda: iter(()))
    return settings


def test_limits_are_raised_and_restored(machine_of: Path) -> None:
    limit, panic = machine_of / "fs/inotify/max_user_instances", machine_of / "kernel/panic"
    machine.prepare()
    assert int(limit.read_text()) == 8192
    panic.write_text("10\n")  # as a kubelet does
    assert machine.restored()
    assert (limit.read_text(), panic.read_text()) == ("100\n", "100\n")


def test_settings_are_saved_once_for_a_recreated_cluster(machine_of: Path) -> None:
    machine.prepare()
    (machine_of / "kernel/panic").write_text("10\n")
    machine.prepare()
    assert machine.restored()
    assert (machine_of / "kernel/panic").read_text() == "100\n"


def test_without_saved_settings_nothing_is_restored(machine_of: Path) -> None:
    assert machine.restored()
    (machine_of / "kernel/panic").write_text("10\n")
    assert machine.restored()
    assert (machine_of / "kernel/panic").read_text() == "10\n"


def test_control_groups_are_found_innermost_first(tmp_path: Path) -> None:
    for hierarchy in ("cpu", "memory/somebody/session"):
        (tmp_path / hierarchy / CGROUP / "node" / "pod").mkdir(parents=True)
    (tmp_path / "cpu" / "other").mkdir()
    found = list(_groups(tmp_path))
    assert len(found) == 6
    for group in found:
        group.rmdir()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "cpu",
        "memory",
        "other",
        "session",
        "somebody",
    ]
