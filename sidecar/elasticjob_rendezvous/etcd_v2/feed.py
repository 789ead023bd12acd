"""What stands in etcd under a run's rendezvous, pushed: one stream of events, read by a thread.

The stream is opened first and the state read after, so that nothing is missed between; a
stream that ends is opened anew, and everything read again. Others may add what they learnt
(`learn`), as a compare-and-set tells the present value whether it succeeds or fails.
"""

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

from elasticjob_rendezvous.etcd_v2.core.paths import Paths, is_keep_alive
from elasticjob_rendezvous.etcd_v2.core.patience import after_failure, takes_part

log = logging.getLogger(__name__)

_IDLE_SECONDS = 30.0
"""A stream that is silent for so long is opened anew: its server may be gone without a word."""
_GONE = frozenset({"expire", "delete", "compareAndDelete"})


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest that is known. `revision` grows with every change that anybody may care about.

    `text` is that of `active_version`, None where there is none, as of etcd's `index`. `gone`
    are the participants' keys that ran out or were deleted while we looked. `reading` counts how
    often everything was read anew: what happened to other keys in between is not known.
    """

    revision: int = 0
    reading: int = 0
    index: int = -1
    text: str | None = None
    gone: frozenset[str] = frozenset()


class Feed:
    """The newest `Seen`, kept up to date by a thread from `open` to `close`."""

    def __init__(self, client: Any, paths: Paths) -> None:
        self._client = client
        self._paths = paths
        self._changed = threading.Condition()
        self._seen = Seen()
        self._stop: threading.Event | None = None
        self._pid = os.getpid()
        self._response: Any = None
        self._failure: Exception | None = None
        self.failed_at = float("-inf")
        """When etcd did not answer last, in monotonic seconds."""
        self._inside = f'"key":"{paths.rendezvous}/v_'.encode()

    @property
    def seen(self) -> Seen:
        return self._seen

    @property
    def failure(self) -> Exception | None:
        """Why nothing new is heard, None where all is well."""
        return self._failure

    def open(self) -> None:
        """Start reading, unless it is going on."""
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
            return  # in a process that was forked the stream is the parent's
        stop.set()
        if (response := self._response) is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
                response.shutdown()
        self.wake()

    def wake(self) -> None:
        """Let all that wait look again. Safe in a signal handler."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, after: int, seconds: float) -> Seen:
        """The newest, once its revision is above `after`, or when the time is up or `wake` calls.

        At first that is what the first reading finds.
        """
        with self._changed:
            if self._seen.revision <= after or self._seen.index < 0:
                self._changed.wait(max(0.0, seconds))
            return self._seen

    def learn(self, text: str | None, index: int) -> None:
        """`active_version` had this text when etcd's index was `index`."""
        with self._changed:
            seen = self._seen
            if index > seen.index:
                changed = text != seen.text or seen.index < 0
                self._update(replace(seen, text=text, index=index), changed)

    def forget(self) -> None:
        """What was known is of another cluster."""
        with self._changed:
            self._seen = replace(self._seen, index=-1)

    def _update(self, seen: Seen, changed: bool) -> None:
        """Under the lock."""
        self._seen = replace(seen, revision=seen.revision + int(changed))
        if changed:
            self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------

    def _run(self, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                self._stream(stop)
                failures = 1  # it ended by itself: open the next at leisure
            except Exception as error:  # a top loop: whoever waits must hear again
                if stop.is_set():
                    return
                failures = 1 if self._failure is None else failures + 1
                self._failure, self.failed_at = error, time.monotonic()
                log.info("the watch of %s ended: %r", self._paths.rendezvous, error)
                self._probe()
            stop.wait(after_failure(failures, random.random()))

    def _probe(self) -> None:
        """Ask anything, so that the client goes on with another server if this one fails."""
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
        if index < before:  # a server that lags, unless all servers together know no better
            text, index = self._read(quorum=True)
        lost = index < before
        if lost:
            log.warning("etcd has lost its data: %s begins anew", self._paths.rendezvous)
        with self._changed:
            seen = self._seen
            if index < seen.index and not lost:
                text, index = seen.text, seen.index
            news = replace(seen, text=text, index=index, reading=seen.reading + 1, gone=frozenset())
            self._update(news, changed=True)

    def _read(self, **options: bool) -> tuple[str | None, int]:
        """The text, and etcd's index."""
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
            return  # the traffic of the workers' stores
        event = json.loads(line)
        action, node = event["action"], event["node"]
        gone, key = action in _GONE, node["key"]
        if key == self._paths.active:
            self.learn(None if gone else node["value"], node["modifiedIndex"])
        elif gone and self._paths.active.startswith(key + "/"):
            self.learn(None, node["modifiedIndex"])  # the whole folder
        elif is_keep_alive(key):
            with self._changed:
                seen = self._seen
                if gone and (node["modifiedIndex"] < seen.index or not takes_part(seen.text, key)):
                    return  # somebody left, and its rank may be another's by now
                keys = seen.gone | {key} if gone else seen.gone - {key}
                self._update(replace(seen, gone=keys), changed=keys != seen.gone)
