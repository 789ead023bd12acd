"""In a fork of the standby: torch's store, served until the launcher ends this process."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from .birth import adopted


def serve(tell: int, launcher: int) -> NoReturn:
    """Tell the pid and the port, then serve; without torch, tell nothing."""
    try:
        os.setsid()
        adopted(launcher)
        store = _store()
        os.write(tell, f"{os.getpid()} {store.port}".encode())
        os.close(tell)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _store() -> Any:
    distributed = sys.modules["torch"].distributed
    return distributed.TCPStore("localhost", 0, None, True, wait_for_workers=False)
