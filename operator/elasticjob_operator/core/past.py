"""Sentences on a job's latest interruption and its latest failure."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.core.classes import UNCHARGED, meaning, remedy
from elasticjob_operator.core.costs import (
    WISHED,
    cold_text,
    recovery_ms,
    recovery_parts_ms,
    seconds_text,
)
from elasticjob_operator.core.evidence import began_at
from elasticjob_operator.core.words import (
    counted,
    moment,
    quoted,
    why,
)
from elasticjob_operator.model.enums import Phase
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import FirstFailure, RoundStatus, Status
from elasticjob_rendezvous.core.records import CauseKind

ENDED = (Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED)


def interruptions(status: Status) -> Iterator[str]:
    """Yield the latest interruption with its phases, then the nodes that joined since."""
    if status.phase in (*ENDED, None):
        return
    later = [found for found in status.rounds if found.cause != CauseKind.START]
    broken = [found for found in later if found.cause != CauseKind.JOIN]
    if broken:
        yield from _told("Last interruption", broken[-1], status)
    if later and later[-1].cause == CauseKind.JOIN:
        yield from _told("Since then" if broken else "Last round", later[-1], status)


def _told(begin: str, found: RoundStatus, status: Status) -> Iterator[str]:
    began, spent = began_at(found), recovery_ms(found)
    when = f" {moment(began)}" if began else ""
    text = f"{begin}: {why(found, status)}{when}"
    if spent is None:
        yield text
        return
    parts = _parts(found)
    lasted = "with a pause of" if found.cause in WISHED else "recovered in"
    yield f"{text}, {lasted} {seconds_text(spent)}" + (f" ({parts})" if parts else "")
    if found.first_step_ms is not None:
        yield f"The first step followed {seconds_text(found.first_step_ms)} after the start"
    if cold := cold_text(found):
        yield cold[:1].upper() + cold[1:]


def _parts(found: RoundStatus) -> str:
    """Return the phases that took at least a millisecond, with their durations."""
    known = recovery_parts_ms(found)
    return ", ".join(f"{part} {seconds_text(ms)}" for part, ms in known.items() if ms)


def latest_failure(job: ElasticJob) -> Iterator[str]:
    """Yield the latest failure, the meaning of its class, and the remedy."""
    failure = job.status.first_failure
    if failure is None or job.status.phase is Phase.SUCCEEDED:
        return
    yield f"{_culprit(failure)}: {meaning(failure)}" + _message(failure)
    yield remedy(failure)
    used, most = job.status.restarts, job.spec.max_restarts
    if failure.class_ not in UNCHARGED and job.status.phase not in ENDED:
        yield f"{used} of {counted(most, 'restart')} {'is' if used == 1 else 'are'} used"


def _message(failure: FirstFailure) -> str:
    said = quoted(failure.message)
    return f": {said}" if said else ""


def _culprit(failure: FirstFailure) -> str:
    where = f"{failure.pod} ({failure.node})" if failure.node else failure.pod
    if failure.rank is None or failure.rank < 0:
        return f"Latest failure, in round {failure.round}: {where}"
    return f"Latest failure, in round {failure.round}: rank {failure.rank} on {where}"
