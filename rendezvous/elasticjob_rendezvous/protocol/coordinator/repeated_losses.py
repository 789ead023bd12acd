"""Back-off of members that are lost repeatedly. No I/O.

An agent without processor time loses its lease, registers again once it runs, and is lost again.
Each time its gang stops and starts twice. A member that was lost more than once, with no round in
between in which it trained, is held back: it gets a rank only after it has been registered for a
delay, which doubles with each loss. The other members do not wait for it, unless they cannot form a
round without it. If a round opens for a newcomer that disappears before the seal, this counts as a
loss too, because the gang stopped for it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.round_writes import KEPT_ROUNDS
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    LossRow,
    Member,
    Round,
    RoundState,
    begun_as,
    cause_with_reasons,
    reasons_of,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster, legal_size
from elasticjob_rendezvous.protocol.replica import Versioned, View

Members = Mapping[str, Versioned[Member]]

TRAINED_SECONDS = 60.0
"""Minimum duration of a final round that counts as training: as in `crash_loop`."""
LONGEST_DELAY_SECONDS = 300.0
LONGEST_SHARED_DELAY_SECONDS = 30.0
"""Maximum delay while other members are idle because of it."""
MAX_ROWS = 64
"""Maximum number of rows in the round record, which every member reads."""
NAMED = 3
"""Maximum number of members whose rows a cause repeats."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Member that is held back, for messages.

    It was lost `times` times within `seconds`, and counts again once it has been registered for
    `delay_seconds`.
    """

    name: str
    times: int
    seconds: int
    delay_seconds: float

    @property
    def text(self) -> str:
        return f"{self.name} was lost {self.losses}"

    @property
    def losses(self) -> str:
        """Losses and their consequence, as the cause of a round names them."""
        return (
            f"{self.times} times in {self.seconds} s without progress, so it waits for "
            f"{self.delay_seconds:g} s after it registers, unless other nodes need it"
        )


def delay_seconds(row: LossRow, bounds: RendezvousParams) -> float:
    """Return the time that the member must be registered: 0, one lease, two, four, …

    A shorter time than a lease would not show that its agent can renew one.
    """
    if row.times < 2:
        return 0.0
    return min(bounds.keep_alive_seconds * 2.0 ** min(row.times - 2, 16), LONGEST_DELAY_SECONDS)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Loss of one member; `session` is the one that ended, or empty if it was only cut off."""

    member: str
    name: str
    session: str


def after_loss(
    current: Round, cause: Cause, ended: Roster | None, members: Members, utc_ms: int
) -> tuple[LossRow, ...]:
    """Return the rows after the end of round `ended` for this cause; `members` are registered.

    The loss of more than half of a gang is not counted: its cause is etcd or the network. The row
    of an absent member, as of a replaced pod, ends when its round is no longer kept.
    """
    lost = _lost(cause, ended)
    if ended is None or 2 * len(lost) > len(ended.seats):
        return current.losses
    losses = [_loss_of(assignment, members) for assignment in lost]
    rows = _counted(current.losses, losses, ended.number, utc_ms)
    gone = {row.member for row in rows.values() if _is_gone(row, ended, members)}
    kept = {
        member: row
        for member, row in rows.items()
        if member not in gone or ended.number - row.round <= KEPT_ROUNDS
    }
    return _bounded(kept, gone)


def at_seal(
    view: View, current: Round, roster: Roster, bounds: RendezvousParams, utc_ms: int
) -> tuple[LossRow, ...]:
    """Return the rows when round `current` is sealed: some for which it opened may be lost already.

    As in `after_loss` the loss of more than half of the members is not counted.
    """
    lost = _lost_newcomers(view, current, bounds)
    if not lost or len(lost) > len(roster.seats):
        return current.losses
    rows = _counted(current.losses, lost, roster.number, utc_ms)
    members = view.members()
    gone = {row.member for row in rows.values() if _is_gone(row, roster, members)}
    return _bounded(rows, gone)


def explained(
    cause: Cause, losses: Iterable[LossRow], ended: Roster | None, bounds: RendezvousParams
) -> Cause:
    """Return the cause of a round with the rows of the members that were lost again."""
    lost = _lost(cause, ended)
    number = 0 if ended is None else ended.number
    rows = {row.member: row for row in losses if row.times > 1 and row.round == number}
    again = [rows[assignment.id] for assignment in lost if assignment.id in rows]
    if ended is None or not again:
        return cause
    texts = [
        f"{row.name} " * (len(lost) > 1) + described(row, bounds).losses for row in again[:NAMED]
    ]
    return cause_with_reasons(
        cause.kind, cause.members, (*reasons_of(cause), *texts), urgent=cause.urgent
    )


def held_back(
    view: View,
    current: Round,
    bounds: RendezvousParams,
    timers: Timers,
    longest_seconds: float = LONGEST_DELAY_SECONDS,
) -> frozenset[str]:
    """Return the members that do not count yet; the timers wake when one counts again.

    The time runs on the coordinator's clock, from the moment at which it first saw the member's
    session after the loss.
    """
    found = []
    for row in lost_again(current, view.rosters.get(current.previous)):
        member = view.member(row.member)
        if member is None:
            continue
        since = timers.since(("held back", row.member, member.record.session, row.round))
        if not timers.passed(since + min(delay_seconds(row, bounds), longest_seconds)):
            found.append(row.member)
    return frozenset(found)


