"""Settings of a dynamic rendezvous: sizes and timeouts, with torch's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

JOIN_SECONDS = 600
LAST_CALL_SECONDS = 30
CLOSE_SECONDS = 30
HEARTBEAT_SECONDS = 5
KEEP_ALIVE_INTERVAL_SECONDS = 5
KEEP_ALIVE_MAX_ATTEMPT = 3
LONGEST = timedelta(days=365_000)
"""Maximum of all times: later dates than the year 9999 do not exist."""


def _at_most(found: timedelta) -> str:
    return f" and at most {LONGEST.days} days, not {found}"


@dataclass(frozen=True, slots=True, init=False)
class RendezvousTimeout:
    """Timeouts of a rendezvous, positive and at most LONGEST; None means the default.

    Args:
        join: timeout of `next_rendezvous` (600 s).
        last_call: time for further joins once a round has its minimum of nodes (30 s).
        close: timeout of `set_closed` and `shutdown` (30 s).
        heartbeat: timeout of one heartbeat (5 s).

    Raises:
        ValueError: a timeout is not positive, or too long.
    """

    join: timedelta
    last_call: timedelta
    close: timedelta
    heartbeat: timedelta

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        for name, given, default_seconds in (
            ("join", join, JOIN_SECONDS),
            ("last_call", last_call, LAST_CALL_SECONDS),
            ("close", close, CLOSE_SECONDS),
            ("heartbeat", heartbeat, HEARTBEAT_SECONDS),
        ):
            limit = timedelta(seconds=default_seconds) if given is None else given
            if not timedelta(0) < limit <= LONGEST:
                raise ValueError(f"the {name} timeout must be positive{_at_most(limit)}")
            object.__setattr__(self, name, limit)


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """Settings of one rendezvous, the same on every node.

    Args:
        run_id: id of the rendezvous.
        min_nodes, max_nodes: minimum and maximum number of nodes of a round.
        timeout: timeouts.
        keep_alive_interval: time between heartbeats.
        keep_alive_max_attempt: number of missed intervals after which a node counts as dead.
        lasting_store: True if the backend's own store can serve the workers of every round.
        recovery_call: last call timeout of all rounds but the first, if different; with it, a
            round after a complete one is complete as soon as all nodes that stopped for it are
            back.
        expected_nodes: number of nodes that completes the first round at once.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    lasting_store: bool = False
    recovery_call: timedelta | None = None
    expected_nodes: int | None = None

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("the run id must not be empty")
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes must be at least 1, not {self.min_nodes}")
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"max_nodes must be at least min_nodes ({self.min_nodes}), not {self.max_nodes}"
            )
        if not timedelta(0) < self.keep_alive_interval <= LONGEST:
            raise ValueError(
                f"keep_alive_interval must be positive{_at_most(self.keep_alive_interval)}"
            )
        if self.keep_alive_max_attempt < 1:
            raise ValueError(
                f"keep_alive_max_attempt must be at least 1, not {self.keep_alive_max_attempt}"
            )

    def last_call(self, number: int) -> timedelta:
        """Return the last call timeout of the round with this number."""
        later = number > 0 and self.recovery_call is not None
        return self.recovery_call if later and self.recovery_call else self.timeout.last_call

    @property
    def interval_seconds(self) -> float:
        return self.keep_alive_interval.total_seconds()

    @property
    def dead_after_seconds(self) -> float:
        """Maximum silence of a node in seconds before it counts as dead."""
        return self.interval_seconds * self.keep_alive_max_attempt
