"""End of a session: the log of it, and the state forgotten with it."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol import session
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.directives import Refused
from elasticjob_rendezvous.protocol.effects import Note
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.state import EngineState
from elasticjob_rendezvous.protocol.worker_group import Local
from tests.unit.rendezvous.builders import KEYS, Job, identity


def member(
    state: RoundState = RoundState.FINAL, leaving: str = "", refused: str = ""
) -> EngineState:
    """pod-7, which has a session and coordinates."""
    me = Identity(identity("pod-7"), "pod-7", "host", 7000, 7001)
    engine_state = EngineState(Config(KEYS.prefix, me, "n"))
    job = Job("pod-7").round(1, state)
    engine_state.view = job.view()
    engine_state.worker_group.report(Local(ready=True, leaving=leaving))
    engine_state.refused = Refused(refused) if refused else None
    engine_state.session = "s1"
    engine_state.leader_link.key = job.stored("pod-7").key
    engine_state.coordinator.take_over(0.0, ())
    engine_state.doubt = False
    return engine_state


def notes(engine_state: EngineState) -> list[Note]:
    return [effect for effect in engine_state.effects if isinstance(effect, Note)]


def test_each_session_has_a_name_unused_by_its_agent() -> None:
    engine_state = member()
    names = []
    for _ in range(3):
        session.begin(engine_state)
        names.append(engine_state.session)
    assert names == ["n-1", "n-2", "n-3"]
    assert engine_state.sessions == 3


@pytest.mark.parametrize("state", [state for state in RoundState if state != "closed"])
def test_log_warns_of_ended_session_with_its_cause(state: RoundState) -> None:
    engine_state = member(state)
    session.lose(engine_state, "its lease ran out")
    [note] = notes(engine_state)
    assert note.warning
    assert "pod-7" in note.text
    assert "its lease ran out" in note.text


@pytest.mark.parametrize(
    "over",
    [{"leaving": "drained"}, {"refused": "other sizes"}, {"state": RoundState.CLOSED}],
    ids=["it leaves", "it was refused", "the job is closed"],
)
def test_expected_end_of_a_session_is_no_warning(over: dict[str, Any]) -> None:
    engine_state = member(**over)
    session.lose(engine_state, "its key is gone")
    assert not notes(engine_state)
    assert engine_state.session == ""


def test_log_warns_that_etcd_lost_its_data() -> None:
    engine_state = member()
    session.restart_session(engine_state)
    [note] = notes(engine_state)
    assert note.warning
    assert note.text.startswith("etcd ")
    assert engine_state.view.round is None


@pytest.mark.parametrize("how", ["lost", "begun anew"])
def test_member_without_session_has_no_coordinator_role(how: str) -> None:
    engine_state = member()
    if how == "lost":
        session.lose(engine_state, "its key is gone")
    else:
        session.restart_session(engine_state)
    assert engine_state.leader_link.key == ""
    assert not engine_state.coordinator.active
    assert engine_state.doubt
