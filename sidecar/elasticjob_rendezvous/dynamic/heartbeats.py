"""The thread that keeps a node alive between its rendezvous."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Heartbeats:
    """Calls a method of `owner` every interval until it is stopped or the owner is gone.

    Only the owner's users keep it alive: a handler that is dropped falls silent.
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
        """Stop, and wait for a heartbeat under way, at most so long."""
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
        except Exception:  # whatever it was, the next heartbeat may work
            log.exception("a heartbeat failed")
        del alive
