"""Store watch whose server may disappear silently."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import etcd

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
