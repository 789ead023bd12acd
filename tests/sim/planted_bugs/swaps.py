"""Planted bugs that replace one rule each; see `planting`.

In the order of the protocol: a member's knowledge and reports, the control of its workers, its
judgement of others, its decisions as coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from elasticjob_rendezvous.protocol import member_key, next_directive
from elasticjob_rendezvous.protocol.coordinator import (
    charging,
    checkpoint_gate,
    crash_loop,
    failure_policy,
    final,
    frozen,
    repeated_losses,
    round_end,
)
from elasticjob_rendezvous.protocol.directives import Stop
from elasticjob_rendezvous.protocol.events import Probed, Verdict
from elasticjob_rendezvous.protocol.kv import KeyValue, Range
from elasticjob_rendezvous.protocol.lease import Lease
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector
from elasticjob_rendezvous.protocol.liveness.leader_link import LeaderLink
from elasticjob_rendezvous.protocol.liveness.peer_state import SessionEvent
from elasticjob_rendezvous.protocol.records import roster
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    Member,
    MemberState,
    RoundState,
    Streak,
)
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Ranks
from elasticjob_rendezvous.protocol.replica import View
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.planted_bugs.planting import swap

Ranges = Iterable[tuple[Range, tuple[KeyValue, ...]]]


# -- knowledge of a member ------------------------------------------------------------


@swap("etcd-trouble", View, "absorb", seed=2)
def reads_delete_nothing(absorb: Any) -> Any:
    """Keep keys that a read did not find."""

    def planted(view: View, revision: int, ranges: Ranges) -> None:
        absorb(
            view, revision, [(replace(each, limit=each.limit or 999), kvs) for each, kvs in ranges]
        )

    return planted


@swap("etcd-trouble", View, "known", seed=68)
def known_numbers_are_taken_again(_: Any) -> Any:
    """Forget the round numbers that members have seen, with etcd's data."""
    return lambda view: 0


# -- reports of a member ----------------------------------------------------------------


@swap("finishing", member_key.MemberKey, "state", seed=160)
def success_of_an_older_round(state: Any) -> Any:
    """Report success forever after having been done once."""

    def planted(self: member_key.MemberKey) -> MemberState:
        over = self.local.done and self.local.workers is Workers.NONE and not self.leaving
        return MemberState.DONE if over else state(self)

    return planted


@swap("scale", member_key.MemberKey, "record", seed=94)
def leaver_has_stopped_at_once(record: Any) -> Any:
    """Report a leaver's workers as stopped while they are still stopping."""

    def planted(self: member_key.MemberKey, *args: Any, **fields: Any) -> Member:
        return replace(record(self, *args, **fields), stopped=bool(self.leaving))

    return planted


@swap("quiet", member_key, "_confirmation", seed=11)
def confirms_unasked(confirmation: Any) -> Any:
    """Name the open round in a confirmation, instead of the question."""

    def planted(mine: member_key.MemberKey, stored: Member) -> int:
        at = mine.view.round
        opens = at is not None and at.record.state is RoundState.JOINABLE
        return at.modified if at is not None and opens else stored.confirmed

    return planted


# -- control of its workers ---------------------------------------------------------------


@swap("crashes", next_directive, "_may_start", seed=18)
def starts_again_in_its_round(may_start: Any) -> Any:
    """Start workers again in a round in which they have ended."""

    def planted(mine: member_key.MemberKey, current: Any) -> bool:
        ran = min(mine.local.round, current.number - 1)
        return bool(may_start(replace(mine, local=replace(mine.local, round=ran)), current))

    return planted


@swap("scale", next_directive, "_may_start", seed=30)
def starts_without_a_seat(_: Any) -> Any:
    """Start every waiting member, whether or not the roster names it."""

    def planted(mine: member_key.MemberKey, current: Any) -> bool:
        ready = mine.local.ready and mine.lease_holds and mine.stored is not None
        sealed = current.state is RoundState.FINAL and current.number in mine.view.rosters
        return ready and sealed and mine.local.round < current.number

    return planted


@swap("churn", next_directive, "Stop", seed=1)
def stuck_workers_have_grace(_: Any) -> Any:
    """Stop workers that hang in a collective gracefully."""
    return lambda number, kill, cause, grace: Stop(number, False, cause, max(grace, 0.5))


@swap("scale", next_directive, "Stop", seed=14)
def planned_stops_kill(_: Any) -> Any:
    """Kill workers that could save."""
    return lambda number, kill, cause, grace: Stop(number, True, cause, 0.0)


@swap("churn", next_directive, "_with_workers", seed=1)
def goes_on_in_an_old_round(with_workers: Any) -> Any:
    """Keep workers in a round that is over."""
    return lambda facts, current: with_workers(facts, None)


@swap("quiet", Lease, "_renew_every", seed=139)
def lease_is_renewed_late(_: Any) -> Any:
    """Renew a lease only after it has expired."""
    return lambda lease, now: lease.ttl_seconds * 1.4


# -- judgement of other members -------------------------------------------------------------


