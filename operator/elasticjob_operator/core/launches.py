"""Pods that could not be started, or ended in failure right after: when to try again, when not.

Nothing is charged for them, as no worker of a round failed; without a back-off a job whose image
lacks Python would make and lose a pod every second, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from elasticjob_operator.core.observed import Pod
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.model.enums import RendezvousState

MOST_LAUNCH_FAILURES = 5
"""In a row. A job that has no round by then is failed: another pod would fare no better."""
FIRST_DELAY_SECONDS = 2
"""After the second failure in a row; the first one is replaced at once. Doubles each time."""


def launch_failures(failed: Iterable[Pod], view: RendezvousView) -> list[Pod]:
    """The pods that failed at their launch since the current round is final, oldest first."""
    since = view.since if view.state is RendezvousState.FINAL else None
    found = [
        pod for pod in failed if pod.launch_failed and (since is None or _ended_at(pod) > since)
    ]
    return sorted(found, key=lambda pod: (_ended_at(pod), pod.index))


def held_until(failures: list[Pod]) -> datetime | None:
    """Until when no pod is created, after these launch failures; None when at once."""
    if len(failures) < 2:
        return None
    delay = FIRST_DELAY_SECONDS * 2 ** (len(failures) - 2)
    return _ended_at(failures[-1]) + timedelta(seconds=delay)


def hopeless(failures: list[Pod], view: RendezvousView, able: int, min_nodes: int) -> str | None:
    """Why the job is to be failed: nobody trains, and too few of its pods can be started."""
    sealed = view.state is RendezvousState.FINAL
    if len(failures) < MOST_LAUNCH_FAILURES or sealed or able >= min_nodes:
        return None
    last = failures[-1]
    reason = f": {last.end_message}" if last.end_message else ""
    return f"{len(failures)} pods in a row could not be started, the last one {last.name}{reason}"


def _ended_at(pod: Pod) -> datetime:
    return pod.ended_at or pod.created_at
