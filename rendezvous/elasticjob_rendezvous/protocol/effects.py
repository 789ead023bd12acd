"""Effects that a step requests; their results come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.kv import Range, Txn
from elasticjob_rendezvous.protocol.records.members import LeaveNotice


@dataclass(frozen=True, slots=True)
class Grant:
    """Request for a lease; answered by `Granted` or `RequestFailed`."""

    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Renewal of a lease; answered by `KeptAlive`, `LeaseGone` or nothing (then sent again)."""

    lease: int


@dataclass(frozen=True, slots=True)
class Read:
    """Ranges to read in one request; answered by `ReadDone` or `RequestFailed`."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Transaction to run; answered by `TxnDone`, `TxnAmbiguous` or `RequestFailed`."""

    txn: Txn


@dataclass(frozen=True, slots=True)
class Watch:
    """Watch on these ranges from `revision` on, or with 0 from now on.

    Answered by `WatchOpened`, any number of `Changed`, and `WatchBroken` at its end. Watches live
    side by side until `Unwatch`. Opening one before reading is the fast order: etcd brings a watch
    that starts in the past up to date only every 100 ms. With `deletions_only` puts need not be
    reported.
    """

    generation: int
    ranges: tuple[Range, ...]
    revision: int
    deletions_only: bool = False


@dataclass(frozen=True, slots=True)
class Unwatch:
    """End of this watch, without an event."""

    generation: int


@dataclass(frozen=True, slots=True)
class Link:
    """Link to hold to this coordinator's agent, instead of any other; redialled when it breaks."""

    member: str
    session: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Order to hold no link."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Round number known to this coordinator, to be sent to linked members."""

    round: int


@dataclass(frozen=True, slots=True)
class SendLeaveNotices:
    """Leave notices, to be sent with each heartbeat on every link from now on."""

    leaving: tuple[LeaveNotice, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Liveness question to a member's launcher (or agent); answered by `Probed`.

    `round` is the newest known number: a launcher that has lost its agent ends the workers of an
    older one. The launcher may let workers of this round live until `live_until`, on this
    process's clock, the time for which their member's lease is renewed. 0 gives no permission.
    """

    member: str
    session: str
    address: str
    agent_port: int
    launcher_port: int
    round: int = 0
    live_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """Log line: a transition (`info`) or a surprise (`warning`)."""

    text: str
    warning: bool = False


Effect = (
    Grant
    | KeepAlive
    | Read
    | Write
    | Watch
    | Unwatch
    | Link
    | Unlink
    | Serve
    | SendLeaveNotices
    | Probe
    | Note
)
"""At most one of Grant, Read and Write is in flight at any time."""
