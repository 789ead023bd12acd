"""The signals by which a terminal, or whoever stops a container, asks a process to end."""

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
def heeded(heard: Callable[[signal.Signals], None], to_the_end: bool = False) -> Iterator[None]:
    """Have them heard in this thread's event loop instead of ending the process.

    Args:
        to_the_end: afterwards they are ignored, for the process only says how it ended.
    """
    loop = asyncio.get_running_loop()
    taken = [signum for signum in handled(signals_to_handle()) if not _unwanted(signum)]

    # Not by the loop's own means: it lets go of a signal only by having it end the process.
    def tell(signum: int, _: object) -> None:
        loop.call_soon_threadsafe(heard, signal.Signals(signum))

    before = {signum: signal.signal(signum, tell) for signum in taken}
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_IGN if to_the_end else before[signum])


class Signals:
    """An agent's: `leave` is called with each one's name, and whether it is to be in a hurry."""

    def __init__(self, leave: Callable[[str, bool], None]) -> None:
        self._leave = leave
        self._heeds = False
        self._interrupted = False
        self.last: signal.Signals | None = None
        """The last one that asked this agent to end."""

    @contextlib.contextmanager
    def heeded(self, to_the_end: bool = False) -> Iterator[None]:
        """See `heeded`. May be entered within itself: by who has more to close than the agent."""
        if self._heeds or threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's; whoever runs an agent elsewhere ends it
            return
        self._heeds = True
        try:
            with heeded(self._heard, to_the_end):
                yield
        finally:
            self._heeds = False

    def _heard(self, signum: signal.Signals) -> None:
        """SIGTERM may come twice from a kubelet; a second Ctrl-C is a person's impatience."""
        self.last = signum
        hurry = signum == signal.SIGINT and self._interrupted
        self._interrupted = self._interrupted or signum == signal.SIGINT
        self._leave(signum.name, hurry)


def handled(names: str) -> list[signal.Signals]:
    """The signals of that list; what is none, or cannot be handled, is warned of and left out."""
    found = []
    for name in names.split(","):
        signum = getattr(signal, name.strip(), None)
        never = (signal.SIGKILL, signal.SIGSTOP)
        if isinstance(signum, signal.Signals) and signum not in never:
            found.append(signum)
        else:
            log.warning("TORCHELASTIC_SIGNALS_TO_HANDLE: cannot handle %r", name)
    return found


def _unwanted(signum: signal.Signals) -> bool:
    """Whether we were started so that it changes nothing, by `nohup`."""
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN
