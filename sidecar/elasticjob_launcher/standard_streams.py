"""Standard input, output and error, which the starter of a process may have closed."""

from __future__ import annotations

import os


def open_missing() -> None:
    """Open each closed standard stream on /dev/null, before any other file is opened.

    Otherwise the next file or socket would get that number, and workers would write into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(fd, True)
