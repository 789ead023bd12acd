"""Part of etcd's v3 data model that the protocol uses, as plain values.

Owns no data: the real client (`elasticjob_rendezvous.etcd.client`) and the simulated store
(`tests/sim`) both take and return these types, so that one protocol runs on either.

Source of the semantics: the etcd v3 API (KV, Lease, Watch).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One stored key.

    `create_revision` is the store revision that created the key and stays the
    same while it is overwritten; `mod_revision` is the last one that wrote it.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Order(StrEnum):
    """Sort order of a range; etcd's default is by key."""

    KEY = "key"
    CREATE = "create"


@dataclass(frozen=True, slots=True)
class Range:
    """One key, or with `prefix` every key that begins with `key`.

    `limit` 0 means all. As a watch target, `order` and `limit` are ignored.
    """

    key: str
    prefix: bool = False
    order: Order = Order.KEY
    limit: int = 0

    def covers(self, key: str) -> bool:
        return key.startswith(self.key) if self.prefix else key == self.key


class Target(StrEnum):
    """Revision that a comparison looks at. A missing key has both revisions 0."""

    CREATE = "create_revision"
    MOD = "mod_revision"


class Is(StrEnum):
    EQUAL = "="
    NOT_EQUAL = "!="
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True)
class Compare:
    """Condition of a transaction: `key`'s `target` `operator` `revision`."""

    key: str
    target: Target
    revision: int
    operator: Is = Is.EQUAL


@dataclass(frozen=True, slots=True)
class Put:
    """Write of `value`. `lease` 0 attaches none and detaches any it had."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of one key, or with `prefix` of every key that begins with it."""

    key: str
    prefix: bool = False


Op = Put | Delete | Range


@dataclass(frozen=True, slots=True)
class Txn:
    """Atomic choice: apply `success` if every comparison holds, else `failure`.

    A key may be put or deleted at most once in one transaction (etcd refuses duplicates), and a
    transaction holds at most 128 operations.
    """

    compares: tuple[Compare, ...]
    success: tuple[Op, ...]
    failure: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys found by a `Range`, with the store revision and cluster they came from."""

    revision: int
    cluster_id: int
    kvs: tuple[KeyValue, ...]
    count: int = 0


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Outcome of a `Txn`.

    `ranges` holds one entry for each `Range` of the branch that was taken, in
    order: the operation and the keys it found. `revision` is the store's
    revision after the transaction; puts that were applied carry it as their
    mod_revision.
    """

    succeeded: bool
    revision: int
    cluster_id: int
    ranges: tuple[tuple[Range, tuple[KeyValue, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Deleted:
    """Watch event: `key` was deleted (or its lease ran out) at `mod_revision`."""

    key: str
    mod_revision: int


WatchEvent = KeyValue | Deleted
"""Event of a watch: the new key-value, or its deletion."""


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Events of one watch response, in revision order, never split within a revision.

    `cluster_id` is that of the watched etcd.
    """

    revision: int
    events: tuple[WatchEvent, ...]
    cluster_id: int


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Granted lease. The deadline counts from the local time the request was *sent*."""

    id: int
    ttl_seconds: int
