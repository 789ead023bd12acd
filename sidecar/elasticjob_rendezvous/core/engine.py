"""Protocol engine of one agent: a step function over events, with no I/O.

`Engine.step` takes one event and returns effects; between events nothing happens. After each event
it looks at its whole state and does what is due (level-triggered), so a lost or repeated event
costs time and never correctness. At most one request to etcd is in flight; when its outcome is in
doubt the engine reads again before it decides anew.

This module holds the order of the parts: `membership` (the state), `intake` and `answers`
(handling of events), `tending` (upkeep without requests), `requesting` (the next request) and
`directing` (the directive for the agent).
"""

from __future__ import annotations

from elasticjob_rendezvous.core import farewells
from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.config import Config
from elasticjob_rendezvous.core.directing import Facts, direct
from elasticjob_rendezvous.core.directives import Directive, Idle, Left, Run
from elasticjob_rendezvous.core.effects import Effect
from elasticjob_rendezvous.core.events import Clock, Event, LeavesTold, PeerHeard, PeerUp
from elasticjob_rendezvous.core.intake import take
from elasticjob_rendezvous.core.leaving import is_saving
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.requesting import next_request
from elasticjob_rendezvous.core.tending import tend
from elasticjob_rendezvous.core.view import View
from elasticjob_rendezvous.core.vouching import live_until, may_go_on, vouched_until


class Engine:
    """Protocol of one member; its interface is `events`, `effects` and `directives`.

    Attributes:
        directive: present order to the agent.
        wake_at: time to send `Tick`, if nothing else happens before.
        view, local, session, lease, safety, watches, leadership, coordinator: state of this member
            (see `membership`); read-only.
    """

    def __init__(self, config: Config) -> None:
        our = self._our = Membership(config)
        self.directive: Directive = Idle("not started")
        self.config = config
        self.lease = our.lease
        self.safety = our.safety
        self.watches = our.watches
        self.leadership = our.leadership
        self.coordinator = our.coordinator
        self._malformed: dict[str, str] = {}

    @property
    def wake_at(self) -> float | None:
        return self._our.alarm.at

    @property
    def view(self) -> View:
        return self._our.view

    @property
    def local(self) -> Local:
        return self._our.local

    @property
    def session(self) -> str:
        return self._our.session

    @property
    def live_until(self) -> float:
        """Deadline of the workers by present knowledge, on the clock of `step`."""
        return live_until(self._our)

    @property
    def vouched_until(self) -> float:
        """Time until which linked members may rely on their round number, on that clock."""
        return vouched_until(self._our)

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        """Take in one event; return the effects to perform, in order."""
        our = self._our
        our.clock = clock
        if isinstance(event, PeerHeard | PeerUp) and self._is_routine(event):
            our.coordinator.peers.up(event, clock.now)
            return []
        if isinstance(event, LeavesTold):
            return farewells.hear(our, event)
        our.alarm = Alarm()
        our.effects = []
        take(our, event)
        self._name_malformed()
        if our.rounds.remember(our.view):
            our.attendance.sealed_at = clock.now
            farewells.forget(our)
        our.coordinator.last = our.rounds.last
        tend(our)
        self._request()
        self.directive = self._direct()
        return our.effects

    def hand_over(self) -> Directive:
        """Return the directive to the agent, which may obey it from now on.

        Workers ordered by a `Run` that was handed over count as starting until the agent reports
        otherwise: in answer to a later `Stop` it names their round even if it never started them.
        """
        if isinstance(self.directive, Run):
            self._our.crew.promise(self.directive.roster.number)
        return self.directive

    def _is_routine(self, event: PeerHeard | PeerUp) -> bool:
        """Return True if the event has no consequence; without a valid lease it is evidence."""
        our = self._our
        return our.safety.backed(our.now) and our.coordinator.peers.is_routine(event)

    def _name_malformed(self) -> None:
        """Log each malformed record once; it counts for nothing."""
        for key, error in self._our.view.malformed.items():
            if self._malformed.get(key) != str(error):
                self._malformed[key] = str(error)
                self._our.note(f"record ignored: {error}", warning=True)

    def _request(self) -> None:
        """Send the next request, if none is in flight and no back-off spares etcd."""
        our = self._our
        if our.inflight.request is not None or not our.alarm.passed(our.backoff.until, our.now):
            return
        request = next_request(our)
        if request is not None:
            our.inflight.send(request, our.view, our.watches)
            our.effects.append(request)

    def _direct(self) -> Directive:
        our = self._our
        if our.refused is not None:
            return our.refused
        if our.left or our.departure.gave_up(our.now, our.alarm):
            return Left()
        bounds = our.bounds
        grace_seconds = (bounds or Bounds(1, 1)).stop_grace_seconds
        late = our.crew.is_late(our.current, grace_seconds, our.now, our.alarm)
        saving = is_saving(our)
        roster = our.rounds.roster
        return direct(Facts(our.own, bounds, may_go_on(our), roster, late, saving, our.store))
