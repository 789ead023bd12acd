"""Leave of a member: give up its rank, or close the rendezvous for all."""

from __future__ import annotations

import logging
import random
import time

import etcd

from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousError
from elasticjob_rendezvous.etcd_v2.core import delays, transitions
from elasticjob_rendezvous.etcd_v2.core.records import State, Status
from elasticjob_rendezvous.etcd_v2.keep_alive import Holder
from elasticjob_rendezvous.etcd_v2.steps import Steps

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_ATTEMPTS_TO_LEAVE = 5


class Endings(Steps):
    """Base class of `EtcdRendezvous` that leaves and closes the rendezvous."""

    def set_closed(self) -> None:
        """Close the run for all members, permanently: no new versions, no new members.

        Raises RendezvousConnectionError if etcd does not answer.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        conflicts = failures = 0
        while True:
            try:
                state = self._active.state()
                if (write := transitions.closed(state)) is None:
                    return
                if state is None:
                    self._active.create(write)
                else:
                    self._active.swap(state, write)
                return
            except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                conflicts += 1
                wait = delays.after_conflict(conflicts, self._num_max_workers, random.random())
            except etcd.EtcdException as error:
                if time.monotonic() > deadline:
                    raise RendezvousConnectionError(f"could not close the run: {error}") from error
                failures += 1
                wait = delays.after_failure(failures, random.random())
            time.sleep(wait)

    def last_versions(self) -> list[str]:
        """Return the last two versions, newest first, including those without this member.

        Empty if this member never saw the run open: the versions then belong to an earlier run.
        Raises etcd.EtcdException if etcd does not answer.
        """
        state = self._active.state()
        if state is None or not self._was_open or state.version is None:
            return []
        newest = int(state.version)
        return [str(number) for number in (newest, newest - 1) if number > 0]

    def _withdraw(self) -> None:
        """Remove state that other members would wait for. Best effort: it expires anyway."""
        try:
            self._give_up_place()
            for _ in range(_ATTEMPTS_TO_LEAVE):
                state = self._active.state()
                if state is None or state.status is not Status.FINAL:
                    return
                if self._left_final(state):
                    return
        except (etcd.EtcdException, RendezvousError) as error:
            log.info("%s: left, but could not give up its rank: %r", self._run_id, error)

    def _left_final(self, state: State) -> bool:
        """Retract our announcement in a final version, or our membership of it."""
        place = self._place
        if self._announced is not None and self._announced[0] == state.version:
            write = transitions.retracted(state)
            if write is not None and not self._change(state, write):
                return False
            self._announced = None
        elif (
            place is not None
            and place.version == state.version
            and state.waiting
            and not place.stays
        ):
            place.delete_own()  # spares the others the wait for its expiry
        return True

    def _give_up_place(self) -> None:
        """Leave a version that we joined and that is not final."""
        place = self._place
        if place is None or place.version == self._completed:
            return
        self._place = None
        place.release()
        if place.holder() is Holder.ANOTHER:
            return
        for _ in range(_ATTEMPTS_TO_LEAVE):
            if (state := self._active.state()) is None:
                return
            step = transitions.withdrawn(state, place.version, place.rank, self._num_min_workers)
            if step is None:
                return
            if self._change(state, step):
                place.delete_own()
                return

    def _change(self, state: State, step: transitions.Write | transitions.Destroy) -> bool:
        """Write the change; return False if another member changed the state first."""
        try:
            if isinstance(step, transitions.Destroy):
                self._active.destroy(state)
            else:
                self._active.swap(state, step)
        except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
            return False
        return True
