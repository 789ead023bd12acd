"""Unusable etcd, in conditions, events and the explanation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_operator.domain.observed.state import UNREADABLE, Observed, SeenTrouble
from elasticjob_operator.domain.status.events import EventType, job_events
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.domain.status.store_condition import find_store_condition, store_sentences
from elasticjob_operator.model.refusals import StoreRefusal
from elasticjob_operator.model.status import Condition, Status
from elasticjob_operator.model.types import Backend, ConditionStatus
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from elasticjob_rendezvous.protocol.store_trouble import (
    StoreFailure,
    StoreState,
    StoreTrouble,
)
from tests.unit.operator.builders import NOW, closed, final_round, job, later, observed, running

NO_SPACE = "etcdserver: mvcc: database space exceeded"
FULL = StoreTrouble("etcd", StoreState.REFUSING, "etcd:2379", NO_SPACE, 0, StoreFailure.NO_SPACE)
AWAY = StoreTrouble("etcd", StoreState.UNREACHABLE, "etcd:2379", "Connection refused", 0)
CALM = observed(*running(2), view=final_round(2))


def seen(trouble: StoreTrouble | None, *members: str, view: Observed = CALM) -> Observed:
    return replace(view, store=None if trouble is None else SeenTrouble(trouble, members))


def after(exists: Observed, before: Status | None = None, seconds: float = 0.0) -> Status:
    a_job = job(status=before, maxNodes=2)
    return next_status(a_job, exists, exists.rendezvous, later(seconds))


def condition(status: Status) -> Condition:
    one = find_store_condition(status)
    assert one is not None
    return one


def told(before: Status, status: Status) -> list[tuple[EventType, str, str]]:
    return [(one.type, one.reason, one.message) for one in job_events(before, status, ())]


def test_reachable_store_gives_no_event() -> None:
    calm = after(seen(None))
    assert (condition(calm).status, condition(calm).message) == (ConditionStatus.FALSE, "")
    assert not [one for one in told(Status(), calm) if "endezvous" in one[1]]


@pytest.mark.parametrize(
    ("trouble", "reason", "remedy"),
    [(FULL, "EtcdRefusesWrites", "etcdctl alarm disarm"), (AWAY, "EtcdUnreachable", "etcd runs")],
)
def test_store_trouble_and_its_end_give_one_event_each(
    trouble: StoreTrouble, reason: str, remedy: str
) -> None:
    calm = after(seen(None))
    stuck = after(seen(trouble), calm, 10)
    one = condition(stuck)
    assert (one.status, one.reason, one.message) == (
        ConditionStatus.TRUE, reason, trouble.sentence
    )  # fmt: skip
    assert told(calm, stuck) == [(EventType.WARNING, reason, trouble.sentence)]
    explained = " ".join(stuck.explanation)
    assert trouble.sentence in stuck.explanation[0]
    assert remedy in explained
    again = after(seen(trouble), stuck, 20)
    assert again == stuck
    over = after(seen(None), again, 40)
    assert condition(over).status is ConditionStatus.FALSE
    message = "etcd can be used again after 30 s"
    assert told(again, over) == [(EventType.NORMAL, "RendezvousAvailable", message)]
    assert trouble.text not in " ".join(over.explanation)
    assert after(seen(None), over, 50) == over


def test_remedy_follows_the_reason_of_a_refusal_and_not_its_text() -> None:
    unusual = replace(FULL, text="etcdserver: quota of no leader")
    stuck = after(seen(unusual))
    assert stuck.store_refusal == StoreRefusal(reason="NoSpace", message=unusual.sentence)
    assert "alarm disarm" in stuck.explanation[1]
    for reason in StoreFailure:
        count = len(after(seen(replace(FULL, reason=reason))).explanation)
        assert count == len(stuck.explanation) - (reason is StoreFailure.OTHER), reason


def test_status_has_the_refusal_only_while_the_store_refuses_writes() -> None:
    stuck = after(seen(FULL))
    assert stuck.store_refusal is not None
    assert after(seen(AWAY), stuck, 1).store_refusal is None
    assert after(seen(None), stuck, 1).store_refusal is None
    ended = replace(seen(FULL), rendezvous=closed(OutcomeKind.SUCCEEDED))
    assert after(ended, stuck, 1).store_refusal is None


def test_status_of_the_previous_release_keeps_its_remedy_and_its_event_is_not_repeated() -> None:
    stuck = after(seen(FULL))
    earlier = stuck.model_copy(update={"store_refusal": None})
    [sentence, remedy] = store_sentences(job(status=earlier, maxNodes=2))
    assert FULL.sentence in sentence
    assert remedy == stuck.explanation[1].rstrip(".")
    now = after(seen(FULL), earlier, 5)
    assert now == stuck
    assert told(earlier, now) == []


def test_refusal_with_other_reporting_pods_gives_no_event_with_the_crd_of_before() -> None:
    uids = [pod.uid for pod in CALM.pods]

    def stored(status: Status) -> Status:
        """Return the status as the API server keeps it with a CRD without `storeRefusal`."""
        return status.model_copy(update={"store_refusal": None})

    first = stored(after(seen(FULL, uids[0])))
    other = stored(after(seen(FULL, uids[1]), first, 5))
    assert other == first
    leaderless = replace(FULL, text="etcdserver: no leader", reason=StoreFailure.NO_LEADER)
    changed = after(seen(leaderless, uids[1]), other, 10)
    assert [one[1] for one in told(other, changed)] == ["EtcdRefusesWrites"]
    assert leaderless.sentence in condition(changed).message
    unusual = replace(FULL, text="etcdserver: unusual", reason=StoreFailure.OTHER)
    assert unusual.sentence in condition(after(seen(unusual), stored(changed), 15)).message


def test_connection_error_with_another_text_is_the_same_trouble() -> None:
    first = after(seen(AWAY))
    other = after(seen(replace(AWAY, text="Connection reset by peer")), first, 1)
    assert other == first
    refused = after(seen(FULL), other, 2)
    assert [one[1] for one in told(other, refused)] == ["EtcdRefusesWrites"]
    more = after(seen(replace(FULL, text="etcdserver: no leader")), refused, 3)
    assert [one[1] for one in told(refused, more)] == ["EtcdRefusesWrites"]


def test_pods_that_alone_report_trouble_are_named() -> None:
    uids = [pod.uid for pod in CALM.pods]
    first = after(seen(FULL, uids[0]))
    name = CALM.pods[0].name
    assert condition(first).message == f"{FULL.sentence} (reported by {name})"
    assert after(seen(FULL, uids[1]), first, 5) == first
    assert condition(after(seen(FULL, *uids))).message == FULL.sentence


def test_c10d_store_has_its_own_reason() -> None:
    a_job = job(maxNodes=2, rendezvous={"backend": Backend.C10D})
    exists = seen(replace(AWAY, store="the c10d store"))
    status = next_status(a_job, exists, exists.rendezvous, NOW)
    assert condition(status).reason == "StoreUnreachable"
    over = next_status(a_job.model_copy(update={"status": status}), CALM, CALM.rendezvous, NOW)
    assert condition(over).message == "the c10d store can be used again after 0 s"


def test_ended_job_has_no_store_trouble_and_unreadable_state_is_unknown() -> None:
    stuck = after(seen(FULL))
    ended = replace(seen(FULL), rendezvous=closed(OutcomeKind.SUCCEEDED))
    status = after(ended, stuck, 1)
    assert (condition(status).status, condition(status).message) == (ConditionStatus.FALSE, "")
    assert FULL.text not in " ".join(status.explanation)
    unread = replace(seen(None), rendezvous=UNREADABLE)
    assert condition(after(unread)).status is ConditionStatus.UNKNOWN
    gone = after(unread, stuck, 1)
    assert condition(gone).status is ConditionStatus.FALSE, "the probe knows that it is over"
