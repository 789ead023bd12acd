"""Launch failures of a job's pods: the back-off before the next pod, and the limit in a row.

Launch failures are pods that could not be started or failed right after their start. They are
not charged as restarts, because no worker of a round failed. Without a back-off a job whose
image lacks Python would create and lose a pod every second, forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from elasticjob_operator.domain.observed.state import Pod, RendezvousView
from elasticjob_operator.domain.status.rounds import final_at
from elasticjob_operator.model.types import RendezvousState

MOST_LAUNCH_FAILURES = 5
"""Launch failures in a row after which a job without a round fails."""
FIRST_DELAY_SECONDS = 2
"""Back-off after the second failure in a row, in seconds; doubles with each further one up to
`MOST_LAUNCH_FAILURES`, since all pods of a large job may fail at once. The first failed pod is
replaced at once."""
MOST_REJECTION_SECONDS = 120.0
"""Maximum back-off after pods that their machines rejected. Up to this it is as long as the
rejections have lasted, since they do not fail the job. A fraction of the default
joinTimeoutSeconds: machines that recover within it are tried again."""


def launch_failures(failed: Iterable[Pod], view: RendezvousView) -> list[Pod]:
    """Return the pods that failed at launch since the last round became final, oldest first."""
    return failed_since(
        failed, view.since if view.state is RendezvousState.FINAL else _last_final_at(view)
    )


def failed_since(pods: Iterable[Pod], since: datetime | None) -> list[Pod]:
    """Return the pods that failed at launch after that time, or at any time, oldest first."""
    found = [pod for pod in pods if pod.launch_failed and (since is None or _end_time(pod) > since)]
    return sorted(found, key=lambda pod: (_end_time(pod), pod.index))


def _last_final_at(view: RendezvousView) -> datetime | None:
    return max((at for round_ in view.rounds if (at := final_at(round_)) is not None), default=None)


def launch_backoff_until(
    failures: list[Pod], most_seconds: float = MOST_REJECTION_SECONDS
) -> datetime | None:
    """Return the end of the back-off after these launch failures; None if there is none.

    Args:
        most_seconds: maximum delay for rejections that last.
    """
    if len(failures) < 2:
        return None
    last = failures[-1]
    delay: float = FIRST_DELAY_SECONDS * 2 ** (min(len(failures), MOST_LAUNCH_FAILURES) - 2)
    first = first_rejected(failures)
    if first is not None and last.rejected:
        lasted = (_end_time(last) - _end_time(first)).total_seconds()
        delay = max(delay, min(lasted, most_seconds))
    return _end_time(last) + timedelta(seconds=delay)


def first_rejected(failures: Iterable[Pod]) -> Pod | None:
    """Return the first of these launch failures, oldest first, that its machine rejected."""
    return next((pod for pod in failures if pod.rejected), None)


def launch_failure_text(name: str, count: int, message: str) -> str:
    """Return the clause for this number of launch failures; name and message are the last one's."""
    more = f" and {count - 1} more" if count > 1 else ""
    reason = f": {message}" if message else ""
    return f"{name}{more} could not be started{reason}"


def launch_limit_reason(
    failures: list[Pod], view: RendezvousView, able: int, min_nodes: int
) -> str | None:
    """Return the reason to fail the job, or None. It fails after `MOST_LAUNCH_FAILURES` in a row,
    if no round is final and fewer than `min_nodes` pods run a launcher.

    Pods that their machines rejected do not count: the job waits, as for a machine.
    """
    failures = [pod for pod in failures if not pod.rejected]
    sealed = view.state is RendezvousState.FINAL
    if len(failures) < MOST_LAUNCH_FAILURES or sealed or able >= min_nodes:
        return None
    return launch_failure_text(failures[-1].name, len(failures), failures[-1].end_message)


def _end_time(pod: Pod) -> datetime:
    return pod.ended_at or pod.created_at
