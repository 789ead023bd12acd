"""When trainers ended, by a clock that is not the node's.

A kubelet tells the end of a container by its machine's clock, and what is counted from an end, such
as the time for which a pod that could not start holds up the next, is counted by ours. What is
known of every end: it came after its pod was made, and before we saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from elasticjob_operator.core.observed import Pod


def first_seen(
    pods: Iterable[Pod], before: Mapping[str, datetime], now: datetime
) -> dict[str, datetime]:
    """Since when each pod, by uid, is known to have ended; `before` is what was known."""
    return {pod.uid: before.get(pod.uid, now) for pod in pods if pod.ended_at is not None}


def bounded(pod: Pod, seen: Mapping[str, datetime]) -> Pod:
    """The pod with an end that can be: not before it was made, not after it was seen."""
    if pod.ended_at is None or pod.uid not in seen:
        return pod
    return replace(pod, ended_at=max(min(pod.ended_at, seen[pod.uid]), pod.created_at))