@swap("pause", FailureDetector, "adopt", seed=6)
def orphans_are_lost(_: Any) -> Any:
    """Count workers whose agent died as ended."""

    def planted(peers: FailureDetector, member: Member, *rest: Any) -> list[Any]:
        peers.take_session(member.id, member.session, SessionEvent.GONE)
        return []

    return planted


@swap("pause", LeaderLink, "probed", seed=6)
def orphaned_leader_is_deleted(probed: Any) -> Any:
    """Count a coordinator whose workers live without its agent as gone."""

    def planted(leader_link: LeaderLink, event: Probed, now: float) -> None:
        lives = event.verdict is Verdict.WORKERS_ALIVE
        probed(leader_link, replace(event, verdict=Verdict.GONE) if lives else event, now)

    return planted


# -- decisions as coordinator -----------------------------------------------------------------


@swap("churn", round_end, "_lost", seed=1)
def a_loss_is_no_reason(lost: Any) -> Any:
    """Continue a round without its lost members."""
    return lambda *args: ([], bool(lost(*args)[0]))


@swap("partition", round_end, "_stopped_by_itself", seed=393)
def cut_off_is_no_loss(_: Any) -> Any:
    """Do not count a member that had to stop its workers as lost."""
    return lambda assignment, view, number: False


@swap("partition", round_end, "_stopped_by_itself", seed=9)
def not_yet_started_is_lost(_: Any) -> Any:
    """Count a waiting member's workers as stopped, even if they have not been started yet."""

    def planted(assignment: RankAssignment, view: View, number: int) -> bool:
        member = view.member(assignment.id)
        waits = member is not None and member.record.state is MemberState.WAITING
        return waits and assignment.id not in view.failures.get(number, {})

    return planted


@swap("scale", final, "counted", seed=30)
def joins_are_counted_as_others(counted: Any) -> Any:
    """Count a round opened by newcomers under another name."""

    def planted(counts: Counts, kind: CauseKind) -> Counts:
        found: Counts = counted(counts, CauseKind.SCALE_DOWN if kind is CauseKind.JOIN else kind)
        return found

    return planted


@swap("crashes", charging, "_without", seed=18)
def charged_and_still_pending(_: Any) -> Any:
    """Keep a verdict pending after it was passed."""
    return lambda pending, number: pending


@swap("endpoints", failure_policy, "includes_cause", seed=163)
def taken_ports_are_charged(speaks: Any) -> Any:
    """Charge a restart at once for a port that was taken."""

    def planted(failures: Iterable[Any]) -> bool:
        known = list(failures)
        return bool(speaks(known)) or failure_policy.port_taken(known)

    return planted


@swap("crashes", crash_loop, "pause_seconds", seed=18)
def pauses_are_halved(pause_seconds: Any) -> Any:
    """Halve the pause after consecutive failures."""
    return lambda streak: pause_seconds(streak) / 2


@swap("crashes", crash_loop, "after_failure", seed=18)
def every_failure_is_the_first(after_failure: Any) -> Any:
    """Restart the row of failures with each failure."""

    def planted(streak: Streak, *rest: Any) -> Streak:
        found: Streak = after_failure(replace(streak, row=0), *rest)
        return found

    return planted


@swap("starved", repeated_losses, "delay_seconds", seed=4)
def delays_are_halved(delay_seconds: Any) -> Any:
    """Halve the delay of a member that was lost again."""
    return lambda row, bounds: delay_seconds(row, bounds) / 2


@swap("scale", checkpoint_gate, "_have_saved", seed=62)
def saved_with_the_first(_: Any) -> Any:
    """Count the gang as saved after one member's save."""
    return lambda gang: any(member.saved or member.completed for member in gang)


@swap("quiet", roster, "ranks", seed=11)
def ranks_are_shifted(ranks: Any) -> Any:
    """Skip a rank from the third member on."""

    def planted(sizes: Sequence[tuple[str, int]]) -> list[Ranks]:
        return [
            each._replace(base_rank=each.base_rank + (index > 1))
            for index, each in enumerate(ranks(sizes))
        ]

    return planted


@swap("quiet", roster, "ranks", seed=11)
def roles_have_one_rank(ranks: Any) -> Any:
    """Make each member believe that it is alone in its role."""
    return lambda sizes: [each._replace(role_world_size=1) for each in ranks(sizes)]


@swap("quiet", frozen, "seal", seed=0)
def master_is_the_last(seal: Any) -> Any:
    """Publish the address of another member than rank 0."""

    def planted(*args: Any, **fields: Any) -> roster.Roster:
        found: roster.Roster = seal(*args, **fields)
        return replace(found, master_address=found.seats[-1].address)

    return planted


@swap("crashes", frozen, "seal", seed=0)
def restarts_are_not_told(seal: Any) -> Any:
    """Report zero restarts to the workers."""
    return lambda *args, **fields: replace(seal(*args, **fields), restarts=0)


@swap("churn", final, "round_end", seed=1)
def losses_are_called_leaves(judged: Any) -> Any:
    """Report a lost member as having left."""

    def planted(*args: Any) -> round_end.RoundEnd:
        found: round_end.RoundEnd = judged(*args)
        cause = found.cause
        if cause is None or cause.kind is not CauseKind.LOSS:
            return found
        return replace(found, cause=Cause(CauseKind.LEAVE, cause.members))

    return planted
