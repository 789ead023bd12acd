"""Records of all jobs of one etcd, each job within a quota of keys, bytes and writes. No I/O.

Any pod of a job may hold the job's etcd user, which may write any key below the job's folder. The
operator keeps these records in memory, so their number and size are bounded. etcd keeps the former
values of a key until its next compaction, so the rate of written bytes is bounded too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticjob_operator.domain.observed.etcd_records import folder_of, job_of
from elasticjob_rendezvous.protocol.kv import KeyValue
from elasticjob_rendezvous.token_bucket import TokenBuckets

KEYS = 1000
KEYS_PER_NODE = 16
"""Keys of one node: sessions, failures and ends of several rounds."""
BYTES = 4 << 20
BYTES_PER_NODE = 32 << 10
"""Bytes of one node: its record, its assignments in several rosters and a traceback of 8 KiB."""
UNKNOWN_NODES = 256
"""Size assumed of a job until its object is read."""
BURST_BYTES = 16 << 20
BURST_BYTES_PER_NODE = 128 << 10
"""Bytes that one node writes in about a hundred rounds."""
BYTES_PER_SECOND = 64 << 10
BYTES_PER_SECOND_AND_NODE = 1 << 10
WRITE_BYTES = 128
"""Bytes counted of each write, besides its key and value: an entry of etcd's index and history."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Maximum of one job.

    Attributes:
        keys: number of its keys.
        bytes: bytes in their names and values.
        burst: bytes that it may write at once.
        rate: bytes that it may write each second after that.
    """

    keys: int
    bytes: int
    burst: int
    rate: int

    def __str__(self) -> str:
        return (
            f"{self.keys:,} keys, {self.bytes / (1 << 20):.1f} MiB, or writes of "
            f"{self.burst / (1 << 20):.1f} MiB and then {self.rate / (1 << 10):.0f} KiB/s"
        )


def quota_of(nodes: int) -> Quota:
    """Return the quota of a job with up to this number of nodes."""
    return Quota(
        keys=KEYS + KEYS_PER_NODE * nodes,
        bytes=BYTES + BYTES_PER_NODE * nodes,
        burst=BURST_BYTES + BURST_BYTES_PER_NODE * nodes,
        rate=BYTES_PER_SECOND + BYTES_PER_SECOND_AND_NODE * nodes,
    )


@dataclass(slots=True)
class Usage:
    """Number and size of one job's records.

    Attributes:
        quota: its present quota.
        keys, total: number of its keys, and their bytes, while it is within its quota.
        exceeded: True once it exceeded its quota; its records are dropped and not counted then.
        unread: True until records that were dropped under a smaller quota are read again.
    """

    quota: Quota = field(default_factory=lambda: quota_of(UNKNOWN_NODES))
    keys: int = 0
    total: int = 0
    exceeded: bool = False
    unread: bool = False

    @property
    def known(self) -> bool:
        """True if all records of the job have been read."""
        return not (self.exceeded or self.unread)

    def put(self, size: int, before: int | None) -> bool:
        """Count a record, `before` the size of the former one of its key; return False if the
        quota is exceeded with it."""
        self.keys += before is None
        self.total += size - (before or 0)
        self.exceeded = self.keys > self.quota.keys or self.total > self.quota.bytes
        return not self.exceeded

    def delete(self, size: int) -> None:
        """Count the deletion of a record of `size` bytes."""
        self.keys -= 1
        self.total -= size

    def allow(self, nodes: int) -> bool:
        """Raise the quota to that of `nodes`; return True if its records must be read again.

        It is never lowered: the records of a larger size remain for a while.
        """
        wanted = quota_of(nodes)
        if wanted.keys <= self.quota.keys:
            return False
        self.quota = wanted
        if not self.exceeded:
            return False
        self.exceeded, self.unread = False, True
        return True


class RecordStore:
    """Records by job and key. `jobs` has those of each prefix: one incarnation of one job."""

    def __init__(
        self,
        quotas: Iterable[tuple[str, Quota]] = (),
        written: TokenBuckets[str] | None = None,
    ) -> None:
        self.jobs: dict[str, dict[str, KeyValue]] = {}
        self._incarnations: dict[tuple[str, str], set[int]] = {}
        self._usages = {folder: Usage(quota) for folder, quota in quotas}
        self._written = written or TokenBuckets(1, 1.0)  # each gets the size of its job's quota

    def emptied(self) -> RecordStore:
        """Return a store without records, with the quotas and counted writes of this one."""
        quotas = ((folder, usage.quota) for folder, usage in self._usages.items())
        return RecordStore(quotas, self._written)

    def uids(self) -> tuple[tuple[str, str], ...]:
        """Return namespace and uid of every job that has a record."""
        return tuple(self._incarnations)

    def newest(self, namespace: str, uid: str) -> int | None:
        """Return the newest incarnation of a job that has a record; None if none has."""
        return max(self._incarnations.get((namespace, uid), ()), default=None)

    def has(self, prefix: str) -> bool:
        """Return True if all records of a job are known, also if it has none."""
        usage = self._usages.get(folder_of(prefix))
        return usage is None or usage.known

    def exceeded(self, folder: str) -> Quota | None:
        """Return the quota that a job's records exceed; None if they do not."""
        usage = self._usages.get(folder)
        return usage.quota if usage is not None and usage.exceeded else None

    def allow(self, folder: str, nodes: int) -> bool:
        """Raise a job's quota to that of `nodes`; return True if all must be read again."""
        return self._usage(folder).allow(nodes)

    def forget(self, folder: str) -> None:
        """Count a job's records from zero, after all of them were deleted."""
        self._usages.pop(folder, None)
        self._written.forget(folder)

    def wrote(self, prefix: str, size: int, now: float) -> bool:
        """Count a change of `size` bytes; return False if its job's writes exceed their quota:
        all of its records are dropped."""
        folder = folder_of(prefix)
        usage = self._usages.get(folder)
        quota = usage.quota if usage is not None else quota_of(UNKNOWN_NODES)
        bucket = self._written.get(folder, now)
        bucket.size, bucket.refill_seconds = quota.burst, 1 / quota.rate
        if bucket.take(now, size + WRITE_BYTES):
            return True
        self._usage(folder).exceeded = True
        self._drop_all(folder)
        return False

    def put(self, prefix: str, kv: KeyValue) -> bool:
        """Keep a record; return False if its job's records exceed their quota: all are dropped."""
        folder = folder_of(prefix)
        usage, job = self._usage(folder), self._job(prefix)
        before = job.get(kv.key)
        if usage.put(size_of(kv), None if before is None else size_of(before)):
            job[kv.key] = kv
            return True
        self._drop_all(folder)
        return False

    def delete(self, prefix: str, key: str) -> None:
        """Drop a record, if it is kept, and with the last one its job."""
        job, folder = self.jobs.get(prefix, {}), folder_of(prefix)
        if (kv := job.pop(key, None)) is None:
            return
        usage = self._usage(folder)
        usage.delete(size_of(kv))
        if not job:
            self._drop(prefix)
        if not usage.keys:
            del self._usages[folder]

    def _usage(self, folder: str) -> Usage:
        return self._usages.get(folder) or self._usages.setdefault(folder, Usage())

    def _job(self, prefix: str) -> dict[str, KeyValue]:
        """Return the records of a prefix; add it if it is new."""
        if prefix not in self.jobs:
            self.jobs[prefix] = {}
            if found := job_of(prefix):
                namespace, uid, incarnation = found
                self._incarnations.setdefault((namespace, uid), set()).add(incarnation)
        return self.jobs[prefix]

    def _drop_all(self, folder: str) -> None:
        for prefix in [key for key in self.jobs if folder_of(key) == folder]:
            self._drop(prefix)

    def _drop(self, prefix: str) -> None:
        del self.jobs[prefix]
        if found := job_of(prefix):
            namespace, uid, incarnation = found
            others = self._incarnations[namespace, uid]
            others.discard(incarnation)
            if not others:
                del self._incarnations[namespace, uid]


def size_of(kv: KeyValue) -> int:
    """Return the bytes of a record's name and value."""
    return len(kv.key) + len(kv.value)
