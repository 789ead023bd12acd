"""Standard input, output and error, which whoever starts a process may have closed."""

from __future__ import annotations

import os


def open_missing() -> None:
    """Have each lead at least nowhere, before anything else is opened.

    Whatever is opened next would get that number, and workers would write into it: a socket, say.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(fd, True)
