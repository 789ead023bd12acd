"""When a member without a key counts as gone, and when its workers count as stopped. Pure.

Two questions of different weight. *Is it lost?* opens a new round: a healthy gang must
not stop because an etcd outage cost a member its lease, so after a change of
coordinator, and while a link to it is alive, it has time to register again. *Have its
workers stopped?* lets the new round start: then it is asked, and only an answer, or more
silence than it could survive itself, is taken for a yes.
"""

from __future__ import annotations

import math

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.events import Verdict
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, MISSED_SECONDS, Peers
from elasticjob_rendezvous.core.records import Member, MemberState
from elasticjob_rendezvous.core.roster import Seat
from elasticjob_rendezvous.core.timers import Timers
from elasticjob_rendezvous.core.view import View

TOOK_OVER = "took over"
ASK_SOON_SECONDS = 0.001
KILL_SECONDS = 1.0
"""How long a member that must stop its workers at once may take for it."""
LAPSE_SECONDS = 0.3
"""The same where its lease ended, of which it knows beforehand, by its own clock."""
RENEWED_SHARE = 2 / 3
"""Of a lease, what is left at least while its agent lives: a third is over when it is renewed."""


def patience_seconds(bounds: Bounds) -> float:
    """How long a member may live on the proof of links alone, and a little more."""
    return max(bounds.keep_alive_seconds, LINK_SILENCE_SECONDS + KILL_SECONDS)


def hung_agent_seconds(keep_alive_seconds: float) -> float:
    """How long workers may live without a word of their agent where others can ask nobody else.

    Where no launcher answers probes, the one below the agent must see to it by itself that they
    have ended when the others count on that. That is about when the agent's lease ends.
    """
    return max(LINK_SILENCE_SECONDS, keep_alive_seconds - 0.5)


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
        case Verdict.WORKERS_ALIVE | Verdict.BOTH_ALIVE:
            return timers.passed(max(since, opened) + peers.orphan_seconds)
        case Verdict.AGENT_ALIVE:
            return timers.passed(max(since + patience_seconds(bounds), opened + KILL_SECONDS))
        case Verdict.UNKNOWN:
            heard = peers.heard_at(seat.id)
            alone = not seat.launcher_port
            lease_seconds = bounds.keep_alive_seconds
            if alone and heard is not None and heard + MISSED_SECONDS < since - lease_seconds:
                heard = None  # it renewed its lease after that: the link went before its agent
            if heard is None:
                renewed = lease_seconds * RENEWED_SHARE
                heard = since - min(renewed if alone else math.inf, LINK_SILENCE_SECONDS)
            trust = hung_agent_seconds(bounds.keep_alive_seconds) if alone else LINK_SILENCE_SECONDS
            fenced = view.round is not None and seat.id in view.round.record.fenced
            lapsed = since + (bounds.keep_alive_seconds if fenced else LAPSE_SECONDS)
            return timers.passed(max(heard + trust + KILL_SECONDS, lapsed))
    _wake_to_ask(seat, peers, timers)
    return False


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
