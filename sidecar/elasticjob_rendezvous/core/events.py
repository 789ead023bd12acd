"""What the world tells the protocol.

`Event`s go in, `effects` come out, and the `directives` say at any moment what the agent
should do with its workers. The driver on a real etcd (`elasticjob_rendezvous.etcd.driver`)
and the simulation (`tests/sim`) both speak exactly this; nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from elasticjob_rendezvous.core.kv import KeyValue, Range, TxnResult, WatchEvent
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.records import Farewell, Outcome
from elasticjob_rendezvous.core.store_trouble import StoreTrouble


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of one step: monotonic seconds for waits, UTC milliseconds for people."""

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
    """Answer to `Read`: what each range held at `revision`."""

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
    """`Read`, `Write` or `Grant` was certainly not applied.

    `terminal`: asking again cannot help (no permission, not an etcd, …).
    """

    error: str = ""
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """Every etcd endpoint refused the connection: it is down, we are not cut off from it."""


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """The monitor's view of etcd: its trouble, None while it can be used. Only for messages."""

    trouble: StoreTrouble | None


@dataclass(frozen=True, slots=True)
class WatchOpened:
    """The watch is in place: every later event than `revision` will come as `Changed`.

    `cluster_id` is that of the etcd that the watch is on.
    """

    generation: int
    revision: int
    cluster_id: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What the watch opened by `Watch(generation)` saw."""

    generation: int
    revision: int
    events: tuple[WatchEvent, ...]


@dataclass(frozen=True, slots=True)
class WatchBroken:
    """The watch can't go on (compaction, lost connection, silence): read again.

    `terminal`: it never opened, and opening it again cannot help (no permission, not an etcd, …).
    """

    generation: int
    error: str = ""
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Our link to the coordinator's agent stands."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class LinkHeard:
    """The coordinator's agent spoke on our link: it knows of `round`.

    `sent`: when we sent the newest word of ours that it had heard by then, as `PeerHeard` says.
    `vouched_seconds`: how long its own evidence lasts, from when it heard that; None: an agent too
    old to tell.
    """

    member: str
    session: str
    round: int
    sent: float | None = field(default=None, compare=False)
    vouched_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LinkQuiet:
    """The coordinator's agent missed beats on our link, which stands as yet."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class LinkDown:
    """Our link to the coordinator broke, or was never had. `refused`: nobody listens there."""

    member: str
    session: str
    refused: bool


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A member linked to us; `sent` is as `PeerHeard` says."""

    member: str
    session: str
    sent: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PeerHeard:
    """A linked member spoke.

    `sent`, on our clock: when we sent the newest word of ours that it had heard by then. Only so
    far does its own word prove that each hears the other. None: an agent too old to tell.
    """

    member: str
    session: str
    sent: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PeerQuiet:
    """A linked member missed beats; its link stands as yet."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A member's link to us closed."""

    member: str
    session: str


@dataclass(frozen=True, slots=True)
class LeavesTold:
    """A link, of ours or to us, told which members leave, and why."""

    leaving: tuple[Farewell, ...]


class Verdict(StrEnum):
    """What a probe of a member's launcher (or agent) found."""

    WORKERS_ALIVE = "workersAlive"  # the agent is gone, its workers train on
    GONE = "gone"  # refused, or somebody else answers, or no worker is left
    AGENT_ALIVE = "agentAlive"  # its agent is attached, and tells of no worker
    BOTH_ALIVE = "bothAlive"  # its agent is attached and workers run: only the link broke
    UNKNOWN = "unknown"  # time-out or unreachable: proves nothing


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to a `Probe`.

    `live_seconds`: how long the workers may live without a new permission, as they were told;
    None where no worker runs, or where nobody gave them a deadline.
    """

    member: str
    session: str
    verdict: Verdict
    live_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Close:
    """Whoever holds this member wants the rendezvous closed (`set_closed`)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `Engine.wake_at` was reached."""


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
    | LinkHeard
    | LinkQuiet
    | LinkDown
    | PeerUp
    | PeerHeard
    | PeerQuiet
    | PeerDown
    | LeavesTold
    | Probed
    | Close
    | Tick
)
