"""Begin and end of this member's sessions. No I/O.

A session is one key on one lease; a member that loses it registers again under another name.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.view import View


def begin(our: Membership) -> None:
    """Take the next session name; its key is yet to be written."""
    our.sessions += 1
    our.session = f"{our.config.session_nonce}-{our.sessions}"


def lose(our: Membership, why: str) -> None:
    """End the session, of which etcd has no key any more."""
    if not (our.leaving or our.refused or our.round_is(RoundState.CLOSED)):
        our.note(f"the session of {our.config.identity.name} ended: {why}", warning=True)
    _forget(our)


def begin_anew(our: Membership) -> None:
    """Discard the view after etcd lost its data; the memory of the rounds stays valid."""
    our.note("etcd lost its data: registering again", warning=True)
    our.view = View(our.keys)
    our.answered.clear()
    our.lease.forget()
    our.effects += our.watches.drop()
    _forget(our)


def _forget(our: Membership) -> None:
    """Drop the session and the role; links stay, as the evidence that lets workers go on."""
    our.safety.lost_its_lease(our.now)
    our.session = ""
    our.leadership.key = ""
    our.coordinator.resign()
    our.doubt = True
