"""Findings about this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_cli.doctor.findings import Grade, Unread, as_document, finding_lines, has_failed
from elasticjob_cli.doctor.local_checks import LocalFacts, local_findings

GOOD = LocalFacts(
    python=(3, 11, 7),
    executable="/usr/bin/python3",
    torch="2.9.1+cu128",
    cuda="H100",
    cores=8,
    ports=64,
    shm="/dev/shm",
    shm_free=8 << 30,
    shm_writable=True,
    limits={"nofile": 20000, "nproc": None, "memlock": None},
    etcd="/usr/bin/etcd 3.5.1: started, wrote and read a key",
    run_folder="/tmp",
    run_folder_trouble="",
    state_folder="/home/a/.local/state/elasticjob",
    state_folder_trouble="",
    disk_free={"/tmp": 50 << 30},
    clock_unix=1_800_000_000.0,
    clock_synchronized=True,
)


def limits(**changed: int | None) -> dict[str, int | None]:
    return {**GOOD.limits, **changed}


def test_good_machine_has_only_good_findings() -> None:
    found = local_findings(GOOD)
    assert {one.grade for one in found} == {Grade.OK}
    assert all(one.found and not one.remedy for one in found)


@pytest.mark.parametrize(
    ("changed", "check", "grade", "words"),
    [
        ({"python": (3, 10, 1)}, "python", Grade.FAIL, "3.10.1"),
        ({"torch": "2.4.0"}, "torch", Grade.FAIL, "2.4.0"),
        ({"torch": "2.\u00b2.0"}, "torch", Grade.FAIL, "2.\u00b2.0"),
        ({"torch": Unread("No module named 'torch'")}, "torch", Grade.WARN, "No module"),
        ({"cuda": Unread("unknown without torch")}, "cuda", Grade.WARN, "unknown"),
        ({"etcd": Unread("no etcd server found")}, "etcd", Grade.FAIL, "no etcd server"),
        ({"ports": Unread("no route")}, "loopback ports", Grade.FAIL, "no route"),
        ({"shm_free": Unread("No such file")}, "shared memory", Grade.FAIL, "No such file"),
        ({"shm_free": 0}, "shared memory", Grade.FAIL, "0 MiB free"),
        ({"shm_free": 64 << 20}, "shared memory", Grade.WARN, "64 MiB free"),
        ({"shm_writable": False}, "shared memory", Grade.FAIL, "cannot be written"),
        ({"limits": limits(nofile=64)}, "ulimit nofile", Grade.FAIL, "64"),
        ({"limits": limits(nofile=512)}, "ulimit nofile", Grade.WARN, "512"),
        ({"limits": limits(nproc=20)}, "ulimit nproc", Grade.FAIL, "20"),
        ({"limits": limits(memlock=0)}, "ulimit memlock", Grade.WARN, "0"),
        ({"run_folder_trouble": "Read-only"}, "run folder", Grade.FAIL, "Read-only"),
        ({"state_folder_trouble": "denied"}, "state folder", Grade.FAIL, "denied"),
        ({"disk_free": {"/tmp": 1 << 20}}, "disk", Grade.FAIL, "1 MiB free in /tmp"),
        ({"disk_free": {"/tmp": 1 << 30}}, "disk", Grade.WARN, "1.0 GiB free in /tmp"),
        ({"clock_unix": 0.0}, "clock", Grade.FAIL, "before this release"),
        ({"clock_synchronized": False}, "clock", Grade.WARN, "not synchronized"),
        ({"cores": 1}, "cores", Grade.WARN, "1 usable"),
    ],
)
def test_trouble_is_found_with_a_remedy(
    changed: dict[str, Any], check: str, grade: Grade, words: str
) -> None:
    found = [one for one in local_findings(replace(GOOD, **changed)) if one.grade is not Grade.OK]
    assert [(one.check, one.grade) for one in found] == [(check, grade)]
    assert words in found[0].found
    assert found[0].remedy
    assert has_failed(found) is (grade is Grade.FAIL)


def test_findings_are_lines_and_a_document() -> None:
    found = local_findings(replace(GOOD, cores=1))
    lines = finding_lines(found)
    at = next(number for number, line in enumerate(lines) if line.startswith("warn"))
    assert lines[at].split() == ["warn", "cores", "1", "usable"]
    assert lines[at + 1].strip().startswith("-> ")
    assert lines[-1] == f"{len(found) - 1} ok, 1 warn, 0 fail"
    document = as_document("this machine", found)
    assert document["ok"] is True
    assert [one["grade"] for one in document["checks"]].count("warn") == 1
