"""Steps of one member through a version: create, join, wait, confirm, announce, free."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import re
import time
from typing import Any

import etcd
import urllib3

from elasticjob_rendezvous.api import RendezvousStateError
from elasticjob_rendezvous.etcd_v2.active_version import ActiveVersion, parsed
from elasticjob_rendezvous.etcd_v2.core import delays, transitions
from elasticjob_rendezvous.etcd_v2.core.records import (
    FIRST_VERSION,
    JOINABLE_TTL_SECONDS,
    KEEPALIVE_TTL_SECONDS,
    Paths,
    State,
    Status,
    is_keep_alive,
)
from elasticjob_rendezvous.etcd_v2.core.transitions import (
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
)
from elasticjob_rendezvous.etcd_v2.directories import lay_out
from elasticjob_rendezvous.etcd_v2.keep_alive import Holder, Place
from elasticjob_rendezvous.etcd_v2.watch import Feed, Seen, Waiting
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger(__name__)

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|µs|us|ns|m|s)")


def leader_seconds(client: Any) -> float:
    """Return the seconds since the server has had its leader; infinity if unknown.

    Small after every outage of etcd, since the cluster then elects a new leader.
    """
    url = f"{client.base_uri}/v2/stats/self"  # python-etcd's method logs a warning: no cluster id
    try:
        found = client.http.request("GET", url, timeout=client.read_timeout, retries=False)
        return duration_seconds(json.loads(found.data)["leaderInfo"]["uptime"])
    except (urllib3.exceptions.HTTPError, OSError, LookupError, TypeError, ValueError) as error:
        log.info("cannot read the uptime of etcd's leader: %r", error)
        return math.inf


def duration_seconds(text: str) -> float:
    """Parse a duration in Go's format, such as 1m2.5s. Raises ValueError."""
    parts = _PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise ValueError(f"a duration must be like 1m2.5s, not {echoed(text)}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


class Steps:
    """Base class of `EtcdRendezvous`; see there for the arguments."""

    def __init__(
        self,
        client: Any,
        paths: Paths,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        notice_seconds: float,
        retries: delays.Retries,
    ) -> None:
        self.client = client
        self._paths = paths
        self._run_id = paths.run_id
        self._num_min_workers = num_min_workers
        self._num_max_workers = num_max_workers
        self._notice_seconds = notice_seconds
        self._expected_workers: int | None = None
        self._retries = retries
        self._feed = Feed(client, paths, retries)
        self._active = ActiveVersion(client, paths, self._feed)
        self._waiting = Waiting(self._feed, timeout)
        self._place: Place | None = None
        self._failed_at = float("-inf")  # time of the last failure of etcd
        self._was_open = False  # set once the run has been seen open
        self._completed: str | None = None  # version of our last rendezvous
        self._announced: tuple[str, float] | None = None  # version and time

    def try_create_rendezvous(self) -> Any:
        """Create a new version and return it in state joinable.

        Raises:
            etcd.EtcdAlreadyExist: a version exists, or another member is creating one.
            EtcdRendezvousRetryableFailure: too slow, another member is creating a version.
            RendezvousStateError: the version counter is malformed.
        """
        setup = transitions.set_up()
        created = self._active.create(setup)
        try:
            version = self._next_version()
            self.client.write(self._paths.version(version), None, dir=True, prevExist=False)
            return self._active.swap(setup.state, transitions.opened(version))
        except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound) as error:
            # Delete our `setup` if it still exists, to spare the others the wait for its expiry.
            with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                self.client.delete(self._paths.active, prevIndex=created.modifiedIndex)
            raise EtcdRendezvousRetryableFailure(f"could not create a version: {error}") from error

    def join_rendezvous(self, expected_version: str) -> tuple[Any, int]:
        """Become a participant; return `(active_version, rank)`.

        Raises:
            EtcdRendezvousRetryableFailure: the version is no longer joinable.
            EtcdRendezvousRetryImmediately: another version has become joinable.
            RendezvousStateError: full but still joinable: another member has different sizes.
        """
        conflicts = 0
        while True:
            seen = self._present_in(expected_version, Status.JOINABLE)
            state = parsed(seen.text)
            if state.status is not Status.JOINABLE:
                raise EtcdRendezvousRetryableFailure(f"too late to join: {state.text}")
            if state.version != expected_version:
                raise EtcdRendezvousRetryImmediately
            try:
                step = transitions.joined(state, self._num_min_workers, self._num_max_workers)
            except transitions.NoSpace as error:
                raise RendezvousStateError(str(error)) from error
            try:
                active_version = self._active.swap(state, step.write)
            except etcd.EtcdCompareFailed:
                conflicts += 1
                seats = self._num_max_workers - step.rank
                self._waiting.pause(delays.after_conflict(conflicts, seats, random.random()))
                continue
            self._take_place(expected_version, step.rank, seen.reading)
            return active_version, step.rank

    def wait_for_peers(self, expected_version: str) -> Any:
        """Wait until the version is frozen, and return it.

        Raises EtcdRendezvousRetryableFailure if the version has ended.
        """
        return self._wait_for(Status.FROZEN, Status.JOINABLE, expected_version)

    def confirm_membership(self, expected_version: str, this_rank: int) -> Any:
        """Add our key to the frozen version, in rank order; the last key makes it final.

        Raises EtcdRendezvousRetryImmediately if the version is no longer frozen.
        """
        place = self._place
        if place is None or (place.version, place.rank) != (expected_version, this_rank):
            place = self._take_place(expected_version, this_rank, self._feed.seen.reading)
        while True:
            seen = self._present_in(expected_version, Status.FROZEN)
            state = parsed(seen.text)
            if not state.has(Status.FROZEN, expected_version) or (
                this_rank not in state.participants
            ):
                raise EtcdRendezvousRetryImmediately
            self._check_place(seen, state)
            if below := transitions.unconfirmed_below(state, this_rank):
                later = self._waiting.next(seen, delays.before_confirming(below))
                if later.text != seen.text:
                    continue
            if (write := transitions.confirmed(state, place.key)) is None:
                return self._active.result(seen)  # the reply to an earlier write was lost
            with contextlib.suppress(etcd.EtcdCompareFailed):
                return self._active.swap(state, write)

    def wait_for_final(self, expected_version: str) -> Any:
        """Wait until all members have confirmed, and return the final version.

        Raises EtcdRendezvousRetryableFailure if the version has ended.
        """
        return self._wait_for(Status.FINAL, Status.FROZEN, expected_version)

    def announce_self_waiting(self, expected_version: str) -> Any:
        """Increment the number of waiting members, once per version.

        Raises EtcdRendezvousRetryImmediately if the version is no longer final.
        """
        conflicts = 0
        while True:
            seen = self._present_in(expected_version, Status.FINAL)
            state = parsed(seen.text)
            if not state.has(Status.FINAL, expected_version):
                raise EtcdRendezvousRetryImmediately
            if self._announced is not None and self._announced[0] == expected_version:
                return self._active.result(seen)
            try:
                active_version = self._active.swap(state, transitions.announced(state))
            except etcd.EtcdCompareFailed:
                conflicts += 1
                competitors = len(state.participants) + state.waiting
                self._waiting.pause(delays.after_conflict(conflicts, competitors, random.random()))
                continue
            self._announced = (expected_version, time.monotonic())
            return active_version

    def wait_for_rendezvous_to_free(self, expected_version: str) -> None:
        """Wait for the end of a final version, and destroy it if one of its members is gone."""
        since = self._announced[1] if self._announced else time.monotonic()
        own = self._place.key if self._place and self._place.version == expected_version else None
        seen, listed, reading, probed = self._waiting.current(), set[str](), -1, False
        while seen.text is not None:
            state = parsed(seen.text)
            if not state.has(Status.FINAL, expected_version):
                return
            unsettled_seconds = self._unsettled_seconds()
            if unsettled_seconds > 0:
                alive, reading = set(delays.keys_of(state)), -1
            else:
                if seen.reading != reading:
                    listed, reading = self._keep_alives(expected_version), seen.reading
                alive = listed - seen.gone
                if not probed and delays.is_lost(state, alive):
                    probed = True
                    self._recall_outage()
                    continue
            waited = time.monotonic() - since
            match delays.verdict_on_final(state, alive, own, waited, self._notice_seconds):
                case delays.Free(reason):
                    self._destroy(state, reason)
                    return
                case delays.Stay(seconds):
                    times = [s for s in (seconds, unsettled_seconds) if s]
                    seen = self._waiting.next(seen, min(times, default=None))

    def _unsettled_seconds(self) -> float:
        """Return the seconds for which missing keys prove nothing after an outage of etcd.

        All keys may have expired during the outage; living members then set theirs again.
        """
        failed_at = max(self._failed_at, self._feed.failed_at)
        if self._place is not None:
            failed_at = max(failed_at, self._place.failed_at)
        return max(0.0, failed_at + KEEPALIVE_TTL_SECONDS - time.monotonic())

    def _recall_outage(self) -> None:
        """Derive a recent outage from the age of etcd's leader, as a new member did not see it."""
        began_at = time.monotonic() - leader_seconds(self.client)
        self._failed_at = max(self._failed_at, began_at)

    def handle_join_last_call(self, expected_version: str, deadline: float) -> None:
        """Wait until `deadline` (a `time.time()` value) for further joins, then freeze the version.

        Until then only this member keeps the version alive. In the first version the wait ends
        early once the expected number of members, if known, has joined.

        Raises EtcdRendezvousRetryableFailure if the version is neither joinable nor frozen.
        """
        ends = time.monotonic() + deadline - time.time()
        seen = self._waiting.current()
        keep_at = time.monotonic()
        while (state := self._unfinished(seen, expected_version)).status is Status.JOINABLE:
            now = time.monotonic()
            with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                if now >= ends or self._all_are_here(state):
                    self._active.swap(state, transitions.frozen(state))
                elif now >= keep_at:
                    self._active.swap(state, transitions.held(state))
                    keep_at = now + JOINABLE_TTL_SECONDS / 2
            later = self._waiting.next(seen, max(0.0, min(ends, keep_at) - now))
            if later.text != seen.text:  # a join renews the time to live
                keep_at = time.monotonic() + JOINABLE_TTL_SECONDS / 2
            seen = later

    def _all_are_here(self, state: State) -> bool:
        expected = self._expected_workers
        first = state.version == FIRST_VERSION
        return expected is not None and first and len(state.participants) >= expected

    # -- helpers of the steps ----------------------------------------------------------

    def _present(self) -> Seen:
        """Return the present state. Raises EtcdRendezvousRetryImmediately if there is none."""
        seen = self._waiting.current()
        if seen.text is None:
            raise EtcdRendezvousRetryImmediately
        return seen

    def _present_in(self, version: str, status: Status) -> Seen:
        """Return the present state. Raises like `_present`."""
        self._await_status(version, status)
        return self._present()

    def _await_status(self, version: str, *statuses: Status) -> Seen:
        """Return the state, read from etcd unless the watch shows one of these statuses.

        The watch can be behind a change that the caller knows of.
        """
        seen = self._waiting.current()
        if seen.text is not None and any(
            parsed(seen.text).has(status, version) for status in statuses
        ):
            return seen
        self._active.state()
        return self._waiting.current()

    def _unfinished(self, seen: Seen, version: str) -> State:
        """Return the state, joinable or frozen; raise if the version has ended.

        Destroys the version if a participant has died.
        """
        if seen.text is None:
            raise EtcdRendezvousRetryableFailure(f"version {version} is gone")
        state = parsed(seen.text)
        if state.version != version or state.status not in (Status.JOINABLE, Status.FROZEN):
            raise EtcdRendezvousRetryableFailure(f"version {version} is over: {state.text}")
        if missing := delays.missing_members(state, seen.gone, self._paths.version(version)):
            self._destroy(state, f"{missing[0]} is not renewed")
            raise EtcdRendezvousRetryImmediately
        self._check_place(seen, state)
        return state

    def _take_place(self, version: str, rank: int, reading: int) -> Place:
        place = self._place = Place(self.client, self._paths, version, rank, reading, self._retries)
        place.take()
        return place

    def _check_place(self, seen: Seen, state: State) -> None:
        """Verify the owner of our key after a new reading of everything.

        An etcd that lost its data may assign our version and rank to another member. Raises
        EtcdRendezvousRetryImmediately if the key belongs to another member, or is gone before the
        version is final. If etcd does not answer, the next call checks again.
        """
        place = self._place
        if place is None or place.reading == seen.reading:
            return
        try:
            holder = place.holder()
        except etcd.EtcdException as error:
            log.info("%s: cannot read our key: %r", self._run_id, error)
            return
        if holder is Holder.US or (holder is Holder.NOBODY and state.status is Status.FINAL):
            place.reading = seen.reading
            return
        self._place = None
        place.release()
        if holder is Holder.NOBODY:  # its new owner, if any, joins again as we do
            self._destroy(state, f"{place.key} is gone")
        raise EtcdRendezvousRetryImmediately

    def _wait_for(self, wanted: Status, until: Status, version: str) -> Any:
        seen = self._await_status(version, wanted, until)
        while seen.text is None or not parsed(seen.text).has(wanted, version):
            if self._unfinished(seen, version).status is not until:
                raise EtcdRendezvousRetryableFailure(f"version {version} is over: {seen.text}")
            seen = self._waiting.next(seen)
        self._check_place(seen, parsed(seen.text))
        return self._active.result(seen)

    def _destroy(self, state: State, reason: str) -> None:
        log.info("%s: version %s is over: %s", self._run_id, state.version, reason)
        with contextlib.suppress(etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
            self._active.destroy(state)

    def _keep_alives(self, version: str) -> set[str]:
        """Return the existing keys of a version's members, without ours if another wrote it."""
        try:
            folder = self.client.read(self._paths.version(version))
        except etcd.EtcdKeyNotFound:
            return set()
        place = self._place
        nodes = (node for node in folder.children if is_keep_alive(node.key))
        return {node.key for node in nodes if place is None or not place.belongs_to_another(node)}

    def _next_version(self) -> str:
        """Increment the version counter. Raises etcd.EtcdCompareFailed if another member did."""
        try:
            counter = self.client.get(self._paths.counter)
        except etcd.EtcdKeyNotFound:
            lay_out(self.client, self._paths, self._completed)  # etcd lost its data
            counter = self.client.get(self._paths.counter)
        if not re.fullmatch(r"[0-9]+", counter.value):
            raise RendezvousStateError(f"the version counter is malformed: {counter.value!r}")
        version = str(int(counter.value) + 1)
        self.client.write(self._paths.counter, version, prevIndex=counter.modifiedIndex)
        return version
