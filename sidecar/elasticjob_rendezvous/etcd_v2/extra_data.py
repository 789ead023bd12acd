"""JSON object that the members of one version share, in addition to the store."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import etcd

from elasticjob_rendezvous.etcd_v2.core.patience import after_conflict

_CROWD = 64
_WATCH_SECONDS = 30.0


def store(client: Any, path: str, key: str, value: Any) -> None:
    """Set one field; concurrent writes by other members are preserved."""
    conflicts = 0
    while True:
        try:
            found = client.get(path)
        except etcd.EtcdKeyNotFound:
            found = None
        fields = json.loads(found.value) if found else {}
        condition = {"prevValue": found.value} if found else {"prevExist": False}
        try:
            client.write(path, json.dumps({**fields, key: value}), **condition)
        except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed):
            conflicts += 1
            time.sleep(after_conflict(conflicts, _CROWD, random.random()))
        else:
            return


def load(client: Any, path: str, key: str, timeout_seconds: float | None) -> Any:
    """Wait for a field and return it. Raises LookupError after the timeout."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        try:
            found = client.get(path)
            index = found.etcd_index
            fields = json.loads(found.value)
            if key in fields:
                return fields[key]
        except etcd.EtcdKeyNotFound as error:
            index = int(error.payload["index"])
        left = _WATCH_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise LookupError(f"no extra data {key!r} within {timeout_seconds:g} s at {path}")
        with contextlib.suppress(etcd.EtcdEventIndexCleared, etcd.EtcdWatchTimedOut):
            client.watch(path, index=index + 1, timeout=min(left, _WATCH_SECONDS))
