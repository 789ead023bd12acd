"""How the coordinator ends the job: when there is no more to hope for, and the write. Pure."""

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
    """Close the round, or what it is to be beforehand (`base`), with this outcome."""
    closed = replace(base or scene.current, state=RoundState.CLOSED, ids=(), outcome=outcome)
    said = f"closed: {outcome.kind} {outcome.detail}".rstrip()
    return write_round(scene, closed, said, surplus(scene.view))


def outcome_of_charge(
    charged: tuple[int, ...], streak: Streak, failures: Collection[Failure], bounds: Bounds
) -> Outcome | None:
    """The end of the job, if this charge was one too many."""
    if verdicts.spent(charged, bounds):
        return _spent(failures, bounds)
    if crashes.is_hopeless(streak):
        return _failed(crashes.hopeless(streak, failures), failures)
    return None


def _spent(failures: Collection[Failure], bounds: Bounds) -> Outcome:
    first = verdicts.culprit(failures)
    said = verdicts.describe(first) if first else "a worker failed"
    most = bounds.max_restarts
    times = f"after {most} restart{'s' * (most > 1)}" if most else "no restarts allowed"
    return _failed(f"{said} ({times})", failures)


def _failed(said: str, failures: Collection[Failure]) -> Outcome:
    first = verdicts.culprit(failures)
    return Outcome(OutcomeKind.FAILED, said, first.member if first else "")
