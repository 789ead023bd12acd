"""Kernel's out-of-memory counters, in both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_launcher.processes.memory_cgroup import MemoryCgroup

V2_EVENTS = "low 0\nhigh 3\nmax 7\noom 4\noom_kill 2\noom_group_kill 1\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def group(tmp_path: Path, own: str, **files: str) -> MemoryCgroup:
    """Make the mount as a folder; `files` are named with `__` for `/`."""
    mount = tmp_path / "cgroup"
    mount.mkdir()
    for name, text in files.items():
        path = mount / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    listing = tmp_path / "own"
    listing.write_text(own)
    return MemoryCgroup(mount, listing)


def test_cgroup_v2_in_container(tmp_path: Path) -> None:
    found = group(tmp_path, "0::/\n", memory_DOT_events=V2_EVENTS, memory_DOT_max="536870912\n")
    assert (found.kills(), found.limit_text()) == (2, "512 MiB")


def test_cgroup_v2_below_a_path(tmp_path: Path) -> None:
    found = group(tmp_path, "0::/a/b\n", a__b__memory_DOT_events=V2_EVENTS)
    assert found.kills() == 2


def test_cgroup_v1_in_container_with_host_path(tmp_path: Path) -> None:
    found = group(
        tmp_path,
        "3:cpu,cpuacct:/x\n4:memory:/kubepods/pod1/c1\n0::/\n",
        memory__memory_DOT_oom_control=V1_CONTROL,
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
    )
    assert (found.kills(), found.limit_text()) == (5, "")


@pytest.mark.parametrize("own", ["", "0::/\n", "garbage\n", "4:memory:/x\n"])
def test_missing_cgroup_files_give_no_counts(tmp_path: Path, own: str) -> None:
    found = group(tmp_path, own)
    assert (found.kills(), found.limit_text()) == (None, "")


def test_no_memory_limit(tmp_path: Path) -> None:
    found = group(tmp_path, "0::/\n", memory_DOT_events=V2_EVENTS, memory_DOT_max="max\n")
    assert found.limit_text() == ""


def test_kill_count_is_read_anew(tmp_path: Path) -> None:
    found = group(tmp_path, "0::/\n", memory_DOT_events=V2_EVENTS)
    (tmp_path / "cgroup" / "memory.events").write_text("oom_kill 3\n")
    assert found.kills() == 3
