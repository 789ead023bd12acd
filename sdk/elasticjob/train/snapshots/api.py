"""Snapshots of the training state in memory that outlives the workers, and in storage.

The launcher of each node owns the folder in memory and names it in `ELASTICJOB_SNAPSHOT_FOLDER`.
Without it, as under torchrun, snapshots are in storage alone. See docs/training.md.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import multiprocessing.util
import operator
import os
import secrets
import struct
import time
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob import layout, train
from elasticjob.train.initialization import check_values
from elasticjob.train.snapshots.core.agreement import (
    MEMORY,
    SHARED,
    STORAGE,
    Missing,
    Offer,
    Part,
    Plan,
    SnapshotError,
    Version,
    are_incomplete_at_stop,
    interval_before,
    next_gang,
    next_regular,
    part_at_stop,
)
from elasticjob.train.snapshots.core.exchange import (
    Begin,
    End,
    Exchange,
    Proposal,
    check_same,
    check_tensors,
    unpack_begins,
    unpack_proposals,
)
from elasticjob.train.snapshots.core.interval import (
    OVERHEAD_AT_FAULTS,
    Interval,
    Losses,
    agreed_losses,
    at_least_one,
    is_within,
    seconds_within_a_day,
)
from elasticjob.train.snapshots.core.replicas import State
from elasticjob.train.snapshots.job import Report, ended_with_error, job_settings, local_rank
from elasticjob.train.snapshots.memory.exclusive import Claim
from elasticjob.train.snapshots.memory.node_memory import NodeMemory
from elasticjob.train.snapshots.memory.part_files import Body, StateChanged
from elasticjob.train.snapshots.memory.reached_step import Reached, ReachedFile, lost_since
from elasticjob.train.snapshots.memory.stop_copy import COPY_SECONDS, StopCopy
from elasticjob.train.snapshots.ranks.gang import Gang, exchanged
from elasticjob.train.snapshots.ranks.replication import Replication, Settings, connected
from elasticjob.train.snapshots.restoring import (
    agree,
    assembled,
    check_group,
    check_size,
)
from elasticjob.train.snapshots.state.codec import decode, encode
from elasticjob.train.snapshots.state.overlap import Optimizers, Overlap, Pace
from elasticjob.train.snapshots.state.sharding import split
from elasticjob.train.snapshots.storage.snapshot_store import SnapshotStore
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Restored", "SnapshotError", "Snapshots"]

log = logging.getLogger("elasticjob.train")

_EXIT_PRIORITY = 0
"""Lowest priority of an exit function that multiprocessing runs before it joins child processes."""
MAX_REPLICAS = 8
MAX_OVERHEAD = 0.01
MIN_KEPT_SECONDS = 1.0
STORE_EVERY = 500
KEEP = 2
REPLICAS_BY_DEFAULT = 1
_DIGEST = struct.Struct("<I")


class Restored(NamedTuple):
    """Restored training state. Its tensors are in CPU memory.

    Args:
        step: number of completed steps.
        state: the state that was passed to `save`.
        rank_state: this rank's own state; None on all ranks if the number of ranks has changed, or
            if the part of any rank was lost with its node and the nodes that had copies.
        place: "memory" or "storage".
        lost_steps: number of completed steps after `step`, which are repeated; None if unknown, for
            example at the first start and after the loss of all nodes.
        lost_seconds: approximate duration of the lost steps.
    """

    step: int
    state: Any
    rank_state: Any
    place: str
    lost_steps: int | None = None
    lost_seconds: float | None = None


class _Wanted(NamedTuple):
    """Snapshot that a call of `save` takes.

    Args:
        is_due: False for none.
        must_store: True if the call returns when the snapshot is in storage.
        unasked: True if a planned stop requires it in storage, not the script.
        keeps: True if a planned stop requires it in memory.
        interval: steps between two regular snapshots, if a planned stop requires this one early.
        is_repeated: True if the call is another one of the same step.
    """

    is_due: bool
    must_store: bool
    unasked: bool
    keeps: bool
    interval: int | None
    is_repeated: bool


class Snapshots:
    """Snapshots of the training state; the newest one is restored after a fault.

    All ranks must make the same calls: `restore` once, then `save` after each step in which they
    exchange gradients.

    The ranks' own state is copied to other nodes in the background, so that it survives the loss of
    a node. Without a given interval, it is adapted to the measured cost of a snapshot.

    An omitted argument has the value in the job's `spec.recovery.snapshots`, or the default.

    Args:
        storage: folder that all nodes share, for the snapshots that survive the loss of all nodes.
        every_steps: steps between two snapshots.
        every_seconds: alternatively the approximate time between two snapshots.
        max_overhead: without an interval, largest share of the training time that snapshots take.
            By default 0.01, and up to 0.05 while faults repeat steps so often that a shorter
            interval saves more than it costs.
        optimizers: the optimizer, or all of them, if nothing else changes the parameters and the
            optimizers' state. The state is then copied during the next step, and the last step is
            copied when the workers stop after a fault. If `restore` precedes the creation of the
            model, give a function that returns them; the next `save` calls it.
        store_every: steps between two snapshots in storage, at least; 500 by default.
        store_seconds: alternatively the time between two snapshots in storage, at least.
        keep: number of complete snapshots in storage, which needs room for two more; 2 by default.
        replicas: number of other nodes that hold copies of each rank's own state; 0 for none, 1 by
            default.
        replica_rate: largest number of bytes that one rank sends to other nodes each second.
        sharded: True if the state has distributed tensors (DTensor, as with FSDP2), or if
            `rank_state` has data that no other rank has. Only a snapshot with the state of all
            ranks is then restored. Another number of ranks can load distributed tensors.

    Raises:
        ValueError: an argument is out of range, or both intervals are given.
        TypeError: an optimizer has no hooks of `step`, as a wrapper of another one.
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
        if not is_within(replica_rate, math.inf):
            raise ValueError(f"replica_rate must be above 0, got {replica_rate!r}")
        most = _first(max_overhead, MAX_OVERHEAD)
        at_faults = OVERHEAD_AT_FAULTS if max_overhead is None else None
        interval = Interval(every_steps, every_seconds, most, at_faults)
        self._optimizers = Optimizers(optimizers)
        self._overlap = Overlap(self._optimizers) if self._optimizers else None
        self._pace = Pace(interval, self._overlap)
        self._is_measured = self._pace.is_measured
        """True if any rank's interval depends on measurements."""
        self._local_rank = local_rank(os.environ)
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        self._report = Report()
        self._limit = job.memory_bytes
        storage = _first(storage, job.storage)
        if storage is not None and not os.fspath(storage):
            raise ValueError("storage must be the path of a folder, got an empty one")
        self._memory = NodeMemory(
            os.environ,
            self._local_rank,
            self._local_ranks,
            self._limit,
            storage is not None,
            self._report,
        )
        folder = self._memory.folder
        self._reached = None if folder is None else ReachedFile(folder, self._local_rank)
        self._stop = (
            None
            if self._overlap is None
            else StopCopy(
                self._optimizers,
                self._overlap,
                self._memory,
                self._local_rank,
                most,
                *(() if self._reached is None else (self._reached.would_lose,)),
            )
        )
        if self._stop is None and self._reached is not None:
            self._reached.would_lose(layout.Loss.NO_OPTIMIZERS)
        self._gang: Gang | None = None
        self._newest = self._before = Version(0, 0)  # of all ranks: taken last, or restored
        self._missing = Missing(0)
        """Places where this rank should have parts of the last snapshot and has none."""
        self._next_step = self._saved_step = 0
        self._has_warned = False  # of a step below that of the last call
        self._interval = 1  # between two regular snapshots, also where the next one is due earlier
        self._store = SnapshotStore(
            None if storage is None else StorageFolder(Path(storage), job.name),
            job.name,
            keep,
            _first(store_every, STORE_EVERY),
            store_seconds,
            self._report,
            self._reached,
        )
        self._is_each_step = every_steps == 1
        self._can_keep = self._keeps = False
        """`_keeps` is True once the ranks do not hold states, and thus take a snapshot before a
        planned stop. It stays True in this round, so that all ranks pass the same save points."""
        self._taken_at = time.monotonic()
        self._claim = self._claimed()
        # Processes of multiprocessing end without the functions of atexit.
        multiprocessing.util.Finalize(
            None,
            _finish,
            args=(
                self._overlap and weakref.ref(self._overlap),
                weakref.ref(self._store),
                self._stop and weakref.ref(self._stop),
                weakref.ref(self),
            ),
            exitpriority=_EXIT_PRIORITY,
        )
        self._has_encoded = self._has_taken = False
        self._has_place = True
        """True if any rank has memory or storage."""
        self._replicas, self._replica_rate, self._sharded = replicas, replica_rate, sharded
        settings = {
            "every_steps": every_steps,
            "every_seconds": every_seconds,
            "store_every": _first(store_every, STORE_EVERY),
            "store_seconds": store_seconds,
            "replicas": replicas,
            "sharded": sharded,
        }
        self._settings = json.dumps({name: str(value) for name, value in settings.items()}).encode()
        """Arguments that must be the same on all ranks."""
        self._replication: Replication | None = None
        self._compared = 0
        """Number of snapshots since the last restore or `close`."""
        self._found: tuple[list[Offer], Plan | None] = ([], None)
        self._copied: Version | None = None  # confirmed by the replication that `close` has ended

    def restore(self, into: Any = None) -> Restored | None:
        """Return the newest snapshot that the ranks have together; None if there is none.

        Call this on all ranks, at the first start and after a fault, once the process group is
        initialized. A rank without a part receives it from one that has it. Incomplete and damaged
        snapshots are skipped.

        Args:
            into: state with the structure of the saved one, or a function that returns it, which is
                called if there is a snapshot. Its distributed tensors receive their restored shards
                and are part of the result. Without it, distributed tensors are restored whole.

        Raises:
            SnapshotError: no snapshot is complete in memory, and storage cannot be read; all
                snapshots of sharded state are of another number of ranks; a distributed tensor
                has another shape; or the ranks have created Snapshots with other arguments.
        """
        self._end_former()
        self._optimizers.restored()
        gang = self._gang = Gang(self._gang)
        self._check_settings(gang)
        self._memory.read_again()
        agreed = agree(
            gang, self._memory.buffers, self._store.folder, self._sharded, self._store.job
        )
        plan, bodies, offers = agreed.plan, agreed.bodies, agreed.offers
        self._store.restored(agreed)
        if gang.rank == 0:
            self._store.warn_of_owner()
        if plan is not None:  # its parts are read; the exchange that follows waits for the removal
            self._memory.remove_former(plan.version)
        self._newest = self._before = Version(0, 0) if plan is None else plan.version
        step = self._newest.step
        lost, due = self._begun(gang, plan, offers)
        self._missing = Missing(0)
        self._next_step = next_regular(step, self._interval, due)
        self._saved_step = step
        self._found = (offers, plan)
        if plan is None:
            check_size(gang, offers, self._sharded)
            if gang.rank == 0 and self._sharded and lost[0]:
                log.warning(
                    "no snapshot has the state of all ranks, and training begins at step 0 instead "
                    "of %d: more nodes were lost at once than there are replicas (%d), or no "
                    "snapshot was complete yet, and %s",
                    lost[0],
                    self._replicas,
                    "storage has none: store them more often"
                    if self._store.is_shared
                    else "there is no storage: give Snapshots a folder that all nodes share",
                )
            return None
        shared, own = exchanged(gang, plan, bodies)
        self._memory.keep(plan.version)  # other ranks may not have read theirs yet
        if self._store.may_keep(plan):
            self._seed(plan, gang.rank, shared, own)
            is_same_size = len(plan.own) == gang.size
            if plan.own and is_same_size and self._replicates(gang):
                self._announce(plan.version)
                mine = [plan.own[gang.rank].part]
                self._replicate([*mine, plan.shared.part] if self._local_rank == 0 else mine)
        place = STORAGE if plan.shared.place == STORAGE else MEMORY
        if plan.shared.part.reshards:
            state, rank_state = assembled(gang, plan, bodies, decode(shared), own, into)
            return Restored(step, state, rank_state, place, *lost)
        rank_state = None if own is None else decode(own)
        return Restored(step, decode(shared), rank_state, place, *lost)

    def _end_former(self) -> None:
        """End the background work of earlier calls before another restore.

        Errors of a background copy are not raised: the restore skips that snapshot, and this rank
        alone has the error, so the other ranks would wait for it in their collective.
        """
        if self._stop is not None:
            self._stop.release()
        if self._overlap is not None:
            _await(self._overlap)
        self._claim.release()  # no copy writes any more
        self._end_replication()
        self._copied = None

    def _end_replication(self) -> None:
        """End the replication; the next `save` with states of the ranks begins another one."""
        self._compared = 0
        if self._stop is not None:
            self._stop.replication = None
        if self._replication is not None:
            self._replication.close()
            self._copied = self._replication.generations.confirmed
            self._replication = None

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
                called if a snapshot is due, or if the state is kept for a copy at a stop.
            rank_state: the state of this rank alone, such as that of random number generators,
                or a function; given by all ranks or by none.
            store: if true, take a snapshot in any case, return when it is in storage, and report it
                with `checkpointed`. Without storage a true value is an error, and a job logs a
                warning at the first call with False.

        Raises:
            ValueError: `step` is not a whole number from 0 to 2**63 - 1, or before the last one.
            TypeError: the state has a type that a snapshot cannot hold; the message has its path.
            SnapshotError: with `store`, the snapshot is not in storage, or there is no storage; or
                the ranks have called with another step, or only some with `store` or `rank_state`;
                the process group has another number of ranks than at the restore, or there is
                none, and several ranks; or the storage belongs to another job.
            RuntimeError: `restore` was not called; another Snapshots in this process, or another
                process of this local rank, saves to the same folder; or a parameter created in
                `skip_initialization` has no value.
        """
        gang = self._gang
        if gang is None:
            raise RuntimeError("call restore() before the first save()")
        check_group(gang, os.environ)
        try:
            is_taken = self._saved(gang, step, state, rank_state, store)
        except SnapshotError as error:
            if error.is_of_calls and self._stop is not None:
                self._stop.release()  # a copy of it would be the newest snapshot of a restart
            raise
        if self._has_place:
            train.link().resumed()
        return is_taken

    def _saved(
        self, gang: Gang, step: int, state: object, rank_state: object, store: bool | None
    ) -> bool:
        """Take a snapshot as `save` does."""
        if store is not None:
            self._store.check_demanded(gang, store)
        step = train.whole_step(step)
        gang.saves(step)
        self._store.check_owner()
        self._optimizers.created()
        check_values()
        self._claim.take()
        train.link().begins(step)
        if self._reached is not None:
            self._reached.due = self._next_step
            self._reached.write(step)
        self._store.report_complete()
        if step < self._newest.step:
            raise ValueError(
                f"step must be at least {self._newest.step}, the step of the last snapshot, got "
                f"{step}: continue at the step that restore() returned, and count over all epochs"
            )
        self._warn_of_earlier(gang, step)
        self._pace.entered(step)
        if self._replication is not None:
            self._replication.saves(step)
        wanted = self._wanted(step, bool(store))
        if self._stop is not None:
            state, rank_state = self._held(self._stop, gang, step, state, rank_state, wanted)
            self._stop.listen()
        if not wanted.is_due:
            copies = self._replication
            is_replicating = copies is not None and copies.state is State.RUNNING
            self._pace.left(step, copied=False, is_replicating=is_replicating)
            return False
        self._take(gang, step, state, rank_state, wanted)
        self._pace.left(step, copied=True)
        return True

    def _warn_of_earlier(self, gang: Gang, step: int) -> None:
        """Warn once if the step is below that of the last call, but not of the last snapshot.

        The number of a step within its epoch is an error only once a snapshot is newer.
        """
        if step < self._saved_step and self._has_place and not self._has_warned:
            self._has_warned = True
            if gang.rank == 0:
                log.warning(
                    "save() was called with step %d after step %d: the next snapshot is due at "
                    "step %d, and a restart continues with the number of its snapshot. Count the "
                    "steps over all epochs",
                    step,
                    self._saved_step,
                    self._next_step,
                )
        self._saved_step = step

    def _wanted(self, step: int, store: bool) -> _Wanted:
        """Return the snapshot that this call of `save` takes, the same on all ranks."""
        # A planned stop comes after a step of the optimizers: see `StopCopy.hold`.
        is_repeated = self._stop is not None and self._stop.repeats(step)
        can_stop = not is_repeated and not store
        unasked = can_stop and self._store.is_shared and train.link().stops_unasked()
        keeps = (
            can_stop and not unasked and self._keeps and train.link().stops_unasked(in_memory=True)
        )
        is_early = (unasked or keeps) and step < self._next_step
        return _Wanted(
            store or unasked or keeps or step >= self._next_step,
            store or unasked,
            unasked,
            keeps,
            self._interval if is_early else None,
            is_repeated,
        )

    def _take(
        self, gang: Gang, step: int, state: object, rank_state: object, wanted: _Wanted
    ) -> None:
        """Take a snapshot: agree on the next one, encode the parts of this rank, and write them."""
        if self._overlap is not None:
            self._overlap.begin()
        self._memory.examine()
        since, self._taken_at = time.monotonic() - self._taken_at, time.monotonic()
        if wanted.keeps:  # for copies in progress, which no others may follow before their end
            self._await_copies(since, 0.25)
        used = time.thread_time()  # not the time of waiting for slower ranks
        newest = self._newest
        begins, store_due = self._schedule(gang, step, rank_state is not None, wanted.must_store)
        if self._newest != newest and self._stop is not None:
            self._rename(self._stop, gang, step, rank_state, wanted.interval)
        used = time.thread_time() - used
        if self._has_taken:  # the ranks have the snapshot before this one, and need none of others
            self._memory.remove_former(None)
        self._has_taken = True
        began = time.perf_counter()
        state, rank_state = _value(state), _value(rank_state)
        overlap = self._overlap
        if wanted.must_store or wanted.keeps or (overlap is not None and not overlap.is_possible):
            overlap = None
        version = Version(step, gang.number)
        parted = split(state, rank_state) if self._sharded else None
        if parted is not None:
            state, rank_state, _ = parted
        is_connected = self._replication is not None
        began += self._compare(gang, rank_state is not None, parted and parted.tensors)
        begins = begins or (self._replication is not None and not is_connected)
        stores = self._store.is_shared and (wanted.must_store or store_due)
        # The first snapshot is encoded in any case, so that a type without an encoding is found.
        has_place = self._memory.buffers is not None or (stores and self._store.folder is not None)
        is_used = has_place or begins or not self._has_encoded
        self._has_encoded = True
        parts = []
        if is_used:
            part = self._part(version, 0 if rank_state is None else gang.size, wanted.interval)
            part = part._replace(reshards=parted is not None)
            parts = self._encoded(gang, part, state, rank_state, overlap)
        stored = []
        if stores:
            stored = [each for each in parts if each[0].rank != SHARED or gang.rank == 0]
            self._store.begins(gang, step, has_ended=store_due and not wanted.must_store)
        begins = begins and rank_state is not None
        if begins:
            self._announce(version)
        write = functools.partial(self._write, step, parts, stored, begins)
        self._missing = Missing.MEMORY | (Missing.STORAGE if stored else Missing(0))
        self._before, self._newest = self._newest, version
        if overlap is None:
            write()
        else:
            overlap.start(functools.partial(self._write_beside, overlap, step, write))
        if self._stop is not None:
            self._stop.taken()
        if not self._has_place:
            self._next_step = layout.MAX_STEP + 1
        self._pace.took(used + time.perf_counter() - began)
        if wanted.must_store:
            lacks_storage = stores and self._store.folder is None and rank_state is not None
            self._confirm_stored(gang, step, lacks_storage, unasked=wanted.unasked)
        if wanted.keeps:
            self._await_copies(since, 0.5)
            gang.gather(Exchange.KEPT, b"")  # all ranks have their parts, or cannot write them
            train.link().kept()

    def _encoded(
        self, gang: Gang, part: Part, state: object, rank_state: object, overlap: Overlap | None
    ) -> list[tuple[Part, Body]]:
        """Return the parts that this rank writes; the shared one last, as it announces the version.

        Args:
            part: the shared part.
            overlap: the copy during the next step; None to complete the snapshot at once.
        """
        stage = None if overlap is None else overlap.stage
        parts = []
        if rank_state is not None:
            parts.append((part._replace(rank=gang.rank), encode(rank_state, stage)))
        if self._local_rank == 0:
            parts.append((part, encode(state, stage)))
        if overlap is None:
            return parts
        return [(part, body._replace(has_changed=overlap.has_changed)) for part, body in parts]

    def _confirm_stored(self, gang: Gang, step: int, lacks_storage: bool, *, unasked: bool) -> None:
        """Wait until the snapshot is in storage, and report it as a checkpoint."""
        try:
            self._store.confirm(gang, gang.number, lacks_storage)
        except SnapshotError as error:
            if not unasked:
                raise
            log.error("%s. The job stops without it", error)
        else:
            train.checkpointed(step)

    def _await_copies(self, since: float, share: float) -> None:
        """Wait before a planned stop for copies on other nodes.

        Args:
            since: duration of the steps since the last snapshot, which is the limit, at least
                `MIN_KEPT_SECONDS`.
            share: largest share of the time that is left up to the stop.
        """
        if self._replication is not None:
            most = max(MIN_KEPT_SECONDS, since)
            self._replication.wait(min(most, share * train.link().stop_seconds))

    def _compare(self, gang: Gang, has_own_part: bool, tensors: list[str] | None = None) -> float:
        """Check that all ranks or none have an own part, and connect the ranks for replication.

        A rank that alone has an own part would wait for the others, or write parts that no restore
        finds complete. The distributed tensors must be the same on all ranks, since shards refer to
        them by number. Both are known only once the functions of the script have been called.

        The ranks compare them at the first, second, fourth, eighth, … call in a round. A call is
        made for the first held state, and for each snapshot.

        Returns the seconds that this took, mostly waiting for slower ranks.
        """
        began = time.perf_counter()
        self._compared += 1
        if gang.size > 1 and self._compared & (self._compared - 1) == 0:
            mine = _DIGEST.pack(zlib.crc32("\n".join(tensors or ()).encode()))
            gathered = gang.gather(Exchange.OWN_PARTS, bytes([has_own_part]) + mine)
            digests = {bytes(each[1:]) for each in gathered}
            if len(digests) > 1 and b"" not in digests:  # earlier versions of the library send none
                texts = gang.gather(Exchange.TENSORS, json.dumps(tensors or []).encode())
                check_tensors([json.loads(bytes(each)) for each in texts])
            check_same("save()", [{"rank_state": bool(each[0])} for each in gathered])
            if has_own_part and self._replication is None:
                self._replicates(gang)
        return time.perf_counter() - began

    def _part(self, version: Version, ranks: int, interval: int | None) -> Part:
        """Return the shared part of a snapshot of all ranks.

        Args:
            interval: steps between two regular snapshots; given if a planned stop requires the
                snapshot before it is due, as the steps since the last one are fewer.
        """
        if interval is not None:
            return part_at_stop(version, interval, ranks)
        return Part(version, SHARED, ranks, self._newest.step)

    def _held(
        self,
        stop: StopCopy,
        gang: Gang,
        step: int,
        state: Any,
        rank_state: Any,
        wanted: _Wanted,
    ) -> tuple[Any, Any]:
        """Hold the states for a stop copy if all ranks do; return the states to save."""
        if stop.is_measured:
            gathered = gang.gather(Exchange.HOLD, bytes([stop.wants()]))
            self._agreed_to_hold(stop, step, all(each[0] for each in gathered))
        if not stop.is_on:
            return state, rank_state
        began = time.perf_counter()
        state, rank_state = _value(state), _value(rank_state)
        if not self._compared:  # own states of each step are copied from now on
            began += self._compare(gang, rank_state is not None)
        ranks = 0 if rank_state is None else gang.size
        version = Version(step, gang.number)
        # The same as that of the regular snapshot, which another rank may complete.
        interval = wanted.interval if wanted.is_due else self._interval
        part = self._part(version, ranks, interval)
        own = None if rank_state is None else (gang.rank, rank_state)
        is_taken = self._is_each_step and self._overlap is not None and self._overlap.is_possible
        earlier = stop.hold(
            part, self._newest, state, began, own, is_taken=is_taken, is_due=wanted.is_due
        )
        if not (wanted.is_repeated and wanted.is_due):
            return state, rank_state
        # All ranks store the states of the same call, also those whose gradients have not grown.
        has_earlier = earlier is not None and (earlier.own is None) == (rank_state is None)
        gathered = gang.gather(Exchange.HOLD, bytes([stop.has_grown, has_earlier]))
        have_grown = any(each[0] for each in gathered)
        have_earlier = all(each[1] for each in gathered)
        if earlier is None or not have_grown or not have_earlier:
            return state, rank_state
        return earlier.state, None if earlier.own is None else decode(earlier.own)

    def _agreed_to_hold(self, stop: StopCopy, step: int, is_on: bool) -> None:
        """Hold states until the next regular snapshot, or stop holding them, as all ranks do.

        Ranks that do not hold states take a snapshot on request before a planned stop.
        """
        stop.agreed(is_on, step)
        self._keeps = self._keeps or (self._can_keep and not is_on)

    def _rename(
        self, stop: StopCopy, gang: Gang, step: int, rank_state: Any, interval: int | None
    ) -> None:
        """Let the held state of this step follow the newest version that all ranks have."""
        own = None if rank_state is None else (gang.rank, rank_state)  # as it was held
        ranks = 0 if own is None else gang.size
        part = self._part(Version(step, gang.number), ranks, interval)
        stop.rename(part, self._newest, own)

    def close(self) -> None:
        """Wait until the last snapshot is complete, also in storage, as long as that answers.

        All ranks must call it, or none: a rank that waits for this one in `save` or `restore`
        raises an error.
        """
        self._record_end(End.CLOSE)
        if self._keeps:
            train.link().keeps_no_more()
        try:
            if self._stop is not None:
                self._stop.close()
            if self._overlap is not None:
                self._overlap.wait()
        finally:
            self._store.end()
            self._store.report_complete()
            self._end_replication()
            self._claim.release()

    def _record_end(self, end: End) -> None:
        """Record for waiting ranks that this one makes no further call, unless it ends in error."""
        if self._gang is not None and not ended_with_error():
            self._gang.ends(end)

    def _claimed(self) -> Claim:
        """Return the claim to the places of this rank, which the first `save` takes."""
        memory, storage = self._memory.folder, self._store.folder

        def places() -> list[str]:
            found = [] if memory is None else [os.path.realpath(memory)]
            return found if storage is None else [*found, storage.place]

        return Claim(self, places, memory, self._local_rank)

    # --- restore

    def _check_settings(self, gang: Gang) -> None:
        """Raise SnapshotError on all ranks if a setting differs: they would decide differently."""
        digest = _DIGEST.pack(zlib.crc32(self._settings))
        if any(bytes(each) != digest for each in gang.gather(Exchange.SETTINGS, digest)):
            gathered = gang.gather(Exchange.SETTINGS_TEXTS, self._settings)
            check_same("Snapshots", [json.loads(bytes(each)) for each in gathered])

    def _begun(
        self, gang: Gang, plan: Plan | None, offers: list[Offer]
    ) -> tuple[tuple[int | None, float | None], int]:
        """Choose the gang number and the first interval. Return the lost steps and their duration
        in seconds, and the step at which the previous workers would have taken the next regular
        snapshot."""
        step, ended = self._newest.step, self._memory.ended()
        stores = self._store.folder is not None
        has_place = self._memory.buffers is not None or stores
        obstacle = layout.Loss.UNKNOWN
        if self._stop is not None:
            obstacle = layout.Loss.SHARDED if self._sharded else self._stop.obstacle
        last = max(ended, key=lambda each: (each.reached.step, each.losses.seconds), default=None)
        mine = Begin(
            secrets.randbits(32),
            self._pace.is_measured,
            has_place,
            stores,
            self._stop is not None and not obstacle,
            *max((each.reached for each in ended), default=Reached()),
            max((each.due for each in ended), default=layout.NO_STEP),
            max((each.loss for each in ended if each.reached.step > step), default=0),
            *(Losses() if last is None else last.losses),
            any(each.reached.step > step and not each.is_counted for each in ended),
            self._pace.follows_faults,
        )
        begins = unpack_begins(gang.gather(Exchange.BEGIN, mine.packed()))
        gang.begins(next_gang(offers, begins[0].bits))
        self._is_measured = any(each.is_measured for each in begins)
        self._has_place = any(each.has_place for each in begins)
        self._store.is_shared = any(each.stores for each in begins)
        is_held = all(each.holds for each in begins)
        self._can_keep = self._has_place and not self._store.is_shared
        self._keeps = self._can_keep and not is_held
        if not self._keeps:  # another restore of this process may have offered it
            train.link().keeps_no_more()
        if self._stop is not None:
            self._stop.start(step, is_held, obstacle)
        reached = [Reached(each.reached_step, each.step_ns) for each in begins]
        losses = agreed_losses(
            [(each.reached_step, Losses(each.faults, each.seconds, each.cost)) for each in begins],
            MAX_OVERHEAD,
            is_fault=any(each.has_lost for each in begins),
        )
        if self._reached is not None:
            self._reached.restored(losses)
        self._interval = self._pace.start(
            step,
            interval_before(plan, offers),
            losses if all(each.follows_faults for each in begins) else Losses(cost=losses.cost),
            max(reached).step_ns / 1e9,
            is_held=self._stop is not None and is_held,
        )
        lost = lost_since(step, reached)
        loss = max(each.loss for each in begins)
        if not loss and plan is not None and are_incomplete_at_stop(plan, offers):
            loss = layout.Loss.RANK_STATE_MISSING
        self._report.change(replicas=0, limit=self._limit, loss=loss, **lost)
        self._memory.report_refusal()
        due = max(each.due for each in begins)
        if "lost" not in lost:
            return (None, None), due
        return (lost["lost"], lost["lost_ms"] / 1000), due

    def _seed(self, plan: Plan, rank: int, shared: Body, own: Body | None) -> None:
        """Commit the restored parts to this node's memory where it lacks them.

        A second fault before the first save then finds them.
        """
        own = own if len(plan.own) > rank else None
        wanted = [] if own is None else [(plan.shared.part._replace(rank=rank), own)]
        if self._local_rank == 0:
            wanted.append((plan.shared.part, shared))
        for part, body in wanted:
            self._memory.seed(part, body)

    # --- replicas

    def _replicates(self, gang: Gang) -> bool:
        """Connect the ranks on the first call; return True if they replicate. A collective."""
        if self._replicas and gang.size > 1:
            self._replication = connected(
                gang,
                self._memory.folder,
                self._local_rank,
                Settings(self._replicas, self._replica_rate, self._sharded, self._local_ranks),
            )
        if self._replication is None:
            self._replicas = 0
            return False
        if self._stop is not None:
            self._stop.replication = self._replication
        self._report.change(replicas=self._replicas)
        if self._copied is None:
            self._replication.restored(*self._found)
        else:
            self._replication.continued(self._copied)
        gang.gather(Exchange.COPIES, b"")  # no copy arrives while stale ones are removed
        return True

    def _announce(self, version: Version) -> None:
        if self._replication is not None:
            self._replication.announce(version)

    def _replicate(self, parts: list[Part]) -> None:
        if self._replication is not None:
            self._replication.send(parts)

    # --- save

    def _write(
        self,
        step: int,
        parts: list[tuple[Part, Body]],
        stored: list[tuple[Part, Body]],
        replicates: bool,
    ) -> None:
        is_committed = False
        try:
            size = sum(body.size for _, body in parts)
            is_committed = all(self._committed(part, body, size) for part, body in parts)
        finally:
            if replicates and not is_committed and self._replication is not None:
                self._replication.give_up()
        if is_committed:  # also on a rank without parts, or without memory
            self._missing &= ~Missing.MEMORY
        if replicates and is_committed:
            self._replicate([part for part, _ in parts])
        if is_committed and self._memory.buffers is not None:
            self._report.change(step=step, size=size)
            self._memory.completed()
        self._store.write(stored)
        self._missing = Missing(0) if is_committed else Missing.MEMORY

    def _committed(self, part: Part, body: Body, size: int) -> bool:
        """Commit a part to memory; return False if the ranks must give up this snapshot.

        `size` is that of all parts of this rank.
        """
        # The training, which takes the processor too, stops before.
        began = time.thread_time()
        is_committed = self._memory.commit(part, body, size)
        is_written = is_committed and self._memory.buffers is not None
        if self._stop is not None and part.rank == SHARED and is_written:
            self._stop.measured(body.size, time.thread_time() - began)
        return is_committed

    def _write_beside(self, overlap: Overlap, step: int, write: Callable[[], None]) -> None:
        """Write during the next step; a change of the state meanwhile leaves the last snapshot."""
        try:
            write()
        except StateChanged:
            overlap.is_possible = False
            log.warning(
                "no snapshot %sof step %d: something other than the optimizers has changed the "
                "parameters or their state since save(). Further snapshots are complete when "
                "save() returns",
                "" if Missing.MEMORY in self._missing else "in storage ",
                step,
            )
            self._missing |= Missing.CHANGED

    def _schedule(
        self, gang: Gang, step: int, has_rank_state: bool, stores: bool
    ) -> tuple[bool, bool]:
        """Set the step of the next snapshot, the same on all ranks: the latest that one proposes.

        Args:
            has_rank_state, stores: of the call of `save`.

        Returns True first if the ranks may begin to copy this snapshot to other nodes, then if it
        is due for storage. A rank enters with its last snapshot complete, or given up. After the
        exchange all ranks have that one, and may overwrite the one before, or keep that instead.
        """
        stop = self._stop
        is_held, share = (False, 0.0) if stop is None else (stop.is_on, stop.share)
        steps = self._pace.proposed(step, share, is_held=is_held)
        if self._reached is not None:
            self._reached.cost = self._pace.cost
        replication, begins = self._replication, False
        store = self._store
        store_due = store.is_due(step)
        exchanges = self._is_measured or store.is_timed or store_due
        if exchanges or replication is not None:
            is_time = store.is_time()
            mine = Proposal(
                has_rank_state,
                stores,
                steps,
                State.IDLE if replication is None else replication.state,
                is_time,
                store.is_busy(store_due or is_time),
                stop is not None and not self._sharded and stop.wants(),
                self._missing,
                store.complete_step,
            )
            proposals = unpack_proposals(gang.gather(Exchange.PROPOSALS, mine.packed()))
            store.record_complete(max(each.complete_step for each in proposals))
            steps = max(each.steps for each in proposals)
            missing = functools.reduce(operator.or_, (each.missing for each in proposals))
            store_due = self._give_up_last(missing) or store_due
            # A version that one rank does not write would be incomplete.
            is_busy = any(each.is_busy for each in proposals)
            store_due = (store_due or proposals[0].is_time) and not is_busy
            if stop is not None:
                self._agreed_to_hold(stop, step, all(each.holds for each in proposals))
            if replication is not None:
                begins = replication.exchanged([State(each.copies) for each in proposals])
                self._report.change(replicated=replication.replicated_step)
        self._interval, self._next_step = steps, step + steps
        return begins, store_due

    def _give_up_last(self, missing: int) -> bool:
        """Give up the last snapshot in the places where a rank lacks its parts. On all ranks.

        Returns True if it was to be stored: the next one is due for that.
        """
        is_due = bool(missing & Missing.STORAGE) and self._store.give_up(self._newest.step)
        if missing & Missing.CHANGED and self._overlap is not None:
            self._overlap.is_possible = False
        if missing & Missing.MEMORY:
            self._newest = self._before
            self._memory.keep(self._newest)
            self._has_taken = False  # parts of former workers may belong to it
        return is_due


def _await(overlap: Overlap) -> None:
    """Wait for the last copy; log its error."""
    try:
        overlap.wait()
    except Exception as error:
        log.warning("the last snapshot is not complete: %s", error)


def _finish(
    overlap: weakref.ReferenceType[Overlap] | None,
    store: weakref.ReferenceType[SnapshotStore],
    stop: weakref.ReferenceType[StopCopy] | None,
    owner: weakref.ReferenceType[Snapshots],
) -> None:
    """Wait at the end of the process for the last copy, which begins the write to storage.

    After an exception copy the state of the last step too. Then wait for the write to storage, as
    long as that answers.
    """
    snapshots = owner()
    if snapshots is not None:
        snapshots._record_end(End.PROCESS)
    copies, writes = None if overlap is None else overlap(), store()
    stops = None if stop is None else stop()
    if copies is not None:
        _await(copies)
    if stops is not None:
        if ended_with_error():
            stops.commit(COPY_SECONDS)
        stops.is_on = False  # `release` then leaves the reason for lost steps
        stops.release()  # waits for a copy that the launcher has asked for
    if writes is not None:
        writes.end()


def _first(*given: Any) -> Any:
    """Return the first value that is not None, else None."""
    return next((each for each in given if each is not None), None)


def _value(given: Any) -> Any:
    """Return the result of a function, or the value itself, such as a module, which is refused."""
    return given() if callable(given) and not hasattr(given, "state_dict") else given
