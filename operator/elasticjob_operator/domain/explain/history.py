"""Sentences on the history of a job: its latest interruption and its latest failure."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.explain.catalog import (
    UNCHARGED_CLASSES,
    failure_meaning,
    failure_remedy,
)
from elasticjob_operator.domain.explain.phrases import quoted, round_cause, time_text
from elasticjob_operator.domain.plan.lifecycle import STOPPING
from elasticjob_operator.domain.status.failures import latest_failure, round_began_at
from elasticjob_operator.domain.status.rounds import (
    PLANNED_CAUSES,
    cold_text,
    recovery_ms,
    recovery_parts_ms,
    seconds_text,
)
from elasticjob_operator.domain.status.snapshots import lost_text
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import FailureStatus, RoundStatus, Status
from elasticjob_operator.model.types import Phase
from elasticjob_rendezvous.protocol.records.members import CauseKind
from elasticjob_rendezvous.protocol.text import counted


def interruption_sentences(status: Status) -> Iterator[str]:
    """Yield the latest interruption with its phases, then the nodes that joined since."""
    if status.phase is None or status.phase in STOPPING:
        return
    later = [found for found in status.rounds if found.cause != CauseKind.START]
    broken = [found for found in later if found.cause != CauseKind.JOIN]
    if broken:
        yield from _round_sentences("Last interruption", broken[-1], status)
    if later and later[-1].cause == CauseKind.JOIN:
        yield from _round_sentences("Since then" if broken else "Last round", later[-1], status)


def _round_sentences(begin: str, found: RoundStatus, status: Status) -> Iterator[str]:
    began, spent = round_began_at(found), recovery_ms(found)
    when = f" {time_text(began)}" if began else ""
    text = f"{begin}: {round_cause(found, status)}{when}"
    if spent is None:
        yield text
        return
    parts = _phases_text(found)
    lasted = "with a pause of" if found.cause in PLANNED_CAUSES else "recovered in"
    lost = ""
    if found.lost_ms is not None:
        lost = f", {lost_text(found.lost_steps or 0, found.lost_ms, found.lost_reason or '')}"
    elif found.lost_steps:
        lost = f", lost at least {found.lost_steps} step{'s' * (found.lost_steps > 1)}"
    yield f"{text}, {lasted} {seconds_text(spent)}" + (f" ({parts})" if parts else "") + lost
    if found.first_step_ms is not None:
        yield f"The first step followed {seconds_text(found.first_step_ms)} after the start"
    if cold := cold_text(found):
        yield cold[:1].upper() + cold[1:]


def _phases_text(found: RoundStatus) -> str:
    """Return the phases that took at least a millisecond, with their durations."""
    known = recovery_parts_ms(found)
    return ", ".join(f"{part} {seconds_text(ms)}" for part, ms in known.items() if ms)


def goodput_sentences(status: Status) -> Iterator[str]:
    """Yield the goodput of the run with the lost times, if the script takes snapshots.

    A pause that lasts counts in the percentage, and is named with its start.
    """
    found = status.snapshots
    if found is None or found.since is None or found.goodput_percent is None:
        return
    lost, paused = seconds_text(found.lost_ms), seconds_text(found.paused_ms)
    current = ""
    if found.paused_since is not None:
        current = f", and the time of the pause that began {time_text(found.paused_since)}"
    yield (
        f"Goodput {found.goodput_percent} % since the first step {time_text(found.since)}: "
        f"{lost} repeated, {paused} paused{current}"
    )


def failure_sentences(job: ElasticJob) -> Iterator[str]:
    """Yield the latest failure, the meaning of its class, and the remedy."""
    failure = latest_failure(job.status)
    if failure is None or job.status.phase is Phase.SUCCEEDED:
        return
    if job.status.phase in STOPPING and failure.returned is False:
        failure = failure.model_copy(update={"returned": None})  # no pod takes its place any more
    yield f"{_failure_place(failure)}: {failure_meaning(failure)}" + _message(failure)
    yield failure_remedy(failure)
    used, most = job.status.restarts, job.spec.max_restarts
    if failure.class_ not in UNCHARGED_CLASSES and job.status.phase not in STOPPING:
        yield f"{used} of {counted(most, 'restart')} {'is' if used == 1 else 'are'} used"


def _message(failure: FailureStatus) -> str:
    message = quoted(failure.message)
    return f": {message}" if message else ""


def _failure_place(failure: FailureStatus) -> str:
    where = f"{failure.pod} ({failure.node})" if failure.node else failure.pod
    if failure.rank is None or failure.rank < 0:
        return f"Latest failure, in round {failure.round}: {where}"
    return f"Latest failure, in round {failure.round}: rank {failure.rank} on {where}"
