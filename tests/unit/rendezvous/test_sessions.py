"""End of a session: the log of it, and the state forgotten with it."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.core import sessions
from elasticjob_rendezvous.core.config import Config, Identity
from elasticjob_rendezvous.core.directives import Refused
from elasticjob_rendezvous.core.effects import Note
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import RoundState
from tests.unit.rendezvous.builders import KEYS, Job, identity


def member(
    state: RoundState = RoundState.FINAL, leaving: str = "", refused: str = ""
) -> Membership:
    """pod-7, which has a session and coordinates."""
    me = Identity(identity("pod-7"), "pod-7", "host", 7000, 7001)
    our = Membership(Config(KEYS.prefix, me, "n"))
    job = Job("pod-7").round(1, state)
    our.view = job.view()
    our.crew.tell(Local(ready=True, leaving=leaving))
    our.refused = Refused(refused) if refused else None
    our.session = "s1"
    our.leadership.key = job.stored("pod-7").key
    our.coordinator.take_over(0.0, ())
    our.doubt = False
    return our


def notes(our: Membership) -> list[Note]:
    return [effect for effect in our.effects if isinstance(effect, Note)]


def test_each_session_has_a_name_unused_by_its_agent() -> None:
    our = member()
    names = []
    for _ in range(3):
        sessions.begin(our)
        names.append(our.session)
    assert names == ["n-1", "n-2", "n-3"]
    assert our.sessions == 3


@pytest.mark.parametrize("state", [state for state in RoundState if state != "closed"])
def test_log_warns_of_ended_session_with_its_cause(state: RoundState) -> None:
    our = member(state)
    sessions.lose(our, "its lease ran out")
    [note] = notes(our)
    assert note.warning
    assert "pod-7" in note.text
    assert "its lease ran out" in note.text


@pytest.mark.parametrize(
    "over",
    [{"leaving": "drained"}, {"refused": "other sizes"}, {"state": RoundState.CLOSED}],
    ids=["it leaves", "it was refused", "the job is closed"],
)
def test_expected_end_of_a_session_is_no_warning(over: dict[str, Any]) -> None:
    our = member(**over)
    sessions.lose(our, "its key is gone")
    assert not notes(our)
    assert our.session == ""


def test_log_warns_that_etcd_lost_its_data() -> None:
    our = member()
    sessions.begin_anew(our)
    [note] = notes(our)
    assert note.warning
    assert note.text.startswith("etcd ")
    assert our.view.round is None


@pytest.mark.parametrize("how", ["lost", "begun anew"])
def test_member_without_session_has_no_coordinator_role(how: str) -> None:
    our = member()
    if how == "lost":
        sessions.lose(our, "its key is gone")
    else:
        sessions.begin_anew(our)
    assert our.leadership.key == ""
    assert not our.coordinator.active
    assert our.doubt
