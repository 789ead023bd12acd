"""Periodic renewal of a key or directory, in one thread each."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import etcd

log = logging.getLogger(__name__)


def renew(
    client: Any,
    path: str,
    ttl_seconds: float,
    *,
    first_after_seconds: float = 0.0,
    lost: Callable[[], bool] = lambda: False,
    failed: Callable[[], None] = lambda: None,
    refresh: Callable[[], object] | None = None,
) -> threading.Event:
    """Refresh `path` twice per time to live, until the returned event is set.

    torch's thread ends on almost any error. This one soon retries after every error: during an
    outage of etcd nothing expires, and no other member can observe an expiry. Only if the path no
    longer exists does `lost` decide whether to continue. The thread calls `failed` after every
    failure. `refresh` replaces the default request.
    """
    stop = threading.Event()
    how = refresh or (lambda: client.refresh(path, ttl=ttl_seconds))
    arguments = (how, path, ttl_seconds, first_after_seconds, lost, failed, stop)
    threading.Thread(target=_keep, args=arguments, name=f"renew {path}", daemon=True).start()
    return stop


def _keep(
    refresh: Callable[[], object],
    path: str,
    ttl_seconds: float,
    pause_seconds: float,
    lost: Callable[[], bool],
    failed: Callable[[], None],
    stop: threading.Event,
) -> None:
    while not stop.wait(pause_seconds):
        pause_seconds = ttl_seconds / 2
        try:
            refresh()
        except etcd.EtcdKeyNotFound:
            failed()
            if not _goes_on(lost):
                log.warning("%s has expired", path)
                return
        except etcd.EtcdException as error:
            if "Not a file" in str(error):
                log.info("not renewing %s: this etcd cannot renew directories", path)
                return
            failed()
            pause_seconds = _soon(path, ttl_seconds, error)
        except Exception as error:  # top-level loop: renewal must continue after any error
            failed()
            pause_seconds = _soon(path, ttl_seconds, error)


def _soon(path: str, ttl_seconds: float, error: Exception) -> float:
    log.info("could not renew %s, trying again: %r", path, error)
    return min(1.0, ttl_seconds / 20) * (0.5 + random.random())


def _goes_on(lost: Callable[[], bool]) -> bool:
    try:
        return lost()
    except Exception as error:  # as above: etcd may be unavailable again
        log.info("could not restore an expired key: %r", error)
        return True
