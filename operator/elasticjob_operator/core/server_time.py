"""Estimate of the API server's clock, which sets the times of objects.

A pod's age is the present time minus its `creationTimestamp`, which the API server sets. If the
operator's clock differed from the API server's by more than `pendingTimeoutSeconds`, a new pod
would be given up at once, or a pod that never starts would be waited for forever. The present time
therefore follows the API server's clock too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

TELLING_SECONDS = 5.0
"""Minimum clock difference that is logged, in seconds."""


def ahead_seconds(known: float, headers: Mapping[str, str], sent: float, received: float) -> float:
    """Return the seconds by which the API server's clock is ahead; negative if it is behind.

    `known`, the previous estimate, changes only as far as this response requires, so that it stays
    0 for synchronized clocks. The response's `Date` is its time of creation, truncated to a second,
    which lies between `sent` and `received` by the operator's clock.
    """
    date = _date(headers.get("Date", ""))
    if date is None:
        return known
    least, most = date - received, date + 1.0 - sent
    return min(max(known, least), most)


def _date(said: str) -> float | None:
    """Parse a date into seconds since 1970; None if it is malformed."""
    try:
        found = parsedate_to_datetime(said)
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
