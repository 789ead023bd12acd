"""Reports on the checkpoint before a planned end: their texts, and their records."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import ClosingRequest, RendezvousParams


@pytest.mark.parametrize(
    ("report", "text", "complete"),
    [
        (SaveReport(SaveResult.SAVED, 163, 163), "saved at step 163", True),
        (SaveReport(SaveResult.SAVED), "saved before the stop", True),
        (
            SaveReport(SaveResult.TIMED_OUT, 163, 120, ("b",)),
            "stopped at step 163; the last checkpoint is of step 120: the requested checkpoint was "
            "not complete in time (b)",
            False,
        ),
        (
            SaveReport(SaveResult.NO_TIME, 7),
            "stopped at step 7; no checkpoint was reported: the grace period leaves no time to "
            "save",
            False,
        ),
        (
            SaveReport(SaveResult.NO_TIME, 7, 5, ("b",), "etcd refused the request"),
            "stopped at step 7; the last checkpoint is of step 5: etcd refused the request",
            False,
        ),
        (
            SaveReport(
                SaveResult.TIMED_OUT, 163, 120, ("b",), "rank 3: /claim: Input/output error"
            ),
            "stopped at step 163; the last checkpoint is of step 120: the requested checkpoint "
            "could not be written: rank 3: /claim: Input/output error",
            False,
        ),
        (SaveReport(SaveResult.NOT_TRAINING), "no workers were training", True),
    ],
)
def test_report_names_the_step_and_the_last_checkpoint(
    report: SaveReport, text: str, complete: bool
) -> None:
    assert (report.text, report.complete) == (text, complete)


def test_stop_after_a_checkpoint_of_the_last_step_loses_nothing() -> None:
    assert SaveReport(SaveResult.NOT_SUPPORTED, 120, 120, ("a",)).complete
    assert not SaveReport(SaveResult.NOT_SUPPORTED, 121, 120, ("a",)).complete
    assert not SaveReport(SaveResult.NOT_SUPPORTED, unsaved=("a",)).complete


def test_failed_save_is_stored_as_a_result_that_earlier_releases_read() -> None:
    """They would take a record with an unknown result for malformed."""
    error = "rank 3: /claim: Input/output error"
    save = SaveReport(SaveResult.TIMED_OUT, 163, 120, ("b",), error)
    stored = encode(Outcome(OutcomeKind.STOPPED, save=save))
    assert b'"result":"TimedOut"' in stored
    assert decode(Outcome, "outcome", stored).save == save
    assert save.kind is SaveResult.SAVE_FAILED
    older = stored.replace(f',"error":"{error}"'.encode(), b"")
    found = decode(Outcome, "outcome", older).save
    assert found is not None
    assert found.kind is SaveResult.TIMED_OUT


def test_report_and_request_survive_encoding_and_are_absent_in_older_records() -> None:
    save = SaveReport(SaveResult.TIMED_OUT, 163, 120, ("a", "b"))
    outcome = Outcome(OutcomeKind.STOPPED, "Suspended", reason="Suspended", save=save)
    bounds = RendezvousParams(1, 2, closing=ClosingRequest(outcome, 1_700_000_000_000))
    assert decode(RendezvousParams, "bounds", encode(bounds)) == bounds
    older = decode(RendezvousParams, "bounds", b'{"minNodes":1,"maxNodes":2}')
    assert older == RendezvousParams(1, 2)
    assert b"closing" not in encode(older)
