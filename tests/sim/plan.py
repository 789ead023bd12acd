"""What one simulated run is given: sizes, rates and the actions of its fault phase. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.crashes import pause_seconds
from elasticjob_rendezvous.core.records import Streak


@dataclass(frozen=True, slots=True)
class Action:
    """At `at` seconds do `name` (a method of `faults.Faults`) to pod number `target`.

    `target` counts the pods alive at that time, modulo their number; `amount`
    is a duration, a size or nothing, as the action wants it.
    """

    at: float
    name: str
    target: int = 0
    amount: float = 0.0


Kind = tuple[str, float, float]
"""A kind of fault: its name, and the range of its amount."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that was decided before it began.

    Args:
        operator: whether an operator writes bounds; else the first member does.
        arrivals: when each pod starts.
        slots: workers of each pod, repeated as needed.
        launcher: whether workers outlive their agent.
        rates: chances, for each message, of the network's faults.
        start_seconds: about how long workers take to come up.
        work_seconds: an undisturbed round ends with success after this; None is never.
        crash_seconds: workers of a whole gang fail about so long after it came up; None never do.
        crash_steps: what they tell before that: "none", the "same" step, or one "further".
        strikes: faults that happen just when the round changes or a member is done.
        strike_share: how often one does.
        stubborn: the share of pods whose scripts ignore SIGTERM.
        quiet_at: from when on no fault happens.
        replaces: whether dead pods are replaced.
        orphan_seconds: how long a launcher lets workers live without an agent.
        checkpoint_seconds: how often a gang that trains saves; None is never.
        asks_to_save: whether scripts want to save before a planned stop.
        save_seconds: about how long that takes them.
        stuck_share: the share of nodes that never come to it.
        endpoints: how many endpoints of etcd each client knows.
    """

    profile: str
    bounds: Bounds
    arrivals: tuple[float, ...]
    operator: bool = True
    slots: tuple[int, ...] = (1,)
    launcher: bool = True
    rates: dict[str, float] = field(default_factory=dict)
    start_seconds: float = 0.3
    work_seconds: float | None = None
    finish_skew_seconds: float = 0.2
    late_error_share: float = 0.0
    hang_share: float = 0.3
    stubborn: float = 0.2
    replaces: bool = True
    orphan_seconds: float = 30.0
    slow_seconds: float = 0.05
    checkpoint_seconds: float | None = None
    crash_seconds: float | None = None
    crash_steps: str = "none"
    asks_to_save: bool = False
    save_seconds: float = 0.5
    stuck_share: float = 0.0
    endpoints: int = 1
    strikes: tuple[Kind, ...] = ()
    strike_share: float = 0.0
    actions: tuple[Action, ...] = ()
    quiet_at: float = 10.0

    @property
    def recovery_seconds(self) -> float:
        """How long after the last fault a round must be final, at the latest.

        Last call, two leases and five seconds; workers that ignore SIGTERM take
        their grace before that, and failures in a row put it off.
        """
        bounds = self.bounds
        lease = max(2.0, bounds.keep_alive_seconds)
        return (
            bounds.last_call_seconds
            + 2 * lease
            + 5.0
            + bounds.stop_grace_seconds
            + pause_seconds(Streak(bounds.max_restarts))
        )
