"""End times of trainers, corrected for the clock skew of nodes.

A kubelet reports the end of a container by its machine's clock. Delays counted from an end, such as
the back-off after a pod that could not start, use the operator's clock. Every end lies between the
pod's creation and its first observation here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from elasticjob_operator.core.observed import Pod


def first_seen(
    pods: Iterable[Pod], before: Mapping[str, datetime], now: datetime
) -> dict[str, datetime]:
    """Return the time of the first observation of each pod's end, by uid; `before` is the
    previous result."""
    return {pod.uid: before.get(pod.uid, now) for pod in pods if pod.ended_at is not None}


def bounded(pod: Pod, seen: Mapping[str, datetime]) -> Pod:
    """Return the pod with its end clamped to the time from its creation to the observation."""
    if pod.ended_at is None or pod.uid not in seen:
        return pod
    return replace(pod, ended_at=max(min(pod.ended_at, seen[pod.uid]), pod.created_at))
