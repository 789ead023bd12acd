"""What a step asks the world to do; what comes of it are events again."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.kv import Range, Txn
from elasticjob_rendezvous.core.records import Farewell


@dataclass(frozen=True, slots=True)
class Grant:
    """Ask etcd for a lease; answered by `Granted` or `RequestFailed`."""

    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Renew a lease; answered by `KeptAlive`, `LeaseGone` or nothing (then asked again)."""

    lease: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read ranges in one request; answered by `ReadDone` or `RequestFailed`."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Run a Txn; answered by `TxnDone`, `TxnAmbiguous` or `RequestFailed`."""

    txn: Txn


@dataclass(frozen=True, slots=True)
class Watch:
    """Watch these ranges from `revision` on, or with 0 from now on.

    Answered by `WatchOpened`, any number of `Changed`, and `WatchBroken` at its end.
    Watches live side by side until `Unwatch`. Opening one before reading is the fast
    order: etcd brings a watch that starts in the past up to date only every 100 ms.
    With `deletions_only` puts need not be reported.
    """

    generation: int
    ranges: tuple[Range, ...]
    revision: int
    deletions_only: bool = False


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Close this watch, silently."""

    generation: int


@dataclass(frozen=True, slots=True)
class Link:
    """Hold a link to this coordinator's agent, instead of any other (and redial it)."""

    member: str
    session: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Hold no link."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Tell linked members the round number that this coordinator knows of."""

    round: int


@dataclass(frozen=True, slots=True)
class Tell:
    """From now on tell with each heartbeat, on every link, who leaves and why."""

    leaving: tuple[Farewell, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a member's launcher (or agent) whether it lives; answered by `Probed`.

    `round` is the newest number that is known: a launcher that has lost its agent
    ends the workers of an older one. Those of this round it may let live until `live_until`,
    on our clock: so long is the lease of their member kept. 0 gives no permission.
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
    """One line for the log: a transition (`info`) or a surprise."""

    text: str
    warning: bool = False


Effect = (
    Grant | KeepAlive | Read | Write | Watch | Unwatch | Link | Unlink | Serve | Tell | Probe | Note
)
"""At most one of Grant, Read and Write is under way at any time."""
