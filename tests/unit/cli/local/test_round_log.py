"""Round log of a run, in the form of `rounds.json`."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_cli.local.round_log import RoundLog
from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.model.status import RoundStatus
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Member
from elasticjob_rendezvous.protocol.records.roster import seal
from elasticjob_rendezvous.protocol.records.timings import History

COLD = "the command changed"
LOST = History(
    2, Cause(CauseKind.LOSS, ("job-2",), "gone"), 2, 9_500, detect_ms=1, stop_ms=2, join_ms=3,
    start_ms=4, confirm_ms=5, first_step_ms=6, backoff_ms=7, cold_nodes=1, cold_reason=COLD,
    lost_steps=2, lost_ms=800, lost_reason="Cost",
)  # fmt: skip
MEMBERS = [Member(f"uid-{n}", "s", f"job-{n}", "host", 1, slots=2) for n in range(2)]


def test_round_log_has_all_costs_and_seats_of_a_round() -> None:
    book = RoundLog(began_ms=8_000)
    found = Records("/p/", rosters={2: seal(2, MEMBERS, 3)}, histories={2: LOST})
    assert book.take(found)
    assert not book.take(found)
    assert book.rounds() == [
        {
            "round": 2,
            "cause": "loss",
            "members": ["job-2"],
            "detail": "gone",
            "nodes": 2,
            "worldSize": 4,
            "restarts": 3,
            "finalSeconds": 1.5,
            "detectMs": 1,
            "stopMs": 2,
            "joinMs": 3,
            "startMs": 4,
            "confirmMs": 5,
            "firstStepMs": 6,
            "backoffMs": 7,
            "coldNodes": 1,
            "coldReason": COLD,
            "lostSteps": 2,
            "lostMs": 800,
            "lostReason": "Cost",
            "recoveryMs": 22,
            "finalTime": "1970-01-01T00:00:09.500Z",
            "seats": [
                {"pod": "job-0", "groupRank": 0, "baseRank": 0, "slots": 2},
                {"pod": "job-1", "groupRank": 1, "baseRank": 2, "slots": 2},
            ],
        }
    ]
    assert book.ranks(2) == {"job-0": "0-1", "job-1": "2-3"}


def test_cause_is_that_which_the_ends_of_pods_corrected() -> None:
    """Agents of torch's backends see a successor join before they miss the lost member."""
    joined = replace(LOST, cause=Cause(CauseKind.JOIN))
    found = Records("/p/", rosters={2: seal(2, MEMBERS, 3)}, histories={2: joined})
    log = RoundLog(began_ms=8_000)
    assert log.take(found)
    assert log.rounds()[0]["cause"] == "join"
    assert log.take(found, [LOST])
    assert not log.take(found, [LOST])
    assert (log.rounds()[0]["cause"], log.rounds()[0]["members"]) == ("loss", ["job-2"])


def test_lost_steps_that_only_the_status_has_stay_after_it_has_dropped_the_round() -> None:
    unknown = replace(LOST, lost_steps=None, lost_ms=None)
    found = Records("/p/", rosters={2: seal(2, MEMBERS, 3)}, histories={2: unknown})
    log = RoundLog(began_ms=8_000)
    assert log.take(found)
    assert log.rounds()[0]["lostSteps"] is None
    shown = RoundStatus(round=2, cause="loss", nodes=2, lost_steps=40)
    assert log.take(found, (), [shown])
    assert not log.take(found, (), [])
    assert (log.rounds()[0]["lostSteps"], log.rounds()[0]["lostMs"]) == (40, None)
