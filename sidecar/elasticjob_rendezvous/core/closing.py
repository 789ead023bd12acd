"""End of the job: the charge that is one too many, and the write of the outcome. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elasticjob_rendezvous.core import crashes, verdicts
from elasticjob_rendezvous.core.acts import Act, Scene, write_round
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.failures import Failure
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind, Round, RoundState, Streak
from elasticjob_rendezvous.core.retention import surplus


def close(scene: Scene, outcome: Outcome, base: Round | None = None) -> Act:
    """Close the round, or its changed form `base`, with this outcome."""
    closed = replace(base or scene.current, state=RoundState.CLOSED, ids=(), outcome=outcome)
    said = f"closed: {outcome.kind} {outcome.detail}".rstrip()
    return write_round(scene, closed, said, surplus(scene.view))


def outcome_of_charge(
    scene: Scene, charged: tuple[int, ...], streak: Streak, number: int
) -> Outcome | None:
    """Return the outcome of the job if the charge of round `number` was one too many; else None."""
    failures = scene.view.failures_of(number).values()
    said = verdicts.told(failures, scene.view.dones_of(number).values())
    if verdicts.spent(charged, scene.bounds):
        return _failed(f"{said} ({_spent(scene.bounds)})", failures)
    if crashes.is_hopeless(streak):
        return _failed(f"{crashes.hopeless(streak)}: {said}", failures)
    return None


def _spent(bounds: Bounds) -> str:
    most = bounds.max_restarts
    return f"after {most} restart{'s' * (most > 1)}" if most else "no restarts allowed"


def _failed(said: str, failures: Collection[Failure]) -> Outcome:
    first = verdicts.culprit(failures)
    return Outcome(OutcomeKind.FAILED, said, first.member if first else "")
