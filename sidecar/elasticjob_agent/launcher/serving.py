"""Store process: a fork of the zygote that serves torch's TCPStore until the launcher kills it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from .birth import adopted


def serve(tell: int, launcher: int) -> NoReturn:
    """Write the pid and port to `tell`, then serve; write nothing if the store cannot start."""
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
