"""Updates of a worker group from worker runtime events. Records facts; gives no orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from elasticjob_agent.core.attribution import UNKNOWN_RANK, failure_of
from elasticjob_agent.core.model import Crew, Ended, Facts, FromHands, StopCause
from elasticjob_agent.hands import (
    Hello,
    Started,
    StartRefused,
    Stopped,
    WorkerExited,
)
from elasticjob_rendezvous.core.failures import ECHOES, Failure, FailureClass

UNSAID = "nobody says why"


def after(
    crew: Crew,
    event: Started | WorkerExited | StartRefused | Stopped,
    reports: Mapping[int, bytes],
    facts: Facts,
    now: float,
) -> Crew:
    """Return the group after an event of its own round."""
    match event:
        case Started():
            if crew.started:
                return crew
            start_ms = max(1, round((now - crew.began) * 1000))
            cold = "" if event.warm else event.cold_reason or UNSAID
            return replace(crew, started=True, start_ms=start_ms, cold_reason=cold)
        case WorkerExited():
            return _after_exit(crew, event, reports, facts, now)
        case StartRefused(_, message):
            return replace(crew, empty=True, failure=_of_all(crew, facts, message))
        case Stopped():
            return replace(crew, empty=True)
        case _:
            assert_never(event)


def _after_exit(
    crew: Crew, exit_: WorkerExited, reports: Mapping[int, bytes], facts: Facts, now: float
) -> Crew:
    """Record a worker's exit; repeated reports of the same exit have no effect."""
    if any(ended.exit.local_rank == exit_.local_rank for ended in crew.exits):
        return crew
    during = StopCause.URGENT if exit_.unasked else None
    if crew.order is not None:
        during = crew.order.cause
    crew = replace(
        crew, exits=(*crew.exits, Ended(exit_, during)), reports={**crew.reports, **reports}
    )
    found = failure_of(crew, facts)
    if found is not None:
        found = replace(found, ran_ms=_ran_ms(crew, now))
    return replace(
        crew,
        failure=_settled(crew.failure, found),
        ended_at=now if crew.all_ended else None,
    )


def with_words(crew: Crew, heard: FromHands) -> Crew:
    """Return the group with its workers' last progress, which arrived with an exit event."""
    return replace(crew, progress={**crew.progress, **heard.progress}) if heard.progress else crew


def _ran_ms(crew: Crew, now: float) -> int | None:
    """Return the workers' run time; None if an earlier agent started them."""
    if not crew.started:
        return 0
    if not crew.start_ms:
        return None
    return max(0, round((now - crew.began) * 1000) - crew.start_ms)


def _settled(known: Failure | None, found: Failure | None) -> Failure | None:
    """Return the failure to keep: only an echo is replaced, and only by a failure that is none."""
    if known is None or found is None:
        return known or found
    echo = known.kind in ECHOES and found.kind not in ECHOES
    return found if echo else known


def without_hands(crew: Crew, facts: Facts, reason: str) -> Crew:
    """Return the group after the launcher's loss; the workers ran in its container and are gone."""
    if crew.empty:
        return crew
    failure = crew.failure
    if failure is None and crew.order is None:
        failure = replace(_of_all(crew, facts, reason), kind=FailureClass.SIGNAL)
    return replace(crew, empty=True, failure=failure)


def _of_all(crew: Crew, facts: Facts, message: str) -> Failure:
    """Return a failure of the whole node, attributed to its first worker."""
    return Failure(
        round=crew.round,
        member=facts.member,
        name=facts.name,
        rank=UNKNOWN_RANK if crew.base_rank is None else crew.base_rank,
        local_rank=0,
        kind=FailureClass.LAUNCH_ERROR,
        at_ms=0,
        message=message[:1000],
        node=facts.node,
        ran_ms=None if crew.started else 0,
    )


def after_hello(
    crew: Crew | None, heard: FromHands, hello: Hello, facts: Facts, now: float
) -> Crew | None:
    """Return the group as the worker runtime reports it, possibly taken over from an earlier agent.

    The worker runtime does not know an ordered group if the order was lost with the connection:
    return None so that the order is repeated.
    """
    number = _round_of(hello)
    if crew is not None and crew.round != number:
        if hello.running is None:
            lost = "the launcher was restarted and its workers are gone"
            return without_hands(crew, facts, lost) if crew.started else None
        crew = None
    if number is None:
        return None
    if crew is None:
        known = hello.pids.keys() | {exit_.local_rank for exit_ in hello.exits}
        crew = Crew(number, max(len(known), facts.slots), heard.base_rank, now)
    crew = replace(with_words(crew, heard), started=True, empty=hello.running != number)
    for exit_ in hello.exits:
        crew = _after_exit(crew, exit_, heard.reports, facts, now)
    return crew


def _round_of(hello: Hello) -> int | None:
    """Return the round started last, running or not."""
    if hello.running is not None:
        return hello.running
    return hello.exits[-1].round if hello.exits else None
