"""Timeouts of the store, and its watch, whose server may disappear silently."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import etcd
import pytest

from elasticjob_rendezvous.etcd_v2.store import EtcdStore


class Deaf:
    """Client whose first watch misses the key that was set meanwhile."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def get(self, path: str) -> Any:
        if not self.asked:
            raise etcd.EtcdKeyNotFound("none", {"index": 7})
        found = etcd.EtcdResult("get", {"key": path, "value": "dg==", "modifiedIndex": 9})
        found.etcd_index = 9
        return found

    def watch(self, path: str, index: int, timeout: float) -> Any:
        self.asked.append(timeout)
        raise etcd.EtcdWatchTimedOut("silence")


def test_silent_watch_is_not_trusted_until_the_timeout() -> None:
    client = Deaf()
    assert EtcdStore(client, "/store", timedelta(seconds=300)).get("key") == b"v"
    assert client.asked == [30.0]


class Empty:
    """Client without keys, whose watches are an error."""

    def get(self, path: str) -> Any:
        raise etcd.EtcdKeyNotFound("none", {"index": 7})


def test_timeout_of_zero_waits_for_no_key() -> None:
    store = EtcdStore(Empty(), "/store", timedelta(0))
    for each in (store, store.clone()):
        assert each.timeout == timedelta(0)
        with pytest.raises(LookupError):
            each.get("key")
    assert EtcdStore(Empty(), "/store").timeout == timedelta(seconds=300)
