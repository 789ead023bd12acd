"""Planted bugs in the rules of coordinator and member; see `planting`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from elasticjob_rendezvous.protocol import next_directive
from elasticjob_rendezvous.protocol.coordinator import (
    charging,
    checkpoint_gate,
    crash_loop,
    failure_policy,
    final,
    frozen,
    quorum,
    repeated_losses,
    round_end,
    scale_up,
)
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import Clock, Event, Granted, KeptAlive, Probed, Verdict
from elasticjob_rendezvous.protocol.kv import Compare, Delete, Txn
from elasticjob_rendezvous.protocol.liveness.self_fencing import SelfFencing
from elasticjob_rendezvous.protocol.records import roster
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Round, Streak
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.replica import View
from tests.sim.planted_bugs.planting import Takes, Writes, bug
from tests.sim.processes.pod import Pod
from tests.sim.world import EngineFactory

# -- the coordinator's rules --------------------------------------------------------


@bug("outlived", seed=104)
def answering_agents_have_stopped() -> Iterator[EngineFactory]:
    """Count running workers as stopped in time because their agent answers too."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if isinstance(event, Probed) and event.verdict is Verdict.BOTH_ALIVE:
                return replace(event, verdict=Verdict.AGENT_ALIVE)
            return event

    yield Planted


@bug("partition", seed=5)
def isolated_coordinator_shoots() -> Iterator[EngineFactory]:
    """Treat an unanswered probe as proof of death."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if isinstance(event, Probed) and event.verdict is Verdict.UNKNOWN:
                return replace(event, verdict=Verdict.GONE)
            return event

    yield Planted


@bug("pause", seed=37)
def old_confirmation_counts() -> Iterator[EngineFactory]:
    """Count a confirmation of any frozen round as one of the current round."""

    def lie(view: Any, id: str, original: Any = View.member) -> Any:
        found = original(view, id)
        at = view.round
        if found is None or not found.record.confirmed or at is None:
            return found
        return replace(found, record=replace(found.record, confirmed=at.modified))

    act = frozen.next_act

    def planted(*args: Any) -> Any:
        with patch.object(View, "member", lie):
            return act(*args)

    with patch.object(frozen, "next_act", planted):
        yield Engine


@bug("churn", seed=5)
def final_beside_old_workers() -> Iterator[EngineFactory]:
    """Start the next round before the last one's workers have stopped."""
    group_members = quorum.group_members

    def planted(*args: Any) -> quorum.Quorum:
        count = group_members(*args)
        waiting = {member.id for member in count.waiting}
        return replace(count, unstopped=(), survivors=count.survivors & waiting)

    with patch.object(quorum, "group_members", planted):
        yield Engine


@bug("churn", seed=0)
def aborts_charged_at_once() -> Iterator[EngineFactory]:
    """Charge an aborted collective without waiting for a loss that explains it."""
    with patch.object(failure_policy, "includes_cause", lambda failures: bool(list(failures))):
        yield Engine


@bug("partition", seed=25)
def verdict_without_window() -> Iterator[EngineFactory]:
    """Pass the verdict on an aborted collective after a tenth of its window."""
    window = failure_policy.window_seconds
    with patch.object(failure_policy, "window_seconds", lambda bounds: window(bounds) / 10):
        yield Engine


@bug("churn", seed=273)
def budget_off_by_one() -> Iterator[EngineFactory]:
    """Fail the job with the last restart that it was granted."""
    with patch.object(
        failure_policy, "is_budget_spent", lambda charged, b: len(tuple(charged)) >= b.max_restarts
    ):
        yield Engine


@bug("partition", seed=25)
def excused_round_not_counted() -> Iterator[EngineFactory]:
    """Leave a failure excused by a loss out of all counters."""
    with patch.object(charging, "counted", lambda counts, _: counts):
        yield Engine


@bug("crashes", seed=18)
def no_back_off() -> Iterator[EngineFactory]:
    """Restart a script that fails at its start at once, forever."""
    with patch.object(crash_loop, "pause_seconds", lambda _: 0.0):
        yield Engine


@bug("starved", seed=1)
def lost_again_and_admitted_at_once() -> Iterator[EngineFactory]:
    """Admit a member that is lost again and again as soon as it registers."""
    with patch.object(repeated_losses, "held_back", lambda *_: frozenset()):
        yield Engine


