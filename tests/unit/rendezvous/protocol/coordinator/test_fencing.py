"""Keys that the coordinator deletes, the log of it, and the effect of a refused deletion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.protocol.coordinator.fencing import duplicates, fence_late, fence_over
from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate, Snapshot
from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.replica import Versioned
from tests.unit.rendezvous.builders import KEYS, Job, identity


def session(job: Job, name: str, session: str = "s1") -> Versioned[Member]:
    return job.view().sessions[identity(name)][session]


@pytest.mark.parametrize(
    ("own", "later", "fenced"),
    [("n-1", "n-2", "n-2"), ("n-1", "m-1", "n-1"), ("s1", "s2", "s1")],
    ids=["of our own agent", "of another agent", "of sessions that name no agent"],
)
def test_later_session_fences_earlier_one_unless_begun_by_the_same_agent(
    own: str, later: str, fenced: str
) -> None:
    """Such a key is a request of ours that was given up for lost and came true after all."""
    job = Job("b").member("a", session=own).member("a", session=later)
    found = duplicates(job.view(), session(job, "a", own))
    assert [duplicate.record.session for duplicate in found] == [fenced]


def session_key(name: str) -> str:
    return KEYS.session(identity(name), "s1")


def fence(job: Job, kind: str, *names: str) -> RoundUpdate:
    judged = [session(job, name) for name in names]
    if kind == "late":
        return fence_late(
            Snapshot(job.view(), session(job, "a"), RendezvousParams(1, 4), job.clock), judged
        )
    return fence_over(job.view(), session(job, "a"), judged)


@pytest.mark.parametrize("kind", ["late", "over"])
def test_log_names_all_fenced_members(kind: str) -> None:
    job = Job("a", "pod-2", "pod-3").round(2)
    act = fence(job, kind, "pod-2", "pod-3")
    assert "fenced pod-2, pod-3: " in act.note
    assert job.commit(act.txn).succeeded
    assert job.names() == {"a"}


@pytest.mark.parametrize("kind", ["late", "over"])
def test_refused_fence_updates_the_records_of_its_targets(kind: str) -> None:
    job = Job("a", "b", "c").round(2)
    act, view, before = fence(job, kind, "b", "c"), job.view(), session(job, "b")
    job.put(before.key, replace(before.record, step=7)).delete(session_key("c"))
    result = job.commit(act.txn)
    assert not result.succeeded
    view.wrote(act.txn, result)
    b = view.member(identity("b"))
    assert b is not None
    assert b.record.step == 7
    assert view.member(identity("c")) is None


@pytest.mark.parametrize("kind", ["late", "over"])
def test_refused_fence_updates_own_keys_of_deposed_coordinator(kind: str) -> None:
    job = Job("a", "b").round(2)
    act, view = fence(job, kind, "b"), job.view()
    job.delete(session_key("a")).member("a", session="s1~")
    result = job.commit(act.txn)
    assert not result.succeeded
    view.wrote(act.txn, result)
    assert set(view.sessions[identity("a")]) == {"s1~"}
