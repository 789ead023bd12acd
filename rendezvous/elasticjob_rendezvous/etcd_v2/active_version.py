"""Key `active_version` in etcd: reads and compare-and-sets, whose replies also update the feed."""

from __future__ import annotations

from typing import Any

import etcd

from elasticjob_rendezvous.api import RendezvousStateError
from elasticjob_rendezvous.etcd_v2.core.records import MalformedState, Paths, State, read
from elasticjob_rendezvous.etcd_v2.core.transitions import Write
from elasticjob_rendezvous.etcd_v2.watch import Feed, Seen


class ActiveVersion:
    """Single key through which all members of a run coordinate."""

    def __init__(self, client: Any, paths: Paths, feed: Feed) -> None:
        self._client = client
        self._paths = paths
        self._feed = feed

    def read(self) -> tuple[Any, State]:
        """Read the key. Raises etcd.EtcdKeyNotFound, RendezvousStateError."""
        found = self._client.get(self._paths.active)
        self._feed.record(found.value, found.etcd_index)
        return found, parsed(found.value)

    def state(self) -> State | None:
        """Return the state; None if the key does not exist."""
        try:
            return self.read()[1]
        except etcd.EtcdKeyNotFound as error:
            self._feed.record(None, int(error.payload["index"]))
            return None

    def create(self, write: Write) -> Any:
        """Create the key. Raises etcd.EtcdAlreadyExist."""
        result = self._client.write(
            self._paths.active, write.state.text, ttl=write.ttl_seconds, prevExist=False
        )
        self._feed.record(result.value, result.modifiedIndex)
        return result

    def swap(self, before: State, write: Write) -> Any:
        """Compare and set the key.

        Raises etcd.EtcdCompareFailed or etcd.EtcdKeyNotFound, after passing the present value to
        the feed.
        """
        try:
            result = self._client.test_and_set(
                self._paths.active, write.state.text, before.text, ttl=write.ttl_seconds
            )
        except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound) as error:
            self._record_refusal(before, error)
            raise
        self._feed.record(result.value, result.modifiedIndex)
        return result

    def destroy(self, before: State) -> None:
        """Delete the key if it still holds `before`. Raises like `swap`."""
        try:
            result = self._client.delete(self._paths.active, prevValue=before.text)
        except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound) as error:
            self._record_refusal(before, error)
            raise
        self._feed.record(None, result.modifiedIndex)

    def result(self, seen: Seen) -> Any:
        """Convert a `Seen` to python-etcd's result type."""
        node = {"key": self._paths.active, "value": seen.text, "modifiedIndex": seen.index}
        result = etcd.EtcdResult("get", node)
        result.etcd_index = seen.index
        return result

    def _record_refusal(self, before: State, error: etcd.EtcdException) -> None:
        """Pass the present value to the feed: etcd's refusal contains it."""
        payload = error.payload or {}
        cause, index = str(payload.get("cause")), payload.get("index")
        if index is None:
            return
        if isinstance(error, etcd.EtcdKeyNotFound):
            self._feed.record(None, int(index))
        elif cause.startswith(start := f"[{before.text} != ") and cause.endswith("]"):
            self._feed.record(cause[len(start) : -1], int(index))


def parsed(text: str | None) -> State:
    """Parse a state. Raises RendezvousStateError."""
    try:
        return read(text)
    except MalformedState as error:
        raise RendezvousStateError(f"the rendezvous state is malformed: {error}") from error
