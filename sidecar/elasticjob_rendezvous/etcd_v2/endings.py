"""How a member's part ends: it gives its place back, or closes the rendezvous for all."""

from __future__ import annotations

import logging
import random
import time

import etcd

from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousError
from elasticjob_rendezvous.etcd_v2.core import patience, transitions
from elasticjob_rendezvous.etcd_v2.core.records import State, Status
from elasticjob_rendezvous.etcd_v2.place import Holder
from elasticjob_rendezvous.etcd_v2.steps import Steps

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_ATTEMPTS_TO_LEAVE = 5


class Endings(Steps):
    """What `EtcdRendezvous` is made of, as `Steps` is."""

    def set_closed(self) -> None:
        """Let no version come any more, nor any member in. For all, and for good.

        Raises RendezvousConnectionError where etcd does not answer.
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
                wait = patience.after_conflict(conflicts, self._num_max_workers, random.random())
            except etcd.EtcdException as error:
                if time.monotonic() > deadline:
                    raise RendezvousConnectionError(f"could not close the run: {error}") from error
                failures += 1
                wait = patience.after_failure(failures, random.random())
            time.sleep(wait)

    def last_versions(self) -> list[str]:
        """The last versions, newest first, also such as gave us no place.

        None where the run was closed before we came: what another run left is no news of ours.
        Raises etcd.EtcdException where etcd does not answer.
        """
        state = self._active.state()
        if state is None or not self._saw_open or state.version is None:
            return []
        newest = int(state.version)
        return [str(number) for number in (newest, newest - 1) if number > 0]

    def _withdraw(self) -> None:
        """Give back what others would wait for. As far as etcd lets us: it all runs out too."""
        try:
            self._give_up_place()
            for _ in range(_ATTEMPTS_TO_LEAVE):
                state = self._active.state()
                if state is None or state.status is not Status.FINAL:
                    return
                if self._left_final(state):
                    return
        except (etcd.EtcdException, RendezvousError) as error:
            log.info("%s: left without giving back its place: %r", self._run_id, error)

    def _left_final(self, state: State) -> bool:
        """Wait no more for a final version to end, or be no more its member."""
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
            place.vacate()  # they need not wait until it runs out
        return True

    def _give_up_place(self) -> None:
        """Leave a version that we joined and that did not become final."""
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
                place.vacate()
                return

    def _change(self, state: State, step: transitions.Write | transitions.Destroy) -> bool:
        """Whether nobody else changed the state first."""
        try:
            if isinstance(step, transitions.Destroy):
                self._active.destroy(state)
            else:
                self._active.swap(state, step)
        except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
            return False
        return True
