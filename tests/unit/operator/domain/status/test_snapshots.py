"""Snapshots in the status: restorable step, replicas, losses, and too little memory."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from elasticjob.layout import Loss
from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.observed.state import UNREADABLE, RendezvousView, StopReason
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.domain.status.snapshots import lost_text, size_text
from elasticjob_operator.model import ConditionType, Phase
from elasticjob_operator.model.status import Condition, SnapshotsStatus, Status
from elasticjob_operator.model.types import ConditionStatus, ReplicaState
from elasticjob_rendezvous.protocol.records.members import (
    OutcomeKind,
    Snapshots,
    SnapshotTrouble,
)
from tests.unit.operator.builders import (
    NOW,
    ago,
    closed,
    final_round,
    history,
    job,
    later,
    observed,
    running,
)

MIB = 2**20


def view(*told: Snapshots | None, number: int = 1, rounds: Any = (), **changes: Any) -> Any:
    """Return a final round whose members report these snapshots."""
    found = final_round(len(told), number, rounds=tuple(rounds), **changes)
    members = zip(found.members, told, strict=True)
    return replace(
        found, members=tuple(replace(one, snapshots=snapshots) for one, snapshots in members)
    )


def status_of(seen: RendezvousView, before: Status | None = None, at: Any = NOW) -> Status:
    return next_status(job(before), observed(*running(2), view=seen), seen, at)


def snapshots_of(seen: RendezvousView, before: Status | None = None, at: Any = NOW) -> Any:
    return status_of(seen, before, at).snapshots


def condition(
    status: Status, kind: ConditionType = ConditionType.SNAPSHOTS_IN_MEMORY
) -> Condition | None:
    return next((one for one in status.conditions if one.type is kind), None)


def test_job_without_snapshots_has_neither_status_nor_condition() -> None:
    status = status_of(view(None, None, rounds=[history(1, final_at=ago(60))]))
    assert status.snapshots is None
    assert condition(status) is None


def test_restorable_step_is_complete_on_all_nodes_or_stored() -> None:
    assert snapshots_of(view(Snapshots(7, bytes=9), Snapshots(8, bytes=5))).restorable_step == 7
    stored = snapshots_of(view(Snapshots(7, stored=4), Snapshots(8)))
    assert (stored.restorable_step, stored.stored_step) == (7, 4)
    assert snapshots_of(view(Snapshots(-1, stored=4), Snapshots(-1))).restorable_step == 4
    assert snapshots_of(view(Snapshots(-1, restored=6), Snapshots(-1))).restorable_step == 6
    assert snapshots_of(view(Snapshots(), Snapshots())).restorable_step is None
    assert snapshots_of(view(Snapshots(7, bytes=9), Snapshots(8, bytes=5))).bytes_per_node == 9


@pytest.mark.parametrize(
    ("told", "replicas", "step"),
    [
        ((Snapshots(7), Snapshots(7)), ReplicaState.NOT_USED, None),
        ((Snapshots(7, replicas=1), Snapshots(7, replicas=1)), ReplicaState.INCOMPLETE, None),
        (
            (Snapshots(7, replicas=1, replicated=5), Snapshots(7, replicas=1)),
            ReplicaState.INCOMPLETE,
            None,
        ),
        (
            (Snapshots(7, replicas=1, replicated=5), Snapshots(7, replicas=1, replicated=6)),
            ReplicaState.HEALTHY,
            5,
        ),
    ],
)
def test_replicas_are_healthy_once_all_nodes_have_confirmed_copies(
    told: tuple[Snapshots, ...], replicas: ReplicaState, step: int | None
) -> None:
    found = snapshots_of(view(*told))
    assert (found.replicas, found.replicated_step) == (replicas, step)


ROUNDS = [
    history(1, final_at=ago(100), start_ms=900, first_step_ms=600),
    history(
        2, "loss", final_at=ago(50), detect_ms=100, stop_ms=200, start_ms=300, first_step_ms=400,
        lost_steps=1, lost_ms=200,
    ),
]  # fmt: skip


def test_unreadable_rendezvous_and_end_keep_the_snapshots() -> None:
    first = status_of(view(Snapshots(9), Snapshots(9), number=2, rounds=ROUNDS))
    assert snapshots_of(UNREADABLE, first) == first.snapshots
    between = replace(final_round(2, 2, rounds=tuple(ROUNDS)), members=())
    kept = snapshots_of(between, first, later(50))
    assert kept.restorable_step == 9
    ended = first.model_copy(update={"phase": Phase.SUCCEEDED})
    assert snapshots_of(between, ended, later(9000)) == first.snapshots


def test_totals_of_hostile_records_fit_the_schema() -> None:
    rounds = [
        history(n, "loss", first_step_ms=1, lost_steps=2**63 - 1, lost_ms=2**53) for n in (1, 2)
    ]
    found = snapshots_of(view(Snapshots(9), None, number=2, rounds=rounds))
    assert found.lost_steps == 2**63 - 1
    negative = [replace(rounds[0], lost_steps=-5, lost_ms=-5)]
    assert snapshots_of(view(Snapshots(9), None, rounds=negative)).lost_steps == 0


def too_small(limit: int) -> Snapshots:
    trouble = SnapshotTrouble.NO_ROOM
    return Snapshots(bytes=600 * MIB, limit=limit, trouble=trouble)


def test_limit_below_two_snapshots_is_a_false_condition_with_the_sizes() -> None:
    status = status_of(view(Snapshots(9), too_small(1024 * MIB)))
    found = condition(status)
    assert found is not None
    assert (found.status, found.reason) == (ConditionStatus.FALSE, "MemoryLimitTooSmall")
    assert found.message == (
        "job-1: two snapshots, and copies for other nodes, do not fit into "
        "recovery.snapshots.memoryLimit (1.0 GiB): set more than 1.2 GiB, and enlarge the "
        "trainer's memory limit by as much"
    )
    told = explanation(job(status), running(2))
    sentence = "Snapshots are not in memory, so that a fault costs more steps: job-1: two"
    assert any(one.startswith(sentence) for one in told), told


def test_advised_limit_is_above_the_present_one() -> None:
    found = condition(status_of(view(Snapshots(9), too_small(4096 * MIB))))
    assert found is not None
    assert "(4.0 GiB): set more than 4.0 GiB" in found.message


def test_advised_sizes_are_rounded_up() -> None:
    """A volume of the size that is rounded down would be too small again."""
    told = Snapshots(bytes=639 * MIB, trouble=SnapshotTrouble.NO_ROOM)  # twice that is 1.248 GiB
    for limit, said in ((1229 * MIB, "set more than 1.3 GiB,"), (0, "needs more than 1.3 GiB;")):
        found = condition(status_of(view(replace(told, limit=limit))))
        assert found is not None
        assert said in found.message


def test_full_shared_memory_and_unusable_folder_have_their_own_reasons() -> None:
    full = condition(status_of(view(too_small(0), too_small(0))))
    assert full is not None
    assert (full.reason, full.message[:18]) == ("SharedMemoryFull", "job-0 and 1 more: ")
    for error, said in ((errno.EACCES, ": EACCES; "), (0, "; "), (2**70, "; ")):
        found = Snapshots(trouble=SnapshotTrouble.UNUSABLE, error=error)
        broken = condition(status_of(view(None, found)))
        assert broken is not None
        assert broken.reason == "MemoryUnusable"
        assert broken.message == (
            "job-1: the folder for snapshots in memory cannot be created or written"
            f"{said}see the worker's log"
        )


def test_condition_is_true_with_snapshots_and_stays_between_rounds() -> None:
    status = status_of(view(Snapshots(9), Snapshots(9)))
    found = condition(status)
    assert found is not None
    assert (found.status, found.reason) == (ConditionStatus.TRUE, "Held")
    between = replace(final_round(2), members=())
    assert condition(status_of(between, status)) == found
    begun = condition(status_of(view(Snapshots(9), Snapshots(-1))))
    assert begun is None, "not before each node has a snapshot"


@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (errno.ETIMEDOUT, "StorageNotAnswering", "the storage does not answer; training goes on"),
        (errno.ENOSPC, "StorageUnusable", "the storage cannot be written: ENOSPC; see"),
        (2**40, "StorageUnusable", "the storage cannot be written; see the worker's log"),
    ],
)
def test_failed_write_to_storage_is_a_condition_until_one_succeeds(
    error: int, reason: str, said: str
) -> None:
    kind = ConditionType.SNAPSHOTS_IN_STORAGE
    good, bad = Snapshots(9), Snapshots(9, storage_error=error)
    assert condition(status_of(view(good, good)), kind) is None
    status = status_of(view(good, bad))
    found = condition(status, kind)
    assert found is not None
    assert (found.status, found.reason) == (ConditionStatus.FALSE, reason)
    assert found.message.startswith(f"job-1: {said}")
    told = explanation(job(status), running(2))
    assert any(one.startswith("Snapshots are not in storage, so that") for one in told), told
    between = replace(final_round(2), members=())
    assert condition(status_of(between, status), kind) == found
    # Workers of the next round have neither an error nor a snapshot in storage yet.
    assert condition(status_of(view(good, good, number=2), status), kind) == found
    over = status_of(view(replace(good, stored=9), good), status)
    cleared = condition(over, kind)
    assert cleared is not None
    assert (cleared.status, cleared.reason) == (ConditionStatus.TRUE, "Written")
    assert "not in storage" not in " ".join(explanation(job(over), running(2)))


def test_conditions_of_a_run_end_with_its_resumption() -> None:
    """A resumed job may have no such place any more, for example with `enabled: false`."""
    kinds = (ConditionType.SNAPSHOTS_IN_MEMORY, ConditionType.SNAPSHOTS_IN_STORAGE)
    full = replace(too_small(1024 * MIB), storage_error=errno.ENOSPC)
    first = status_of(view(full, full, number=2))
    ended = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
    a_job = job(first, runPolicy={"suspend": True})
    suspended = next_status(a_job, observed(view=ended), ended, later(60))
    assert all(condition(suspended, kind) == condition(first, kind) for kind in kinds)
    resumed = status_of(view(Snapshots(), Snapshots()), suspended, later(90))
    assert [condition(resumed, kind) for kind in kinds] == [None, None]
    assert resumed.phase is Phase.RUNNING
    assert "Snapshots are not" not in " ".join(explanation(job(resumed), running(2)))


def test_explanation_has_the_lost_steps_of_the_last_interruption() -> None:
    seen = view(Snapshots(9), Snapshots(9), number=2, rounds=ROUNDS)
    told = " ".join(explanation(job(status_of(seen)), running(2)))
    assert "recovered in 0.6 s (detect 0.1 s, stop 0.2 s, start 0.3 s), lost 1 step (0.2 s of" in (
        told
    )
    without = replace(ROUNDS[1], lost_steps=None, lost_ms=None)
    seen = view(Snapshots(9), Snapshots(9), number=2, rounds=[ROUNDS[0], without])
    assert " lost " not in " ".join(explanation(job(status_of(seen)), running(2))).replace(
        "was lost", ""
    )


@pytest.mark.parametrize(
    ("steps", "ms", "text"),
    [
        (0, 0, "lost no step"),
        (1, 200, "lost 1 step (0.2 s of work)"),
        (12, 61_000, "lost 12 steps (61 s of work)"),
    ],
)
def test_lost_steps_in_words(steps: int, ms: int, text: str) -> None:
    assert lost_text(steps, ms) == text
    assert lost_text(steps, ms, "OfANewerRelease") == text


@pytest.mark.parametrize("loss", [each for each in Loss if each])
def test_each_reason_for_lost_steps_has_a_text(loss: Loss) -> None:
    text = lost_text(2, 400, loss.reason)
    assert text.startswith("lost 2 steps (0.4 s of work), without a copy at the stop: ")
    assert lost_text(0, 0, loss.reason) == "lost no step"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_size_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


def test_status_of_an_earlier_release_has_no_snapshots() -> None:
    assert Status.model_validate({"phase": "Running"}).snapshots is None
    assert SnapshotsStatus().replicas is ReplicaState.NOT_USED
