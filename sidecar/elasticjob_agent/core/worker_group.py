"""Updates of a worker group from worker runtime events. Records facts; gives no orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from elasticjob_agent.core.events import RuntimeEvent
from elasticjob_agent.core.failures import UNKNOWN_RANK, first_failure_of
from elasticjob_agent.core.state import (
    Facts,
    StopCause,
    WorkerEnded,
    WorkerGroup,
)
from elasticjob_agent.worker_runtime import Hello, Started, StartRefused, Stopped, WorkerExited
from elasticjob_rendezvous.protocol.records.failures import ECHOES, Failure, FailureClass

NO_REASON = "no reason was given"


def after_event(
    group: WorkerGroup,
    event: Started | WorkerExited | StartRefused | Stopped,
    reports: Mapping[int, bytes],
    facts: Facts,
    now: float,
) -> WorkerGroup:
    """Return the group after an event of its own round."""
    match event:
        case Started():
            if group.started:
                return group
            start_ms = max(1, round((now - group.began) * 1000))
            cold = "" if event.warm else event.cold_reason or NO_REASON
            return replace(group, started=True, start_ms=start_ms, cold_reason=cold)
        case WorkerExited():
            return _after_exit(group, event, reports, facts, now)
        case StartRefused(_, message):
            return replace(group, empty=True, failure=_node_failure(group, facts, message))
        case Stopped():
            return replace(group, empty=True)
        case _:
            assert_never(event)


def _after_exit(
    group: WorkerGroup, exit_: WorkerExited, reports: Mapping[int, bytes], facts: Facts, now: float
) -> WorkerGroup:
    """Record a worker's exit; repeated reports of the same exit have no effect."""
    if any(ended.exit.local_rank == exit_.local_rank for ended in group.exits):
        return group
    during = StopCause.URGENT if exit_.unasked else None
    if group.order is not None:
        during = group.order.cause
    group = replace(
        group,
        exits=(*group.exits, WorkerEnded(exit_, during)),
        cut_off=group.cut_off or (exit_.unasked and group.order is None),
        reports={**group.reports, **reports},
    )
    found = first_failure_of(group, facts)
    if found is not None:
        found = replace(found, ran_ms=_ran_ms(group, now))
    return replace(
        group,
        failure=_failure_to_keep(group.failure, found),
        ended_at=now if group.all_ended else None,
    )


def with_progress(group: WorkerGroup, taken: RuntimeEvent) -> WorkerGroup:
    """Return the group with its workers' last progress, which arrived with an exit event."""
    return (
        replace(group, progress={**group.progress, **taken.progress}) if taken.progress else group
    )


def _ran_ms(group: WorkerGroup, now: float) -> int | None:
    """Return the workers' run time; None if an earlier agent started them."""
    if not group.started:
        return 0
    if not group.start_ms:
        return None
    return max(0, round((now - group.began) * 1000) - group.start_ms)


def _failure_to_keep(known: Failure | None, found: Failure | None) -> Failure | None:
    """Return the failure to keep: only an echo is replaced, by a failure that is not an echo."""
    if known is None or found is None:
        return known or found
    echo = known.kind in ECHOES and found.kind not in ECHOES
    return found if echo else known


def without_runtime(group: WorkerGroup, facts: Facts, reason: str) -> WorkerGroup:
    """Return the group after the launcher's loss; the workers ran in its container and are gone."""
    if group.empty:
        return group
    failure = group.failure
    if failure is None and group.order is None:
        failure = replace(_node_failure(group, facts, reason), kind=FailureClass.SIGNAL)
    return replace(group, empty=True, failure=failure)


def _node_failure(group: WorkerGroup, facts: Facts, message: str) -> Failure:
    """Return a failure of the whole node, attributed to its first worker."""
    return Failure(
        round=group.round,
        member=facts.member,
        name=facts.name,
        rank=UNKNOWN_RANK if group.base_rank is None else group.base_rank,
        local_rank=0,
        kind=FailureClass.LAUNCH_ERROR,
        at_ms=0,
        message=message[:1000],
        node=facts.node,
        ran_ms=None if group.started else 0,
    )


def after_hello(
    group: WorkerGroup | None, taken: RuntimeEvent, hello: Hello, facts: Facts, now: float
) -> WorkerGroup | None:
    """Return the group as the worker runtime reports it, possibly taken over from an earlier agent.

    The worker runtime does not know an ordered group if the order was lost with the connection:
    return None so that the order is repeated.
    """
    number = _round_of(hello)
    if group is not None and group.round != number:
        if hello.running is None:
            lost = "the launcher was restarted and its workers are gone"
            return without_runtime(group, facts, lost) if group.started else None
        group = None
    if number is None:
        return None
    if group is None:
        known = hello.pids.keys() | {exit_.local_rank for exit_ in hello.exits}
        group = WorkerGroup(number, max(len(known), facts.slots), taken.base_rank, now)
    group = replace(with_progress(group, taken), started=True, empty=hello.running != number)
    for exit_ in hello.exits:
        group = _after_exit(group, exit_, taken.reports, facts, now)
    return group


def _round_of(hello: Hello) -> int | None:
    """Return the round started last, running or not."""
    if hello.running is not None:
        return hello.running
    return hello.exits[-1].round if hello.exits else None
