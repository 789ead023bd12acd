"""Thread that sends a node's heartbeats between its rendezvous."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Heartbeats:
    """Periodic call of a method of `owner`, until `stop` or the owner's garbage collection.

    The thread holds only a weak reference: a dropped handler stops sending heartbeats.
    """

    def __init__(self, owner: Any, beat: Callable[[Any], None], interval_seconds: float) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(self._stop, weakref.ref(owner), beat, interval_seconds),
            name="rendezvous-heartbeats",
            daemon=True,
        )
        self._end = weakref.finalize(owner, self._stop.set)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop, and wait up to `seconds` for a heartbeat in progress."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)


def _run(
    stop: threading.Event,
    owner: weakref.ref[Any],
    beat: Callable[[Any], None],
    interval_seconds: float,
) -> None:
    while not stop.wait(interval_seconds):
        alive = owner()
        if alive is None:
            return
        try:
            beat(alive)
        except Exception:  # the next heartbeat may succeed
            log.exception("a heartbeat failed")
        del alive
