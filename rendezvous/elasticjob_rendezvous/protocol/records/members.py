"""Records of members and rounds; the table also has the other records of a rendezvous in etcd.

| record             | written by                                           | module     |
|--------------------|------------------------------------------------------|------------|
| `RendezvousParams` | the operator; outside Kubernetes the first member    | `params`   |
| `Member`           | its own agent, under a lease                         | here       |
| `Round`            | the coordinator                                      | here       |
| `Roster`           | the coordinator, once, in the Txn that sets `final`  | `roster`   |
| `History`          | the coordinator: cost of each round                  | `timings`  |
| `Failure`          | the agent whose worker failed                        | `failures` |
| `Done`             | the agent whose workers all ended with success       | here       |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport
from elasticjob_rendezvous.protocol.records.codec import prepare

ABORTED = "PeersAborted"
"""Reason in a cause: the collectives of the members' peers broke."""

_TEXTS = {ABORTED: "its peers' collectives broke"}
"""Texts that stand for reasons in a detail; other reasons stand there as they are."""
_SEPARATOR = "; "
ASIDE = "~"
"""Suffix of a session that was set aside: its member does not coordinate."""


class RoundState(StrEnum):
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"


NEXT_STATES: dict[RoundState, frozenset[RoundState]] = {
    RoundState.JOINABLE: frozenset({RoundState.FROZEN, RoundState.CLOSED}),
    RoundState.FROZEN: frozenset({RoundState.FINAL, RoundState.JOINABLE, RoundState.CLOSED}),
    RoundState.FINAL: frozenset({RoundState.JOINABLE, RoundState.CLOSED}),
    RoundState.CLOSED: frozenset(),
}
"""Legal transitions. A return from `frozen` or `final` to `joinable` takes a new number."""


class MemberState(StrEnum):
    """State that a member reports. `Member.round` qualifies it."""

    WAITING = "waiting"  # no worker of any round runs here; ready for the next
    RUNNING = "running"  # workers of `round` run here
    STOPPING = "stopping"  # workers of `round` are being ended here
    LEAVING = "leaving"  # as stopping, and this member will not wait again
    DONE = "done"  # every worker of `round` here ended with success


class CauseKind(StrEnum):
    """Reason for a new round."""

    START = "start"
    JOIN = "join"
    LEAVE = "leave"
    PREEMPTION = "preemption"  # a leave that the cluster asked for: evicted, preempted, tainted
    LOSS = "loss"
    FAILURE = "failure"
    SCALE_DOWN = "scaleDown"
    UNCONFIRMED = "unconfirmed"
    MASTER_PORT = "masterPort"
    DATA_LOST = "dataLost"


URGENT = frozenset({CauseKind.LOSS, CauseKind.FAILURE, CauseKind.MASTER_PORT, CauseKind.DATA_LOST})
"""Causes for which running workers are killed at once: their collectives cannot end."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a new round.

    Args:
        kind: the kind.
        members: names of the members behind it.
        detail: text for people. `cause_with_reasons` repeats the reasons in it, for the previous
            release.
        urgent: collectives broke already, so workers are killed at once for any kind.
        reasons: reasons of the members as they or their drain requests gave them, such as
            `SIGTERM`; empty if the detail is a text. Read with `reasons_of`.
    """

    kind: CauseKind
    members: tuple[str, ...] = ()
    detail: str = ""
    urgent: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def kills(self) -> bool:
        """True if running workers are killed at once: they may be stuck in a collective."""
        return self.urgent or self.kind in URGENT


def cause_with_reasons(
    kind: CauseKind, members: Iterable[str], reasons: Iterable[str], urgent: bool = False
) -> Cause:
    """Return the cause with these reasons, each once; empty ones are left out."""
    ordered = sorted({*reasons} - {""}, key=lambda reason: (reason == ABORTED, reason))
    detail = _SEPARATOR.join(_TEXTS.get(reason, reason) for reason in ordered)
    return Cause(kind, tuple(members), detail, urgent, tuple(ordered))


def reasons_of(cause: Cause) -> tuple[str, ...]:
    """Return the reasons of a cause, also of one that the previous release wrote."""
    return cause.reasons or reasons_in_detail(cause.kind, cause.detail)


def reasons_in_detail(kind: str, detail: str) -> tuple[str, ...]:
    """Return the reasons in the detail of a cause of the previous release, which had no others."""
    known = {text: reason for reason, text in _TEXTS.items()}
    found = tuple(known.get(part, part) for part in detail.split(_SEPARATOR) if part)
    if kind in (CauseKind.LEAVE, CauseKind.PREEMPTION):
        return found
    # The detail of another loss is a text.
    return found if kind == CauseKind.LOSS and found == (ABORTED,) else ()


