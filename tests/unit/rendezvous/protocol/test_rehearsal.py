"""Rehearsal: it reaches a round, and etcd's form preserves all values."""

from __future__ import annotations

from elasticjob_rendezvous.etcd import member as edge
from elasticjob_rendezvous.protocol import rehearsal as core
from elasticjob_rendezvous.protocol.kv import Deleted, Txn, TxnResult, WatchEvent


def test_rehearsal_forms_a_round_of_two_members() -> None:
    assert core.rehearse()
    assert edge.rehearse()


def test_rehearsal_writes_a_complete_round() -> None:
    txns: list[Txn] = []

    def answered(txn: Txn, result: TxnResult) -> TxnResult:
        txns.append(txn)
        return result

    assert core.rehearse(answered)
    written = {op.key for txn in txns for op in txn.success if hasattr(op, "value")}
    assert {"/rehearsal/state/round", "/rehearsal/state/roster", "/rehearsal/roster/1"} <= written


def test_rehearsal_with_wrong_answers_ends_without_a_round() -> None:
    def refused(txn: Txn, result: TxnResult) -> TxnResult:
        return TxnResult(False, result.revision, result.cluster_id)

    assert not core.rehearse(refused)


def test_answers_survive_the_etcd_encoding() -> None:
    passed: list[tuple[TxnResult, TxnResult]] = []

    def both(txn: Txn, result: TxnResult) -> TxnResult:
        passed.append((result, edge.answered(txn, result)))
        return result

    assert core.rehearse(both)
    assert any(result.ranges for result, _ in passed)
    for result, after in passed:
        assert after == result


def test_events_survive_the_etcd_encoding() -> None:
    seen: list[tuple[WatchEvent, ...]] = [(Deleted("/rehearsal/members/a/b", 7),)]

    def kept(events: tuple[WatchEvent, ...]) -> tuple[WatchEvent, ...]:
        seen.append(events)
        return events

    assert core.rehearse(seen=kept)
    for events in seen:
        assert edge.seen(events) == events
