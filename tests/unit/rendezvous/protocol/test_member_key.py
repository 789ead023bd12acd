"""Content of a member's own key, written only by its rightful session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol import member_key as own_key
from elasticjob_rendezvous.protocol.kv import Compare, Target, Txn
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Done,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
    Snapshots,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.rendezvous.builders import KEYS, UTC_MS, Job, a_failure, identity

A, B = identity("a"), identity("b")
WAITING, RUNNING, STOPPING, LEAVING, DONE = MemberState
STOPPED = Outcome(OutcomeKind.STOPPED, "by hand")
IDLE = Local(ready=True, master_port=20000)


def busy(round: int = 1, **local: Any) -> Local:
    plain = {"ready": True, "workers": Workers.RUNNING, "round": round, "master_port": 20000}
    return Local(**{**plain, **local})


def record(job: Job, name: str = "a") -> Member:
    return job.stored(name).record


# -- content --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "leaving", "state"),
    [
        (IDLE, "", WAITING),
        (busy(workers=Workers.STARTING), "", RUNNING),
        (busy(), "", RUNNING),
        (busy(workers=Workers.STOPPING), "", STOPPING),
        (busy(workers=Workers.NONE), "", WAITING),
        (busy(workers=Workers.NONE, done=True), "", DONE),
        (IDLE, "drained", LEAVING),
        (busy(), "drained", LEAVING),
    ],
)
def test_member_state_from_local_state(local: Local, leaving: str, state: MemberState) -> None:
    job = Job("a").sealed("a", number=1)
    assert job.own("a", local=local, leaving=leaving).state() is state


def test_done_member_waits_again_when_the_round_moved_on() -> None:
    job = Job("a").sealed("a", number=1).round(2)
    assert job.own("a", local=busy(workers=Workers.NONE, done=True)).state() is WAITING


def test_record_has_identity_and_addresses() -> None:
    said = Job("a").own("a", lease=9, known=4, local=busy(3, start_ms=250)).record()
    assert (said.id, said.session, said.name, said.address) == (A, "s1", "a", "host-a")
    assert (said.agent_port, said.launcher_port, said.master_port) == (7000, 7001, 20000)
    assert (said.round, said.lease, said.known, said.start_ms) == (3, 9, 4, 250)
    assert (said.sizes, said.confirmed) == ("", 0)
    assert Job("a").own("a", local=busy(3, cold="a shell")).record().cold == "a shell"
    stopping = busy(3, workers=Workers.STOPPING, cold="a shell")
    assert Job("a").own("a", local=stopping).record().cold is None
    assert Job("a").own("a", bounds=RendezvousParams(1, 4, 3)).record().sizes == "1:4:3"


@pytest.mark.parametrize("workers", list(Workers))
def test_record_has_the_state_of_the_workers(workers: Workers) -> None:
    """The start is reported only while workers run; it is unknown for others."""
    told: dict[str, Any] = {
        "step": 7, "checkpoint_step": 5, "master_served": True, "busy_ms": 40, "saves": True,
        "passed": 3, "saved": True, "completed": True, "snapshots": Snapshots(6, bytes=2**40),
    }  # fmt: skip
    starts = {"start_ms": 250, "first_step_ms": 900, "cold": "a shell"}
    starts |= {"lost_steps": 2, "lost_ms": 700}
    own = Job("a").own("a", local=busy(3, workers=workers, **told, **starts))
    said = own.record(confirmed=8, known=6)
    runs = workers is Workers.RUNNING
    assert {name: getattr(said, name) for name in told} == told
    assert (said.start_ms, said.first_step_ms) == ((250, 900) if runs else (0, 0))
    assert said.cold == ("a shell" if runs else None)
    assert (said.lost_steps, said.lost_ms) == ((2, 700) if runs else (-1, 0))
    assert decode(Member, "key", encode(said)) == said
    assert (said.confirmed, said.known, said.reason) == (8, 6, "")


def test_record_has_slots_role_and_machine() -> None:
    own = Job("a").own("a", leaving="drained")
    me = replace(own.config.identity, slots=8, role="learner", node="node-7")
    said = replace(own, config=replace(own.config, identity=me)).record()
    assert (said.slots, said.role, said.node) == (8, "learner", "node-7")
    assert said.reason == "drained"


# -- only the rightful session writes -------------------------------------------------


def leave(own: MemberKey) -> Txn | None:
    assert own.stored is not None
    return own_key.write_leaving(own, own.stored)


def close(own: MemberKey) -> Txn | None:
    assert own.stored is not None
    return own_key.close(own, own.stored, STOPPED, UTC_MS)


def depose(own: MemberKey) -> Txn | None:
    assert own.stored is not None
    leader = own.view.member(B)
    assert leader is not None
    return own_key.depose(own, own.stored, leader)


def resign(own: MemberKey) -> Txn | None:
    stored = own.view.member(A)
    assert stored is not None
    return own_key.recreate(own, stored)


def set_aside(own: MemberKey) -> Txn | None:
    leader = own.view.member(B)
    assert own.stored is not None
    assert leader is not None
    return own_key.set_aside(own, own.stored, leader)


def with_stored(make: Callable[[MemberKey, Any], Txn | None]) -> Callable[[MemberKey], Txn | None]:
    def write(own: MemberKey) -> Txn | None:
        assert own.stored is not None
        return make(own, own.stored)

    return write


WRITES: dict[str, tuple[Callable[[MemberKey], Txn | None], dict[str, Any]]] = {
    "update": (with_stored(own_key.update), {"local": busy()}),
    "delete": (with_stored(own_key.delete), {}),
    "say leaving": (leave, {"leaving": "drained"}),
    "resign": (resign, {"session": "s2"}),
    "close": (close, {}),
    "depose": (depose, {}),
    "set aside": (set_aside, {}),
}


@pytest.mark.parametrize(("write", "own"), WRITES.values(), ids=WRITES.keys())
def test_fenced_session_writes_nothing(
    write: Callable[[MemberKey], Txn | None], own: dict[str, Any]
) -> None:
    """Fenced between its read and its write: etcd refuses the whole transaction."""
    job = Job("b", "a").round(1)
    txn = write(job.own("a", **own))
    assert txn is not None
    job.gone("a")
    before = job.etcd.revision
    assert not job.commit(txn).succeeded
    assert job.etcd.revision == before


@pytest.mark.parametrize(("write", "own"), WRITES.values(), ids=WRITES.keys())
def test_live_session_can_write(
    write: Callable[[MemberKey], Txn | None], own: dict[str, Any]
) -> None:
    job = Job("b", "a").round(1)
    txn = write(job.own("a", **own))
    assert txn is not None
    assert job.commit(txn).succeeded


@pytest.mark.parametrize("name", ["update", "delete", "say leaving", "resign"])
def test_key_changed_in_the_meantime_is_not_overwritten(name: str) -> None:
    write, own = WRITES[name]
    job = Job("b", "a").round(1)
    txn = write(job.own("a", **own))
    job.change("a", node="changed by another hand")
    assert txn is not None
    assert not job.commit(txn).succeeded
    assert record(job).node == "changed by another hand"


@pytest.mark.parametrize("name", ["update", "say leaving", "resign"])
def test_written_key_is_attached_to_the_lease(name: str) -> None:
    write, own = WRITES[name]
    job = Job("b", "a").round(1)
    lease = job.etcd.grant(30, 0.0).id
    mine = job.own("a", **own, lease=lease)
    txn = write(mine)
    assert txn is not None
    assert job.commit(txn).succeeded
    stored = job.etcd.get(job.stored("a").key)
    assert stored is not None
    assert stored.lease == lease


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("update", {KEYS.round, KEYS.session(A, "s1")}),
        ("delete", {KEYS.session(A, "s1")}),
        ("say leaving", {KEYS.session(A, "s1")}),
        ("resign", {KEYS.session(A, "s1")}),
        ("close", {KEYS.round}),
        ("depose", {KEYS.round, KEYS.bounds, KEYS.session(B, "s1")}),
        ("set aside", {KEYS.round, KEYS.bounds, KEYS.session(B, "s1")}),
    ],
)
def test_refused_write_reads_the_keys_that_refused_it(name: str, keys: set[str]) -> None:
    write, own = WRITES[name]
    job = Job("b", "a").round(1)
    txn = write(job.own("a", **own))
    job.round(2).change("a", node="changed").change("b", node="changed")
    assert txn is not None
    result = job.commit(txn)
    assert not result.succeeded
    found = {kv.key: kv for _, kvs in result.ranges for kv in kvs}
    assert set(found) == keys
    assert all(kv == job.etcd.get(key) for key, kv in found.items())


@pytest.mark.parametrize("name", ["close", "depose", "set aside"])
def test_shared_keys_are_written_on_the_session_not_on_its_last_record(name: str) -> None:
    """A key of ours that merely changed does not stop it."""
    write, own = WRITES[name]
    job = Job("b", "a").round(1)
    txn = write(job.own("a", **own))
    mine = job.stored("a")
    assert txn is not None
    assert Compare(mine.key, Target.CREATE, mine.created) in txn.compares
    job.change("a", node="changed")
    assert job.commit(txn).succeeded


# -- adoption of a member -------------------------------------------------------------


def test_first_session_is_created_and_reads_the_current_state() -> None:
    job = Job("a").round(3)
    lease = job.etcd.grant(30, 0.0).id
    own = job.own("b", session="x-1", lease=lease)
    result = job.commit(own_key.create(own, carries=False))
    assert result.succeeded
    stored = job.etcd.get(own.key)
    assert stored is not None
    assert stored.lease == lease
    found = {kv.key for _, kvs in result.ranges for kv in kvs}
    assert {KEYS.round, KEYS.bounds, job.stored("a").key, own.key} <= found


def test_session_is_never_created_twice() -> None:
    job = Job("a")
    txn = own_key.create(job.own("a"), carries=False)
    assert txn.compares == (Compare(job.stored("a").key, Target.CREATE, 0),)
    result = job.round(1).commit(txn)
    assert not result.succeeded
    found = {kv.key for _, kvs in result.ranges for kv in kvs}
    assert found == {KEYS.round, KEYS.bounds, job.stored("a").key}, "it reads where things stand"


def test_returning_agent_replaces_its_old_session_in_one_transaction() -> None:
    job = Job("a", "b").sealed("a", "b", number=2)
    txn = own_key.create(job.own("a", session="x-1", local=busy(2)), carries=True)
    assert job.commit(txn).succeeded
    assert record(job).session == "x-1"
    assert record(job).state is RUNNING
    assert job.etcd.get(KEYS.session(A, "s1")) is None


@pytest.mark.parametrize("opened", [False, True])
def test_registration_with_a_past_round_succeeds_only_before_a_round_is_opened(
    opened: bool,
) -> None:
    """etcd lost its data: neither the round nor a key of this member is there."""
    job = Job("b")
    txn = own_key.create(job.own("a", session="x-1", local=busy(2)), carries=True)
    if opened:
        job.round(1)
    assert job.commit(txn).succeeded is not opened


@pytest.mark.parametrize("change", ["round", "old session", "old session gone"])
def test_registration_with_a_past_round_requires_the_round_and_session_read(change: str) -> None:
    job = Job("a", "b").sealed("a", "b", number=2)
    txn = own_key.create(job.own("a", session="x-1", local=busy(2)), carries=True)
    match change:
        case "round":
            job.round(3)
        case "old session":
            job.change("a", state=STOPPING)
        case "old session gone":
            job.gone("a")
    assert not job.commit(txn).succeeded
    assert job.etcd.get(KEYS.session(A, "x-1")) is None


def test_resigning_recreates_the_key_as_the_youngest() -> None:
    job = Job("a", "b")
    stored = job.stored("a")
    txn = own_key.recreate(job.own("a", session="s2"), stored)
    assert job.commit(txn).succeeded
    assert record(job).session == "s2"
    assert job.stored("a").created > job.stored("b").created
    assert job.etcd.get(KEYS.session(A, "s1")) is None


# -- rounds that were never started ----------------------------------------------------


@pytest.mark.parametrize(
    ("state", "local", "ran"),
    [
        (RoundState.JOINABLE, IDLE, 3),
        (RoundState.FROZEN, IDLE, 3),
        (RoundState.FINAL, IDLE, 0),
        (RoundState.JOINABLE, busy(3, workers=Workers.STOPPING), 3),
        (RoundState.JOINABLE, busy(2, workers=Workers.STOPPING), 2),
    ],
)
def test_member_that_reads_a_newer_round_records_the_older_one_as_past(
    state: RoundState, local: Local, ran: int
) -> None:
    """The coordinator would otherwise wait for workers that do not exist."""
    job = Job("a", "b").sealed("a", "b", number=3).round(4, state, previous=3)
    assert job.own("a", local=local).record().round == ran


def test_member_without_rank_assignment_in_the_last_round_has_not_run_it() -> None:
    job = Job("a", "b").sealed("b", number=3).round(4, previous=3)
    assert job.own("a").record().round == 0
    assert job.own("b", local=busy(1, workers=Workers.NONE)).record().round == 3


# -- updates --------------------------------------------------------------------------


def update(job: Job, **own: Any) -> Txn | None:
    return own_key.update(job.own("a", **own), job.stored("a"))


def updated(job: Job, **own: Any) -> Member:
    txn = update(job, **own)
    assert txn is not None, "nothing was worth a request"
    assert job.commit(txn).succeeded
    return record(job)


def test_before_the_first_round_there_is_no_confirmation() -> None:
    assert update(Job("a")) is None


def test_unchanged_record_is_not_written() -> None:
    job = Job("a").round(1)
    assert update(job) is None
    assert update(job, known=5) is None  # worth remembering, not worth a request


@pytest.mark.parametrize("workers", [Workers.STARTING, Workers.STOPPING])
def test_transient_state_is_not_written(workers: Workers) -> None:
    job = Job("a").sealed("a", number=1).change("a", state=WAITING, round=0)
    assert update(job, local=busy(workers=workers)) is None


def test_running_state_is_written() -> None:
    job = Job("a").sealed("a", number=1).change("a", state=WAITING, round=0)
    said = updated(job, local=busy(1, start_ms=120))
    assert (said.state, said.round, said.start_ms) == (RUNNING, 1, 120)


def frozen(*ids: str) -> Job:
    return Job("a", "b").round(1, RoundState.FROZEN, ids=ids)


def test_frozen_round_is_confirmed_by_its_revision() -> None:
    job = frozen(A, B)
    asked = job.view().round
    assert asked is not None
    assert updated(job).confirmed == asked.modified
    assert update(job) is None


@pytest.mark.parametrize(
    ("ids", "own"),
    [((B,), {}), ((A,), {"lease_holds": False}), ((A,), {"local": Local(master_port=20000)})],
    ids=["not asked", "lease over", "not ready"],
)
def test_conditions_that_prevent_a_confirmation(ids: tuple[str, ...], own: dict[str, Any]) -> None:
    assert update(frozen(*ids), **own) is None


def test_late_confirmation_names_the_revision_it_answers() -> None:
    """The coordinator compares it with the current question: it counts for no other one."""
    job = frozen(A, B)
    asked = job.view().round
    txn = update(job)
    assert txn is not None
    job.round(2, RoundState.FROZEN, ids=(A, B))
    assert job.commit(txn).succeeded
    stands = job.view().round
    assert asked is not None
    assert stands is not None
    assert record(job).confirmed == asked.modified != stands.modified


def test_failure_and_state_are_written_in_one_transaction() -> None:
    job = Job("a").sealed("a", number=1)
    failure = a_failure("a")
    said = updated(job, local=busy(workers=Workers.STOPPING, failure=failure))
    assert said.state is STOPPING
    assert job.read(Failure, KEYS.failure(1, A)) == failure
    assert update(job, local=busy(workers=Workers.STOPPING, failure=failure)) is None


def test_failure_of_a_round_before_etcd_lost_its_data_is_not_written() -> None:
    """a failed in a round 1; b, which knew of none, sealed another one in the empty store."""
    lost = busy(workers=Workers.NONE, failure=a_failure("a"))
    unsealed = Job("a", "b")
    assert updated(unsealed, local=lost).state is WAITING
    assert unsealed.read(Failure, KEYS.failure(1, A)) == a_failure("a")
    sealed = Job("a", "b").sealed("b", number=1)
    assert updated(sealed, local=lost).state is WAITING
    assert sealed.etcd.get(KEYS.failure(1, A)) is None


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (1, FailureClass.PEER_ABORT, True),
        (2, FailureClass.PEER_ABORT, False),
        (2, FailureClass.USER_ERROR, True),
        (3, FailureClass.USER_ERROR, False),
    ],
)
def test_old_consequence_is_not_written(number: int, kind: FailureClass, told: bool) -> None:
    job = Job("a").sealed("a", number=1)
    if number > 1:
        job.round(number)
    failure = a_failure("a", kind=kind)
    txn = update(job, local=busy(workers=Workers.STOPPING, failure=failure))
    assert (txn is not None) is told


def test_success_is_written_once_with_the_done_state() -> None:
    job = Job("a").sealed("a", number=1)
    local = busy(workers=Workers.NONE, done=True)
    assert updated(job, local=local).state is DONE
    assert job.read(Done, KEYS.done(1, A)) == Done(1, A, "a")
    stored = job.etcd.get(KEYS.done(1, A))
    assert stored is not None
    assert stored.lease == 0
    assert update(job, local=local) is None


def test_success_is_written_again_by_a_session_that_began_with_it() -> None:
    """The earlier session was lost between its last worker's end and the write."""
    job = Job("a").sealed("a", number=1)
    local = busy(workers=Workers.NONE, done=True)
    again = job.own("a", session="x-1", local=local)
    job.commit(own_key.create(again, carries=True))
    assert record(job).state is DONE
    assert job.etcd.get(KEYS.done(1, A)) is None
    updated(job, session="x-1", local=local)
    assert job.read(Done, KEYS.done(1, A)) == Done(1, A, "a")
    assert update(job, session="x-1", local=local) is None


