"""Back-off and limit for pods that could not be started or failed right after their start.

They are not charged as restarts, because no worker of a round failed. Without a back-off a job
whose image lacks Python would create and lose a pod every second, forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from elasticjob_operator.core.observed import Pod
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.model.enums import RendezvousState

MOST_LAUNCH_FAILURES = 5
"""Launch failures in a row after which a job without a round fails."""
FIRST_DELAY_SECONDS = 2
"""Back-off after the second failure in a row, in seconds; doubles with each further one. The first
failed pod is replaced at once."""


def launch_failures(failed: Iterable[Pod], view: RendezvousView) -> list[Pod]:
    """Return the pods that failed at launch since the current round became final, oldest first."""
    since = view.since if view.state is RendezvousState.FINAL else None
    found = [
        pod for pod in failed if pod.launch_failed and (since is None or _ended_at(pod) > since)
    ]
    return sorted(found, key=lambda pod: (_ended_at(pod), pod.index))


def held_until(failures: list[Pod]) -> datetime | None:
    """Return the end of the back-off after these launch failures; None if there is none."""
    if len(failures) < 2:
        return None
    delay = FIRST_DELAY_SECONDS * 2 ** (len(failures) - 2)
    return _ended_at(failures[-1]) + timedelta(seconds=delay)


def hopeless(failures: list[Pod], view: RendezvousView, able: int, min_nodes: int) -> str | None:
    """Return the reason to fail the job, or None. It fails after `MOST_LAUNCH_FAILURES` in a row,
    if no round is final and fewer than `min_nodes` pods run a launcher."""
    sealed = view.state is RendezvousState.FINAL
    if len(failures) < MOST_LAUNCH_FAILURES or sealed or able >= min_nodes:
        return None
    last = failures[-1]
    reason = f": {last.end_message}" if last.end_message else ""
    return f"{len(failures)} pods in a row could not be started, the last one {last.name}{reason}"


def _ended_at(pod: Pod) -> datetime:
    return pod.ended_at or pod.created_at