class OutcomeKind(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timedOut"
    STOPPED = "stopped"  # ended from outside: deletion, suspension, deadline, set_closed


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a job, written with `closed`.

    Args:
        kind: the kind.
        detail: text for people.
        culprit: the member whose failure ended the job.
        reason: the operator's reason to close it, one word such as `Suspended`; empty if the
            operator did not, or was of a release that wrote the reason into `detail`.
        save: result of the checkpoint before a planned end; None for another end.
    """

    kind: OutcomeKind
    detail: str = ""
    culprit: str = ""
    reason: str = ""
    save: SaveReport | None = None


class Restore(StrEnum):
    """Progress of a node's workers in restoring the snapshots of earlier rounds."""

    NONE = ""  # no workers of an earlier round have saved here, or nothing is known
    PENDING = "pending"  # they have, and the workers of this round have not all saved a step
    DONE = "done"  # all workers of this round have saved a step


class SnapshotTrouble(StrEnum):
    """Reason for which a node holds no snapshots in memory."""

    NONE = ""
    NO_ROOM = "noRoom"
    UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Snapshots that the workers of a node report; steps are -1 while there is none.

    Args:
        step: newest snapshot that is complete in the memory of the node.
        stored: newest snapshot of which the node's parts are in storage.
        replicated: newest snapshot with copies of the ranks' own parts on other nodes.
        replicas: number of these copies that the workers make; 0 for none.
        restored: step with which the workers' round began.
        bytes: size of one snapshot in the memory of the node.
        limit: memory of the node for snapshots in bytes; 0 without a limit of the job.
        trouble: see `SnapshotTrouble`.
        error: errno of memory that is unusable; 0 if it is unknown.
        storage_error: errno of the last write to storage; ETIMEDOUT while storage does not answer,
            0 if it has not failed.
    """

    step: int = -1
    stored: int = -1
    replicated: int = -1
    replicas: int = 0
    restored: int = -1
    bytes: int = 0
    limit: int = 0
    trouble: SnapshotTrouble = SnapshotTrouble.NONE
    error: int = 0
    storage_error: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """Session of one agent.

    Args:
        id: the member: a pod's uid, or a nonce of the agent's process.
        session: a nonce; an agent that returns continues its member under a new one.
        name: display name; natural order of names gives the ranks.
        address: address of its workers for peers.
        agent_port: port on which its agent answers peers.
        launcher_port: port on which its launcher answers probes; 0 when the workers are the
            agent's own children, which die with it.
        slots: number of workers that it runs (torch's local world size).
        state: see `MemberState`.
        round: round of its workers; for `waiting` the highest round of which a worker ever ran
            here (none runs any more).
        confirmed: mod_revision of the frozen round it has confirmed, or 0.
        master_port: a port held for this member's next round.
        master_served: a store for the workers listens there already.
        lease: lease of this key.
        known: highest round number seen, which survives a loss of etcd's data.
        reason: reason for the leave, for `leaving`.
        start_ms: for `running`: milliseconds from `final` to started workers.
        sizes: the sizes it was started with, where no operator sets them.
        stopped: for `leaving`: no worker runs here any more.
        first_step_ms: for `running`: milliseconds from started workers to the first step that all
            of them have reported; 0 while unknown.
        step: the last step of `round` that its workers reported, updated every few seconds; -1
            while there is none.
        checkpoint_step: the last step that a checkpoint of this round contains, or -1.
        ended_round, ended_step: the last round whose workers have all ended here, and the last step
            that they reported; 0 and -1 while there is none.
        cut_off_round: the last round whose workers its launcher ended without an order, because
            nothing confirmed in time that it is the newest; 0 without one.
        busy_ms: duration of a step of its slowest worker without the wait for others, where the
            script reports it; 0 else.
        saves: its workers want to save before a planned stop.
        keeps: its workers can keep their state in memory before a planned stop, other than that of
            the whole job.
        restore: see `Restore`; `DONE` also where there was nothing to restore.
        passed: answer to `Round.save`: the last save point that a worker here passed, or -1.
        saved: its workers passed the save point that `Round.save` names.
        completed: one of them has reported a checkpoint since then: that of the whole gang.
        save_error: error of that checkpoint, once all of them have reported that it failed; empty
            before, and from agents of an earlier release.
        cold: for `running`: reason for which they were not forked from a zygote; empty if they
            were, None where that was not wanted or is unknown.
        lost_steps, lost_ms: for `running`: completed steps of earlier rounds that its workers
            repeat, and their duration, from their first step on; -1 and 0 while unknown.
        lost_reason: reason for which the state of the last of these steps was not copied at the
            stop, a name in CamelCase; empty if it is unknown.
        snapshots: its workers' snapshots, updated with `step`; None without a report.
        launch: reason, found in the program's files, for which the command runs once for this node
            and starts the workers; empty if the launch is as the operator decided.
    """

    id: str
    session: str
    name: str
    address: str
    agent_port: int
    launcher_port: int = 0
    slots: int = 1
    role: str = "default"
    node: str = ""
    state: MemberState = MemberState.WAITING
    round: int = 0
    confirmed: int = 0
    master_port: int = 0
    lease: int = 0
    known: int = 0
    reason: str = ""
    start_ms: int = 0
    sizes: str = ""
    stopped: bool = False
    first_step_ms: int = 0
    step: int = -1
    checkpoint_step: int = -1
    master_served: bool = False
    busy_ms: int = 0
    saves: bool = False
    keeps: bool = False
    restore: Restore = Restore.NONE
    passed: int = -1
    saved: bool = False
    completed: bool = False
    save_error: str = ""
    cold: str | None = None
    lost_steps: int = -1
    lost_ms: int = 0
    lost_reason: str = ""
    snapshots: Snapshots | None = None
    ended_round: int = 0
    ended_step: int = -1
    launch: str = ""
    cut_off_round: int = 0

    @property
    def runs(self) -> bool:
        """True if workers of its round run, or are being stopped."""
        return self.state in (MemberState.RUNNING, MemberState.STOPPING)


def begun_as(session: str) -> str:
    """Return the name of a session before it was set aside."""
    return session.rstrip(ASIDE)


def agent_of(session: str) -> str:
    """Return the process of the agent that began a session."""
    return begun_as(session).rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """Leave notice on links: the member's id, its agent's process, and the reason."""

    id: str
    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """Checkpoint that all workers of a final round are asked for before its planned end.

    Args:
        cause: reason for the planned end.
        seconds: time for the checkpoint, counted from the request.
        point: save point of the scripts at which all save; 0 until all have answered.
    """

    cause: Cause
    seconds: float
    point: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of ended rounds by each cause that costs no restart; see `cause_counts`.

    others: fewer members wanted, a taken port, etcd's data lost.
    """

    losses: int = 0
    leaves: int = 0
    preemptions: int = 0
    joins: int = 0
    others: int = 0


@dataclass(frozen=True, slots=True)
class Streak:
    """Charged failures in a row; see `crash_loop`.

    row: number of those soon after the start, before a first step.
    step: step of the last one that reported its step, or -1.
    times: number of failures in a row at that step.
    """

    row: int = 0
    step: int = -1
    times: int = 0


@dataclass(frozen=True, slots=True)
class LossRow:
    """Consecutive losses of one member that has not trained in between; see `repeated_losses`.

    Args:
        member, name: the member's id and its name.
        times: number of losses.
        round: the round in which it was lost last.
        first_ms, last_ms: UTC times of the first and of the last loss, for people.
        session: the session that the last loss ended; empty if the member was only cut off.
    """

    member: str
    name: str
    times: int = 1
    round: int = 0
    first_ms: int = 0
    last_ms: int = 0
    session: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """State machine of the job: one key, written by the coordinator; any member may close it.

    Args:
        number: only ever grows; sealed by at most one roster.
        previous: number of the last round that became final, or 0.
        ids: members asked to confirm (while frozen).
        charged: rounds whose failure was charged to the budget.
        pending: rounds with a failure that still waits for its verdict.
        coordinator, successor: member ids, so that watchers know who acts next.
        nodes, world_size, master_*: of the last final roster, for observers.
        port_retries: rounds in a row that were re-formed because MASTER_PORT was taken.
        since_ms: UTC time of the last transition, for people.
        counts: number of rounds that ended so far without a charge, by cause.
        streak: the charged failures in a row up to now.
        save: while final: the checkpoint requested before this round ends.
        fenced: until it is final: members whose key was deleted while workers ran there.
        losses: the members lost without a round that trained with them since.
    """

    number: int
    state: RoundState
    cause: Cause
    previous: int = 0
    ids: tuple[str, ...] = ()
    charged: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    coordinator: str = ""
    successor: str = ""
    nodes: int = 0
    world_size: int = 0
    master_address: str = ""
    master_port: int = 0
    master_name: str = ""
    port_retries: int = 0
    outcome: Outcome | None = None
    since_ms: int = 0
    counts: Counts = Counts()
    streak: Streak = Streak()
    save: Save | None = None
    fenced: tuple[str, ...] = ()
    losses: tuple[LossRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Success of every worker of `member` in `round`."""

    round: int
    member: str
    name: str


prepare(Member, Round, Done)
