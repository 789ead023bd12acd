"""Parameters of one simulated run: sizes, rates and the actions of its fault phase. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.coordinator.crash_loop import pause_seconds
from elasticjob_rendezvous.protocol.records.members import Streak
from elasticjob_rendezvous.protocol.records.params import RendezvousParams


@dataclass(frozen=True, slots=True)
class Action:
    """Fault `name` (a method of `faults.Faults`) against pod number `target` at time `at`.

    `target` counts the pods alive at that time, modulo their number; `amount` is a duration or a
    size, or unused, depending on the action.
    """

    at: float
    name: str
    target: int = 0
    amount: float = 0.0


Kind = tuple[str, float, float]
"""Kind of a fault: its name, and the range of its amount."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a run, fixed before it begins.

    Args:
        operator: whether an operator writes bounds; otherwise the first member does.
        arrivals: start time of each pod.
        slots: workers of each pod, repeated as needed.
        launcher: whether workers outlive their agent.
        rates: probability per message of each network fault.
        start_seconds: approximate start time of workers.
        work_seconds: an undisturbed round ends with success after this time; None: never.
        crash_seconds: approximate time after which a complete gang's workers fail; None: never.
        crash_steps: step reported before the crash: "none", the "same", or one "further".
        strikes: faults injected right after the round changes or a member is done.
        strike_share: probability of such a fault.
        stubborn: share of pods whose scripts ignore SIGTERM.
        quiet_at: time after which no fault happens.
        replaces: whether dead pods are replaced.
        orphan_seconds: maximum life of workers without an agent, enforced by the launcher.
        checkpoint_seconds: interval between checkpoints of a training gang; None: never.
        asks_to_save: whether scripts want to save before a planned stop.
        keeps: whether they only keep their state in memory, which no end of the job waits for.
        save_seconds: approximate duration of that save.
        stuck_share: share of nodes that never reach the save.
        saves_fail: every save fails, and the nodes report it.
        endpoints: number of etcd endpoints known to each client.
    """

    profile: str
    bounds: RendezvousParams
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
    keeps: bool = False
    save_seconds: float = 0.5
    stuck_share: float = 0.0
    saves_fail: bool = False
    endpoints: int = 1
    strikes: tuple[Kind, ...] = ()
    strike_share: float = 0.0
    actions: tuple[Action, ...] = ()
    quiet_at: float = 10.0

    @property
    def recovery_seconds(self) -> float:
        """Maximum seconds from the last fault to a final round.

        Last call, two leases and five seconds; before that come the grace period of workers that
        ignore SIGTERM and the pause after consecutive failures.
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
