"""Groups of the end-to-end tests: completeness, distribution, and claims of several processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations, groupby
from pathlib import Path

import pytest

from tests.e2e.groups import (
    ALONE,
    CLUSTER,
    DISTURBS_ALL,
    DISTURBS_WORKERS,
    GROUPS,
    ON_CONTROL_PLANE,
    ON_WORKERS,
    PARTS,
    WORKERS,
    Claims,
    Use,
    group_of,
    is_pinned,
    place_of,
)
from tests.e2e.manifests import CONTROL, TOLERATION, job, on_control_plane
from tests.e2e.report import Report
from tests.paths import ROOT

FOLDER = ROOT / "tests" / "e2e"
ALL = ("disturbs all", "disturbs workers", "on workers", "on the control plane")
CLAIMS = dict(zip(ALL, (DISTURBS_ALL, DISTURBS_WORKERS, ON_WORKERS, ON_CONTROL_PLANE), strict=True))
SIDE_BY_SIDE = {
    ("disturbs workers", "on the control plane"),
    ("on workers", "on workers"),
    ("on workers", "on the control plane"),
    ("on the control plane", "on the control plane"),
}
CONFTEST = """
from pathlib import Path
import tests.e2e.conftest as real
from tests.e2e.conftest import (
    pytest_collection_modifyitems, pytest_runtest_protocol, pytest_xdist_make_scheduler,
)
from tests.e2e.groups import Claimed
real.CLAIMED = Claimed(Path(__file__).parent / "claims")
"""
TIMED = """
import os, pathlib, time
log = pathlib.Path(__file__).parent / "log"
mark = log.parent / "claims" / "alone"
def timed(name):
    def test():
        began = time.monotonic()
        time.sleep(0.05)
        with log.open("a") as file:
            file.write(f"{name} {began} {time.monotonic()} {os.getpid()} {mark.exists()}\\n")
    return test
