"""Excerpt of a worker's standard error that shows the reason for its exit. Pure."""

from __future__ import annotations

import re

TAIL_BYTES = 16 * 1024
"""Maximum excerpt size: fits a traceback through a framework with that of its cause."""
GAP = b"\n[...]\n"

_HEADER = b"Traceback (most recent call last):"
_RANK_PREFIX = re.compile(rb"(?m)^\[rank\d+\]: ?")


def telling(kept: bytes) -> bytes:
    """Return the end of `kept`, with the start of a final traceback if its message is longer.

    This requires that the message's further lines are indented: other lines may be a log that
    continues after a caught exception.
    """
    begin = kept.rfind(_HEADER)
    if len(kept) <= TAIL_BYTES or begin < 0 or begin >= len(kept) - TAIL_BYTES:
        return kept[-TAIL_BYTES:]
    lines = _RANK_PREFIX.sub(b"", kept[begin:]).split(b"\n")
    outer = [n for n, line in enumerate(lines) if n and line[:1].strip()]
    if len(outer) != 1:
        return kept[-TAIL_BYTES:]
    half = TAIL_BYTES // 2
    return kept[begin : begin + half] + GAP + kept[-half:]
