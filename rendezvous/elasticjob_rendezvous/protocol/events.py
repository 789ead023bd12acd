"""Events: the inputs of the protocol.

The protocol takes in `Event`s and returns `effects`; the `directives` are at any moment the state
that the agent should bring its workers into. The driver on a real etcd
(`elasticjob_rendezvous.etcd.driver`) and the simulation (`tests/sim`) both use exactly this
interface; nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from elasticjob_rendezvous.protocol.kv import KeyValue, Range, TxnResult, WatchEvent
from elasticjob_rendezvous.protocol.records.members import LeaveNotice, Outcome
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble
from elasticjob_rendezvous.protocol.worker_group import Local


@dataclass(frozen=True, slots=True)
class Clock:
    """Time of one step: monotonic seconds for waits, UTC milliseconds for people."""

    now: float
    utc_ms: int


@dataclass(frozen=True, slots=True)
class Started:
    """First event: begin."""


@dataclass(frozen=True, slots=True)
class LocalChanged:
    local: Local


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to `Grant`. `deadline` counts from the local time the request was sent."""

    lease: int
    deadline: float


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """Answer to `KeepAlive`: the lease lives until `deadline` (from the time of sending)."""

    lease: int
    deadline: float


@dataclass(frozen=True, slots=True)
class LeaseGone:
    """Answer to `KeepAlive`: etcd no longer knows the lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class ReadDone:
    """Answer to `Read`: content of each range at `revision`."""

    revision: int
    cluster_id: int
    ranges: tuple[tuple[Range, tuple[KeyValue, ...]], ...]


@dataclass(frozen=True, slots=True)
class TxnDone:
    """Answer to `Write`: the transaction was decided."""

    result: TxnResult


@dataclass(frozen=True, slots=True)
class TxnAmbiguous:
    """Answer to `Write`: it may or may not have been applied."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Failure of `Read`, `Write` or `Grant`, which was certainly not applied.

    `terminal`: another attempt cannot help (no permission, not an etcd, …).
    """

    error: str = ""
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """Refusal by every etcd endpoint: etcd is down, this member is not cut off from it."""


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """Report of the store monitor: etcd's trouble, None while it is usable. Only for messages."""

    trouble: StoreTrouble | None


@dataclass(frozen=True, slots=True)
class WatchOpened:
    """Start of a watch: every event after `revision` will come as `Changed`.

    `cluster_id` is that of the watched etcd.
    """

    generation: int
    revision: int
    cluster_id: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Events seen by the watch that `Watch(generation)` opened."""

    generation: int
    revision: int
    events: tuple[WatchEvent, ...]


@dataclass(frozen=True, slots=True)
class WatchBroken:
    """End of a watch that cannot continue (compaction, lost connection, silence): read again.

    `terminal`: it never opened, and another attempt cannot help (no permission, not an etcd, …).
    """

    generation: int
    error: str = ""
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Start of this member's link to the coordinator's agent."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class LinkHeartbeat:
    """Heartbeat of the coordinator's agent on this member's link: it knows of `round`.

    `sent`: when this member sent the newest of its messages that the coordinator had received by
    then, as in `PeerHeartbeat`.
    `vouched_seconds`: validity of the coordinator's own evidence, counted from that receipt; None:
    an agent too old to report it.
    """

    member: str
    session: str
    round: int
    sent: float | None = field(default=None, compare=False)
    vouched_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LinkQuiet:
    """Missed heartbeats of the coordinator's agent on a link that still stands."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class LinkDown:
    """End of the link to the coordinator, or failure to open it. `refused`: nothing listens."""

    member: str
    session: str
    refused: bool


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Start of a link from a member; `sent` as in `PeerHeartbeat`."""

    member: str
    session: str
    sent: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PeerHeartbeat:
    """Heartbeat of a linked member.

    `sent`, on this process's clock: when this side sent the newest of its messages that the member
    had received by then. Only up to that time does the heartbeat prove that the link works in
    both directions. None: an agent too old to report it.
    """

    member: str
    session: str
    sent: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PeerQuiet:
    """Missed heartbeats of a linked member whose link still stands."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class PeerDown:
    """End of a member's link to this agent."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class LeaveNoticesReceived:
    """Leave notices that came on a link, outgoing or incoming: members and reasons."""

    leaving: tuple[LeaveNotice, ...]


class Verdict(StrEnum):
    """Result of a probe of a member's launcher (or agent)."""

    WORKERS_ALIVE = "workersAlive"  # the agent is gone, its workers keep running
    GONE = "gone"  # refused, answered by another member, or no worker left
    AGENT_ALIVE = "agentAlive"  # its agent is attached and reports no worker
    BOTH_ALIVE = "bothAlive"  # its agent is attached and workers run: only the link broke
    UNKNOWN = "unknown"  # time-out or unreachable: proves nothing


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer to a `Probe`.

    `live_seconds`: remaining life that the workers were permitted, without a new permission; None
    where no worker runs or none has a deadline.
    """

    member: str
    session: str
    verdict: Verdict
    live_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Close:
    """Request of this member's user to close the rendezvous (`set_closed`)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """Passage of time: `Engine.wake_at` was reached."""


Event = (
    Started
    | LocalChanged
    | Granted
    | KeptAlive
    | LeaseGone
    | ReadDone
    | TxnDone
    | TxnAmbiguous
    | RequestFailed
    | StoreRefused
    | StoreChanged
    | WatchOpened
    | Changed
    | WatchBroken
    | LinkUp
    | LinkHeartbeat
    | LinkQuiet
    | LinkDown
    | PeerUp
    | PeerHeartbeat
    | PeerQuiet
    | PeerDown
    | LeaveNoticesReceived
    | Probed
    | Close
    | Tick
)