# -- leaving, closing, deposing, bounds -----------------------------------------------


def test_leave_is_written_once_with_its_reason() -> None:
    job = Job("a").sealed("a", number=1)
    own = job.own("a", local=busy(), leaving="drained")
    txn = own_key.write_leaving(own, job.stored("a"))
    assert txn is not None
    job.commit(txn)
    assert (record(job).state, record(job).reason) == (LEAVING, "drained")
    assert not record(job).stopped
    again = job.own("a", local=busy(workers=Workers.STOPPING), leaving="drained")
    assert own_key.write_leaving(again, job.stored("a")) is None


def test_leaving_member_writes_again_when_its_workers_ended() -> None:
    job = Job("a").sealed("a", number=1).change("a", state=LEAVING, reason="drained")
    txn = own_key.write_leaving(job.own("a", leaving="drained"), job.stored("a"))
    assert txn is not None
    job.commit(txn)
    assert (record(job).state, record(job).stopped) == (LEAVING, True)
    assert own_key.write_leaving(job.own("a", leaving="drained"), job.stored("a")) is None


@pytest.mark.parametrize("workers", list(Workers))
@pytest.mark.parametrize("leaving", ["", "drained"])
def test_only_a_leaving_member_without_workers_has_stopped(workers: Workers, leaving: str) -> None:
    """A waiting member reports the same by its state."""
    own = Job("a").own("a", local=busy(workers=workers), leaving=leaving)
    assert own.record().stopped is (bool(leaving) and workers is Workers.NONE)


