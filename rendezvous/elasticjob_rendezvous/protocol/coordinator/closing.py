"""End of the job: the charge that is one too many, and the write of the outcome. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elasticjob_rendezvous.protocol.coordinator import crash_loop, failure_policy
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    surplus,
    write_round,
)
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import (
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
    Streak,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams


def close(snapshot: Snapshot, outcome: Outcome, base: Round | None = None) -> RoundUpdate:
    """Close the round, or its changed form `base`, with this outcome."""
    closed = replace(base or snapshot.current, state=RoundState.CLOSED, ids=(), outcome=outcome)
    note = f"closed: {outcome.kind} {outcome.detail}".rstrip()
    return write_round(snapshot, closed, note, surplus(snapshot.view))


def outcome_of_charge(
    snapshot: Snapshot, charged: tuple[int, ...], streak: Streak, number: int
) -> Outcome | None:
    """Return the outcome of the job if the charge of round `number` was one too many; else None."""
    failures = snapshot.view.failures_of(number).values()
    text = failure_policy.failures_text(failures, snapshot.view.dones_of(number).values())
    if failure_policy.is_budget_spent(charged, snapshot.bounds):
        return _failed(f"{text} ({_spent(charged, snapshot.bounds)})", failures)
    if crash_loop.is_without_progress(streak):
        return _failed(f"{crash_loop.no_progress_text(streak)}: {text}", failures)
    return None


def _spent(charged: tuple[int, ...], bounds: RendezvousParams) -> str:
    most = bounds.max_restarts
    return (
        f"{len(charged)} failures charged, maxRestarts is {most}" if most else "no restarts allowed"
    )


def _failed(text: str, failures: Collection[Failure]) -> Outcome:
    first = failure_policy.culprit(failures)
    return Outcome(OutcomeKind.FAILED, text, first.member if first else "")
