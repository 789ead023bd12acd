"""Simulated etcd v3, in memory: revisions, transactions, leases, watches, compaction.

This module owns the simulated store. It has no network and no clock: the caller passes the time,
and delays, loses and answers requests. `tests/integration/etcd/test_simulated_etcd.py` compares
its behaviour with a real server.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Deleted,
    Is,
    KeyValue,
    LeaseGrant,
    Put,
    Range,
    RangeResult,
    Target,
    Txn,
    TxnResult,
    WatchBatch,
    WatchEvent,
)
from tests.sim.etcd.values import (
    MAX_OPS,
    Change,
    Compacted,
    Lease,
    LeaseMissing,
    Refused,
    Watcher,
    check_branch,
    select,
)

__all__ = ["Change", "Compacted", "LeaseMissing", "Refused", "SimEtcd", "Watcher"]

MIN_TTL_SECONDS = 2
EXPIRY_CHECK_SECONDS = 0.5

CommitObserver = Callable[[int, tuple[Change, ...], str], None]


class SimEtcd:
    """Store of one cluster.

    `on_commit(revision, changes, origin)` sees every commit; origin is the name given to `txn` by
    its caller, or "lease" for an expired lease.
    """

    def __init__(self, on_commit: CommitObserver | None = None) -> None:
        self.cluster_id = 1
        self.revision = 1
        self.compacted = 0
        self.on_commit = on_commit
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, Lease] = {}
        self._next_lease = 100
        self._history: list[tuple[int, tuple[WatchEvent, ...]]] = []
        self._watchers: list[Watcher] = []

    # -- reads ----------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        return self._keys.get(key)

    def range(self, target: Range) -> RangeResult:
        found = select(self._keys, target)
        limited = found[: target.limit] if target.limit else found
        return RangeResult(self.revision, self.cluster_id, limited, len(found))

    # -- transactions ---------------------------------------------------------------

    def txn(self, txn: Txn, origin: str = "") -> TxnResult:
        """Decide one transaction; raise `Refused` if etcd would answer with an error."""
        for branch in (txn.success, txn.failure):
            check_branch(branch)
        if len(txn.compares) > MAX_OPS:
            raise Refused("too many operations in txn request")
        succeeded = all(self._holds(compare) for compare in txn.compares)
        branch = txn.success if succeeded else txn.failure
        for op in branch:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise LeaseMissing("requested lease not found")
        changes: list[Change] = []
        ranges: list[tuple[Range, tuple[KeyValue, ...]]] = []
        for op in branch:
            if isinstance(op, Range):
                found = select(self._keys, op)
                ranges.append((op, found[: op.limit] if op.limit else found))
            elif isinstance(op, Put):
                changes.append(self._put(op, self.revision + 1))
            else:
                changes.extend(self._delete(op))
        self._commit(changes, origin)
        return TxnResult(succeeded, self.revision, self.cluster_id, tuple(ranges))

    def _holds(self, compare: Compare) -> bool:
        found = self._keys.get(compare.key)
        actual = 0
        if found is not None:
            by_mod = compare.target is Target.MOD
            actual = found.mod_revision if by_mod else found.create_revision
        match compare.operator:
            case Is.EQUAL:
                return actual == compare.revision
            case Is.NOT_EQUAL:
                return actual != compare.revision
            case Is.GREATER:
                return actual > compare.revision
            case Is.LESS:
                return actual < compare.revision

    def _put(self, op: Put, revision: int) -> Change:
        before = self._keys.get(op.key)
        created = before.create_revision if before is not None else revision
        if before is not None and before.lease:
            self._leases[before.lease].keys.discard(op.key)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        after = KeyValue(op.key, op.value, created, revision, op.lease)
        self._keys[op.key] = after
        return Change(op.key, before, after)

    def _delete(self, op: Delete) -> list[Change]:
        changes = []
        for before in select(self._keys, Range(op.key, op.prefix)):
            del self._keys[before.key]
            if before.lease:
                self._leases[before.lease].keys.discard(before.key)
            changes.append(Change(before.key, before, None))
        return changes

    def _commit(self, changes: list[Change], origin: str) -> None:
        if not changes:
            return
        self.revision += 1
        events: tuple[WatchEvent, ...] = tuple(
            change.after if change.after is not None else Deleted(change.key, self.revision)
            for change in changes
        )
        self._history.append((self.revision, events))
        for watcher in list(self._watchers):
            self._notify(watcher, self.revision, events)
        if self.on_commit is not None:
            self.on_commit(self.revision, tuple(changes), origin)

    # -- leases ---------------------------------------------------------------------

    def grant(self, ttl_seconds: int, now: float) -> LeaseGrant:
        ttl = max(ttl_seconds, MIN_TTL_SECONDS)
        self._next_lease += 1
        self._leases[self._next_lease] = Lease(self._next_lease, ttl, now + ttl)
        return LeaseGrant(self._next_lease, ttl)

    def keep_alive(self, lease: int, now: float) -> int:
        """Restart a lease; return its TTL, or 0 if there is no such lease."""
        held = self._leases.get(lease)
        if held is None or held.expires <= now:
            return 0
        held.expires = now + held.ttl_seconds
        return held.ttl_seconds

    def revoke(self, lease: int, origin: str = "lease") -> bool:
        """End a lease and delete its keys in one revision; return False if there is none."""
        held = self._leases.get(lease)
        if held is None:
            return False
        changes = []
        for key in sorted(held.keys):
            changes.extend(self._delete(Delete(key)))
        del self._leases[lease]
        self._commit(changes, origin)
        return True

    def next_expiry(self) -> float | None:
        return min((lease.expires for lease in self._leases.values()), default=None)

    def expire(self, now: float) -> tuple[int, ...]:
        """Revoke every expired lease, as etcd does twice a second; return their ids."""
        late = tuple(lease.id for lease in self._leases.values() if lease.expires <= now)
        for lease in late:
            self.revoke(lease)
        return late

    def expires(self, lease: int) -> float | None:
        """Return the expiry time of a lease, None if there is none."""
        held = self._leases.get(lease)
        return None if held is None else held.expires

    # -- watches --------------------------------------------------------------------

    def watch(self, target: Range, start: int, sink: Callable[[WatchBatch], None]) -> Watcher:
        """Watch one range from revision `start` on (0: from the next); history is sent at once."""
        if 0 < start < self.compacted:
            raise Compacted(self.compacted)
        watcher = Watcher(target, start, sink)
        self._watchers.append(watcher)
        if start:
            for revision, events in list(self._history):
                if revision >= start:
                    self._notify(watcher, revision, events)
        return watcher

    def cancel(self, watcher: Watcher) -> None:
        watcher.alive = False
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _notify(self, watcher: Watcher, revision: int, events: tuple[WatchEvent, ...]) -> None:
        if not watcher.alive or revision < watcher.start:
            return
        seen = tuple(event for event in events if watcher.target.covers(event.key))
        if seen:
            watcher.sink(WatchBatch(revision, seen, self.cluster_id))

    # -- faults ---------------------------------------------------------------------

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`."""
        self.compacted = min(max(revision, self.compacted), self.revision)
        self._history = [entry for entry in self._history if entry[0] >= self.compacted]

    def elect(self, now: float) -> None:
        """Restart each lease with its full TTL, as after a leader change or a restart with data."""
        for lease in self._leases.values():
            lease.expires = now + lease.ttl_seconds

    def wipe(self) -> None:
        """Lose all data: another cluster, from revision 1; watchers are not notified."""
        self.cluster_id += 1
        self.revision = 1
        self.compacted = 0
        self._keys.clear()
        self._leases.clear()
        self._history.clear()
        self._watchers.clear()