def test_close_ends_the_round_once() -> None:
    job = Job("a").round(4, RoundState.FROZEN, ids=(A,))
    txn = close(job.own("a"))
    assert txn is not None
    assert job.commit(txn).succeeded
    current = job.current()
    assert (current.number, current.state, current.ids) == (4, RoundState.CLOSED, ())
    assert (current.outcome, current.since_ms) == (STOPPED, UTC_MS)
    assert close(job.own("a")) is None


def test_round_that_has_not_begun_or_moved_on_is_not_closed() -> None:
    assert close(Job("a").own("a")) is None
    job = Job("a").round(1)
    txn = close(job.own("a"))
    assert txn is not None
    job.round(2)
    assert not job.commit(txn).succeeded


@pytest.mark.parametrize("remove", [depose, set_aside])
def test_coordinator_that_still_writes_is_not_removed(
    remove: Callable[[MemberKey], Txn | None],
) -> None:
    job = Job("b", "a")
    txn = remove(job.own("a"))
    assert txn is not None
    job.change("b", state=RUNNING)
    assert not job.commit(txn).succeeded
    assert job.names() == {"a", "b"}


def test_replaced_coordinator_keeps_everything_but_its_seniority() -> None:
    job = Job()
    lease = job.etcd.grant(30, 0.0).id
    job.member("b", lease=lease, state=RUNNING, round=3).member("a")
    before = record(job, "b")
    txn = set_aside(job.own("a"))
    assert txn is not None
    result = job.commit(txn)
    assert result.succeeded
    after = job.stored("b")
    assert after.created > job.stored("a").created
    assert replace(after.record, session=before.session) == before
    stored = job.etcd.get(after.key)
    assert stored is not None
    assert stored.lease == lease
    assert [kv.key for target, kvs in result.ranges if target.limit for kv in kvs] == [
        job.stored("a").key
    ]


@pytest.mark.parametrize(
    ("mine", "differs"),
    [
        (RendezvousParams(1, 4), ""),
        (RendezvousParams(1, 4, keep_alive_seconds=9), ""),
        (RendezvousParams(2, 4), "min_nodes=2, but the job has 1"),
        (RendezvousParams(1, 8), "max_nodes=8, but the job has 4"),
        (RendezvousParams(1, 4, 3), "increment=3, but the job has 1"),
    ],
)
def test_members_must_have_equal_sizes(mine: RendezvousParams, differs: str) -> None:
    said = own_key.disagreement(Job("a").own("a", bounds=mine))
    assert differs in said
    assert bool(said) is bool(differs)
    assert ("same sizes" in said) is bool(differs)


def test_member_without_sizes_agrees() -> None:
    assert own_key.disagreement(Job("a").own("a")) == ""
    assert (
        own_key.disagreement(Job("a").delete(KEYS.bounds).own("a", bounds=RendezvousParams(9, 9)))
        == ""
    )
