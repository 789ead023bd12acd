"""Agreement of the ranks on the snapshot to restore, and the read of its parts.

All calls are collectives. A part that cannot be read is offered no more, and the ranks decide again
until each of them has read and verified its parts.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob import layout
from elasticjob.train.snapshots.core.agreement import (
    MEMORY,
    REPLICAS,
    STORAGE,
    Offer,
    Part,
    Plan,
    SnapshotError,
    Source,
    Version,
    complete_versions,
    decide,
    sizes_of,
    version_after,
)
from elasticjob.train.snapshots.core.exchange import (
    Exchange,
    RestoreMessage,
    pack_message,
    unpack_message,
)
from elasticjob.train.snapshots.job import whole_number
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers, ReplicaBuffers
from elasticjob.train.snapshots.memory.part_files import (
    Body,
    CorruptSnapshot,
    read,
    reading,
)
from elasticjob.train.snapshots.memory.reached_step import InStorage, in_storage_of
from elasticjob.train.snapshots.ranks.gang import Gang, streams
from elasticjob.train.snapshots.ranks.torch_group import group_size
from elasticjob.train.snapshots.state.codec import decode
from elasticjob.train.snapshots.state.sharding import Assembly, ShapeMismatch, Shard, own_state
from elasticjob.train.snapshots.storage.calls import StoredOffer, called
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

log = logging.getLogger("elasticjob.train")

MAX_TROUBLES = 3
_READ, _REFUSED, _SILENT = range(3)
"""Results of the reads of one rank: all verified; one refused; storage does not answer one."""


class UnknownContent(CorruptSnapshot):
    """Part that this version of the library cannot decode, and another one can."""


class Agreed(NamedTuple):
    """Snapshot that the ranks restore together.

    Args:
        plan: sources of its parts; None if there is no snapshot.
        bodies: parts that this rank has read.
        offers: parts that each rank can read.
        stored: newest snapshots in storage up to the restored step, the same on all ranks.
        stored_at: UTC time of the newest complete snapshot in storage; 0 if it is unknown.
        owner: job to which the storage belongs, the same on all ranks; empty if it is unknown.
        job: this job, the same on all ranks; empty if no rank knows it.
    """

    plan: Plan | None
    bodies: dict[Part, Body]
    offers: list[Offer]
    stored: InStorage
    stored_at: float
    owner: str
    job: str


def check_group(gang: Gang, environ: Mapping[str, str]) -> None:
    """Check in `save` that the ranks have restored together.

    Otherwise they would save, and restore after a fault, as gangs of one rank, each another
    version. A process that restores alone, as for an evaluation, does not save.

    Raises:
        SnapshotError: the process group has another number of ranks than at the restore; or there
            is none, and the environment names several ranks.
    """
    ranks, named = group_size(), whole_number(environ, "WORLD_SIZE")
    if ranks is None and gang.size == 1 and named > 1:
        raise SnapshotError(
            f"save() was called without a process group, and WORLD_SIZE={named} names {named} "
            "ranks, which save and restore together: call restore() after init_process_group(), "
            "or set WORLD_SIZE=1 in the environment of a process that trains alone"
        )
    if ranks not in (None, gang.size):
        raise SnapshotError(
            f"the process group of save() has {ranks} ranks, and restore() was called with "
            f"{gang.size}: call restore() after init_process_group()"
        )


def agree(
    gang: Gang,
    memory: MemoryBuffers | None,
    storage: StorageFolder | None,
    is_sharded: bool,
    job: str,
) -> Agreed:
    """Agree on a plan whose readers have verified their parts. Raises SnapshotError.

    Args:
        job: this job, as far as this rank knows.
    """
    reads = _Reads(gang.rank, memory, storage)
    known = InStorage() if memory is None else in_storage_of(memory.folder)
    is_patient = False
    while True:
        stored = reads.stored
        offer = reads.offer(is_patient)
        mine = RestoreMessage(
            offer,
            stored.trouble,
            stored.is_silent,
            stored.is_listed,
            *known,
            reads.damage(),
            stored.owner,
            job,
        )
        gathered = gang.gather(Exchange.OFFERS, pack_message(mine))
        messages = [unpack_message(content) for content in gathered]
        offers = [each.offer for each in messages]
        plan = decide(offers, is_sharded)
        is_silent = any(each.is_silent for each in messages)
        if is_silent and not is_patient and _may_improve(plan, messages):
            is_patient = True
            continue
        _check_known(plan, messages)
        bodies: dict[Part, Body] = {}  # frees those of a refused plan
        bodies, outcome = reads.read(plan, gang, version_after(plan, offers, is_sharded))
        outcomes = [bytes(each)[0] for each in gang.gather(Exchange.READS, bytes([outcome]))]
        if plan is not None and not _is_readable(plan, offers, outcomes, is_sharded):
            raise SnapshotError(
                f"the snapshot of step {plan.version.step} is in storage, which does not "
                f"answer rank {outcomes.index(_SILENT)}: make it readable, or give Snapshots "
                "another folder to go on without it"
            )
        if not any(outcomes):
            _warn_of_damage(messages, gang.rank, stored)
            _check_storage(plan, messages, gang.rank)
            owner = next((each.owner for each in messages if each.owner), "")
            name = next((each.job for each in messages if each.job), "")
            newest = _newest_stored(plan, messages)
            return Agreed(plan, bodies, offers, newest, stored.at, owner, name)


def check_size(gang: Gang, offers: list[Offer], is_sharded: bool) -> None:
    """Raise SnapshotError if all snapshots are sharded state of another number of ranks."""
    sizes = sorted(sizes_of(offers))
    if is_sharded and sizes and gang.size not in sizes:
        raise SnapshotError(
            f"the snapshots have sharded state of {' or '.join(map(str, sizes))} ranks and "
            f"cannot be restored by {gang.size}: start that number of ranks, or remove the "
            "snapshots and restore a distributed checkpoint"
        )


def assembled(
    gang: Gang, plan: Plan, bodies: dict[Part, Body], shared: Any, own: Body | None, target: Any
) -> tuple[Any, Any]:
    """Return the state with its distributed tensors, and the own state of this rank.

    Ranks with exactly the shards that they need read no others; otherwise all ranks read all
    shards, one part at a time. `target` is the state to restore into, or None.
    """
    if not plan.own:
        raise SnapshotError(
            "the shards of the snapshot are not complete: create Snapshots with sharded=True, "
            "as for the snapshot"
        )
    trouble, rank_state, assembly = "", None, None
    shards: list[Shard] = []
    try:
        assembly = Assembly(shared, target() if callable(target) else target)
    except ShapeMismatch as error:
        trouble = str(error)
    if own is not None:
        shards, rank_state = own_state(decode(own))
    whole = assembly is not None and assembly.needs_own_alone(shards)
    gathered = gang.gather(Exchange.SHARDS, f"{int(whole)}{trouble}".encode())
    texts = [bytes(each).decode() for each in gathered]
    bad = next((text[1:] for text in texts if text[1:]), "")
    if bad or assembly is None:
        raise SnapshotError(bad)
    if all(text[0] == "1" for text in texts):
        assembly.add(shards)
    else:
        for body in _own_parts(gang, plan, bodies):
            assembly.add(own_state(decode(body))[0])
    return assembly.state, rank_state


def _own_parts(gang: Gang, plan: Plan, bodies: dict[Part, Body]) -> Iterator[Body]:
    """Yield the own parts of all ranks that wrote the snapshot, one after another, on all ranks.

    Removes each part from `bodies` once it is sent.
    """
    for source in plan.own:
        reader = source.readers[0]
        yield gang.broadcast(bodies.pop(source.part) if gang.rank == reader else None, reader)


class _Reads:
    """Parts that this rank offers, and its reads of those that the ranks have chosen."""

    def __init__(
        self, rank: int, memory: MemoryBuffers | None, storage: StorageFolder | None
    ) -> None:
        self._rank = rank
        self._memory = memory
        self.stored = StoredOffer(storage)
        self._places: dict[str, dict[Part, Path]] = {}
        self._refused: set[tuple[str, Part]] = set()
        self._damaged: list[str] = []

    def damage(self) -> str:
        """Return the error of a part that is damaged, or cannot be decoded; empty without one."""
        return next(iter([*self._damaged, *self.stored.damaged[-1:]]), "")

    def offer(self, is_patient: bool) -> Offer:
        """Return the parts that can be read; `is_patient`: wait for storage."""
        self.stored.update(is_patient)
        memory = self._memory
        self._places = {
            MEMORY: {} if memory is None else memory.parts(),
            REPLICAS: {} if memory is None else ReplicaBuffers(memory.folder).parts(),
            STORAGE: self.stored.parts,
        }
        return Offer(
            **{
                place: tuple(part for part in found if (place, part) not in self._refused)
                for place, found in self._places.items()
            }
        )

    def read(
        self, plan: Plan | None, gang: Gang, keep: Version | None
    ) -> tuple[dict[Part, Body], int]:
        """Return the parts that this rank reads or receives for the plan, and the result.

        `keep`: version that stays in the memory of this node, in case that one is damaged.
        """
        if self._memory is not None:
            self._memory.forget_ahead()
        bodies: dict[Part, Body] = {}
        outcome = _READ
        for source in () if plan is None else (plan.shared, *plan.own):
            streamed = plan is not None and source is plan.shared and streams(plan, gang.size)
            if self._rank not in source.readers and not streamed:
                continue
            try:
                if streamed:
                    body = self._streamed(source, gang, keep)
                else:
                    body = self._body(source.place, source.part)
                if body is not None:
                    if self._rank in source.readers:
                        self._check_content(source, body)
                    bodies[source.part] = body
            except (CorruptSnapshot, TimeoutError) as error:
                cause = error.__cause__ or error
                if source.place == STORAGE and isinstance(cause, TimeoutError):
                    self._refused.update((STORAGE, part) for part in self.stored.parts)
                    self.stored.failed(cause)
                    return bodies, _SILENT
                log.warning("passing over a snapshot: %s", error)
                if source.place == MEMORY and self._memory is not None:
                    # Another buffer of this node may hold the same part.
                    self._memory.damaged(self._places[MEMORY][source.part], source.part)
                else:
                    self._refused.add((source.place, source.part))
                if source.place == STORAGE and isinstance(cause, OSError):
                    self.stored.failed(cause)
                elif source.place == STORAGE or isinstance(error, UnknownContent):
                    self._damaged.append(str(error))
                outcome = _REFUSED
        return bodies, outcome

    def _check_content(self, source: Source, body: Body) -> None:
        """Raise UnknownContent for a part that this version of the library cannot decode.

        Its checksum is right. The ranks have not agreed on it yet, and can take another one.
        """
        try:
            decode(body)
        except CorruptSnapshot as error:
            path = self._places[source.place][source.part]
            raise UnknownContent(f"{path}: {error}") from error

    def _streamed(self, source: Source, gang: Gang, keep: Version | None) -> Body | None:
        """Return the part, which its first reader reads and sends. A collective.

        A rank that lacks it writes it to the memory of its node meanwhile.
        """
        reader = source.readers[0]
        if self._rank == reader:
            path = self._places[source.place][source.part]
            return gang.stream(reading(path, source.part, threads=True), reader)
        ahead = None
        if self._memory is not None and self._rank not in source.readers:
            ahead = functools.partial(self._memory.write_ahead, keep, source.part)
        return gang.stream(None, reader, ahead)

    def _body(self, place: str, part: Part) -> Body:
        """Read a part. Raises CorruptSnapshot, or TimeoutError if storage does not answer."""
        path = self._places[place][part]
        if place == STORAGE:
            return called(functools.partial(read, path, part))
        return read(path, part, threads=True)


def _newest_stored(plan: Plan | None, messages: list[RestoreMessage]) -> InStorage:
    """Return the newest snapshots in storage up to the restored step."""
    step = 0 if plan is None else plan.version.step
    if not any(each.is_listed for each in messages):
        return InStorage(
            min(step, max(each.begun for each in messages)),
            min(step, max(each.complete for each in messages)),
        )
    parts = [part for each in messages for part in each.offer.storage]
    complete = max(
        (each.step for each in complete_versions(parts) if each.step <= step),
        default=layout.NO_STEP,
    )
    return InStorage(complete, complete)


def _may_improve(plan: Plan | None, messages: list[RestoreMessage]) -> bool:
    """Return True if storage, which has not answered, may have what the plan lacks.

    That is a newer version, as when there was no room in memory, or the ranks' own parts.
    """
    if plan is None or plan.version.step < max(each.begun for each in messages):
        return True
    part = plan.shared.part
    return not plan.own and part.ranks > 0 and (part.reshards or part.ranks == len(messages))


def _is_readable(plan: Plan, offers: list[Offer], outcomes: list[int], sharded: bool) -> bool:
    """Return True unless the plan needs the storage of a rank that it does not answer."""
    if _SILENT not in outcomes:
        return True
    left = [
        offer._replace(storage=()) if outcome == _SILENT else offer
        for offer, outcome in zip(offers, outcomes)
    ]
    other = decide(left, sharded)
    return other is not None and other.version == plan.version and bool(other.own) == bool(plan.own)


def _check_known(plan: Plan | None, messages: list[RestoreMessage]) -> None:
    """Raise SnapshotError if storage has a newer snapshot than the plan and cannot be read.

    A rank that has read all of its storage without an error shows what is left of it.
    """
    troubles = _storage_troubles(messages)
    newest = max(each.complete for each in messages)
    if plan is None or plan.version.step >= newest or not troubles:
        return
    if not any(each.is_listed and each.offer.storage and not each.trouble for each in messages):
        raise SnapshotError(
            f"the snapshot of step {newest} is in storage, which cannot be read "
            f"({troubles}): make it readable, or give Snapshots another "
            f"folder to go on at step {plan.version.step}"
        )


def _check_storage(plan: Plan | None, messages: list[RestoreMessage], rank: int) -> None:
    """Raise SnapshotError if storage that cannot be read may have the only snapshot.

    With a snapshot from elsewhere it is a warning. Damage of the only one is an error too.
    """
    if plan is not None:
        if messages[rank].trouble:
            log.warning(
                "the storage of snapshots cannot be read: %s. Training continues at step %d, from "
                "%s",
                messages[rank].trouble,
                plan.version.step,
                "storage" if plan.shared.place == STORAGE else "memory",
            )
        return
    if troubles := _storage_troubles(messages):
        raise SnapshotError(
            "there is no complete snapshot in memory, and the storage cannot be read "
            f"({troubles}): make it readable, or give Snapshots another "
            "folder to begin at step 0"
        )
    if damage := next((each.damage for each in messages if each.damage), ""):
        raise SnapshotError(
            f"all snapshots are damaged, or of a newer version of the library ({damage}): repair "
            "the files, install the version that wrote them, or give Snapshots another folder to "
            "begin at step 0"
        )


def _warn_of_damage(messages: list[RestoreMessage], rank: int, stored: StoredOffer) -> None:
    """Warn of the damaged parts in storage, on the first rank that has read it."""
    if next((at for at, each in enumerate(messages) if each.is_listed), None) == rank:
        for text in stored.damaged:
            log.warning("passing over a snapshot in storage: %s", text)


def _storage_troubles(messages: list[RestoreMessage]) -> str:
    """Return the first ranks that cannot read storage, with their errors; empty for none."""
    found = [f"rank {at}: {each.trouble}" for at, each in enumerate(messages) if each.trouble]
    return "; ".join(found[:MAX_TROUBLES])
