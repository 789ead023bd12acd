"""Errors that a blocking handler raises for a member that has no place in the rendezvous."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.etcd.handler import refusal
from elasticjob_rendezvous.protocol.directives import (
    Directive,
    Finish,
    Idle,
    Left,
    RefusalKind,
    Refused,
)
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind

BOUNDS_TEXT = "this member was started with max_nodes=2, but the job has 3"


@pytest.mark.parametrize(
    ("directive", "error", "message"),
    [
        (Refused(BOUNDS_TEXT, RefusalKind.BOUNDS), RendezvousStateError, BOUNDS_TEXT),
        (Refused(BOUNDS_TEXT), RendezvousConnectionError, BOUNDS_TEXT),
        (Refused("denied", RefusalKind.STORE), RendezvousConnectionError, "denied"),
        (Left(), RendezvousGracefulExitError, "left the run 'digits'"),
        (
            Finish(Outcome(OutcomeKind.TIMED_OUT, "1 of 2 nodes")),
            RendezvousTimeoutError,
            "1 of 2 nodes",
        ),
        (
            Finish(Outcome(OutcomeKind.STOPPED, "suspended")),
            RendezvousClosedError,
            "the run 'digits' is closed: stopped suspended",
        ),
        (
            Finish(Outcome(OutcomeKind.SUCCEEDED)),
            RendezvousClosedError,
            "the run 'digits' is closed: succeeded",
        ),
        (Idle("waiting"), RendezvousStateError, "unexpected directive Idle(reason='waiting')"),
    ],
)
def test_directive_without_rank_assignment_becomes_an_error_by_its_kind(
    directive: Directive, error: type[Exception], message: str
) -> None:
    found = refusal("digits", directive)
    assert type(found) is error
    assert str(found) == message
