"""How our session begins and ends. Pure.

A session is one key of ours on one lease; who loses it comes back under another name.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.view import View


def begin(our: Membership) -> None:
    """Take the next name; its key is yet to be written."""
    our.sessions += 1
    our.session = f"{our.config.session_nonce}-{our.sessions}"


def lose(our: Membership, why: str) -> None:
    """Etcd has no key of our session any more."""
    if not (our.leaving or our.refused or our.round_is(RoundState.CLOSED)):
        our.note(f"the session of {our.config.identity.name} ended: {why}", warning=True)
    _forget(our)


def begin_anew(our: Membership) -> None:
    """Etcd lost its data: what we know of it is void; our memory of the rounds is not."""
    our.note("etcd lost its data: registering anew", warning=True)
    our.view = View(our.keys)
    our.answered.clear()
    our.lease.forget()
    our.effects += our.watches.drop()
    _forget(our)


def _forget(our: Membership) -> None:
    """Links stay: they are the proof that lets workers go on meanwhile."""
    our.safety.lost_its_lease(our.now)
    our.session = ""
    our.leadership.key = ""
    our.coordinator.resign()
    our.doubt = True
