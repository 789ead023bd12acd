"""What a dynamic rendezvous is told: sizes and limits, with the reference's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

JOIN_SECONDS = 600
LAST_CALL_SECONDS = 30
CLOSE_SECONDS = 30
HEARTBEAT_SECONDS = 5
KEEP_ALIVE_INTERVAL_SECONDS = 5
KEEP_ALIVE_MAX_ATTEMPT = 3


@dataclass(frozen=True, slots=True, init=False)
class RendezvousTimeout:
    """The time limits of a rendezvous; each must be positive, None means its default.

    Args:
        join: for a round to come about (600 s).
        last_call: how long a round stays open once it has its minimum of nodes (30 s).
        close: for `set_closed` and `shutdown` (30 s).
        heartbeat: for one keep-alive heartbeat (5 s).

    Raises:
        ValueError: a limit is not positive.
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
            if limit <= timedelta(0):
                raise ValueError(f"the {name} timeout must be positive, not {limit}")
            object.__setattr__(self, name, limit)


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The settings of one rendezvous, the same on every node.

    Args:
        run_id: which rendezvous.
        min_nodes, max_nodes: how many nodes a round may have.
        timeout: the time limits.
        keep_alive_interval: how often a node says that it lives.
        keep_alive_max_attempt: after how many missed intervals it counts as dead.
        lasting_store: the backend has a store where the workers of every round can meet.
        recovery_call: the last call of every round but the first, if it is another; with it, a
            round that follows on another is complete as soon as all who stopped for it are back.
        expected_nodes: the first round is complete as soon as so many take part.

    Raises:
        ValueError: a value is out of range; it says which.
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
        if self.keep_alive_interval <= timedelta(0):
            raise ValueError(
                f"keep_alive_interval must be positive, not {self.keep_alive_interval}"
            )
        if self.keep_alive_max_attempt < 1:
            raise ValueError(
                f"keep_alive_max_attempt must be at least 1, not {self.keep_alive_max_attempt}"
            )

    def last_call(self, number: int) -> timedelta:
        """How long the round of this number stays open once it has its minimum of nodes."""
        later = number > 0 and self.recovery_call is not None
        return self.recovery_call if later and self.recovery_call else self.timeout.last_call

    @property
    def interval_seconds(self) -> float:
        return self.keep_alive_interval.total_seconds()

    @property
    def dead_after_seconds(self) -> float:
        """How long a node may be silent before it counts as dead."""
        return self.interval_seconds * self.keep_alive_max_attempt
