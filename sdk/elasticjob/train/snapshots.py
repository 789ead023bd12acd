"""Snapshots of the training state in memory that outlives the workers, and in storage.

The launcher of each node owns the folder in memory and names it in `ELASTICJOB_SNAPSHOT_FOLDER`.
Without it, as under torchrun, snapshots are in storage alone. See docs/training.md.
"""

from __future__ import annotations

import errno
import functools
import logging
import multiprocessing.util
import os
import secrets
import struct
import time
import weakref
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
    complete_versions,
    decide,
    next_gang,
    sizes_of,
)
from elasticjob.train.buffers import BUFFERS, MemoryBuffers, NoRoom, ReplicaBuffers, StorageFolder
from elasticjob.train.codec import decode, encode
from elasticjob.train.gang import (
    Gang,
    RestoreMessage,
    exchanged,
    own_parts,
    pack_message,
    unpack_message,
)
from elasticjob.train.interval import Cost, Interval, at_least_one, seconds_within_a_day
from elasticjob.train.job import (
    InStorage,
    Reached,
    ReachedFile,
    Report,
    in_storage_of,
    job_settings,
    lost_since,
    reached_on,
    refused_memory,
)
from elasticjob.train.overlap import Overlap
from elasticjob.train.part_files import Body, CorruptSnapshot, read
from elasticjob.train.replicas import State
from elasticjob.train.replication import Replication, Settings, connected
from elasticjob.train.sharding import Assembly, ShapeMismatch, Shard, own_state, split
from elasticjob.train.storage import StorageWriter, StoredOffer, called

log = logging.getLogger("elasticjob.train")

_EXIT_PRIORITY = 0
"""The least with which a function at the end of a process precedes the wait for its children."""
MAX_REPLICAS = 8
MAX_TROUBLES = 3
MAX_OVERHEAD = 0.01
STORE_EVERY = 500
KEEP = 2
REPLICAS_BY_DEFAULT = 1
_PROPOSAL = struct.Struct("<QB??q")
_SILENT = 2
"""Result of a read that storage does not answer."""
_BEGIN = struct.Struct("<I??qQ")


_writers: dict[str, weakref.ReferenceType[Snapshots]] = {}
"""Last Snapshots of this process that began to save to a folder, by its path."""


class SnapshotError(Exception):
    """Snapshot that could not be stored or restored; the message has the rank and the cause."""


class Restored(NamedTuple):
    """Restored training state. Its tensors are in CPU memory.

    Args:
        step: number of completed steps.
        state: the state that `save` was given.
        rank_state: this rank's own state; None on all ranks if the number of ranks has changed, or
            if the part of any rank was lost with its node and the nodes that had copies.
        place: "memory" or "storage".
        lost_steps: number of completed steps after `step`, which are repeated; None if it is
            unknown, such as at the first start and after the loss of all nodes.
        lost_seconds: their approximate duration.
    """

    step: int
    state: Any
    rank_state: Any
    place: str
    lost_steps: int | None = None
    lost_seconds: float | None = None


