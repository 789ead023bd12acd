"""Stop copy: snapshot of the last step, taken when the workers stop between regular snapshots.

Between a call of `save` and the next step of an optimizer, parameters and optimizers have exactly
the saved state. If another rank fails, this rank stops there, in its backward. Each call of `save`
therefore holds the state (see `held_state`). Before the launcher stops the workers, it requests the
copy over a socket in the folder of snapshots; a worker that ends with an exception copies without a
request. The own state of a rank is committed at each step, on its node and on other nodes. See
0087, 0091 and 0101 in docs/decisions.
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import statistics
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from elasticjob import layout, train
from elasticjob.layout import Loss
from elasticjob.train.snapshots.core.interval import FIRST_COSTS, HoldPolicy
from elasticjob.train.snapshots.memory import copy_requests
from elasticjob.train.snapshots.memory.buffers import OWN_BYTES
from elasticjob.train.snapshots.memory.part_files import Body, StateChanged
from elasticjob.train.snapshots.state.codec import encode
from elasticjob.train.snapshots.state.held_state import (
    Copies,
    Gradients,
    Held,
    NotHeld,
    Sources,
    marked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticjob.train.snapshots.core.agreement import Part, Version
    from elasticjob.train.snapshots.memory.node_memory import NodeMemory
    from elasticjob.train.snapshots.ranks.replication import Replication
    from elasticjob.train.snapshots.state.overlap import Optimizers, Overlap

log = logging.getLogger("elasticjob.train")

COPY_SECONDS = 10.0
"""Maximum duration of a copy, for which the launcher waits."""
LONG_STEP_SECONDS = 0.2
"""Minimum duration of a step whose end a planned stop waits for."""
BEGUN_SHARE = 0.25
"""Share of a step before which its end is not waited for. Ranks that get the request shortly before
and after the same `save` thus copy the same step."""
LATE_SHARE = 1.5
"""Duration of a step, as a multiple of the usual one, from which it may hang: no longer wait."""
BYTES_PER_SECOND = 500e6
"""Assumed speed of a copy until one is measured."""
FLUSH_SECONDS = 0.5
"""Maximum wait at a planned stop until the own state is copied to other nodes."""
STEP_SECONDS = 1.0
"""Minimum wait for the end of a step whose optimizers are at work."""
SAMPLED = 8
"""Approximate number of gradients marked in each parameter group until a step is repeated."""
MEASURED = 5
"""Number of measured times, of which the median counts."""


class StopCopy:
    """Holder of the last step's state, which it copies to the memory of the node at a stop.

    Args:
        optimizers: all optimizers that change parameters.
        overlap: regular copies in the background; one in progress is completed at a stop.
        max_overhead: largest share of the training time that snapshots take.
        record: called, also by a thread, with the `Loss` of the last step if the worker ended now.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        overlap: Overlap,
        memory: NodeMemory,
        local_rank: int,
        max_overhead: float,
        record: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.is_on = False
        """True if all ranks hold: `state` is then called in each step of all of them."""
        self.replication: Replication | None = None  # of the own part of each step
        self._optimizers = optimizers
        self._overlap, self._memory, self._local_rank = overlap, memory, local_rank
        self._policy = HoldPolicy(max_overhead)
        self._record = record
        self._refused = Loss.UNKNOWN
        """Reason for which this rank does not hold; unknown if another one does not."""
        self._folder = memory.folder  # also while the memory is full
        self._releases, self._skips = 0, False  # since the last `save`; True if it left out steps
        self._called = layout.NO_STEP, 0  # step of the last `save`, and `_stepped` then
        self._stepped = 0  # how often an optimizer has begun a step
        self._since = layout.NO_STEP, Gradients(())  # step whose state is held, or was restored
        self._has_repeated = False  # a step in two calls of `save`
        self._most = 0  # number of marked gradients of each group, about; 0 for all
        self.has_grown = False  # gradients, at the last call of `hold`
        self._accumulates = False  # gradients have grown between two calls with one step
        self._changed = threading.Condition()
        self._held: Held | None = None
        self._sources: Sources | None = None
        self._size = 0
        self._is_needless = False
        """True while regular snapshots of each short step have the state."""
        self._held_steps = 0  # since the ranks have agreed to hold
        self._steps: collections.deque[float] = collections.deque(maxlen=MEASURED)
        self._between: collections.deque[float] = collections.deque(maxlen=MEASURED)
        self._released_at: float | None = None
        self._last: tuple[int, float] | None = None
        self._spent = 0.0  # in further calls with the same step
        self._ends = 0  # number of steps whose state was held, or could not be
        self._rates: collections.deque[float] = collections.deque(maxlen=MEASURED)
        self._is_stopping = False
        """True while the end of the step is waited for: `save` then does not return."""
        self._keep: Version | None = None
        self._keep_at = self._taken_at = time.monotonic()
        self._pid = 0
        self._listener: weakref.finalize[..., StopCopy] | None = None
        optimizers.before_steps(self, StopCopy.release)

    # --- each step

    @property
    def obstacle(self) -> Loss:
        """Reason for which this rank cannot hold states; `UNKNOWN` if it can."""
        if self._memory.buffers is None or self._memory.lacks_room:
            return Loss.NO_MEMORY
        groups = [group for each in self._optimizers.all for group in each.param_groups]
        on_cpu = all(tensor.device.type == "cpu" for group in groups for tensor in group["params"])
        return Loss.UNKNOWN if on_cpu else Loss.ON_DEVICE

    def start(self, step: int, is_on: bool, obstacle: Loss = Loss.UNKNOWN) -> None:
        """Begin after a restore. `is_on`: the ranks hold states; `obstacle`: this one cannot."""
        self._give_up()
        self._begin(step)
        self._refused, self._releases, self._skips = obstacle, 0, False
        self._switch(is_on)
        self._record(Loss.IN_STEP if is_on else obstacle)  # up to the end of the first `save`
        self._sources = None  # the state may be another one
        self._policy.start()
        self._held_steps, self._spent = 0, 0.0
        self._called, self._accumulates = (step, self._stepped), False
        self._steps.clear()
        self._between.clear()
        self._last = self._released_at = None
        self._keep_at = self._taken_at = time.monotonic()

    def wants(self) -> bool:
        """Return True if this rank proposes to hold states until the next regular snapshot."""
        step = statistics.median(self._steps) if self._steps else None
        wants = self._policy.proposed(step, is_on=self.is_on)
        found = Loss.UNKNOWN if wants else self._refused or Loss.COST
        self._refused = self.obstacle or found
        return not self._refused

    def agreed(self, is_on: bool, step: int = layout.NO_STEP) -> None:
        """Hold states until the next regular snapshot if `is_on`, as the ranks have agreed."""
        if self.is_on and not is_on:
            self._give_up()
        if is_on and not self.is_on:
            self._held_steps, self._releases = 0, 0
            self._begin(step)
        self._switch(is_on)

    def _begin(self, step: int) -> None:
        """Mark the gradients: the state of this step is kept once a backward has changed them."""
        self._most = 0
        self._since = step, Gradients(self._parameters())

    def _parameters(self) -> list[Any]:
        """Return the parameters whose gradients are marked."""
        return marked(self._optimizers.all, self._most)

    def repeats(self, step: int) -> bool:
        """Return True if no optimizer has begun a step since the last `save`, which had this one.

        Called once in each `save`.
        """
        former, self._called = self._called, (step, self._stepped)
        return former == self._called

    def _switch(self, is_on: bool) -> None:
        """Turn holding on or off, and wake a stop that waits for a state."""
        self.is_on = is_on
        if not is_on:
            self._sources = None
            self._record(self._refused)
        if self._pid == os.getpid():  # in a fork the lock may stay held
            with self._changed:
                self._changed.notify_all()

    @property
    def is_measured(self) -> bool:
        """True at the one step at which the ranks exchange the measured cost of holding.

        They do not wait for the next regular snapshot, which may be a thousand steps away.
        """
        return self.is_on and self._held_steps == FIRST_COSTS

    @property
    def share(self) -> float:
        """Share of the training time that holding the state takes."""
        step = statistics.median(self._steps) if self._steps else 0.0
        return self._policy.share(step) if self.is_on and step else 0.0

    def hold(
        self,
        part: Part,
        keep: Version,
        state: Any,
        began: float,
        own: tuple[int, Any] | None = None,
        *,
        is_taken: bool = False,
        is_due: bool = False,
    ) -> Held | None:
        """Hold the state until the next step of an optimizer.

        The own state of this rank is committed at once: if the rank is killed, the others copy the
        shared part of the same step.

        If a step is saved again after a backward has accumulated gradients, the state of the first
        call is kept: no state has these gradients, and the data position is past their samples.
        With `is_due` that state is returned, if it is held and nothing else has changed it.

        Args:
            began: time by `time.perf_counter` at which `save` requested the state.
            own: rank of this process, and its own state; None without one.
            is_taken: True if each step has a regular snapshot, which a stop completes. The state is
                then kept only to detect the end of a step that a planned stop waits for.
        """
        step = part.version.step
        is_end = bool(self._releases) or step != self._since[0]
        self._held_steps += is_end or self._held_steps == FIRST_COSTS
        self.has_grown = not is_end and self._since[1].have_grown(self._parameters())
        self._accumulates = self._accumulates or self.has_grown
        if self._accumulates and not is_end:
            self._has_repeated = True
            self._spent += time.perf_counter() - began
            held = self._held if is_due else None
            return None if held is None or held.marks.have_changed() else held
        self._skips, self._releases = self._releases > len(self._optimizers.all), 0
        if self._last is not None and step > self._last[0]:
            self._steps.append((began - self._last[1]) / (step - self._last[0]))
        if is_end or self._last is None:
            self._last = step, began
        if self._released_at is not None:
            self._between.append(began - self._released_at)
        self._released_at = None
        if keep != self._keep:
            self._keep, self._keep_at = keep, self._taken_at
        held = None
        is_short = bool(self._steps) and statistics.median(self._steps) < LONG_STEP_SECONDS
        self._is_needless = is_taken and is_short
        try:
            if not self._is_needless:
                held = self._kept(part, keep, state, own)
        except (NotHeld, RuntimeError, TypeError, OSError) as error:  # also one that has itself
            self._refused = getattr(error, "loss", Loss.UNSUPPORTED_STATE)
            self._policy.is_refused = True
        self._has_repeated = self._has_repeated or not is_end
        # Most scripts repeat no step: a few gradients are enough to find the first one.
        self._most = 0 if self._has_repeated else SAMPLED
        self._since = step, Gradients(self._parameters())
        self._record(self._refused or Loss.WORKERS_ENDED)
        self._policy.took(self._spent + time.perf_counter() - began)
        self._spent = 0.0
        with self._changed:
            self._held, self._ends = held, self._ends + is_end
            self._changed.notify_all()
            if self._is_stopping and is_end and self._pid == os.getpid():
                self._changed.wait_for(lambda: not self._is_stopping, COPY_SECONDS)
        return None

    def _kept(self, part: Part, keep: Version, state: Any, own: tuple[int, Any] | None) -> Held:
        body = None
        if own is not None:  # before the shared part is held: see `has_own_parts`
            body = self._commit_own(part._replace(rank=own[0]), own[1])
        optimizers = self._optimizers.all
        if self._sources is None or not self._sources.are_those_of(optimizers):
            self._sources = None
            self._sources = Sources(optimizers)
        marks, copies = self._sources.marks(keep), Copies(self._sources)
        values = copies.held(state)
        if not copies.size:  # as on ranks that leave the state to rank 0
            raise NotHeld(Loss.NO_TENSORS)
        self._size = copies.size
        return Held(part, keep, values, copies.size, marks, body)

    def _commit_own(self, part: Part, own: Any) -> Body:
        body, buffers = encode(own), self._memory.buffers
        if buffers is None or body.size > OWN_BYTES:
            raise NotHeld(Loss.RANK_STATE_TOO_LARGE if buffers else Loss.NO_MEMORY)
        body = Body(body.head_bytes, [memoryview(b"".join(body.views))])
        buffers.commit_own(part, body)
        if self.replication is not None:
            self.replication.send_step(part, body)
        return body

    def rename(self, part: Part, keep: Version, own: tuple[int, Any] | None) -> None:
        """Change the part of the held state, which then follows an older version `keep`.

        The ranks have given up the version between. All have an own part of this step under its
        former name, so that of the previous step, which is overwritten, is not needed.

        Args:
            keep, own: as for `hold`.
        """
        if self._held is None:
            return
        is_named = True
        try:
            if own is not None:  # before the shared part, as in `hold`
                self._commit_own(part._replace(rank=own[0]), own[1])
        except (NotHeld, OSError):
            self._policy.is_refused, is_named = True, False
        with self._changed:
            if self._held is not None:
                self._held = self._held._replace(part=part, keep=keep) if is_named else None

    def release(self) -> None:
        """Drop the held state before an optimizer changes it, after a copy in progress."""
        self._stepped += 1
        self._give_up()

    def _give_up(self) -> None:
        self._releases += 1
        if self._pid != os.getpid():  # in a fork the lock may stay held
            return
        if self._released_at is None:
            self._released_at = time.perf_counter()
        skips = self._skips or self._releases > len(self._optimizers.all)
        with self._changed:
            self._held = None
            if self.is_on and not self._refused:
                self._record(Loss.STEPS_SKIPPED if skips else Loss.IN_STEP)

    def taken(self) -> None:
        """Record the time of a regular snapshot: a stop copy saves the steps since then."""
        self._taken_at = time.monotonic()

    def measured(self, size: int, seconds: float) -> None:
        """Record the duration of a write to the memory of the node."""
        if size and seconds > 0:
            self._rates.append(size / seconds)
            self._size = max(size, self._size)

    # --- the stop

    def commit(self, seconds: float, patience: float = 0.0) -> bool:
        """Copy the held state; return True if the node then has a copy of its step.

        Args:
            seconds: maximum time until the copy begins.
            patience: maximum wait for the state of a step whose optimizers are running.
        """
        if self._pid != os.getpid():
            return False
        deadline = time.monotonic() + seconds
        self._overlap.settle(seconds)
        with self._changed:
            self._changed.wait_for(self._has_no_more_to_come, patience)
            held, buffers = self._held, self._memory.buffers
            self._held = None
            if held is None or buffers is None or not self._is_worth_it(held.size):
                return False
            left = max(0.0, deadline - time.monotonic())
            try:
                body = encode(held.state)._replace(has_changed=held.marks.have_changed)
                is_there = buffers.commit_at_stop(held.part, body, held.keep, left)
                missing = Loss.RANK_STATE_MISSING if held.part.ranks else Loss.COPY_LATE
                self._record(Loss.UNKNOWN if is_there else missing)
                return is_there
            except StateChanged:
                self._record(Loss.STATE_CHANGED)
                reason: object = (
                    "something other than the optimizers has changed the parameters or their state "
                    "since save()"
                )
            except (OSError, TypeError, RuntimeError, MemoryError) as error:
                self._record(Loss.WRITE_FAILED)
                reason = error
            log.warning(
                "no copy of step %d at the stop: %s. The last snapshot remains",
                held.part.version.step,
                reason,
            )
            return False

    def _has_no_more_to_come(self) -> bool:
        return self._held is not None or self._is_needless or not self.is_on

    def answer(self, link: socket.socket) -> None:
        """Answer a request of the launcher, which closes the connection to end its wait."""
        kind, most = copy_requests.requested(link)
        seconds, is_finished = self._limit_seconds(), False
        left = self._left_of_step(most) if seconds and kind != copy_requests.AT_ONCE else 0.0
        try:
            if seconds and (kind != copy_requests.END_STEP or left):
                copy_requests.confirm(link, seconds)
                is_finished = bool(left) and self._finish_step(left)
                if kind != copy_requests.END_STEP:
                    self.commit(seconds, 0.0 if is_finished else min(seconds, self._patience()))
            if kind != copy_requests.AT_ONCE and (replication := self.replication) is not None:
                if kind == copy_requests.END_STEP and seconds and most and not is_finished:
                    with self._changed:  # other nodes wait for it, too
                        self._changed.wait_for(self._has_no_more_to_come, self._patience())
                replication.flush_steps(FLUSH_SECONDS)  # this node may leave
        finally:
            with self._changed:
                self._is_stopping = False
                self._changed.notify_all()

    def _left_of_step(self, most: float) -> float:
        """Return the maximum wait for the end of the current step; 0 to lose that step.

        It is 0 after a requested save, since no further step begins.

        Args:
            most: maximum seconds for both the end of the step and the copy.
        """
        if self._last is None or not self._steps or train.link().awaits_stop:
            return 0.0
        usual, since = statistics.median(self._steps), time.perf_counter() - self._last[1]
        left = LATE_SHARE * usual - since
        copy = self._copy_seconds(self._size) * (3 if self._rates else 1)  # or a slow assumption
        is_worth_it = usual >= LONG_STEP_SECONDS and since >= BEGUN_SHARE * usual
        return max(0.0, left) if is_worth_it and left + 1.0 + copy <= most else 0.0

    def _finish_step(self, seconds: float) -> bool:
        """Wait for the next `save`, which then blocks until the state is copied.

        Returns False if the time is over, or the ranks stop holding states.
        """
        with self._changed:
            ends, self._is_stopping = self._ends, True
            self._changed.wait_for(lambda: self._ends > ends or not self.is_on, seconds)
            return self._ends > ends

    def _patience(self) -> float:
        """Return the maximum wait for the end of a step whose optimizers are running.

        A worker may also hang there, in a collective between the step and `save`.
        """
        return STEP_SECONDS + 3 * (statistics.median(self._between) if self._between else 0.0)

    def _limit_seconds(self) -> float:
        """Return the maximum duration of a copy; 0 for none."""
        is_held = self.is_on and not self._policy.is_refused and not self._is_needless
        if not (is_held and self._is_worth_it(self._size)) and not self._overlap.is_copying:
            return 0.0
        if not self._size:
            return COPY_SECONDS
        step = statistics.median(self._steps) if self._steps else 1.0
        return min(COPY_SECONDS, 1.0 + 3 * self._copy_seconds(self._size) + 2 * step)

    def _is_worth_it(self, size: int) -> bool:
        """Return True if a copy takes less time than the steps that it saves; if not, record it."""
        needed = self._copy_seconds(size)
        is_worth_it = needed < min(COPY_SECONDS, time.monotonic() - self._keep_at)
        if not is_worth_it:
            self._record(Loss.COPY_TOO_LONG)
        return is_worth_it

    def _copy_seconds(self, size: int) -> float:
        return size / (statistics.median(self._rates) if self._rates else BYTES_PER_SECOND)

    # --- the socket

    def listen(self) -> None:
        """Listen for requests of the launcher, once in this process."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._changed = threading.Condition()
        folder = self._folder
        if folder is None:
            return
        try:
            self._listener = copy_requests.listen(folder, self._local_rank, self)
        except OSError as error:
            log.warning("a stop of this worker takes no snapshot: %s: %s", folder, error.strerror)

    def close(self) -> None:
        """Stop holding states, and close the socket."""
        self.release()
        self._switch(False)
        if self._listener is not None:
            self._listener()
        self._pid = 0
