"""torch's `EtcdRendezvous`: one member of one run's rendezvous over etcd's v2 API.

The names, the phases and what stands in etcd are those of
`torch.distributed.elastic.rendezvous.etcd_rendezvous`; members of both kinds meet in one
version. What differs is how a member waits (one stream, see `feed`) and what becomes of it
when it leaves or dies; `docs/reference.md` has the list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from typing import Any

import etcd

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
)
from elasticjob_rendezvous.etcd_v2 import extra_data
from elasticjob_rendezvous.etcd_v2.active import parsed
from elasticjob_rendezvous.etcd_v2.core import patience
from elasticjob_rendezvous.etcd_v2.core.paths import Paths
from elasticjob_rendezvous.etcd_v2.core.records import (
    FIRST_VERSION,
    KEEPALIVE_TTL_SECONDS,
    RUN_TTL_SECONDS,
    Status,
)
from elasticjob_rendezvous.etcd_v2.endings import Endings
from elasticjob_rendezvous.etcd_v2.errors import (
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
)
from elasticjob_rendezvous.etcd_v2.layout import is_lost, lay_out, make_folder
from elasticjob_rendezvous.etcd_v2.lease import renew
from elasticjob_rendezvous.etcd_v2.store import EtcdStore

log = logging.getLogger(__name__)

NOTICE_SECONDS = 1.0
"""How long members that work have to see that somebody waits, before their version goes."""
_YOUNG_SECONDS = 1.0
"""How long who has got no place in a version may take to wait for the next one."""
_RETRY_SECONDS = 0.05


class EtcdRendezvous(Endings):
    """One member.

    Args:
        client: an `etcd.Client`, best made by `create_client`.
        prefix: the path of all runs in etcd.
        run_id: the run; a number, say, stands in etcd as its text.
        num_min_workers, num_max_workers: how many members a version has.
        timeout: seconds that `rendezvous_barrier` takes at most.
        last_call_timeout: seconds that others may still join once the fewest have.
        notice_seconds: see NOTICE_SECONDS.
        recovery_call_timeout: the last call of every version but the first, if it is another.
        expected_workers: the first version's last call ends once so many have joined.

    Raises:
        ValueError: prefix or run id cannot be part of a path.
        etcd.EtcdException: etcd does not answer.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
        *,
        notice_seconds: float = NOTICE_SECONDS,
        recovery_call_timeout: float | None = None,
        expected_workers: int | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._given_run_id = run_id
        paths = Paths.of(prefix, run_id)
        super().__init__(client, paths, num_min_workers, num_max_workers, timeout, notice_seconds)
        self._expected_workers = expected_workers
        self._last_call_timeout = last_call_timeout
        self._recovery_call_timeout = recovery_call_timeout
        self._looked: tuple[float, set[str] | None] = (0.0, None)  # when, and what was there
        self._spare: tuple[float, int | None] = (0.0, None)  # until when to count, and how many
        lay_out(client, paths, None)
        self._lease_run_id_stop = renew(client, paths.run, RUN_TTL_SECONDS, lost=lambda: True)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            if self._pid == os.getpid():  # in a fork all of it is the parent's
                self.close()

    @property
    def run_id(self) -> str:
        """As it was given."""
        return self._given_run_id

    def close(self) -> None:
        """End all threads and connections; our keys run out by themselves."""
        self._lease_run_id_stop.set()
        if self._place is not None:
            self._place.release()
        self._feed.close()
        http = getattr(self.client, "http", None)
        if http is not None:
            http.clear()  # a store that is still used makes new ones

    def leave(self) -> None:
        """Take no part any more: a barrier in progress raises RendezvousGracefulExitError.

        Our place goes back to the others, who need not wait until it runs out. The
        rendezvous stays open. May be called by any thread and by a signal handler.
        """
        self._waiting.end()
        if not self._waiting.active:
            self._withdraw()
            self.close()

    def rendezvous_barrier(self) -> tuple[str, int, int]:
        """Take part in the next version: `(rdzv_version, rank, world_size)`. Blocks.

        Raises:
            RendezvousTimeoutError: none came about in time.
            RendezvousClosedError: the run is closed.
            RendezvousStateError: what stands in etcd is malformed or contradicts us.
            RendezvousGracefulExitError: `leave` was called.
        """
        self._waiting.begin()
        if self._place is not None:
            self._place.release()
        failures = 0
        try:
            while True:
                self._waiting.check()
                try:
                    place = self.init_phase()
                    self._waiting.check_going()
                    return place
                except EtcdRendezvousRetryImmediately:
                    failures = 0
                except EtcdRendezvousRetryableFailure as failure:
                    failures = 0
                    log.info("%s: trying again: %s", self._run_id, failure)
                    self._waiting.pause(_RETRY_SECONDS * random.random())
                except etcd.EtcdException as error:
                    failures += 1
                    log.info("%s: trying again after %r", self._run_id, error)
                    if isinstance(error, etcd.EtcdClusterIdChanged):
                        self._feed.forget()
                    self._waiting.pause(patience.after_failure(failures, random.random()))
        except BaseException:
            self._withdraw()
            raise
        finally:
            self._waiting.finish()
            self._feed.close()
            if self._waiting.ended:  # who called it could not do so before
                self.close()

    # -- phases ---------------------------------------------------------------------

    def init_phase(self) -> tuple[str, int, int]:
        """Make a version, join the present one, or wait for it to end.

        Raises:
            RendezvousClosedError: the run is closed.
            EtcdRendezvousRetryableFailure: others were changing the state; begin again.
            EtcdRendezvousRetryImmediately: the present version ended; begin again.
        """
        self._give_up_place()
        seen = self._waiting.look()
        if seen.text is None:
            try:
                self.try_create_rendezvous()
            except etcd.EtcdAlreadyExist:
                self._waiting.next(seen, _RETRY_SECONDS)  # its value is on the way
                raise EtcdRendezvousRetryImmediately from None
            seen = self._present()
        state = parsed(seen.text)
        self._saw_open |= state.status is not Status.CLOSED
        match state.status:
            case Status.CLOSED:
                raise RendezvousClosedError(f"the run {self._run_id!r} is closed")
            case Status.JOINABLE:
                return self.join_phase(str(state.version))
            case Status.FINAL:
                self.handle_existing_rendezvous(str(state.version))
                raise EtcdRendezvousRetryImmediately
        self._waiting.next(seen)
        raise EtcdRendezvousRetryableFailure(f"others are at it: {state.text}")

    def join_phase(self, expected_version: str) -> tuple[str, int, int]:
        """Join this version, wait until nobody else may, and confirm."""
        active_version, this_rank = self.join_rendezvous(expected_version)
        state = parsed(active_version.value)
        log.info("%s: rank %d of version %s", self._run_id, this_rank, expected_version)
        if this_rank == self._num_min_workers - 1 and state.status is Status.JOINABLE:
            deadline = time.time() + self._call_timeout(expected_version)
            self.handle_join_last_call(expected_version, deadline)
        self.wait_for_peers(expected_version)
        return self.confirm_phase(expected_version, this_rank)

    def _call_timeout(self, version: str) -> float:
        recovery = self._recovery_call_timeout
        return self._last_call_timeout if recovery is None or version == FIRST_VERSION else recovery

    def confirm_phase(self, expected_version: str, this_rank: int) -> tuple[str, int, int]:
        """Say that we are there, and wait until every participant has."""
        self.confirm_membership(expected_version, this_rank)
        state = parsed(self.wait_for_final(expected_version).value)
        self._completed = expected_version
        self._looked = (time.monotonic(), None)
        self._spare = (time.monotonic() + _YOUNG_SECONDS, None)
        if self._place is not None:
            self._place.confirm_final(state.text)
        log.info("%s: version %s is final: %s", self._run_id, expected_version, state.text)
        return expected_version, this_rank, len(state.participants)

    def handle_existing_rendezvous(self, expected_version: str) -> None:
        """Announce ourselves to a final version, and wait until it is over."""
        self.announce_self_waiting(expected_version)
        log.info("%s: version %s goes on: standing by for a place", self._run_id, expected_version)
        self.wait_for_rendezvous_to_free(expected_version)

    # -- the state ------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Raises etcd.EtcdException where etcd does not answer."""
        state = self._active.state()
        return state is not None and state.status is Status.CLOSED

    def get_rdzv_state(self) -> tuple[Any, dict[str, Any]]:
        """`active_version` as etcd has it, and as it reads.

        Raises etcd.EtcdKeyNotFound where there is none.
        """
        active_version, state = self._active.read()
        return active_version, dict(state.fields)

    def try_wait_for_state_change(
        self, etcd_index: int, timeout: float | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Wait for a change at or after an index of etcd, for a time or until the deadline.

        Returns what is there then, changed or not. Raises RendezvousTimeoutError after the
        deadline, etcd.EtcdKeyNotFound where nothing is there.
        """
        until = time.monotonic() + (self._waiting.left_seconds if timeout is None else timeout)
        seen = self._waiting.look()
        while seen.index < etcd_index and (left := until - time.monotonic()) > 0:
            later = self._waiting.next(seen, left)
            if later.text != seen.text:
                seen = later
                break
            seen = later
        if seen.text is None:
            raise etcd.EtcdKeyNotFound(f"Key not found : {self._paths.active}")
        return self._active.result(seen), dict(parsed(seen.text).fields)

    def num_nodes_waiting(self) -> int:
        """How many wait for the next version; more than 0 too where ours is over.

        Looks after the members' keys now and then, so that the loss of a node is told.
        When etcd was away they count again once all who live have had the time to set theirs.
        Raises etcd.EtcdException where etcd does not answer.
        """
        try:
            state = self._active.state()
        except etcd.EtcdException:
            self._failed_at = time.monotonic()
            raise
        ours = self._completed
        alive, spare = None, 0
        if state is None and is_lost(self.client, self._paths):
            return 0  # it is not over: the members put it back
        if state is not None and ours is not None and state.has(Status.FINAL, ours):
            looked, alive = self._looked
            if self._unsettled_seconds() > 0:
                alive = None
                self._looked = (0.0, None)
            elif time.monotonic() - looked > KEEPALIVE_TTL_SECONDS / 4:
                alive = self._keep_alives(ours)
                self._looked = (time.monotonic(), alive)
            until, known = self._spare
            young = known is None or time.monotonic() < until
            spare = patience.spare_nodes(state, self._num_max_workers, known or 0, young)
            self._spare = (until, spare)
        return patience.nodes_waiting(state, ours, alive, spare)

    def lost(self) -> bool:
        """Whether a member of our version is gone, as the last `num_nodes_waiting` has seen it."""
        state, ours = self._active.state(), self._completed
        final = state is not None and ours is not None and state.has(Status.FINAL, ours)
        return final and state is not None and patience.is_lost(state, self._looked[1])

    def gone(self) -> frozenset[int]:
        """The ranks of our version whose members are gone, as `num_nodes_waiting` has seen it."""
        state, ours, place = self._active.state(), self._completed, self._place
        if state is None or ours is None or not state.has(Status.FINAL, ours):
            return frozenset()
        own = frozenset() if place is None else frozenset({place.rank})
        return patience.gone(state, self._looked[1]) - own

    def moved_on(self) -> bool:
        """Whether our version is over, or is about to be, for others that want a newer one."""
        state, ours = self._active.state(), self._completed
        if ours is None or (state is None and is_lost(self.client, self._paths)):
            return False
        return patience.moved_on(state, ours, self._looked[1])

    def stay(self) -> None:
        """Be no loss to our version any more, whatever becomes of us: we are done with it.

        Raises etcd.EtcdException where etcd does not answer; it is tried again.
        """
        if self._place is not None and self._place.version == self._completed:
            self._place.stay()

    def setting_up(self) -> bool:
        """Whether somebody is just making a version, as far as a barrier of ours has seen."""
        text = self._feed.seen.text if self._waiting.active else None
        return text is not None and parsed(text).status is Status.SETUP

    # -- paths, leases, data --------------------------------------------------------

    def get_path(self, path: str) -> str:
        """A path of this run."""
        return self._paths.of_run(path)

    def create_path_if_not_exists(self, full_path: str, ttl: int | None = None) -> None:
        """Make a folder, for `ttl` seconds or for good."""
        make_folder(self.client, full_path, ttl)

    def setup_lease_renewal(self, full_path: str, ttl: float) -> threading.Event:
        """Keep a path from running out until the returned event is set, or it is gone.

        Goes on through any trouble with etcd.
        """
        return renew(self.client, full_path, ttl)

    def store_extra_data(self, rdzv_version: str, key: str, value: Any) -> None:
        """Give something to the other members of a version, as JSON."""
        extra_data.store(self.client, self._paths.extra_data(rdzv_version), key, value)

    def load_extra_data(self, rdzv_version: str, key: str, timeout: float | None = None) -> Any:
        """Wait for what a member gives. Raises LookupError after `timeout` seconds."""
        return extra_data.load(self.client, self._paths.extra_data(rdzv_version), key, timeout)

    def setup_kv_store(self, rdzv_version: str) -> EtcdStore:
        """The store of a version. Its folder comes with the first key."""
        return EtcdStore(self.client, self._paths.store(rdzv_version))
