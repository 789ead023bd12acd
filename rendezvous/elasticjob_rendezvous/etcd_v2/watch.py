"""Watch of a run's rendezvous in etcd, and the waits for its changes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import etcd
import urllib3

from elasticjob_rendezvous.api import RendezvousGracefulExitError, RendezvousTimeoutError
from elasticjob_rendezvous.etcd_v2.core.delays import Retries, takes_part
from elasticjob_rendezvous.etcd_v2.core.records import Paths, is_keep_alive

log = logging.getLogger(__name__)

_IDLE_SECONDS = 30.0
"""Maximum silence of a stream before it is reopened: its server may have disappeared."""
_GONE = frozenset({"expire", "delete", "compareAndDelete"})


@dataclass(frozen=True, slots=True)
class Seen:
    """Newest known state. `revision` grows with every relevant change.

    `text` is the value of `active_version` at etcd's `index`, None if it does not exist. `gone`
    holds the participants' keys that expired or were deleted during the watch. `reading` counts
    the complete reads; changes of other keys between a stream's end and the next read are unknown.
    """

    revision: int = 0
    reading: int = 0
    index: int = -1
    text: str | None = None
    gone: frozenset[str] = frozenset()


class Feed:
    """Holder of the newest `Seen`, which a thread updates from `open` to `close`."""

    def __init__(self, client: Any, paths: Paths, retries: Retries) -> None:
        self._client = client
        self._paths = paths
        self._retries = retries
        self._changed = threading.Condition()
        self._seen = Seen()
        self._stop: threading.Event | None = None
        self._pid = os.getpid()
        self._response: Any = None
        self._failure: Exception | None = None
        self.failed_at = float("-inf")
        """Monotonic time of the last failure of etcd."""
        self._inside = f'"key":"{paths.rendezvous}/v_'.encode()

    @property
    def seen(self) -> Seen:
        return self._seen

    @property
    def failure(self) -> Exception | None:
        """Error that interrupts the updates; None if there is none."""
        return self._failure

    def open(self) -> None:
        """Start reading, unless it is already in progress."""
        if self._pid != os.getpid():
            self._pid, self._stop, self._response = os.getpid(), None, None
        if self._stop is None:
            self._seen = replace(self._seen, index=-1, text=None, gone=frozenset())
            self._stop = threading.Event()
            name = f"watch {self._paths.run_id}"
            threading.Thread(target=self._run, args=(self._stop,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop reading; the thread ends by itself."""
        stop, self._stop = self._stop, None
        if stop is None or self._pid != os.getpid():
            return  # in a forked process the stream belongs to the parent
        stop.set()
        if (response := self._response) is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
                response.shutdown()
        self.wake()

    def wake(self) -> None:
        """Wake all waiting threads. Safe in a signal handler."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, after: int, seconds: float) -> Seen:
        """Wait for a revision above `after`, the timeout or `wake`; return the newest state.

        Before the first reading, wait for its result.
        """
        with self._changed:
            if self._seen.revision <= after or self._seen.index < 0:
                self._changed.wait(max(0.0, seconds))
            return self._seen

    def record(self, text: str | None, index: int) -> None:
        """Record that `active_version` had this text at etcd's index `index`."""
        with self._changed:
            seen = self._seen
            if index > seen.index:
                changed = text != seen.text or seen.index < 0
                self._update(replace(seen, text=text, index=index), changed)

    def forget(self) -> None:
        """Discard the state that was read: it belongs to another cluster."""
        with self._changed:
            self._seen = replace(self._seen, index=-1)

    def _update(self, seen: Seen, changed: bool) -> None:
        """Store a state and notify waiters of a change. The caller holds the lock."""
        self._seen = replace(seen, revision=seen.revision + int(changed))
        if changed:
            self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------

    def _run(self, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                self._stream(stop)
                failures = 1  # a regular end: reopen after the shortest delay
            except Exception as error:  # top-level loop: updates must resume
                if stop.is_set():
                    return
                failures = 1 if self._failure is None else failures + 1
                self._failure, self.failed_at = error, time.monotonic()
                log.info("the watch of %s ended: %r", self._paths.rendezvous, error)
                self._probe()
            stop.wait(self._retries.watch(failures, random.random()))

    def _probe(self) -> None:
        """Send any request, so that the client switches servers if the current one fails."""
        try:
            self._client.read(self._paths.active)
        except etcd.EtcdClusterIdChanged:
            self.forget()
        except etcd.EtcdException:
            pass

    def _stream(self, stop: threading.Event) -> None:
        client = self._client
        headers = {}
        if disown := getattr(client, "disown", None):
            disown()
        if client.username and client.password:
            headers = urllib3.make_headers(basic_auth=f"{client.username}:{client.password}")
        response = client.http.request(
            "GET",
            client.base_uri + client.key_endpoint + self._paths.rendezvous,
            fields={"wait": "true", "stream": "true", "recursive": "true"},
            headers=headers,
            timeout=urllib3.Timeout(connect=client.read_timeout, read=_IDLE_SECONDS),
            retries=False,
            preload_content=False,
        )
        self._response = response
        try:
            if response.status != 200:
                raise etcd.EtcdException(f"HTTP {response.status}: {response.data[:200]!r}")
            self._read_all()
            self._failure = None
            with contextlib.suppress(urllib3.exceptions.ReadTimeoutError):
                self._follow(response, stop)
        finally:
            self._response = None
            response.close()

    def _read_all(self) -> None:
        before = self._seen.index
        text, index = self._read()
        if index < before:  # the server lags, unless a quorum read confirms the index
            text, index = self._read(quorum=True)
        lost = index < before
        if lost:
            log.warning("etcd has lost its data: %s starts again", self._paths.rendezvous)
        with self._changed:
            seen = self._seen
            if index < seen.index and not lost:
                text, index = seen.text, seen.index
            news = replace(seen, text=text, index=index, reading=seen.reading + 1, gone=frozenset())
            self._update(news, changed=True)

    def _read(self, **options: bool) -> tuple[str | None, int]:
        """Return the text of `active_version`, and etcd's index."""
        try:
            found = self._client.read(self._paths.active, **options)
            return found.value, found.etcd_index
        except etcd.EtcdKeyNotFound as error:
            return None, int(error.payload["index"])

    def _follow(self, response: Any, stop: threading.Event) -> None:
        rest = b""
        for chunk in response.stream(None):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    self._take(line)
            if stop.is_set():
                return

    def _take(self, line: bytes) -> None:
        if self._inside in line and b"/rank_" not in line:
            return  # traffic of the workers' stores
        event = json.loads(line)
        action, node = event["action"], event["node"]
        gone, key = action in _GONE, node["key"]
        if key == self._paths.active:
            self.record(None if gone else node["value"], node["modifiedIndex"])
        elif gone and self._paths.active.startswith(key + "/"):
            self.record(None, node["modifiedIndex"])  # the whole directory was deleted
        elif is_keep_alive(key):
            with self._changed:
                seen = self._seen
                if gone and (node["modifiedIndex"] < seen.index or not takes_part(seen.text, key)):
                    return  # a member left, and its rank may have a new owner
                keys = seen.gone | {key} if gone else seen.gone - {key}
                self._update(replace(seen, gone=keys), changed=keys != seen.gone)


class Waiting:
    """Wait for at most `timeout_seconds` after `begin`, or after the first use without it."""

    def __init__(self, feed: Feed, timeout_seconds: float) -> None:
        self._feed = feed
        self._timeout_seconds = timeout_seconds
        self._deadline: float | None = None
        self._ended = threading.Event()
        self.active = False
        """True while a barrier is in progress."""

    def begin(self) -> None:
        self._deadline = time.monotonic() + self._timeout_seconds
        self.active = True

    def finish(self) -> None:
        self._deadline = None
        self.active = False

    def end(self) -> None:
        """Make all present and future waits raise RendezvousGracefulExitError."""
        self._ended.set()
        self._feed.wake()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def left_seconds(self) -> float:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_seconds
        return self._deadline - time.monotonic()

    def check(self) -> None:
        """Check deadline and cancellation.

        Raises RendezvousTimeoutError, RendezvousGracefulExitError.
        """
        self.check_going()
        if self.left_seconds <= 0:
            cause = self._feed.failure
            cause_text = f"; etcd does not answer: {cause}" if cause else ""
            raise RendezvousTimeoutError(
                f"no rendezvous within {self._timeout_seconds:g} s{cause_text}"
            ) from cause

    def check_going(self) -> None:
        """Check cancellation. Raises RendezvousGracefulExitError."""
        if self._ended.is_set():
            raise RendezvousGracefulExitError("this member left the rendezvous")

    def current(self) -> Seen:
        """Return the present state; wait for the first reading if necessary."""
        self._feed.open()
        seen = self._feed.seen
        while seen.index < 0:
            self.check()
            seen = self._feed.wait(seen.revision, self.left_seconds)
        return seen

    def next(self, seen: Seen, seconds: float | None = None) -> Seen:
        """Wait for a change or `seconds`, and return the state. Raises like `check`."""
        self.check()
        left = self.left_seconds
        self._feed.open()
        seen = self._feed.wait(seen.revision, left if seconds is None else min(seconds, left))
        self.check()
        return seen if seen.index >= 0 else self.current()

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`. Raises like `check`."""
        self._ended.wait(min(seconds, max(0.0, self.left_seconds)))
        self.check()
