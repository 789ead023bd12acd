"""Snapshots of the training state in memory that outlives the workers, and in storage.

The launcher of each node owns the folder in memory and names it in `ELASTICJOB_SNAPSHOT_FOLDER`.
Without it, as under torchrun, snapshots are in storage alone. See docs/training.md.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from elasticjob import layout, train
from elasticjob.train.agreement import (
    MEMORY,
    REPLICAS,
    SHARED,
    STORAGE,
    Offer,
    Part,
    Plan,
    Version,
    decide,
    next_gang,
    sizes_of,
)
from elasticjob.train.buffers import (
    BUFFERS,
    Body,
    CorruptSnapshot,
    MemoryBuffers,
    ReplicaBuffers,
    StorageFolder,
    StorageWrite,
    read,
)
from elasticjob.train.codec import decode, encode
from elasticjob.train.gang import Gang, exchanged, pack_offer, unpack_offer
from elasticjob.train.interval import Interval, at_least_one
from elasticjob.train.overlap import Overlap
from elasticjob.train.replicas import State
from elasticjob.train.replication import Replication, Settings, connected

log = logging.getLogger("elasticjob.train")

MAX_REPLICAS = 8
_PROPOSAL = struct.Struct("<QB")


class SnapshotError(Exception):
    """Snapshot that could not be stored; the message has the rank and the cause."""


class Restored(NamedTuple):
    """Restored training state. Its tensors are in CPU memory.

    Args:
        step: number of completed steps.
        state: the state that `save` was given.
        rank_state: this rank's own state; None on all ranks if the number of ranks has changed, or
            if the part of any rank was lost with its node and the nodes that had copies.
        place: "memory" or "storage".
    """

    step: int
    state: Any
    rank_state: Any
    place: str


class Snapshots:
    """Snapshots of the training state, of which the newest is restored after a fault.

    All ranks make the same calls: `restore` once, then `save` after each step, in which the ranks
    have exchanged gradients.

    The ranks' own state is copied to other nodes in the background, so that it survives the loss of
    a node. The interval is adapted to the measured cost of a snapshot, unless one is given.

    Args:
        storage: folder that all nodes share, for the snapshots that survive the loss of all nodes;
            None for none.
        every_steps: steps between two snapshots.
        every_seconds: alternatively the approximate time between two snapshots.
        max_overhead: largest share of the training time that snapshots take, without an interval.
        optimizers: the optimizer, or all of them, if nothing else changes parameters and the
            optimizers' state: they are then copied during the next step.
        store_every: steps between two snapshots in storage, at least.
        keep: number of complete snapshots in storage.
        replicas: number of other nodes that hold copies of each rank's own state; 0 for none.
        replica_rate: largest number of bytes that one rank sends to other nodes each second.
        sharded: True if `rank_state` has what no other rank has, such as the rank's shard of a
            model: then only a snapshot with the state of all ranks is restored.

    Raises:
        ValueError: an argument is out of range, or both intervals are given.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        max_overhead: float = 0.01,
        optimizers: Any = (),
        store_every: int = 500,
        keep: int = 2,
        replicas: int = 1,
        replica_rate: float = 250e6,
        sharded: bool = False,
    ) -> None:
        at_least_one("store_every", store_every)
        at_least_one("keep", keep)
        if replicas not in range(MAX_REPLICAS + 1):
            raise ValueError(f"replicas must be from 0 to {MAX_REPLICAS}, got {replicas!r}")
        if not replica_rate > 0:
            raise ValueError(f"replica_rate must be above 0, got {replica_rate!r}")
        self._interval = Interval(every_steps, every_seconds, max_overhead)
        given = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
        self._overlap = Overlap(given) if given else None
        self._cost: float | None = None
        self._store_every = store_every
        self._keep = keep
        self._storage = None if storage is None else StorageFolder(Path(storage))
        folder = os.environ.get(layout.SNAPSHOT_FOLDER, "")
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._memory = MemoryBuffers(Path(folder), self._local_rank) if folder else None
        self._gang: Gang | None = None
        self._number = 0
        self._last_step = self._stored_step = self._next_step = 0
        self._writing: StorageWrite | None = None
        self._replicas, self._replica_rate, self._sharded = replicas, replica_rate, sharded
        self._replication: Replication | None = None
        self._found: tuple[list[Offer], Plan | None] = ([], None)

    def restore(self) -> Restored | None:
        """Return the newest snapshot that the ranks hold together; None if there is none.

        The same call at the first start and after a fault, on all ranks, once the process group is
        initialized. A rank without a copy receives it from one that has it. A snapshot that is
        incomplete or damaged is passed over.

        Raises:
            SnapshotError: all snapshots of sharded state are of another number of ranks.
        """
        gang = self._gang = Gang()
        plan, bodies, offers = self._agreed(gang)
        drawn = int.from_bytes(gang.gather(secrets.token_bytes(4))[0], "little")
        self._number = next_gang(offers, drawn)
        step = self._last_step = 0 if plan is None else plan.version.step
        self._interval.start(step, time.monotonic())
        self._next_step = step + self._interval.first
        stored = (part for offer in offers for part in offer.storage if part.rank == SHARED)
        self._stored_step = max(
            (p.version.step for p in stored if p.version.step <= step), default=0
        )
        self._found = (offers, plan)
        if plan is None:
            sizes = sorted(sizes_of(offers))
            if self._sharded and sizes and gang.size not in sizes:
                raise SnapshotError(
                    f"the snapshots have sharded state of {' or '.join(map(str, sizes))} ranks and "
                    f"cannot be restored by {gang.size}: start that number of ranks, or remove the "
                    "snapshots and restore a distributed checkpoint"
                )
            return None
        shared, own = exchanged(gang, plan, bodies)
        self._seed(plan, gang.rank, shared, own)
        if plan.own and self._replicates(gang):
            self._announce(plan.version)
            mine = [plan.own[gang.rank].part]
            self._replicate([*mine, plan.shared.part] if self._local_rank == 0 else mine)
        rank_state = None if own is None else decode(own)
        place = STORAGE if plan.shared.place == STORAGE else MEMORY
        return Restored(step, decode(shared), rank_state, place)

    def save(
        self, step: int, state: object, rank_state: object = None, *, store: bool = False
    ) -> bool:
        """Take a snapshot if one is due after `step` steps; return True if it was taken.

        It is complete on return; with `optimizers`, before their next step. A part for storage is
        written in the background, from a copy.

        Args:
            state: the state that is the same on all ranks: nested dicts, lists and tuples of
                tensors, numbers, strings, bytes and None; or a function that returns it, which is
                called if a snapshot is due.
            rank_state: the state of this rank alone, such as that of random number generators,
                or a function; given by all ranks or by none.
            store: take a snapshot in any case, return when it is in storage, and report it with
                `checkpointed`.

        Raises:
            ValueError: `step` is not a whole number from 0 to 2**63 - 1, or before the last one.
            TypeError: the state has a type that a snapshot cannot hold; the message has its path.
            SnapshotError: with `store`, the snapshot is not in storage.
            RuntimeError: `restore` was not called.
        """
        gang = self._gang
        if gang is None:
            raise RuntimeError("call restore() before the first save()")
        if store and self._storage is None:
            raise SnapshotError("there is no storage: give Snapshots a folder that all nodes share")
        step = train.whole_step(step)
        if step < self._last_step:
            raise ValueError(
                f"step must be at least {self._last_step}, the step of the last snapshot, got "
                f"{step}: continue at the step that restore() returned"
            )
        if step < self._next_step and not store:
            return False
        if self._overlap is not None:
            self._overlap.begin()
        begins = self._schedule(gang, step)
        began = time.perf_counter()
        state, rank_state = _value(state), _value(rank_state)
        overlap = None if store else self._overlap
        stage = None if overlap is None else overlap.stage
        version = Version(step, self._number)
        ranks = 0 if rank_state is None else gang.size
        writes_shared = self._local_rank == 0
        parts = []
        # The shared part last: it announces the version.
        if rank_state is not None:
            parts.append(
                (Part(version, gang.rank, ranks, self._last_step), encode(rank_state, stage))
            )
        if writes_shared:
            parts.append((Part(version, SHARED, ranks, self._last_step), encode(state, stage)))
        stored = []
        if self._storage is not None and (store or step - self._stored_step >= self._store_every):
            stored = [each for each in parts if each[0].rank != SHARED or gang.rank == 0]
            self._stored_step = step
        if rank_state is not None and self._replication is None:
            self._replicates(gang)  # the next snapshot is the first to be copied
        begins = begins and rank_state is not None
        if begins:
            self._announce(version)
        write = functools.partial(self._write, parts, stored, begins)
        if overlap is None:
            write()
        else:
            overlap.start(write)
        self._last_step = step
        self._cost = time.perf_counter() - began
        if store:
            self._confirm(gang)
            train.checkpointed(step)
        return True

    def close(self) -> None:
        """Wait until the last snapshot is complete, also in storage."""
        if self._overlap is not None:
            self._overlap.wait()
        self._end_storing()
        if self._replication is not None:
            self._replication.close()

    def _end_storing(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    # --- restore

    def _agreed(self, gang: Gang) -> tuple[Plan | None, dict[Part, Body], list[Offer]]:
        """Agree on a plan whose readers have verified their parts.

        Returns it with the parts that this rank has read, and the offers of all ranks. A part that
        fails its check is offered no more, and the ranks decide again.
        """
        refused: set[tuple[str, Part]] = set()
        while True:
            places = {
                MEMORY: self._in_memory(),
                REPLICAS: self._in_replicas(),
                STORAGE: self._in_storage(),
            }
            offer = Offer(
                **{
                    place: tuple(part for part in found if (place, part) not in refused)
                    for place, found in places.items()
                }
            )
            offers = [unpack_offer(content) for content in gang.gather(pack_offer(offer))]
            plan = decide(offers, self._sharded)
            bodies = {}
            bad = 0
            for source in () if plan is None else (plan.shared, *plan.own):
                if gang.rank in source.readers:
                    try:
                        bodies[source.part] = read(places[source.place][source.part], source.part)
                    except CorruptSnapshot as error:
                        log.warning("passing over a snapshot: %s", error)
                        refused.add((source.place, source.part))
                        if source.place == MEMORY and self._memory is not None:
                            self._memory.damaged(source.part)
                        bad = 1
            if not any(bytes(content) != b"\0" for content in gang.gather(bytes([bad]))):
                return plan, bodies, offers

    def _in_memory(self) -> dict[Part, Path]:
        return {} if self._memory is None else self._memory.parts()

    def _in_replicas(self) -> dict[Part, Path]:
        return {} if self._memory is None else ReplicaBuffers(self._memory.folder).parts()

    def _in_storage(self) -> dict[Part, Path]:
        return {} if self._storage is None else self._storage.parts()

    def _seed(self, plan: Plan, rank: int, shared: Body, own: Body | None) -> None:
        """Commit the restored parts to this node's memory where it lacks them.

        A second fault before the first save then finds them.
        """
        wanted = [] if own is None else [(plan.shared.part._replace(rank=rank), own)]
        if self._local_rank == 0:
            wanted.append((plan.shared.part, shared))
        for part, body in wanted:
            if self._memory is not None and not self._memory.restored(part):
                self._commit(part, body)

    # --- replicas

    def _replicates(self, gang: Gang) -> bool:
        """Connect the ranks on the first call; return True if they replicate. A collective."""
        if self._replicas and gang.size > 1:
            self._replication = connected(
                gang,
                None if self._memory is None else self._memory.folder,
                self._local_rank,
                Settings(self._replicas, self._replica_rate, self._sharded),
            )
        if self._replication is None:
            self._replicas = 0
            return False
        self._replication.restored(*self._found)
        return True

    def _announce(self, version: Version) -> None:
        if self._replication is not None:
            self._replication.announce(version)

    def _replicate(self, parts: list[Part]) -> None:
        if self._replication is not None:
            self._replication.send(parts)

    # --- save

    def _commit(self, part: Part, body: Body) -> None:
        """Commit a part to memory; without room, go on without memory on this node."""
        if self._memory is None:
            return
        try:
            self._memory.commit(part, body)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
            log.warning(
                "no more snapshots in the memory of this node: %s: %s%s. Training goes on %s",
                self._memory.folder,
                error.strerror,
                f": {BUFFERS} snapshots of {body.size} bytes must fit; enlarge /dev/shm and the "
                "memory limit"
                if full
                else "",
                "with snapshots in storage" if self._storage else "without snapshots of this node",
            )
            self._memory = None

    def _write(
        self, parts: list[tuple[Part, Body]], stored: list[tuple[Part, Body]], replicates: bool
    ) -> None:
        for part, body in parts:
            self._commit(part, body)
        if replicates:
            self._replicate([part for part, _ in parts])
        if stored and self._storage is not None:
            self._store(self._storage, stored)

    def _store(self, storage: StorageFolder, parts: list[tuple[Part, Body]]) -> None:
        self._end_storing()
        copies = [(part, Body(body.head_bytes, [_copy(body)])) for part, body in parts]
        keep = self._keep if any(part.rank == SHARED for part, _ in parts) else 0
        self._writing = StorageWrite(storage, copies, keep)
        self._writing.start()

    def _confirm(self, gang: Gang) -> None:
        """Wait until all ranks have written their parts to storage; raise SnapshotError if not."""
        writing = self._writing
        self._end_storing()
        trouble = "" if writing is None else writing.trouble
        told = [bytes(content).decode() for content in gang.gather(trouble.encode())]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        if failed:
            raise SnapshotError(f"the snapshot is not in storage: {'; '.join(failed)}")

    def _schedule(self, gang: Gang, step: int) -> bool:
        """Set the step of the next snapshot, the same on all ranks: the latest that one proposes.

        Returns True if the ranks may begin to copy this snapshot to other nodes. A rank enters with
        its last snapshot complete, so after the exchange all ranks have that one, and may overwrite
        the one before.
        """
        cost = self._cost
        if cost is not None and self._overlap is not None:
            cost += self._overlap.cost_seconds()
        steps = self._interval.proposed(step, time.monotonic(), cost)
        replication, begins = self._replication, False
        if self._interval.is_measured or self._overlap is not None or replication is not None:
            state = State.IDLE if replication is None else replication.state
            told = gang.gather(_PROPOSAL.pack(steps, state), is_fixed=True)
            proposals = [_PROPOSAL.unpack(content) for content in told]
            steps = max(proposed for proposed, _ in proposals)
            if replication is not None:
                begins = replication.exchanged([State(each) for _, each in proposals])
        self._next_step = step + steps
        return begins


def _value(given: Any) -> Any:
    return given() if callable(given) else given


def _copy(body: Body) -> memoryview:
    return memoryview(b"".join(body.views))