def by_losses(current: Round, members: Collection[str]) -> list[str]:
    """Return the members in the order of their losses, the one with the least first."""
    times = {row.member: row.times for row in current.losses}
    return sorted(members, key=lambda member: (times.get(member, 0), member))


def leaves_others_idle(bounds: RendezvousParams, others: int, held: int) -> bool:
    """Return True if some of `others` have a rank only in a round with members held back.

    The legal sizes of a `nodeIncrement` above 1 have gaps.
    """
    return legal_size(bounds, others) < min(others, legal_size(bounds, others + held))


def rows_to_end(view: View, current: Round, roster: Roster, timers: Timers) -> frozenset[str]:
    """Return the members whose row ends, because this final round has trained with them.

    A round has trained once it has lasted, and a worker reported a step of it. Without any report
    of steps in this job the duration is enough.
    """
    if not current.losses:
        return frozenset()
    seated = {assignment.id for assignment in roster.seats}
    ended = frozenset(row.member for row in current.losses if row.member in seated)
    started = ("state", current.number, RoundState.FINAL)
    if not ended or not timers.over(started, TRAINED_SECONDS):
        return frozenset()
    members = [found.record for id in seated if (found := view.member(id)) is not None]
    stepped = any(member.round == roster.number and member.step >= 0 for member in members)
    reports = any(max(member.step, member.ended_step) >= 0 for member in members)
    return ended if stepped or not reports else frozenset()


def lost_again(current: Round, roster: Roster | None) -> Iterator[LossRow]:
    """Yield the rows of members lost again that had no rank since: `roster` is the last one."""
    again = [row for row in current.losses if row.times > 1]
    if not again:
        return
    seats = () if roster is None else roster.seats
    seated = {assignment.id for assignment in seats}
    for row in again:
        admitted = roster is not None and roster.number > row.round and row.member in seated
        if not admitted:
            yield row


def described(row: LossRow, bounds: RendezvousParams) -> HeldBack:
    """Return the row for people."""
    seconds = max(0, round((row.last_ms - row.first_ms) / 1000))
    return HeldBack(row.name, row.times, seconds, delay_seconds(row, bounds))


def _lost(cause: Cause, ended: Roster | None) -> list[RankAssignment]:
    if cause.kind is not CauseKind.LOSS or ended is None:
        return []
    names = frozenset(cause.members)
    return [assignment for assignment in ended.seats if assignment.name in names]


def _loss_of(assignment: RankAssignment, members: Members) -> _Loss:
    session, member = begun_as(assignment.session), members.get(assignment.id)
    stays = member is not None and begun_as(member.record.session) == session
    return _Loss(assignment.id, assignment.name, "" if stays else session)


def _lost_newcomers(view: View, current: Round, bounds: RendezvousParams) -> list[_Loss]:
    """Return the members for which this round opened that were lost since.

    A cause has their names alone, which a replaced pod has as well: the last one that went counts.
    """
    if current.cause.kind is not CauseKind.JOIN:
        return []
    names = set(current.cause.members)
    names -= {member.record.name for member in view.members().values()}
    last = {member.name: member for member in view.departed.values() if member.name in names}
    return [
        _Loss(member.id, member.name, begun_as(member.session))
        for member in last.values()
        if view.leaves(member.id) is None and bounds.marked(member.id) is None
    ]


def _counted(
    rows: Iterable[LossRow], losses: Iterable[_Loss], number: int, utc_ms: int
) -> dict[str, LossRow]:
    """Return the rows with these losses, which round `number` showed, in order of time.

    The end of one session is one loss, even if several rounds that it broke are judged by it.
    """
    found = {row.member: row for row in rows}
    for loss in losses:
        before = found.pop(loss.member, LossRow(loss.member, "", 0, 0, utc_ms))
        known = before.session == loss.session != ""
        found[loss.member] = replace(
            before,
            name=loss.name,
            times=before.times + (not known),
            round=max(before.round, number),
            last_ms=before.last_ms if known else utc_ms,
            session=loss.session,
        )
    return found


def _is_gone(row: LossRow, ended: Roster, present: Container[str]) -> bool:
    """Return True if the member was lost in an earlier round and has not returned."""
    return row.round < ended.number and row.member not in present


def _bounded(rows: Mapping[str, LossRow], gone: Container[str]) -> tuple[LossRow, ...]:
    """Return at most `MAX_ROWS` rows, in order of time.

    Rows of members that are `gone` are dropped first, then the shortest, of equal ones the oldest.
    """
    order = {member: index for index, member in enumerate(rows)}

    def value(row: LossRow) -> tuple[bool, int, int]:
        return row.member not in gone, row.times, order[row.member]

    kept = sorted(rows.values(), key=value)[-MAX_ROWS:]
    return tuple(sorted(kept, key=lambda row: order[row.member]))
