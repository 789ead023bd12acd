"""Transition tables of the failure detector: every state and event."""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.liveness.peer_state import (
    CONTACT,
    INQUIRY,
    KEY,
    LINK,
    WORKERS,
    ContactState,
    ImpossibleTransition,
    InquiryState,
    KeyState,
    LinkState,
    MemberEvent,
    Orphan,
    PeerState,
    SessionEvent,
    SessionState,
    Table,
    WorkersState,
)
from elasticjob_rendezvous.protocol.liveness.probes import RepeatedProbe
from tests.unit.rendezvous.builders import a_member

UNLINKED, LINKED, ANSWERING = LinkState
WITH_AGENT, ORPHANED = WorkersState
VALID, ABANDONED, GONE = KeyState
NORMAL, LOST, SILENT, LOST_SILENT = ContactState
NONE, SUSPICION, ABSENCE = InquiryState
S, M = SessionEvent, MemberEvent

TABLES: dict[str, tuple[Table[Any, Any], list[StrEnum], list[StrEnum]]] = {
    "link": (LINK, list(LinkState), list(SessionEvent)),
    "workers": (WORKERS, list(WorkersState), list(SessionEvent)),
    "key": (KEY, list(KeyState), list(SessionEvent)),
    "contact": (CONTACT, list(ContactState), list(MemberEvent)),
    "inquiry": (INQUIRY, list(InquiryState), list(MemberEvent)),
}

MOVES: dict[tuple[StrEnum, StrEnum], StrEnum] = {
    (UNLINKED, S.LINK_OPENED): LINKED,
    (ANSWERING, S.LINK_OPENED): LINKED,
    (UNLINKED, S.HEARTBEAT): LINKED,
    (ANSWERING, S.HEARTBEAT): LINKED,
    (LINKED, S.LINK_CLOSED): UNLINKED,
    (UNLINKED, S.AGENT_ANSWERED): ANSWERING,
    (ANSWERING, S.PROBE_REPEATED): UNLINKED,
    (ANSWERING, S.KEY_LOST): UNLINKED,
    (ANSWERING, S.REPLACED): UNLINKED,
    (ANSWERING, S.TOOK_OVER): UNLINKED,
    (WITH_AGENT, S.WORKERS_ONLY): ORPHANED,
    (ORPHANED, S.LINK_OPENED): WITH_AGENT,
    (ORPHANED, S.OTHER_LINK_OPENED): WITH_AGENT,
    (ORPHANED, S.GONE): WITH_AGENT,
    (ORPHANED, S.NO_ANSWER): WITH_AGENT,
    (ORPHANED, S.REPLACED): WITH_AGENT,
    (ORPHANED, S.ORPHAN_EXPIRED): WITH_AGENT,
    (VALID, S.GONE): GONE,
    (ABANDONED, S.GONE): GONE,
    (VALID, S.ORPHAN_EXPIRED): ABANDONED,
    (ABANDONED, S.TOOK_OVER): VALID,
    (GONE, S.TOOK_OVER): VALID,
    (NORMAL, M.LINK_LOST): LOST,
    (SILENT, M.LINK_LOST): LOST_SILENT,
    (NORMAL, M.NO_ANSWER): SILENT,
    (LOST, M.NO_ANSWER): LOST_SILENT,
    (SILENT, M.HEARTBEAT): NORMAL,
    (LOST_SILENT, M.HEARTBEAT): LOST,
    (LOST, M.LINK_OPENED): NORMAL,
    (SILENT, M.LINK_OPENED): NORMAL,
    (LOST_SILENT, M.LINK_OPENED): NORMAL,
    (LOST, M.TOOK_OVER): NORMAL,
    (SILENT, M.TOOK_OVER): NORMAL,
    (LOST_SILENT, M.TOOK_OVER): NORMAL,
    (NONE, M.SUSPECTED): SUSPICION,
    (ABSENCE, M.SESSION_SUSPECTED): SUSPICION,
    (NONE, M.ABSENT): ABSENCE,
    (SUSPICION, M.ABSENT): ABSENCE,
    (SUSPICION, M.LINK_OPENED): NONE,
    (SUSPICION, M.HEARTBEAT): NONE,
    (SUSPICION, M.LED): NONE,
    (SUSPICION, M.INQUIRY_OVER): NONE,
    (ABSENCE, M.INQUIRY_OVER): NONE,
    (SUSPICION, M.RESIGNED): NONE,
    (ABSENCE, M.RESIGNED): NONE,
}
"""Every change of state; any other pair that is possible leaves the state as it is."""

IMPOSSIBLE = {
    (UNLINKED, S.PROBE_REPEATED),
    (LINKED, S.PROBE_REPEATED),
    (WITH_AGENT, S.ORPHAN_EXPIRED),
    (NONE, M.SESSION_SUSPECTED),
    (NONE, M.INQUIRY_OVER),
}

