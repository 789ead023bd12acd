"""Checks of charges, outcomes and ranks against the ground truth. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.records.members import CauseKind, OutcomeKind, Round, RoundState
from elasticjob_rendezvous.protocol.records.roster import Roster, natural_order

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker


def check_charges(checker: Checker, before: Round, after: Round) -> None:
    """Check that a charged round had a worker that failed by itself, not just peers of a loss.

    An abort that no loss and no leave explains may be charged once its verdict's window has passed:
    a cut between pods that healed looks like that.
    """
    truth, now = checker.world.truth, checker.world.now
    for number in set(after.charged) - set(before.charged):
        if number in truth.genuine:
            continue
        aborted = truth.aborts.get(number)
        if aborted is None:
            checker.fail("charges", f"round {number} was charged, but nothing failed in it")
            return
        bounds = checker.recent_bounds()
        window = min(b.keep_alive_seconds for b in bounds) + 1.0
        roster = checker.sealed[number]
        # The key of an earlier agent may go until a moment before the round is sealed.
        since = max(aborted - 3.0, checker.sealed_at[number])
        # Events before the abort may have caused it: no fault excuses its charge. Later events are
        # known in time only if no fault is active.
        until = aborted if checker.in_trouble() else min(aborted + window - 0.5, now)
        lost = [
            assignment.name
            for assignment in roster.seats
            if any(since <= at <= until for at in truth.departures.get(assignment.id, ()))
        ]
        if lost:
            checker.fail("charges", f"round {number} was charged for the end of {lost}")
        if now - aborted < window - 0.5:
            checker.fail("charges", f"round {number} was charged {now - aborted:.1f} s after")


def check_counts(checker: Checker, before: Round, after: Round) -> None:
    """Check that each round that ends is counted once, when it ends or by its verdict.

    A preemption requires the operator's mark on a pod that is named.
    """
    reopened = before.state is RoundState.FINAL and after.number > before.number
    failed = len(after.charged) > len(before.charged) and after.state is RoundState.CLOSED
    ended = reopened or (failed and before.state is RoundState.FINAL and not before.pending)
    grown = _tally(after) - _tally(before)
    if not before.pending or not failed:  # otherwise the last charge may belong to a verdict
        said = f"{before.counts} {before.pending} became {after.counts} {after.pending}"
        checker.need(grown == int(ended), "counts", said)
    if after.counts.preemptions > before.counts.preemptions:
        preempted = checker.world.truth.preempted
        names = {pod.name for pod in checker.world.pods if pod.id in preempted}
        told = after.cause.kind is not CauseKind.PREEMPTION or names & set(after.cause.members)
        checker.need(bool(told), "counts", f"nobody wanted these gone: {after.cause}")


def _tally(round_: Round) -> int:
    counts = round_.counts
    free = counts.losses + counts.leaves + counts.preemptions + counts.joins + counts.others
    return free + len(round_.charged) + len(round_.pending)


def check_outcome(checker: Checker, before: Round | None, after: Round) -> None:
    """Check that each outcome has its reason."""
    world, truth = checker.world, checker.world.truth
    outcome = after.outcome
    if outcome is None:
        checker.fail("outcome", "closed without one")
        return
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            roster = checker.sealed.get(after.number)
            seats = roster.seats if roster is not None else ()
            missing = [s.name for s in seats if (after.number, s.id) not in truth.ended]
            checker.need(bool(seats), "outcome", f"success without a roster: {after}")
            checker.need(not missing, "outcome", f"success, but {missing} did not end")
        case OutcomeKind.FAILED:
            allowed = min(b.max_restarts for b in checker.recent_bounds())
            spent = len(after.charged) > allowed or checker.crashing.no_progress_text
            checker.need(spent, "outcome", f"failed with charges {after.charged} of {allowed}")
        case OutcomeKind.TIMED_OUT:
            patience = min(b.join_timeout_seconds for b in checker.recent_bounds())
            since = checker.final_at or 0.0
            checker.need(world.now - since >= patience, "outcome", "timed out too early")
        case OutcomeKind.STOPPED:
            checker.need(truth.closed_by_hand, "outcome", "nobody asked for the end")


def check_ranks(checker: Checker, roster: Roster) -> None:
    """Check that ranks are a bijection onto 0 … world size - 1, in the natural order of names."""
    ranks: list[int] = []
    for index, assignment in enumerate(roster.seats):
        checker.need(assignment.group_rank == index, "ranks", f"group ranks of {roster}")
        ranks.extend(range(assignment.base_rank, assignment.base_rank + assignment.slots))
    checker.need(ranks == list(range(roster.world_size)), "ranks", f"{ranks} in {roster}")
    names = [(natural_order(assignment.name), assignment.id) for assignment in roster.seats]
    checker.need(names == sorted(names), "ranks", f"not in the order of names: {roster}")
    checker.need(len(set(names)) == len(names), "ranks", f"a name is seated twice: {roster}")
