"""Values of the simulated etcd, and its two rules without state: key selection, branch checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.kv import Delete, KeyValue, Op, Order, Put, Range, WatchBatch

MAX_OPS = 128


class Refused(Exception):
    """Request that etcd answers with an error; nothing was applied."""


class LeaseMissing(Refused):
    """Put with a lease that does not exist, or grant of one that does."""


class Compacted(Refused):
    """Watch of revisions that were compacted away."""

    def __init__(self, compacted: int) -> None:
        super().__init__(f"revisions up to {compacted} were compacted")
        self.compacted = compacted


@dataclass(frozen=True, slots=True)
class Change:
    """Key of a commit, with its values before and after; None if absent."""

    key: str
    before: KeyValue | None
    after: KeyValue | None


@dataclass(slots=True)
class Lease:
    id: int
    ttl_seconds: int
    expires: float
    keys: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Watcher:
    """Watched range. `sink` gets each batch; a cancelled watcher gets none."""

    target: Range
    start: int
    sink: Callable[[WatchBatch], None]
    alive: bool = True


def select(keys: dict[str, KeyValue], target: Range) -> tuple[KeyValue, ...]:
    if not target.prefix:
        found = keys.get(target.key)
        return () if found is None else (found,)
    head = target.key
    matching = [kv for key, kv in keys.items() if key.startswith(head)]
    if target.order is Order.CREATE:
        matching.sort(key=lambda kv: (kv.create_revision, kv.key))
    else:
        matching.sort(key=lambda kv: kv.key)
    return tuple(matching)


def check_branch(branch: tuple[Op, ...]) -> None:
    """Raise `Refused` if one branch puts a key twice, or puts and deletes it, as etcd does."""
    if len(branch) > MAX_OPS:
        raise Refused("too many operations in txn request")
    put: set[str] = set()
    for op in branch:
        if isinstance(op, Put):
            if not op.key:
                raise Refused("key is not provided")
            if op.key in put:
                raise Refused("duplicate key given in txn request")
            put.add(op.key)
    for op in branch:
        if isinstance(op, Delete) and any(Range(op.key, op.prefix).covers(key) for key in put):
            raise Refused("duplicate key given in txn request")