"""
"""Module of a test that records its times, its process, and the mark of the last group."""
HOLD = """
import sys
from pathlib import Path
from tests.e2e.groups import Claimed, Use
wanted = {part: Use[use] for part, use in (each.split("=") for each in sys.argv[2:])}
claimed = Claimed(Path(sys.argv[1]))
claimed.hold(wanted)
print("held", flush=True)
sys.stdin.readline()
claimed.keep({})
print("released", flush=True)
sys.stdin.readline()
"""


def all_tests() -> list[str]:
    """Return file and name of every end-to-end test."""
    return [
        f"{path.name}::{line.removeprefix('def ').partition('(')[0]}"
        for path in FOLDER.glob("test_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def test_")
    ]


def test_every_test_is_in_one_group_and_every_entry_names_tests() -> None:
    found = all_tests()
    assert len(found) > 50
    entries = [entry for group in GROUPS for entry in group.tests]
    named = [[e for e in entries if name == e or name.startswith(f"{e}::")] for name in found]
    assert [len(each) for each in named] == [1] * len(found), dict(zip(found, named, strict=True))
    assert {entry for each in named for entry in each} == set(entries)


def test_test_outside_the_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must name test_new\.py::test_x in a group"):
        group_of("tests/e2e/test_new.py::test_x[a/b]")


def test_parameters_do_not_change_the_group() -> None:
    assert group_of("tests/e2e/test_frameworks.py::test_x[a/b::c]").name == "frameworks"


def test_tests_that_change_the_installation_are_last_and_in_order() -> None:
    ordered = sorted(all_tests(), key=place_of)
    assert GROUPS[-1].claims == DISTURBS_ALL
    assert [group.claims for group in GROUPS].count(DISTURBS_ALL) == 1
    assert ordered[-1] == "test_documented_pages.py::test_readme_installs_and_runs_a_job"
    assert ordered[-2] == (
        "test_install.py::test_namespace_with_jobs_is_deletable_without_operator"
    )


def test_groups_of_a_sequence_are_adjacent() -> None:
    names = [key for key, _ in groupby(group.sequence or group.name for group in GROUPS)]
    assert len(names) == len(set(names))


def test_tests_with_node_faults_do_not_run_beside_jobs_on_these_nodes() -> None:
    assert [g.name for g in GROUPS if g.claims == DISTURBS_WORKERS] == ["node faults"]
    sources = {path.name: path.read_text() for path in FOLDER.glob("test_*.py")}
    words = ("drain(", "cut_off(", "kill_pods(")
    disturbing = {
        f"{file}::{test.partition('(')[0]}"
        for file, text in sources.items()
        for test in re.split(r"^def ", text, flags=re.M)
        if test.startswith("test_") and any(word in test for word in words)
    }
    assert len(disturbing) == 4
    assert {group_of(name).name for name in disturbing} == {"node faults"}


def test_only_files_whose_jobs_stay_on_the_control_plane_are_pinned() -> None:
    files = {path.name for path in FOLDER.glob("test_*.py")}
    pinned = {name for name in files if is_pinned(name)}
    assert {"test_lifecycle.py", "test_agents.py"} <= pinned
    assert pinned.isdisjoint({"test_faults.py", "test_restarts.py", "test_documented_pages.py"})


def test_pinned_jobs_and_pods_run_on_the_control_plane() -> None:
    chosen = {"nodeSelector": {CONTROL: ""}, "tolerations": [TOLERATION]}
    plain = job("any", nodes=2)
    moved = on_control_plane(plain)
    assert moved["spec"]["template"] == {"spec": plain["spec"]["template"]["spec"] | chosen}
    assert {**moved["spec"], "template": 0} == {**plain["spec"], "template": 0}
    pod = {"kind": "Pod", "spec": {"containers": []}}
    assert on_control_plane(pod) == {"kind": "Pod", "spec": {"containers": [], **chosen}}
    service = {"kind": "Service", "spec": {"ports": []}}
    assert on_control_plane(service) == service


def test_measurements_of_several_processes_are_in_one_report(tmp_path: Path) -> None:
    one, two = (Report(tmp_path / "build" / "report.json") for _ in range(2))
    one.add("leaves", seconds=1)
    two.add("leaves", seconds=2)
    assert two.spread("lag", [0.1, 0.3, 0.2]) == 0.2
    one.add("rounds", number=3)
    found = json.loads(one.path.read_text())
    assert found["leaves"] == [{"seconds": 1}, {"seconds": 2}]
    assert (found["lag"]["count"], found["rounds"]) == (3, [{"number": 3}])


class Process:
    """Another process that holds claims until it is told to release them."""

    def __init__(self, folder: Path, claims: Claims) -> None:
        words = [f"{part}={use.name}" for part, use in claims.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def says(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"

    def proceed(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.mark.parametrize("pair", [(one, one) for one in ALL] + list(combinations(ALL, 2)))
def test_claims_decide_which_groups_run_at_the_same_time(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    one, two = (CLAIMS[name] for name in pair)
    first = Process(tmp_path, one)
    first.says("held")
    second = Process(tmp_path, two)
    if pair in SIDE_BY_SIDE:
        second.says("held")  # while the first one holds its own
        first.proceed()
        first.says("released")
    else:
        first.proceed()
        first.says("released")
        second.says("held")
    second.proceed()
    second.says("released")
    first.end()
    second.end()


def test_workers_run_whole_groups_in_order_and_apart_from_those_they_disturb(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in (tests := all_tests()):
        file, _, test = name.partition("::")
        with (tmp_path / file).open("a") as module:
            module.write(f"{TIMED}\n{test} = timed({name!r})\n")
    folder = str(tmp_path)
    options = ["-q", "-n4", "-p", "no:cacheprovider", "--rootdir", folder, "-c", "/dev/null"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=importlib", *options, folder],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    ran = sorted((float(began), float(end), name, pid) for name, began, end, pid, _ in rows)
    assert (tmp_path / "claims" / ALONE).exists()
    marked = {name for name, *_, mark in rows if mark == "True"}
    assert marked == {name for name in tests if group_of(name) is GROUPS[-1]}
    assert sorted(name for *_, name, _ in ran) == sorted(tests)
    assert len({pid for *_, pid in ran}) == 4
    for group in GROUPS:
        of_group = [(name, pid) for *_, name, pid in ran if group_of(name) is group]
        assert [name for name, _ in of_group] == [
            name for name in sorted(tests, key=place_of) if group_of(name) is group
        ]
        assert len({pid for _, pid in of_group}) == 1
    for sequence in {group.sequence for group in GROUPS} - {""}:
        in_one = [pid for *_, name, pid in ran if group_of(name).sequence == sequence]
        assert len(in_one) > 5
        assert len({*in_one}) == 1, sequence
    for one, two in combinations(ran, 2):
        claims = (group_of(one[2]).claims, group_of(two[2]).claims)
        if one[3] != two[3] and conflict(*claims):
            assert one[1] <= two[0], (one, two)
    assert group_of(ran[-1][2]).name == "operator"
    assert min(began for began, *_, name, _ in ran if group_of(name).name == "operator") >= max(
        end for _, end, name, _ in ran if group_of(name).name != "operator"
    )


def conflict(one: Claims, two: Claims) -> bool:
    return any(
        part in one and part in two and Use.ALONE in (one[part], two[part]) for part in PARTS
    )


def test_every_group_that_needs_a_part_alone_conflicts_with_its_users() -> None:
    pairs = [(a, b) for a in ALL for b in ALL if ALL.index(a) <= ALL.index(b)]
    free = {(a, b) for a, b in pairs if not conflict(CLAIMS[a], CLAIMS[b])}
    assert free == SIDE_BY_SIDE
    assert all(CLUSTER in group.claims for group in GROUPS)
    assert all(set(group.claims) <= {CLUSTER, WORKERS} for group in GROUPS)
