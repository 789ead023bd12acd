"""When a member without a key counts as gone, and when its workers count as stopped. Pure.

Two questions of different weight. *Is it lost?* opens a new round: a healthy gang must
not stop because an etcd outage cost a member its lease, so after a change of
coordinator, and while a link to it is alive, it has time to register again. *Have its
workers stopped?* lets the new round start: then it is asked, and only an answer, or more
silence than it could survive itself, is taken for a yes.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.events import Verdict
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, Peers
from elasticjob_rendezvous.core.records import Bounds, MemberState, Seat
from elasticjob_rendezvous.core.timers import Timers
from elasticjob_rendezvous.core.view import View

TOOK_OVER = "took over"
KILL_SECONDS = 1.0
"""How long a member that must stop its workers at once may take for it."""
ORPHAN_SECONDS = 30.0


def patience_seconds(bounds: Bounds) -> float:
    """How long a member may live on the proof of links alone, and a little more."""
    return max(bounds.keep_alive_seconds, LINK_SILENCE_SECONDS + KILL_SECONDS)


def is_lost(id: str, bounds: Bounds, peers: Peers, timers: Timers) -> bool:
    """Whether member `id`, which has no key, is lost; else be called again then."""
    since = timers.since(("absent", id))
    if peers.is_gone(id):
        return True
    took_over = timers.known(TOOK_OVER)
    patience = 0.0
    if (took_over is not None and since <= took_over) or peers.alive(id, timers.now):
        patience = patience_seconds(bounds)
    return timers.passed(since + patience)


def has_stopped(seat: Seat, view: View, bounds: Bounds, peers: Peers, timers: Timers) -> bool:
    """Whether no worker runs any more at the seat of a member that has no key.

    It said so before it went, or it is asked: its launcher kills what is older than the
    newest round, its agent gets the time to, and silence counts once the member itself
    can trust nothing any more.
    """
    since = timers.since(("absent", seat.id))
    last = view.departed.get(seat.id)
    if last is not None and last.state is not MemberState.RUNNING:
        if last.state in (MemberState.LEAVING, MemberState.DONE):
            return True
        if last.state is MemberState.WAITING and _ended_all(last.round, view):
            return True
    if peers.is_gone(seat.id):
        return True
    match peers.inquire(seat, timers.now):
        case Verdict.GONE:
            return True
        case Verdict.WORKERS_ALIVE:
            return timers.passed(since + ORPHAN_SECONDS)
        case Verdict.AGENT_ALIVE:
            return timers.passed(since + patience_seconds(bounds))
        case Verdict.UNKNOWN:
            heard = peers.last_heard.get(seat.id, since - LINK_SILENCE_SECONDS)
            lapsed = since + (bounds.keep_alive_seconds if seat.id in peers.fenced else 0.0)
            return timers.passed(max(heard + LINK_SILENCE_SECONDS + KILL_SECONDS, lapsed))
    timers.passed(timers.now + 0.01)
    return False


def _ended_all(round: int, view: View) -> bool:
    return view.round is not None and round >= view.round.record.previous


def ended(id: str, timers: Timers) -> None:
    """The member has a key again."""
    timers.forget(("absent", id))
