"""Member of a run's rendezvous over etcd's v2 API, compatible with torch's `EtcdRendezvous`.

Names, phases and the data in etcd are those of
`torch.distributed.elastic.rendezvous.etcd_rendezvous`; members of both kinds can join the same
version. The differences are the wait (one stream, see `watch`) and the handling of members that
leave or die; `docs/reference.md` lists them.
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

from elasticjob_rendezvous.api import RendezvousClosedError
from elasticjob_rendezvous.etcd_v2 import store
from elasticjob_rendezvous.etcd_v2.active_version import parsed
from elasticjob_rendezvous.etcd_v2.core import delays
from elasticjob_rendezvous.etcd_v2.core.records import (
    FIRST_VERSION,
    KEEPALIVE_TTL_SECONDS,
    RUN_TTL_SECONDS,
    Paths,
    Status,
)
from elasticjob_rendezvous.etcd_v2.core.transitions import (
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
)
from elasticjob_rendezvous.etcd_v2.directories import is_lost, lay_out, make_folder
from elasticjob_rendezvous.etcd_v2.keep_alive import renew
from elasticjob_rendezvous.etcd_v2.leaving import Endings
from elasticjob_rendezvous.etcd_v2.store import EtcdStore

log = logging.getLogger(__name__)

NOTICE_SECONDS = 1.0
"""Time for working members to notice a waiting one before their version is destroyed."""
_YOUNG_SECONDS = 1.0
"""Time after a version becomes final in which members without a rank in it announce themselves."""
_RETRY_SECONDS = 0.05


class EtcdRendezvous(Endings):
    """Member of the rendezvous of one run.

    Args:
        client: an `etcd.Client`, preferably from `create_client`.
        prefix: path of all runs in etcd.
        run_id: id of the run; other types, such as numbers, are converted to text.
        num_min_workers, num_max_workers: minimum and maximum number of members of a version.
        timeout: timeout of `rendezvous_barrier` in seconds.
        last_call_timeout: seconds for further joins once the minimum has joined.
        notice_seconds: see NOTICE_SECONDS.
        recovery_call_timeout: last call timeout of all versions but the first, if different.
        expected_workers: number of members that ends the first version's last call.
        retries: delays before requests to etcd are repeated; the default if absent.

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
        retries: delays.Retries | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._given_run_id = run_id
        paths = Paths.of(prefix, run_id)
        retries = retries or delays.Retries()
        super().__init__(
            client, paths, num_min_workers, num_max_workers, timeout, notice_seconds, retries
        )
        self._expected_workers = expected_workers
        self._last_call_timeout = last_call_timeout
        self._recovery_call_timeout = recovery_call_timeout
        self._checked: tuple[float, set[str] | None] = (0.0, None)  # time and keys of last check
        self._spare: tuple[float, int | None] = (0.0, None)  # end of counting, and the count
        lay_out(client, paths, None)
        self._lease_run_id_stop = renew(
            client, paths.run, RUN_TTL_SECONDS, retries, lost=lambda: True
        )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            if self._pid == os.getpid():  # in a forked process everything belongs to the parent
                self.close()

    @property
    def run_id(self) -> str:
        """Id of the run, as passed to the constructor."""
        return self._given_run_id

    def close(self) -> None:
        """End all threads and connections; our keys then expire."""
        self._lease_run_id_stop.set()
        if self._place is not None:
            self._place.release()
        self._feed.close()
        http = getattr(self.client, "http", None)
        if http is not None:
            http.clear()  # a store that is still in use opens new connections

    def leave(self) -> None:
        """Leave the rendezvous: a barrier in progress raises RendezvousGracefulExitError.

        Gives up our rank, so that the others need not wait for its expiry. The rendezvous
        remains open. Callable from any thread and from a signal handler.
        """
        self._waiting.end()
        if not self._waiting.active:
            self._withdraw()
            self.close()

    def rendezvous_barrier(self) -> tuple[str, int, int]:
        """Join the next version and block until it is final: `(rdzv_version, rank, world_size)`.

        Raises:
            RendezvousTimeoutError: no version became final within the timeout.
            RendezvousClosedError: the run is closed.
            RendezvousStateError: the state in etcd is malformed or contradicts our settings.
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
                    self._waiting.pause(delays.after_failure(failures, random.random()))
        except BaseException:
            self._withdraw()
            raise
        finally:
            self._waiting.finish()
            self._feed.close()
            if self._waiting.ended:  # `leave` could not close it during the barrier
                self.close()

    # -- phases ---------------------------------------------------------------------

    def init_phase(self) -> tuple[str, int, int]:
        """Create a version, join the present one, or wait for its end.

        Raises:
            RendezvousClosedError: the run is closed.
            EtcdRendezvousRetryableFailure: others were changing the state; start again.
            EtcdRendezvousRetryImmediately: the present version ended; start again.
        """
        self._give_up_place()
        seen = self._waiting.current()
        if seen.text is None:
            try:
                self.try_create_rendezvous()
            except etcd.EtcdAlreadyExist:
                self._waiting.next(seen, _RETRY_SECONDS)  # wait for its value in the feed
                raise EtcdRendezvousRetryImmediately from None
            seen = self._present()
        state = parsed(seen.text)
        self._was_open |= state.status is not Status.CLOSED
        match state.status:
            case Status.CLOSED:
                raise RendezvousClosedError(f"the run {self._run_id!r} is closed")
            case Status.JOINABLE:
                return self.join_phase(str(state.version))
            case Status.FINAL:
                self.handle_existing_rendezvous(str(state.version))
                raise EtcdRendezvousRetryImmediately
        self._waiting.next(seen)
        raise EtcdRendezvousRetryableFailure(f"other members are forming a version: {state.text}")

    def join_phase(self, expected_version: str) -> tuple[str, int, int]:
        """Join this version, wait until it is frozen, and confirm."""
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
        """Confirm our membership, and wait until every participant has confirmed."""
        self.confirm_membership(expected_version, this_rank)
        state = parsed(self.wait_for_final(expected_version).value)
        self._completed = expected_version
        self._checked = (time.monotonic(), None)
        self._spare = (time.monotonic() + _YOUNG_SECONDS, None)
        if self._place is not None:
            self._place.confirm_final(state.text)
        log.info("%s: version %s is final: %s", self._run_id, expected_version, state.text)
        return expected_version, this_rank, len(state.participants)

    def handle_existing_rendezvous(self, expected_version: str) -> None:
        """Announce ourselves in a final version, and wait for its end."""
        self.announce_self_waiting(expected_version)
        log.info("%s: version %s is final: standing by for a place", self._run_id, expected_version)
        self.wait_for_rendezvous_to_free(expected_version)

    # -- the state ------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Return True if the run is closed. Raises etcd.EtcdException if etcd does not answer."""
        state = self._active.state()
        return state is not None and state.status is Status.CLOSED

    def get_rdzv_state(self) -> tuple[Any, dict[str, Any]]:
        """Return etcd's result for `active_version`, and the parsed state.

        Raises etcd.EtcdKeyNotFound if it does not exist.
        """
        active_version, state = self._active.read()
        return active_version, dict(state.fields)

    def try_wait_for_state_change(
        self, etcd_index: int, timeout: float | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Wait for a change at or after an etcd index, up to `timeout` or the member's deadline.

        Returns the present state, changed or not. Raises RendezvousTimeoutError after the
        deadline, and etcd.EtcdKeyNotFound if there is no state.
        """
        until = time.monotonic() + (self._waiting.left_seconds if timeout is None else timeout)
        seen = self._waiting.current()
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
        """Return the number of members waiting for the next version; above 0 too if ours is over.

        Checks the members' keys periodically, so that the loss of a node counts as well. After an
        outage of etcd, missing keys count only once all living members have had time to set theirs.
        Raises etcd.EtcdException if etcd does not answer.
        """
        try:
            state = self._active.state()
        except etcd.EtcdException:
            self._failed_at = time.monotonic()
            raise
        ours = self._completed
        alive, spare = None, 0
        if state is None and is_lost(self.client, self._paths):
            return 0  # not over: its members restore it
        if state is not None and ours is not None and state.has(Status.FINAL, ours):
            checked_at, alive = self._checked
            if self._unsettled_seconds() > 0:
                alive = None
                self._checked = (0.0, None)
            elif time.monotonic() - checked_at > KEEPALIVE_TTL_SECONDS / 4:
                alive = self._keep_alives(ours)
                self._checked = (time.monotonic(), alive)
            until, known = self._spare
            young = known is None or time.monotonic() < until
            spare = delays.spare_nodes(state, self._num_max_workers, known or 0, young)
            self._spare = (until, spare)
        return delays.nodes_waiting(state, ours, alive, spare)

    def lost(self) -> bool:
        """Return True if a member of our version is gone, by the last `num_nodes_waiting`."""
        state, ours = self._active.state(), self._completed
        final = state is not None and ours is not None and state.has(Status.FINAL, ours)
        return final and state is not None and delays.is_lost(state, self._checked[1])

    def gone(self) -> frozenset[int]:
        """Return the ranks of lost members of our version, by the last `num_nodes_waiting`."""
        state, ours, place = self._active.state(), self._completed, self._place
        if state is None or ours is None or not state.has(Status.FINAL, ours):
            return frozenset()
        own = frozenset() if place is None else frozenset({place.rank})
        return delays.gone(state, self._checked[1]) - own

    def moved_on(self) -> bool:
        """Return True if other members have ended our version, or are about to, for a newer one."""
        state, ours = self._active.state(), self._completed
        if ours is None or (state is None and is_lost(self.client, self._paths)):
            return False
        return delays.moved_on(state, ours, self._checked[1])

    def stay(self) -> None:
        """Make our key permanent: we have finished, and our end must not count as a loss.

        Raises etcd.EtcdException if etcd does not answer; a later renewal tries again.
        """
        if self._place is not None and self._place.version == self._completed:
            self._place.stay()

    def setting_up(self) -> bool:
        """Return True if our barrier has seen that a member is creating a version."""
        text = self._feed.seen.text if self._waiting.active else None
        return text is not None and parsed(text).status is Status.SETUP

    # -- paths, leases, data --------------------------------------------------------

    def get_path(self, path: str) -> str:
        """Return a path of this run."""
        return self._paths.of_run(path)

    def create_path_if_not_exists(self, full_path: str, ttl: int | None = None) -> None:
        """Create a directory, for `ttl` seconds or permanently."""
        make_folder(self.client, full_path, ttl)

    def setup_lease_renewal(self, full_path: str, ttl: float) -> threading.Event:
        """Renew a path until the returned event is set or the path no longer exists.

        Continues through any trouble with etcd.
        """
        return renew(self.client, full_path, ttl, self._retries)

    def store_extra_data(self, rdzv_version: str, key: str, value: Any) -> None:
        """Share a value with the other members of a version, as JSON."""
        store.store(self.client, self._paths.extra_data(rdzv_version), key, value)

    def load_extra_data(self, rdzv_version: str, key: str, timeout: float | None = None) -> Any:
        """Wait for a shared value. Raises LookupError after `timeout` seconds."""
        return store.load(self.client, self._paths.extra_data(rdzv_version), key, timeout)

    def setup_kv_store(self, rdzv_version: str) -> EtcdStore:
        """Return the store of a version. The first key creates its directory."""
        return EtcdStore(self.client, self._paths.store(rdzv_version))