class Snapshots:
    """Snapshots of the training state, of which the newest is restored after a fault.

    All ranks make the same calls: `restore` once, then `save` after each step, in which the ranks
    have exchanged gradients.

    The ranks' own state is copied to other nodes in the background, so that it survives the loss of
    a node. The interval is adapted to the measured cost of a snapshot, unless one is given.

    An argument that is not given is that of the job, in `spec.recovery.snapshots`, or the default.

    Args:
        storage: folder that all nodes share, for the snapshots that survive the loss of all nodes.
        every_steps: steps between two snapshots.
        every_seconds: alternatively the approximate time between two snapshots.
        max_overhead: without an interval, largest share of the training time that snapshots take;
            0.01 by default.
        optimizers: the optimizer, or all of them, if nothing else changes parameters and the
            optimizers' state: they are then copied during the next step.
        store_every: steps between two snapshots in storage, at least; 500 by default.
        store_seconds: alternatively the time between two snapshots in storage, at least.
        keep: number of complete snapshots in storage, which needs room for two more; 2 by default.
        replicas: number of other nodes that hold copies of each rank's own state; 0 for none, 1 by
            default.
        replica_rate: largest number of bytes that one rank sends to other nodes each second.
        sharded: True if the state has distributed tensors (DTensor, as with FSDP2), or `rank_state`
            has what no other rank has: then only a snapshot with the state of all ranks is
            restored. Another number of ranks can load distributed tensors.

    Raises:
        ValueError: an argument is out of range, or both intervals are given.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        max_overhead: float | None = None,
        optimizers: Any = (),
        store_every: int | None = None,
        store_seconds: float | None = None,
        keep: int | None = None,
        replicas: int | None = None,
        replica_rate: float = 250e6,
        sharded: bool = False,
    ) -> None:
        job = job_settings(os.environ)
        if every_steps is None and every_seconds is None and max_overhead is None:
            every_steps, every_seconds = job.every_steps, job.every_seconds
        if store_every is None and store_seconds is None:
            store_seconds = job.store_seconds
        keep = _first(keep, job.keep, KEEP)
        replicas = _first(replicas, job.replicas, REPLICAS_BY_DEFAULT)
        if store_every is not None and store_seconds is not None:
            raise ValueError("give store_every or store_seconds, not both")
        if store_seconds is not None:
            seconds_within_a_day("store_seconds", store_seconds)
        at_least_one("store_every", _first(store_every, STORE_EVERY))
        at_least_one("keep", keep)
        if replicas not in range(MAX_REPLICAS + 1):
            raise ValueError(f"replicas must be from 0 to {MAX_REPLICAS}, got {replicas!r}")
        if not replica_rate > 0:
            raise ValueError(f"replica_rate must be above 0, got {replica_rate!r}")
        self._interval = Interval(every_steps, every_seconds, _first(max_overhead, MAX_OVERHEAD))
        given = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
        self._overlap = Overlap(given) if given else None
        self._cost: float | None = None
        self._left: tuple[int, float, bool] | None = None  # step, time and result of the last call
        self._store_every = _first(store_every, STORE_EVERY)
        self._store_seconds = store_seconds
        self._stored_at = 0.0
        self._keep = keep
        storage = _first(storage, job.storage)
        self._storage = None if storage is None else StorageFolder(Path(storage))
        folder = os.environ.get(layout.SNAPSHOT_FOLDER, "")
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        self._memory = (
            MemoryBuffers(Path(folder), self._local_rank, job.memory_bytes, self._local_ranks)
            if folder
            else None
        )
        self._reached = ReachedFile(Path(folder), self._local_rank) if folder else None
        self._report = Report()
        self._limit = job.memory_bytes
        self._refused = None if folder else refused_memory(os.environ)
        self._gang: Gang | None = None
        self._number = 0
        self._last_step = self._stored_step = self._next_step = 0
        self._complete_step = self._told_step = layout.NO_STEP
        self._writer = (
            None
            if self._storage is None
            else StorageWriter(self._storage, keep, self._is_stored, self._report.storage)
        )
        # Processes of multiprocessing end without the functions of atexit.
        multiprocessing.util.Finalize(
            None, _finish, args=(weakref.ref(self),), exitpriority=_EXIT_PRIORITY
        )
        self._has_encoded = self._has_taken = self._has_removed = False
        self._is_writer = self._is_replaced = False
        self._has_place = True
        """True if any rank has memory or storage."""
        self._has_storage = self._storage is not None
        """True if any rank has storage; before the ranks have agreed, if this one has."""
        self._has_warned = False
        """True after the warning that there is no storage."""
        self._replicas, self._replica_rate, self._sharded = replicas, replica_rate, sharded
        self._replication: Replication | None = None
        self._found: tuple[list[Offer], Plan | None] = ([], None)

    def restore(self, into: Any = None) -> Restored | None:
        """Return the newest snapshot that the ranks hold together; None if there is none.

        The same call at the first start and after a fault, on all ranks, once the process group is
        initialized. A rank without a copy receives it from one that has it. A snapshot that is
        incomplete or damaged is passed over.

        Args:
            into: state like the saved one, or a function that returns it, which is called if there
                is a snapshot. Its distributed tensors are overwritten with their restored shards,
                and are those of the result. Without it distributed tensors are restored whole.

        Raises:
            SnapshotError: no snapshot is complete in memory, and storage cannot be read; all
                snapshots of sharded state are of another number of ranks; or a distributed tensor
                has another shape.
        """
        self._end_former()
        gang = self._gang = Gang()
        plan, bodies, offers = self._agreed(gang)
        if plan is not None:  # its parts are read; the exchange that follows waits for the removal
            self._remove_former(plan.version)
        step = self._last_step = 0 if plan is None else plan.version.step
        lost = self._begun(gang, step, offers)
        known = 1 if plan is None or plan.shared.part.before < 0 else step - plan.shared.part.before
        self._interval.start(step, time.monotonic(), known)
        self._cost = self._left = None
        self._next_step = step + self._interval.first
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
        if self._memory is not None:
            self._memory.keep(plan.version)  # other ranks may not have read theirs yet
        self._seed(plan, gang.rank, shared, own)
        is_same_size = len(plan.own) == gang.size
        if plan.own and is_same_size and self._replicates(gang):
            self._announce(plan.version)
            mine = [plan.own[gang.rank].part]
            self._replicate([*mine, plan.shared.part] if self._local_rank == 0 else mine)
        place = STORAGE if plan.shared.place == STORAGE else MEMORY
        if plan.shared.part.reshards:
            state, rank_state = self._assembled(gang, plan, bodies, decode(shared), own, into)
            return Restored(step, state, rank_state, place, *lost)
        rank_state = None if own is None else decode(own)
        return Restored(step, decode(shared), rank_state, place, *lost)

    def _end_former(self) -> None:
        """End the work that a former call of `restore` began, and let `save` write again.

        The restore passes over a snapshot whose copy failed. That error is on this rank alone, and
        to raise it would leave the other ranks in their collective.
        """
        self._is_writer = self._is_replaced = False
        if self._overlap is not None:
            try:
                self._overlap.wait()
            except Exception as error:
                log.warning("the last snapshot before the restore is not complete: %s", error)
        if self._replication is not None:
            self._replication.close()
            self._replication = None

    def _assembled(
        self,
        gang: Gang,
        plan: Plan,
        bodies: dict[Part, Body],
        shared: Any,
        own: Body | None,
        into: Any,
    ) -> tuple[Any, Any]:
        """Return the state with its distributed tensors, and the own state of this rank.

        Ranks with exactly the shards that they need read no others; otherwise all ranks read all
        shards, one part at a time.
        """
        if not plan.own:
            raise SnapshotError(
                "the shards of the snapshot are not complete: create Snapshots with sharded=True, "
                "as for the snapshot"
            )
        trouble, rank_state, assembly = "", None, None
        shards: list[Shard] = []
        try:
            assembly = Assembly(shared, _value(into))
        except ShapeMismatch as error:
            trouble = str(error)
        if own is not None:
            shards, rank_state = own_state(decode(own))
        whole = assembly is not None and assembly.needs_own_alone(shards)
        told = [bytes(each).decode() for each in gang.gather(f"{int(whole)}{trouble}".encode())]
        bad = next((text[1:] for text in told if text[1:]), "")
        if bad or assembly is None:
            raise SnapshotError(bad)
        if all(text[0] == "1" for text in told):
            assembly.add(shards)
        else:
            for body in own_parts(gang, plan, bodies):
                assembly.add(own_state(decode(body))[0])
        return assembly.state, rank_state

    def save(
        self, step: int, state: object, rank_state: object = None, *, store: bool | None = None
    ) -> bool:
        """Take a snapshot if one is due after `step` steps; return True if it was taken.

        It is complete on return; with `optimizers`, before their next step. A part for storage is
        written in the background, from a copy; while that write is in progress, no further one
        begins. If no rank has memory or storage, as under torchrun, only the first call has an
        effect: it checks the types of the state.

        Args:
            state: the state that is the same on all ranks: nested dicts, lists and tuples of
                tensors, numbers, strings, bytes and None; or a function that returns it, which is
                called if a snapshot is due.
            rank_state: the state of this rank alone, such as that of random number generators,
                or a function; given by all ranks or by none.
            store: if true, take a snapshot in any case, return when it is in storage, and report it
                with `checkpointed`. Without storage a true value is an error, and a job logs a
                warning at the first call with False.

        Raises:
            ValueError: `step` is not a whole number from 0 to 2**63 - 1, or before the last one.
            TypeError: the state has a type that a snapshot cannot hold; the message has its path.
            SnapshotError: with `store`, the snapshot is not in storage, or there is no storage.
            RuntimeError: `restore` was not called, or another Snapshots in this process has saved
                to the same folder since.
        """
        gang = self._gang
        if gang is None:
            raise RuntimeError("call restore() before the first save()")
        self._check_replaced()
        if store is not None and not self._has_storage:
            self._lacks_storage(gang, store)
        step = train.whole_step(step)
        train.link().begins(step)
        if self._reached is not None:
            self._reached.write(step)
        self._tell_stored()
        if step < self._last_step:
            raise ValueError(
                f"step must be at least {self._last_step}, the step of the last snapshot, got "
                f"{step}: continue at the step that restore() returned"
            )
        self._entered(step)
        unasked = not store and self._has_storage and train.link().stops_unasked()
        store = bool(store) or unasked
        if step < self._next_step and not store:
            self._left = step, time.perf_counter(), False
            return False
        self._use_places()
        if self._overlap is not None:
            self._overlap.begin()
        used = time.thread_time()  # not the time of waiting for slower ranks
        begins, store_due = self._schedule(gang, step)
        used = time.thread_time() - used
        if self._has_taken:  # the ranks have the snapshot before this one, and need none of others
            self._remove_former(None)
        self._has_taken = True
        began = time.perf_counter()
        state, rank_state = _value(state), _value(rank_state)
        overlap = None if store else self._overlap
        stage = None if overlap is None else overlap.stage
        version = Version(step, self._number)
        parted = split(state, rank_state) if self._sharded else None
        if parted is not None:
            state, rank_state = parted
        ranks = 0 if rank_state is None else gang.size
        part = Part(version, SHARED, ranks, self._last_step, parted is not None)
        writes_shared = self._local_rank == 0
        parts = []
        # The shared part last: it announces the version.
        stores = self._has_storage and (store or store_due)
        # The first snapshot is encoded in any case, so that a type without an encoding is found.
        has_place = self._memory is not None or (stores and self._storage is not None)
        is_used = has_place or begins or not self._has_encoded
        self._has_encoded = True
        if rank_state is not None and is_used:
            parts.append((part._replace(rank=gang.rank), encode(rank_state, stage)))
        if writes_shared and is_used:
            parts.append((part, encode(state, stage)))
        stored = []
        if stores:
            stored = [each for each in parts if each[0].rank != SHARED or gang.rank == 0]
            self._stored_step, self._stored_at = step, time.time()
            if self._reached is not None:
                self._reached.begun = step
                self._reached.write(step)
        if rank_state is not None and self._replication is None:
            self._replicates(gang)  # the next snapshot is the first to be copied
        begins = begins and rank_state is not None
        if begins:
            self._announce(version)
        write = functools.partial(self._write, step, parts, stored, begins)
        if overlap is None:
            write()
        else:
            overlap.start(write)
        self._last_step = step
        lacks_storage = stores and self._storage is None and rank_state is not None
        if not self._has_place:
            self._next_step = layout.MAX_STEP + 1
        self._cost = used + time.perf_counter() - began
        if store:
            try:
                self._confirm(gang, lacks_storage)
            except SnapshotError as error:
                if not unasked:
                    raise
                log.error("%s. The job stops without it", error)
                train.link().save_failed()
            else:
                train.checkpointed(step)
        self._left = step, time.perf_counter(), True
        return True

    def _entered(self, step: int) -> None:
        """Measure the time since the last call of `save`, unless the copy is a GPU's."""
        if self._left is not None and not (self._overlap and self._overlap.is_on_device):
            last, left, copied = self._left
            self._interval.stepped(step - last, time.perf_counter() - left, copied=copied)

    def _check_replaced(self) -> None:
        """Raise if another Snapshots of this process writes to these folders since.

        Each would restore the state of the other one.
        """
        if self._is_replaced:
            raise RuntimeError(
                "another Snapshots in this process has saved to the same memory or storage since: "
                "use one Snapshots, with one state for all models"
            )

    def _use_places(self) -> None:
        """Become the writer of these folders in this process."""
        if self._is_writer:
            return
        self._is_writer = True
        places = [] if self._memory is None else [self._memory.folder]
        places += [] if self._storage is None else [self._storage.folder]
        for place in map(os.path.abspath, places):
            writer = _writers.get(place)
            other = None if writer is None else writer()
            if other is not None:
                other._is_replaced = True
            _writers[place] = weakref.ref(self)

    def _lacks_storage(self, gang: Gang, store: bool) -> None:
        """Raise SnapshotError for a snapshot in storage; warn once of a false value in a job."""
        text = (
            "there is no storage for save(store=...): give Snapshots a folder that all nodes "
            "share, set recovery.snapshots.storage in the job, or leave out store"
        )
        if store:
            raise SnapshotError(text)
        if gang.rank == 0 and not self._has_warned and train.link().has_agent:
            log.warning("%s. The first call with a true value is an error", text)
        self._has_warned = True

    def close(self) -> None:
        """Wait until the last snapshot is complete, also in storage, as long as that answers."""
        if self._overlap is not None:
            self._overlap.wait()
        if self._writer is not None:
            self._writer.end()
        self._tell_stored()
        if self._replication is not None:
            self._replication.close()

    # --- restore

    def _agreed(self, gang: Gang) -> tuple[Plan | None, dict[Part, Body], list[Offer]]:
        """Agree on a plan whose readers have verified their parts.

        Returns it with the parts that this rank has read, and the offers of all ranks. A part that
        fails its check is offered no more, and the ranks decide again.
        """
        refused: set[tuple[str, Part]] = set()
        stored = StoredOffer(self._storage)
        known = InStorage() if self._memory is None else in_storage_of(self._memory.folder)
        is_patient = False
        while True:
            stored.update(is_patient)
            places = {
                MEMORY: self._in_memory(),
                REPLICAS: self._in_replicas(),
                STORAGE: stored.parts,
            }
            offer = Offer(
                **{
                    place: tuple(part for part in found if (place, part) not in refused)
                    for place, found in places.items()
                }
            )
            mine = RestoreMessage(offer, stored.trouble, stored.is_silent, stored.is_listed, *known)
            messages = [unpack_message(content) for content in gang.gather(pack_message(mine))]
            offers = [each.offer for each in messages]
            plan = decide(offers, self._sharded)
            is_silent = any(each.is_silent for each in messages)
            if is_silent and not is_patient and _may_improve(plan, messages):
                is_patient = True
                continue
            _check_known(plan, messages)
            bodies = {}
            bad = 0
            for source in () if plan is None else (plan.shared, *plan.own):
                if gang.rank in source.readers:
                    try:
                        bodies[source.part] = _read(places, source.place, source.part)
                    except (CorruptSnapshot, TimeoutError) as error:
                        cause = error.__cause__ or error
                        if source.place == STORAGE and isinstance(cause, TimeoutError):
                            bad = _SILENT
                            refused.update((STORAGE, part) for part in stored.parts)
                            stored.failed(cause)
                            break
                        log.warning("passing over a snapshot: %s", error)
                        refused.add((source.place, source.part))
                        if source.place == STORAGE and isinstance(cause, OSError):
                            stored.failed(cause)
                        if source.place == MEMORY and self._memory is not None:
                            self._memory.damaged(source.part)
                        bad = 1
            outcomes = [bytes(content)[0] for content in gang.gather(bytes([bad]))]
            if plan is not None and not _is_readable(plan, offers, outcomes, self._sharded):
                raise SnapshotError(
                    f"the snapshot of step {plan.version.step} is in storage, which does not "
                    f"answer rank {outcomes.index(_SILENT)}: make it readable, or give Snapshots "
                    "another folder to go on without it"
                )
            if not any(outcomes):
                self._stored_at = 0.0 if self._store_seconds is None else stored.at
                _check_storage(plan, messages, gang.rank)
                self._record_stored(plan, messages)
                return plan, bodies, offers

    def _record_stored(self, plan: Plan | None, messages: list[RestoreMessage]) -> None:
        """Set the newest snapshot in storage, up to the restored step, the same on all ranks."""
        step = 0 if plan is None else plan.version.step
        parts = [part for each in messages for part in each.offer.storage]
        complete = max(
            (each.step for each in complete_versions(parts) if each.step <= step),
            default=layout.NO_STEP,
        )
        begun = complete
        if not any(each.is_listed for each in messages):
            begun = min(step, max(each.begun for each in messages))
            complete = min(step, max(each.complete for each in messages))
        self._stored_step = max(begun, 0)
        if self._reached is not None:
            self._reached.begun, self._reached.complete = begun, complete

    def _in_memory(self) -> dict[Part, Path]:
        return {} if self._memory is None else self._memory.parts()

    def _in_replicas(self) -> dict[Part, Path]:
        return {} if self._memory is None else ReplicaBuffers(self._memory.folder).parts()

    def _remove_former(self, keep: Version | None) -> None:
        """Remove the parts of workers that this node had more than now, once the gang has its own.

        Without `keep` once in a round: no worker begins later.
        """
        if self._local_rank == 0 and self._memory is not None and not self._has_removed:
            self._has_removed = keep is None
            self._memory.remove_former(keep)

    def _begun(self, gang: Gang, step: int, offers: list[Offer]) -> tuple[int | None, float | None]:
        """Number this gang; return the lost steps and their duration in seconds."""
        folder = None if self._memory is None else self._memory.folder
        reached = Reached() if folder is None else reached_on(folder)
        has_place = self._memory is not None or self._storage is not None
        begin = _BEGIN.pack(secrets.randbits(32), has_place, self._storage is not None, *reached)
        told = gang.gather(begin, is_fixed=True)
        drawn = [_BEGIN.unpack(content) for content in told]
        self._number = next_gang(offers, drawn[0][0])
        self._has_place = any(place for _, place, *_ in drawn)
        self._has_storage = any(stores for _, _, stores, *_ in drawn)
        lost = lost_since(step, [Reached(*fields) for _, _, _, *fields in drawn])
        self._report.change(replicas=0, limit=self._limit, **lost)
        if self._refused is not None:
            self._report.change(trouble=layout.unusable(self._refused.errno))
            if self._local_rank == 0:
                log.warning(
                    "no snapshots in the memory of this node: cannot create a folder in %s: %s. "
                    "Training goes on %s",
                    self._refused.filename,
                    self._refused.strerror,
                    self._place_left(),
                )
            self._refused = None
        if "lost" not in lost:
            return None, None
        return lost["lost"], lost["lost_ms"] / 1000

    def _seed(self, plan: Plan, rank: int, shared: Body, own: Body | None) -> None:
        """Commit the restored parts to this node's memory where it lacks them.

        A second fault before the first save then finds them.
        """
        own = own if len(plan.own) > rank else None
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
                Settings(self._replicas, self._replica_rate, self._sharded, self._local_ranks),
            )
        if self._replication is None:
            self._replicas = 0
            return False
        self._report.change(replicas=self._replicas)
        self._replication.restored(*self._found)
        gang.gather(b"\0", is_fixed=True)  # no copy arrives while stale ones are removed
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
            trouble = layout.NO_ROOM if full else layout.unusable(error.errno)
            needed = -(-error.needed // BUFFERS) if isinstance(error, NoRoom) else body.size
            self._report.change(trouble=trouble, size=needed)
            log.warning(
                "no more snapshots in the memory of this node: %s: %s%s. Training goes on %s",
                self._memory.folder,
                error.strerror,
                _remedy(error, body) if full else "",
                self._place_left(),
            )
            self._memory = None

    def _place_left(self) -> str:
        """Return the place of snapshots without memory, for messages."""
        return "with snapshots in storage" if self._storage else "without snapshots of this node"

    def _write(
        self,
        step: int,
        parts: list[tuple[Part, Body]],
        stored: list[tuple[Part, Body]],
        replicates: bool,
    ) -> None:
        for part, body in parts:
            self._commit(part, body)
        if self._memory is not None:  # a rank without parts lacks nothing
            self._report.change(step=step, size=sum(body.size for _, body in parts))
        if replicates:
            self._replicate([part for part, _ in parts])
        if stored and self._writer is not None:
            self._writer.start(stored)

    def _is_stored(self, step: int) -> None:
        self._report.change(stored=step)
        self._complete_step = step
        self._record_complete(step)

    def _record_complete(self, step: int) -> None:
        if self._reached is not None:
            self._reached.complete = max(step, self._reached.complete)

    def _tell_stored(self) -> None:
        """Report the newest snapshot in storage as a checkpoint, in the thread of the script."""
        if self._writer is not None:
            self._writer.check()
        step = self._complete_step
        if step > self._told_step and train.link().stored(step):
            self._told_step = step

    def _confirm(self, gang: Gang, lacks_storage: bool) -> None:
        """Wait until all ranks have written their parts to storage; raise SnapshotError if not."""
        trouble = "" if self._writer is None else self._writer.confirmed()
        if lacks_storage or (gang.rank == 0 and self._storage is None):
            trouble = "Snapshots has no storage on this rank: give it on all ranks"
        told = [bytes(content).decode() for content in gang.gather(trouble.encode())]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        if failed:
            raise SnapshotError(f"the snapshot is not in storage: {'; '.join(failed)}")
        self._record_complete(self._stored_step)
        if self._reached is not None:
            self._reached.write(self._stored_step)
        if gang.rank == 0 and self._writer is not None and self._storage is not None:
            self._is_stored(self._stored_step)
            try:
                self._writer.remove_expired(Version(self._stored_step, self._number))
            except OSError as error:  # the next write removes them
                log.warning(
                    "cannot remove older snapshots from storage: %s: %s",
                    self._storage.folder,
                    error.strerror,
                )

    def _spent(self) -> Cost | None:
        """Return the cost of the last snapshot, which is complete; None before the first."""
        if self._cost is None:
            return None
        waited, copied = (0.0, 0.0) if self._overlap is None else self._overlap.spent_seconds()
        return Cost(self._cost + waited, self._cost, copied)

    def _schedule(self, gang: Gang, step: int) -> tuple[bool, bool]:
        """Set the step of the next snapshot, the same on all ranks: the latest that one proposes.

        Returns True first if the ranks may begin to copy this snapshot to other nodes, then if it
        is due for storage. A rank enters with its last snapshot complete, so after the exchange all
        ranks have that one, and may overwrite the one before.
        """
        steps = self._interval.proposed(step, time.monotonic(), self._spent())
        replication, begins = self._replication, False
        timed = self._has_storage and self._store_seconds is not None
        store_due = (
            self._has_storage and not timed and step - self._stored_step >= self._store_every
        )
        exchanges = self._interval.is_measured or self._overlap is not None or timed or store_due
        if exchanges or replication is not None:
            state = State.IDLE if replication is None else replication.state
            due = timed and time.time() - self._stored_at >= (self._store_seconds or 0.0)
            is_busy = self._writer is not None and self._writer.is_busy(store_due or due)
            mine = _PROPOSAL.pack(steps, state, due, is_busy, self._complete_step)
            told = gang.gather(mine, is_fixed=True)
            proposals = [_PROPOSAL.unpack(content) for content in told]
            self._record_complete(max(complete for *_, complete in proposals))
            steps = max(proposed for proposed, *_ in proposals)
            # A version that one rank does not write would be incomplete.
            store_due = (store_due or proposals[0][2]) and not any(each[3] for each in proposals)
            if replication is not None:
                begins = replication.exchanged([State(each) for _, each, *_ in proposals])
                self._report.change(replicated=replication.replicated_step)
        self._next_step = step + steps
        return begins, store_due


def _read(places: dict[str, dict[Part, Path]], place: str, part: Part) -> Body:
    """Read a part. Raises CorruptSnapshot, or TimeoutError if storage does not answer."""
    path = places[place][part]
    if place == STORAGE:
        return called(functools.partial(read, path, part))
    return read(path, part)


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

    With a snapshot from elsewhere it is a warning.
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


def _storage_troubles(messages: list[RestoreMessage]) -> str:
    """Return the first ranks that cannot read storage, with their errors; empty for none."""
    found = [f"rank {at}: {each.trouble}" for at, each in enumerate(messages) if each.trouble]
    return "; ".join(found[:MAX_TROUBLES])


def _finish(snapshots: weakref.ReferenceType[Snapshots]) -> None:
    """Wait for the write to storage at the end of the process, as long as storage answers."""
    found = snapshots()
    if found is not None and found._writer is not None:
        found._writer.end()


def _remedy(error: OSError, body: Body) -> str:
    if isinstance(error, NoRoom):
        return "; enlarge recovery.snapshots.memoryLimit and the memory limit"
    size = f"{BUFFERS} snapshots of {body.size} bytes"
    return f": {size} must fit; enlarge /dev/shm and the memory limit"


def _first(*given: Any) -> Any:
    """Return the first value that is not None, else None."""
    return next((each for each in given if each is not None), None)


def _value(given: Any) -> Any:
    return given() if callable(given) else given
