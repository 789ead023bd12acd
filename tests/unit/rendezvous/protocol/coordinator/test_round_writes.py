"""Write of a round, and of everything that becomes true together with it."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.coordinator.round_writes import Snapshot, write_round
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, RoundState, Save
from tests.unit.rendezvous.builders import Job, a_round


@pytest.mark.parametrize("state", RoundState)
def test_requested_save_and_fences_belong_to_states_of_a_round(state: RoundState) -> None:
    """A save is requested of a final round; members are fenced before a round is."""
    job = Job("a", "b").round(1)
    view = job.view()
    assert view.bounds is not None
    snapshot = Snapshot(view, job.stored("a"), view.bounds.record, job.clock)
    save = Save(Cause(CauseKind.LEAVE), 30.0)
    new = a_round(2, state, save=save, fenced=("id-c",))
    update = write_round(snapshot, new, "round 2")
    assert update.note == "round 2"
    assert job.commit(update.txn).succeeded
    final = state is RoundState.FINAL
    assert job.current().save == (save if final else None)
    assert job.current().fenced == (() if final else ("id-c",))
