"""Keeping a key or a folder from running out: one thread for each."""

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
    """Refresh `path` every half of its time to live, until the returned event is set.

    torch's thread dies of any error but one. This one tries again, soon, whatever went
    wrong: while etcd is away nothing runs out, and nobody else can say that it has. Only
    where etcd no longer knows the path does `lost` decide whether to go on. `failed` is
    called, by the thread, whenever it went wrong. `refresh` is another way to do it.
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
                log.warning("%s has run out", path)
                return
        except etcd.EtcdException as error:
            if "Not a file" in str(error):
                log.info("%s is a folder, and this etcd cannot renew folders", path)
                return
            failed()
            pause_seconds = _soon(path, ttl_seconds, error)
        except Exception as error:  # a top loop: whatever it is, the key must be kept
            failed()
            pause_seconds = _soon(path, ttl_seconds, error)


def _soon(path: str, ttl_seconds: float, error: Exception) -> float:
    log.info("could not renew %s, trying again: %r", path, error)
    return min(1.0, ttl_seconds / 20) * (0.5 + random.random())


def _goes_on(lost: Callable[[], bool]) -> bool:
    try:
        return lost()
    except Exception as error:  # as above: etcd may be away again
        log.info("could not look after a lost key: %r", error)
        return True
