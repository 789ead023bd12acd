"""Handling of the signals by which a terminal or a container runtime asks a process to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator

from elasticjob_agent.settings import signals_to_handle

log = logging.getLogger("elasticjob.agent")


@contextlib.contextmanager
def handle_signals(
    handle: Callable[[signal.Signals], None], to_the_end: bool = False
) -> Iterator[None]:
    """Handle termination signals in this thread's event loop while the context is entered.

    Args:
        handle: called in the event loop with each signal.
        to_the_end: ignore the signals afterwards, since the process only reports its end;
            otherwise restore the earlier handlers.
    """
    loop = asyncio.get_running_loop()
    taken = [signum for signum in handleable_signals(signals_to_handle()) if not _unwanted(signum)]

    # Not loop.add_signal_handler: on removal it resets the signal to end the process.
    def forward(signum: int, _: object) -> None:
        loop.call_soon_threadsafe(handle, signal.Signals(signum))

    before = {signum: signal.signal(signum, forward) for signum in taken}
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_IGN if to_the_end else before[signum])


class Signals:
    """Termination signals of an agent: calls `leave` with the signal's name and the urgency."""

    def __init__(self, leave: Callable[[str, bool], None]) -> None:
        self._leave = leave
        self._handling = False
        self._interrupted = False
        self.last: signal.Signals | None = None
        """Last signal that asked this agent to end."""

    @contextlib.contextmanager
    def handling(self, to_the_end: bool = False) -> Iterator[None]:
        """See `handle_signals`. Reentrant, for a caller that has more to close than the agent."""
        if self._handling or threading.current_thread() is not threading.main_thread():
            yield  # only the main thread handles signals; elsewhere the caller ends the agent
            return
        self._handling = True
        try:
            with handle_signals(self._take, to_the_end):
                yield
        finally:
            self._handling = False

    def _take(self, signum: signal.Signals) -> None:
        """Leave; a second SIGINT is urgent. A second SIGTERM is not: a kubelet may send two."""
        self.last = signum
        hurry = signum == signal.SIGINT and self._interrupted
        self._interrupted = self._interrupted or signum == signal.SIGINT
        self._leave(signum.name, hurry)


def handleable_signals(names: str) -> list[signal.Signals]:
    """Return the signals in a list of names; warn about and skip those that cannot be handled."""
    found = []
    for name in names.split(","):
        signum = getattr(signal, name.strip(), None)
        never = (signal.SIGKILL, signal.SIGSTOP)
        if isinstance(signum, signal.Signals) and signum not in never:
            found.append(signum)
        else:
            log.warning("TORCHELASTIC_SIGNALS_TO_HANDLE: cannot handle %r", name)
    return list(dict.fromkeys(found))  # the second handler of one would be restored as the former


def _unwanted(signum: signal.Signals) -> bool:
    """Return True for SIGHUP if `nohup` started this process with it ignored."""
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN
