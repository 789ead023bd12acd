"""Removal of a shared cluster, and selection of an existing one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster import borrowing
from tests.cluster.borrowing import Ledger, ends_with_tests, named
from tests.cluster.cluster import Cluster
from tests.cluster.engine import Engine

ME = os.getpid()
MY_PARENT = os.getppid()
NOBODY = 2**22 + 1  # more than the kernel's maximum


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def test_only_user_stops_cluster_it_started(ledger: Ledger) -> None:
    with ledger.open():
        ledger.enter(ME, brought_up=True)
        assert ledger.leave(ME)


def test_cluster_that_existed_before_stays(ledger: Ledger) -> None:
    with ledger.open():
        ledger.enter(ME, brought_up=False)
        assert not ledger.leave(ME)


def test_last_user_stops_cluster_started_by_any_user(ledger: Ledger) -> None:
    with ledger.open():
        ledger.enter(ME, brought_up=True)
        ledger.enter(MY_PARENT, brought_up=False)
        assert not ledger.leave(ME)
        assert ledger.leave(MY_PARENT)


def test_dead_users_do_not_count(ledger: Ledger) -> None:
    with ledger.open():
        ledger.enter(NOBODY, brought_up=True)
        ledger.enter(ME, brought_up=False)
        assert ledger.leave(ME)


def test_cluster_kept_by_a_person_stays(ledger: Ledger) -> None:
    with ledger.open():
        ledger.enter(ME, brought_up=True)
        ledger.close()
        assert not ledger.leave(ME)


@pytest.mark.parametrize(
    ("engine", "brought_up", "kept", "ends"),
    [
        (Engine(Path("docker"), ""), True, False, True),
        (Engine(Path("docker"), ""), True, True, False),
        (Engine(Path("docker"), ""), False, False, False),
        (None, True, False, False),
    ],
    ids=["of the tests", "kept by a person", "of a person", "existing"],
)
def test_only_the_cluster_of_the_tests_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine | None,
    brought_up: bool, kept: bool, ends: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(borrowing, "_USERS", tmp_path)
    ledger, nowhere = Ledger(tmp_path), Path("nowhere")
    with ledger.open():
        ledger.enter(ME, brought_up=brought_up)
    if kept:
        borrowing.keep()
    assert ends_with_tests(Cluster(nowhere, nowhere, nowhere, "any", (), engine)) is ends


def test_own_cluster_is_default() -> None:
    assert named({}) is None
    assert named({"CLUSTER_CONTEXT": "somewhere"}) is None


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"CLUSTER": "existing"}, "needs CLUSTER_CONTEXT"),
        ({"CLUSTER": "existing", "CLUSTER_CONTEXT": ""}, "needs CLUSTER_CONTEXT"),
        ({"CLUSTER": "mine", "CLUSTER_CONTEXT": "x"}, "must be CLUSTER=existing"),
    ],
)
def test_incomplete_cluster_name_is_refused(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        named(environment)