PAIRS = [
    pytest.param(name, state, event, id=f"{name}: {state}, {event}")
    for name, (_, states, events) in TABLES.items()
    for state, event in product(states, events)
]


@pytest.mark.parametrize("name", TABLES)
def test_each_event_has_either_a_row_with_all_states_or_is_declared_ignored(name: str) -> None:
    table, states, events = TABLES[name]
    assert table.rows.keys() | table.ignored == set(events)
    assert not table.rows.keys() & table.ignored
    assert {len(row) for row in table.rows.values()} == {len(states)}


@pytest.mark.parametrize(("name", "state", "event"), PAIRS)
def test_each_pair_of_state_and_event_has_its_transition(
    name: str, state: StrEnum, event: StrEnum
) -> None:
    table = TABLES[name][0]
    if (state, event) in IMPOSSIBLE:
        with pytest.raises(ImpossibleTransition):
            table.after(state, event)
        return
    assert table.after(state, event) is MOVES.get((state, event), state)


def test_each_state_can_be_reached_from_the_first_and_left_again() -> None:
    for table, states, events in TABLES.values():
        first, *others = states
        next_states = {
            state: {
                table.after(state, event) for event in events if (state, event) not in IMPOSSIBLE
            }
            for state in states
        }
        reached = {first}
        for _ in others:
            reached |= {after for state in reached for after in next_states[state]}
        assert reached == set(states)
        assert all(next_states[state] != {state} for state in states)


@pytest.mark.parametrize("link", LinkState)
@pytest.mark.parametrize("workers", WorkersState)
@pytest.mark.parametrize("key", KeyState)
@pytest.mark.parametrize("event", SessionEvent)
def test_session_keeps_the_data_of_its_state_only(
    link: LinkState, workers: WorkersState, key: KeyState, event: SessionEvent
) -> None:
    orphan = Orphan(a_member("b"), 9.0, 9.0, 1) if workers is ORPHANED else None
    session = SessionState(link, workers, key, answers=0 if link is LINKED else 3, orphan=orphan)
    if {(link, event), (workers, event), (key, event)} & IMPOSSIBLE:
        with pytest.raises(ImpossibleTransition):
            session.take(event)
        return
    session.take(event)
    kept = workers is ORPHANED and session.workers is ORPHANED
    assert session.orphan is (orphan if kept else None)
    afresh = link is LINKED or session.link is LINKED or event is S.TOOK_OVER
    assert session.answers == (0 if afresh else 3)
    assert session.linked is (session.link is LINKED)
    assert session.open is (
        session.link is ANSWERING or session.workers is ORPHANED or session.key is not VALID
    )
    assert session.known is (session.linked or session.open or session.answers > 0)


@pytest.mark.parametrize("contact", ContactState)
@pytest.mark.parametrize("inquiry_state", InquiryState)
@pytest.mark.parametrize("event", MemberEvent)
def test_member_keeps_the_data_of_its_state_only(
    contact: ContactState, inquiry_state: InquiryState, event: MemberEvent
) -> None:
    symptom = 4.0 if contact in (LOST, LOST_SILENT) else None
    inquiry = None if inquiry_state is NONE else RepeatedProbe(a_member("b"), 5.0, 9.0)
    peer = PeerState(contact=contact, inquiry_state=inquiry_state, symptom=symptom, inquiry=inquiry)
    if {(contact, event), (inquiry_state, event)} & IMPOSSIBLE:
        with pytest.raises(ImpossibleTransition):
            peer.take(event)
        return
    peer.take(event)
    assert peer.symptom == (symptom if peer.contact in (LOST, LOST_SILENT) else None)
    assert peer.inquiry is (None if peer.inquiry_state is NONE else inquiry)
    assert peer.silent is (peer.contact in (SILENT, LOST_SILENT))


class Lamp(StrEnum):
    """States of a table of its own."""

    OFF = "off"
    ON = "on"


class Act(StrEnum):
    """Events of that table."""

    SWITCH = "switch"
    LOOK = "look"


def test_table_leads_from_each_state_by_its_event() -> None:
    rows = {Act.SWITCH: (Lamp.ON, None)}
    table = Table(Lamp, rows, frozenset({Act.LOOK}))
    assert table.rows == rows
    assert table.ignored == frozenset({Act.LOOK})
    assert table.after(Lamp.OFF, Act.SWITCH) is Lamp.ON
    assert [table.after(lamp, Act.LOOK) for lamp in Lamp] == [Lamp.OFF, Lamp.ON]
    with pytest.raises(ImpossibleTransition, match=r"^switch cannot occur in the state on$"):
        table.after(Lamp.ON, Act.SWITCH)


def test_table_needs_an_entry_for_each_state() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table(Lamp, {Act.SWITCH: (Lamp.ON,)})