@bug("starved", seed=0)
def every_loss_is_the_first() -> Iterator[EngineFactory]:
    """Forget the losses of a member with the next round."""
    after = repeated_losses.after_loss

    def planted(current: Round, *rest: Any) -> Any:
        return after(replace(current, losses=()), *rest)

    with patch.object(repeated_losses, "after_loss", planted):
        yield Engine


@bug("starved", seed=1)
def losses_end_at_the_start_of_a_round() -> Iterator[EngineFactory]:
    """End a row of losses when a round starts with its member, before it has trained."""
    with patch.object(repeated_losses, "TRAINED_SECONDS", 0.5):
        yield Engine


@bug("churn", seed=3)
def losses_end_while_the_member_is_away() -> Iterator[EngineFactory]:
    """End the row of losses of a member that is absent at the end of a later round."""
    with patch.object(repeated_losses, "KEPT_ROUNDS", 0):
        yield Engine


@bug("crashes", seed=50)
def hope_without_end() -> Iterator[EngineFactory]:
    """Continue a job that fails repeatedly at one step until its budget is spent."""
    with patch.object(crash_loop, "is_without_progress", lambda _: False):
        yield Engine


@bug("crashes", seed=18)
def despair_without_reason() -> Iterator[EngineFactory]:
    """Count failures at different steps as failures at one step."""
    after = crash_loop.after_failure

    def planted(streak: Streak, *rest: Any) -> Streak:
        return replace(after(streak, *rest), times=streak.times + 1)

    with patch.object(crash_loop, "after_failure", planted):
        yield Engine


@bug("scale", seed=78)
def every_mark_is_a_preemption() -> Iterator[EngineFactory]:
    """Treat every member marked by the operator as preempted."""
    marked = RendezvousParams.marked

    def planted(bounds: RendezvousParams, member: str) -> Any:
        found = marked(bounds, member)
        return None if found is None else replace(found, preempted=True)

    with patch.object(RendezvousParams, "marked", planted):
        yield Engine


@bug("finishing", seed=122)
def done_member_missed() -> Iterator[EngineFactory]:
    """Count a member that left after it was done as lost."""
    look = round_end.round_end

    def planted(view: Any, seated: Roster, *rest: Any) -> round_end.RoundEnd:
        found = look(view, seated, *rest)
        done = view.dones.get(seated.number, {})
        missed = tuple(
            assignment.name
            for assignment in seated.seats
            if assignment.id in done and view.member(assignment.id) is None
        )
        if found.cause is None and not found.succeeded and missed:
            return replace(found, cause=Cause(CauseKind.LOSS, missed))
        return found

    with patch.object(final, "round_end", planted):
        yield Engine


@bug("finishing", seed=21)
def success_at_first_done() -> Iterator[EngineFactory]:
    """Declare success with the first member that is done."""
    look = round_end.round_end

    def planted(view: Any, seated: Roster, *rest: Any) -> round_end.RoundEnd:
        if view.dones.get(seated.number):
            return round_end.RoundEnd(succeeded=True)
        return look(view, seated, *rest)

    with patch.object(final, "round_end", planted):
        yield Engine


@bug("finishing", seed=1)
def newcomers_after_done() -> Iterator[EngineFactory]:
    """Let newcomers open a round although a member is done already."""
    look = round_end.round_end

    def planted(
        view: Any, seated: Roster, bounds: RendezvousParams, *rest: Any
    ) -> round_end.RoundEnd:
        found = look(view, seated, bounds, *rest)
        ids = {assignment.id for assignment in seated.seats}
        new = [m.record.name for id, m in view.members().items() if id not in ids]
        room = len(ids) < bounds.max_nodes and bounds.increment == 1
        waits = not (found.succeeded or found.cause) and view.dones.get(seated.number)
        if waits and new and room:
            return replace(found, cause=Cause(CauseKind.JOIN, tuple(new)))
        return found

    with patch.object(final, "round_end", planted):
        yield Engine


@bug("scale", seed=206)
def surplus_opens_rounds() -> Iterator[EngineFactory]:
    """Let a member that has no place open a round."""
    with patch.object(round_end, "legal_size", lambda bounds, available: available):
        yield Engine


