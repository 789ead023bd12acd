"""Stop orders for a worker group, with cause and grace, from the state alone."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_agent.core.asking import waits_to_save
from elasticjob_agent.core.hang import DUMP_SECONDS, hangs_at, stands_still
from elasticjob_agent.core.model import Crew, State, StopCause, StopOrder
from elasticjob_rendezvous.core.directives import Finish, Left, Refused, Run, Stop
from elasticjob_rendezvous.core.records import CauseKind


def wanted_order(state: State, crew: Crew, now: float) -> StopOrder | None:
    """Return the most urgent stop order for this worker group, or None to let it run."""
    return min(_reasons(state, crew, now), key=lambda order: order.grace_seconds, default=None)


def _reasons(state: State, crew: Crew, now: float) -> Iterator[StopOrder]:
    dumps = crew.order is not None and crew.order.dump
    hangs = hangs_at(state)
    if hangs is not None and now >= hangs:
        yield StopOrder(StopCause.HANG, DUMP_SECONDS)
    # Hanging workers get the time to dump their stacks, whatever else happens in the meantime.
    if crew.failure is not None and not dumps:
        yield StopOrder(StopCause.FAILURE, 0.0)
    if state.leaving and not waits_to_save(state, crew, now):
        grace = 0.0 if state.hurried else state.facts.stop_grace_seconds
        yield StopOrder(StopCause.LEAVE, grace)
    if crew.leftovers_at is not None and now >= crew.leftovers_at:
        yield StopOrder(StopCause.LEFTOVERS, state.facts.stop_grace_seconds)
    match state.directive:
        case Stop(number, kill, cause, grace) if crew.round <= number:
            if not kill:
                yield StopOrder(StopCause.PLANNED, grace)
            elif cause.kind is CauseKind.FAILURE:
                if not dumps and stands_still(state, now):
                    yield StopOrder(StopCause.HANG, DUMP_SECONDS)
                elif not dumps:
                    yield StopOrder(StopCause.PEER_FAILURE, 0.0)
            else:
                yield StopOrder(StopCause.URGENT, 0.0)
        case Run(roster=roster) if crew.round < roster.number:
            yield StopOrder(StopCause.URGENT, 0.0)  # a later round is final: this one is obsolete
        case Finish(_, _, grace):
            yield StopOrder(StopCause.END, grace)
        case Left() | Refused():
            yield StopOrder(StopCause.END, 0.0)
