"""Protocol engine of one member: a step function over events. No I/O.

`Engine.step` processes one event and returns the effects to perform; between events nothing
happens. Each step evaluates the whole state (level-triggered), so a lost or repeated event costs
time and never correctness. At most one request to etcd is in flight; if its outcome is uncertain,
the engine reads again before it decides.

A step runs these modules in order: `handle_event` and `handle_etcd` update the `state` from the
event, `upkeep` maintains lease, watches and links, `next_request` chooses the next request to etcd,
and `next_directive` derives the directive for the agent.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.config import Config
from elasticjob_rendezvous.protocol.directives import Directive, Idle, Left, Run
from elasticjob_rendezvous.protocol.effects import Effect
from elasticjob_rendezvous.protocol.events import (
    Clock,
    Event,
    LeaveNoticesReceived,
    PeerHeartbeat,
    PeerUp,
)
from elasticjob_rendezvous.protocol.handle_event import handle
from elasticjob_rendezvous.protocol.leaving import is_saving
from elasticjob_rendezvous.protocol.liveness import leave_notices
from elasticjob_rendezvous.protocol.liveness.worker_deadlines import (
    evidence_until,
    live_until,
    may_workers_continue,
)
from elasticjob_rendezvous.protocol.next_directive import Facts, direct
from elasticjob_rendezvous.protocol.next_request import next_request, reads_failure
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.replica import View
from elasticjob_rendezvous.protocol.state import EngineState
from elasticjob_rendezvous.protocol.upkeep import maintain
from elasticjob_rendezvous.protocol.worker_group import Local


class Engine:
    """Protocol of one member; its interface is `events`, `effects` and `directives`.

    Attributes:
        directive: current directive for the agent.
        wake_at: time at which the driver sends `Tick`, if there is no other event before.
        view, local, session, lease, self_fencing, watches, leader_link, coordinator: parts of the
            `EngineState`; read-only.
    """

    def __init__(self, config: Config) -> None:
        state = self._state = EngineState(config)
        self.directive: Directive = Idle("not started")
        self.config = config
        self.lease = state.lease
        self.self_fencing = state.self_fencing
        self.watches = state.watches
        self.leader_link = state.leader_link
        self.coordinator = state.coordinator
        self._malformed: dict[str, str] = {}

    @property
    def wake_at(self) -> float | None:
        return self._state.alarm.at

    @property
    def view(self) -> View:
        return self._state.view

    @property
    def local(self) -> Local:
        return self._state.local

    @property
    def session(self) -> str:
        return self._state.session

    @property
    def live_until(self) -> float:
        """Deadline of the workers by the current evidence, on the clock of `step`."""
        return live_until(self._state)

    @property
    def evidence_until(self) -> float:
        """Time until which linked members may rely on their round number, on that clock."""
        return evidence_until(self._state)

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        """Process one event; return the effects to perform, in order."""
        state = self._state
        state.clock = clock
        if isinstance(event, PeerHeartbeat | PeerUp) and self._is_routine(event):
            state.coordinator.peers.up(event, clock.now)
            return []
        if isinstance(event, LeaveNoticesReceived):
            return leave_notices.receive(state, event)
        state.alarm = Alarm()
        state.effects = []
        handle(state, event)
        self._log_malformed()
        if not state.round_is(RoundState.CLOSED):
            state.closed_at = None
        elif state.closed_at is None:
            state.closed_at = clock.now
        if state.rounds.update(state.view):
            state.link_delay.sealed_at = clock.now
            leave_notices.forget(state)
        state.coordinator.last = state.rounds.last
        maintain(state)
        self._request()
        self.directive = self._direct()
        return state.effects

    def hand_over(self) -> Directive:
        """Return the directive to the agent, which may obey it from now on.

        Workers ordered by a `Run` that was handed over count as starting until the agent reports
        otherwise: in answer to a later `Stop` it names their round even if it never started them.
        """
        if isinstance(self.directive, Run):
            self._state.worker_group.count_as_starting(self.directive.roster.number)
        return self.directive

    def _is_routine(self, event: PeerHeartbeat | PeerUp) -> bool:
        """Return True if the event changes only the time of a member's last heartbeat.

        Without a valid lease every heartbeat is evidence, on which the workers' deadline depends.
        """
        state = self._state
        return state.self_fencing.backed(state.now) and state.coordinator.peers.is_routine(event)

    def _log_malformed(self) -> None:
        """Log each malformed record once; the protocol ignores it."""
        for key, error in self._state.view.malformed.items():
            if self._malformed.get(key) != str(error):
                self._malformed[key] = str(error)
                self._state.note(f"record ignored: {error}", warning=True)

    def _request(self) -> None:
        """Send the next request, unless one is in flight or a back-off has not ended."""
        state = self._state
        if state.inflight.request is not None or not state.alarm.passed(
            state.backoff.until, state.now
        ):
            return
        request = next_request(state)
        if request is not None:
            state.inflight.send(request, state.view, state.watches)
            state.effects.append(request)

    def _direct(self) -> Directive:
        state = self._state
        if state.refused is not None:
            return state.refused
        if state.left or state.leave_state.gave_up(state.now, state.alarm):
            return Left()
        bounds = state.bounds
        grace_seconds = (bounds or RendezvousParams(1, 1)).stop_grace_seconds
        late = state.worker_group.is_late(state.current, grace_seconds, state.now, state.alarm)
        saving = is_saving(state)
        roster = state.rounds.roster
        safe, reads = may_workers_continue(state), reads_failure(state)
        return direct(Facts(state.own, bounds, safe, roster, late, saving, state.store, reads))
