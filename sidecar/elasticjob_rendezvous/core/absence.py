"""When a member without a key counts as gone, and when its workers count as stopped. Pure.

Two questions of different weight. *Is it lost?* opens a new round: a healthy gang must
not stop because an etcd outage cost a member its lease, so after a change of
coordinator, and while a link to it is alive, it has time to register again. *Have its
workers stopped?* lets the new round start: then it is asked, and only an answer, or more
silence than it could survive itself, is taken for a yes.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.events import Verdict
from elasticjob_rendezvous.core.leadership import HANDOVER_SECONDS
from elasticjob_rendezvous.core.peers import (
    LINK_SILENCE_SECONDS,
    RELAY_SECONDS,
    TRUST_SECONDS,
    Peers,
)
from elasticjob_rendezvous.core.records import Member, MemberState
from elasticjob_rendezvous.core.roster import Seat
from elasticjob_rendezvous.core.timers import Timers
from elasticjob_rendezvous.core.view import View

TOOK_OVER = "took over"
RETURNED = "returned"
ASK_SOON_SECONDS = 0.001
KILL_SECONDS = 0.5
"""The fixed allowance for killing: between the deadline of workers, which their launcher knows
beforehand, and their end."""
OBEY_SECONDS = 1.0
"""Maximum time for an agent to act on a newer round number."""


def patience_seconds(bounds: Bounds) -> float:
    """How long a member may live on the proof of links alone, and a little more."""
    return max(bounds.keep_alive_seconds, TRUST_SECONDS + KILL_SECONDS)


def is_lost(seat: Seat, view: View, bounds: Bounds, peers: Peers, timers: Timers) -> bool:
    """Whether a seat's member, which has no key, is lost; else be called again then."""
    since = timers.since(("absent", seat.id))
    if (seat.id, _last_session(seat, view)) in peers.gone:
        return True
    took_over = timers.known(TOOK_OVER)
    patience = 0.0
    if peers.alive(seat.id, timers.now):
        patience = patience_seconds(bounds)
    elif took_over is not None and since <= took_over:
        patience = patience_seconds(bounds)
        if _nobody_answers(seat, peers, timers, patience):
            return True
    return timers.passed(since + patience)


def _nobody_answers(seat: Seat, peers: Peers, timers: Timers, seconds: float) -> bool:
    """Whether a member is as silent as a machine without power: neither link nor launcher.

    After an outage of etcd, which is what it has patience for, both would answer.
    """
    verdict = peers.inquire_meanwhile(seat, timers.now, seconds)
    _wake_to_ask(seat, peers, timers)
    if verdict is not Verdict.UNKNOWN:
        return False
    heard = peers.heard_at(seat.id)
    return heard is None or timers.passed(heard + LINK_SILENCE_SECONDS)


def _last_session(seat: Seat, view: View) -> str:
    """The member's last session, as far as is known here."""
    last = view.departed.get(seat.id)
    return seat.session if last is None else last.session


def has_stopped(
    seat: Seat, view: View, bounds: Bounds, peers: Peers, timers: Timers, opened: float
) -> bool:
    """Whether no worker runs any more at the seat of a member that has no key.

    It said so before it went, or it is asked: its launcher kills what is older than the
    newest round, its agent gets the time to from when that round `opened`, and silence
    counts once the member itself can trust nothing any more. Workers that are seen to run
    have not stopped, whatever their agent should have done: it may hang since a moment, or
    belong to a whole gang that outlives etcd.
    """
    since = timers.since(("absent", seat.id))
    last = view.departed.get(seat.id)
    if last is not None and _said_stopped(last, view):
        return True
    if (seat.id, _last_session(seat, view)) in peers.gone:
        return True
    match peers.inquire(seat, timers.now):
        case Verdict.GONE:
            return True
        case Verdict.WORKERS_ALIVE:
            told = peers.inquiries.live_until(seat.id)
            if told is not None:
                latest = max(told, peers.granted.get(seat.id, told))
                return timers.passed(latest + KILL_SECONDS)
            return timers.passed(max(since, opened) + peers.orphan_seconds)
        case Verdict.BOTH_ALIVE:
            return timers.passed(max(since, opened) + peers.orphan_seconds)
        case Verdict.AGENT_ALIVE:
            return timers.passed(max(since + patience_seconds(bounds), opened + OBEY_SECONDS))
        case Verdict.UNKNOWN:
            latest = _latest_deadline(seat, since, view, bounds, peers, timers)
            return timers.passed(latest + KILL_SECONDS)
    _wake_to_ask(seat, peers, timers)
    return False


def _latest_deadline(
    seat: Seat, since: float, view: View, bounds: Bounds, peers: Peers, timers: Timers
) -> float:
    """Return the latest moment to which anybody can have let a silent member's workers live.

    Its launcher ends them at a deadline, which only evidence moves: the member's lease, which
    has ended, or not yet in its own eyes where its key was deleted; its link, from when we heard
    of it last; permissions of our own; or what it answered last. Of a member whose link was never
    ours the evidence came through the coordinator before us.
    """
    fenced = view.round is not None and seat.id in view.round.record.fenced
    latest = [since + bounds.keep_alive_seconds if fenced else since]
    latest += [at for at in (peers.inquiries.live_until(seat.id),) if at is not None]
    latest += [peers.granted[seat.id]] if seat.id in peers.granted else []
    heard, took_over = peers.heard_at(seat.id), timers.known(TOOK_OVER)
    latest += [] if heard is None else [heard + TRUST_SECONDS]
    # One that comes back shows that its gang outlived etcd, and the others were linked to it.
    returned = timers.known(RETURNED)
    latest += [] if returned is None else [returned + TRUST_SECONDS]
    if took_over is not None and (heard is None or heard < took_over):
        leader = max(peers.led, key=lambda id: peers.led[id], default="")
        if leader != seat.id:
            led = peers.led.get(leader, took_over)
            latest += [took_over + HANDOVER_SECONDS, led + TRUST_SECONDS + RELAY_SECONDS]
    return max(latest)


def _wake_to_ask(seat: Seat, peers: Peers, timers: Timers) -> None:
    """An inquiry that has just begun is sent with the next step."""
    at = peers.inquiries.first_at(seat.id)
    if at is not None:
        timers.passed(max(at, timers.now + ASK_SOON_SECONDS))


def _said_stopped(last: Member, view: View) -> bool:
    """Whether a member's last word was that no worker of the last round runs there."""
    match last.state:
        case MemberState.DONE:
            return True
        case MemberState.LEAVING:
            return last.stopped
        case MemberState.WAITING:
            return view.round is not None and last.round >= view.round.record.previous
    return False


def ended(id: str, timers: Timers) -> None:
    """The member has a key again."""
    timers.forget(("absent", id))


def returned(seat: Seat, timers: Timers) -> None:
    """Note that a member of the last roster has a key again after its absence."""
    if timers.known(("absent", seat.id)) is not None:
        timers.start(RETURNED, timers.now)
        ended(seat.id, timers)