@bug("scale", seed=94)
def newcomers_do_not_wait() -> Iterator[EngineFactory]:
    """Let newcomers interrupt a round without waiting for a checkpoint."""
    with patch.object(round_end, "must_wait", lambda *_: False):
        yield Engine


@bug("scale", seed=62)
def ranks_save_apart() -> Iterator[EngineFactory]:
    """Choose a save point that the first member has not passed but others have."""

    def planted(gang: Any) -> int:
        return 1 + min(member.passed for member in gang)

    with patch.object(checkpoint_gate, "_point", planted):
        yield Engine


@bug("scale", seed=62)
def place_without_all_answers() -> Iterator[EngineFactory]:
    """Choose the save point before all members have answered."""
    with patch.object(
        checkpoint_gate, "_all_answered", lambda gang: any(m.passed >= 0 for m in gang)
    ):
        yield Engine


@bug("scale", seed=62)
def nobody_is_asked_to_save() -> Iterator[EngineFactory]:
    """End a round for a planned stop without asking for a checkpoint."""

    def planted(*args: Any) -> round_end.RoundEnd | None:
        look: round_end.RoundEnd = args[4]
        return look if look.cause is not None else None

    with patch.object(checkpoint_gate, "before_end", planted):
        yield Engine


@bug("scale", seed=993)
def memory_leaves_before_it_was_restored() -> Iterator[EngineFactory]:
    """End a round for a leave before the nodes that stay have restored."""
    with patch.object(checkpoint_gate, "_must_restore", lambda *_: False):
        yield Engine


@bug("scale", seed=22)
def any_checkpoint_will_do() -> Iterator[EngineFactory]:
    """Let newcomers in after a checkpoint that was completed before they came."""

    def planted(view: Any, seated: Roster, bounds: RendezvousParams, *rest: Any) -> bool:
        saved = scale_up._checkpoint(view, seated) >= 0
        return not saved and scale_up.must_wait(view, seated, bounds, *rest)

    with patch.object(round_end, "must_wait", planted):
        yield Engine


@bug("scale", seed=30)
def increment_forgotten() -> Iterator[EngineFactory]:
    """Accept any size between minimum and maximum, ignoring the increment."""

    def planted(bounds: RendezvousParams, available: int) -> int:
        top = min(available, bounds.max_nodes)
        return top if top >= bounds.min_nodes else 0

    with patch.object(quorum, "legal_size", planted):
        yield Engine


@bug("quiet", seed=11)
def ranks_by_arrival() -> Iterator[EngineFactory]:
    """Assign ranks by order of arrival instead of by name."""
    with patch.object(roster, "by_name", lambda members: list(members)[::-1]):
        yield Engine


# -- the member's rules -------------------------------------------------------------


@bug("partition", seed=26)
def launcher_ignores_its_deadline() -> Iterator[EngineFactory]:
    """Let workers live past the last deadline that their agent gave the launcher."""
    with patch.object(Pod, "_watch_deadline", lambda _: None):
        yield Engine


@bug("partition", seed=9)
def deadline_from_the_answer() -> Iterator[EngineFactory]:
    """Count a lease from the arrival of the answer, not from the request."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if isinstance(event, Granted | KeptAlive):
                ttl = self.lease.ttl_seconds
                return replace(event, deadline=clock.now + ttl)
            return event

    yield Planted


@bug("partition", seed=2)
def runs_past_its_lease() -> Iterator[EngineFactory]:
    """Let an isolated member train on without limit."""
    with patch.object(SelfFencing, "live_until", lambda *_: 1e9):
        yield Engine


@bug("storm", seed=540)
def starts_past_its_lease() -> Iterator[EngineFactory]:
    """Start workers without checking the lease."""
    start = next_directive._may_start

    def planted(own: Any, current: Round) -> bool:
        return start(replace(own, lease_holds=True), current)

    with patch.object(next_directive, "_may_start", planted):
        yield Engine


@bug("finishing", seed=23)
def fence_on_a_guess() -> Iterator[EngineFactory]:
    """Fence sessions by name, without comparing their last revision."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            deleted = {op.key for op in txn.success if isinstance(op, Delete)}

            def kept(compare: Compare) -> bool:
                return compare.key not in deleted

            return replace(txn, compares=tuple(filter(kept, txn.compares)))

    yield Planted
