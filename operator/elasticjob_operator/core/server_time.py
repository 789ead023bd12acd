"""What time it is where the times of objects are made: by the API server's clock, not by ours.

A pod's age is its `creationTimestamp`, of the API server's clock, beside the time now. Where the
two are of clocks that differ by more than `pendingTimeoutSeconds`, a new pod is given up at once,
or one that never starts is waited for for ever. So now is by the API server's clock too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

TELLING_SECONDS = 5.0
"""A difference that is worth a word in the log."""


def ahead_seconds(known: float, headers: Mapping[str, str], sent: float, received: float) -> float:
    """By how much the API server's clock is ahead of ours; negative where it is behind.

    `known` changes by no more than it takes to explain this answer, so that it stays 0 between
    clocks that are alike. The answer's `Date` is the time at which it was made, cut to a second;
    that was between `sent` and `received` of our clock.
    """
    date = _date(headers.get("Date", ""))
    if date is None:
        return known
    least, most = date - received, date + 1.0 - sent
    return min(max(known, least), most)


def _date(said: str) -> float | None:
    """Seconds since 1970; None for what is no time."""
    try:
        found = parsedate_to_datetime(said)
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
