"""Nodes that fail a job repeatedly, and nodes that slow down their peers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from elasticjob_operator.domain.explain.catalog import OFFENCES
from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.domain.manifests.pod import pod as pod_of
from elasticjob_operator.domain.observed.etcd_records import decode_records, rendezvous_view
from elasticjob_operator.domain.observed.state import Offence, RendezvousView
from elasticjob_operator.domain.plan.actions import DeletePod, DeleteReason
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.plan.surplus import Disfavored, surplus
from elasticjob_operator.domain.status.failures import (
    FLAGGED_AFTER,
    WINDOW,
    avoided_names,
    avoided_nodes,
    lasting_stragglers,
    stragglers,
)
from elasticjob_operator.model import Phase, RendezvousState
from elasticjob_operator.model.status import AvoidedNode, RendezvousStatus, Status, Straggler
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import seal
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.operator.builders import NOW, ago, final_round, job, later, observed, pod
from tests.unit.operator.domain.observed.test_etcd_records import KEYS, PREFIX, kv


def offending(*offences: tuple[str, float]) -> RendezvousView:
    return final_round(
        3, offences=tuple(Offence(node, ago(seconds), "Hang") for node, seconds in offences)
    )


def test_machine_with_two_offences_within_an_hour_is_avoided() -> None:
    view = offending(("rack-a", 1200.0), ("rack-b", 600.0), ("rack-a", 60.0))
    (found,) = avoided_nodes(view, Status(), NOW)
    assert (found.node, found.until) == ("rack-a", ago(60.0) + WINDOW)
    assert found.reason == "2 times: a worker hung"


def test_machine_with_one_or_old_offences_is_not_avoided() -> None:
    long_ago = WINDOW.total_seconds() + 1
    assert avoided_nodes(offending(("rack-a", 60.0)), Status(), NOW) == []
    assert avoided_nodes(offending(("rack-a", long_ago), ("rack-a", 60.0)), Status(), NOW) == []


def test_machine_that_cannot_end_workers_is_avoided_at_once() -> None:
    stuck = replace(pod(1).terminating().get(), stuck="process 7 waits", node="rack-a")
    assert avoided_names(Status(), NOW, (pod(0).get(), stuck)) == ("rack-a",)
    found = avoided_nodes(offending(), Status(), NOW, (pod(0).get(), stuck))
    reason = "once: its kernel did not end the workers"
    assert found == [AvoidedNode(node="rack-a", until=NOW + WINDOW, reason=reason)]
    seconds = WINDOW.total_seconds()
    before = Status(avoided_nodes=found)
    assert avoided_nodes(offending(), before, later(seconds - 1), (stuck,)) == found, "no writes"
    (renewed,) = avoided_nodes(offending(), before, later(seconds + 1), (stuck,))
    assert renewed.until == later(seconds + 1) + WINDOW
    assert avoided_nodes(offending(), before, later(seconds + 1)) == []


def test_machine_whose_stuck_pod_has_ended_is_not_avoided() -> None:
    ended = replace(pod(1).failed().get(), stuck="process 7 waits", node="rack-a")
    assert avoided_nodes(offending(), Status(), NOW, (ended,)) == []


def test_offences_of_a_machine_with_a_stuck_pod_do_not_change_the_status_again() -> None:
    stuck = replace(pod(1).get(), stuck="process 7 waits", node="rack-a")
    view = offending(("rack-a", 1200.0), ("rack-a", 60.0))
    found = avoided_nodes(view, Status(), NOW, (stuck,))
    assert [each.node for each in found] == ["rack-a"]
    assert avoided_nodes(view, Status(avoided_nodes=found), later(5.0), (stuck,)) == found


def test_surplus_pod_beside_a_stuck_one_is_deleted_first() -> None:
    stuck = replace(pod(3).terminating().get(), stuck="process 7 waits", node="rack-a")
    beside = replace(pod(0).get(), node="rack-a")
    others = (pod(1).get(), pod(2).get())
    here = observed(beside, *others, stuck, view=final_round(3))
    found = plan(job(maxNodes=3, nodes=2), here, NOW)
    assert [(one.name, one.reason) for one in found.actions if isinstance(one, DeletePod)] == [
        ("job-0", DeleteReason.SURPLUS_NODE_AVOIDED)
    ]


def test_avoided_node_is_kept_until_its_time() -> None:
    known = AvoidedNode(node="rack-a", until=later(10.0), reason="2 times: it was lost")
    before = Status(avoided_nodes=[known])
    assert avoided_nodes(offending(), before, NOW) == [known]
    assert avoided_names(before, NOW) == ("rack-a",)
    assert avoided_nodes(offending(), before, later(10.0)) == []
    assert avoided_names(before, later(10.0)) == ()


def lost_and_failed(kind: FailureClass) -> RendezvousView:
    """Return round 2 after a loss and round 3 after a failure of that class, both on rack-1."""
    members = [
        Member(f"id-{n}", "s", f"pod-{n}", "10.0.0.1", 1, node=f"rack-{n}", round=3)
        for n in range(2)
    ]
    failed = Failure(2, "id-1", "pod-1", 1, 0, kind, 5, node="rack-1")
    return rendezvous_view(
        decode_records(
            PREFIX,
            [
                kv(KEYS.round, Round(3, RoundState.FINAL, Cause(CauseKind.FAILURE), nodes=2)),
                *(kv(KEYS.roster(n), seal(n, members, 0)) for n in (1, 2, 3)),
                kv(KEYS.history(1), History(1, Cause(CauseKind.START), 2, final_ms=1000)),
                kv(KEYS.history(2), History(2, Cause(CauseKind.LOSS, ("pod-1",)), 2, 2000)),
                kv(KEYS.history(3), History(3, Cause(CauseKind.FAILURE, ("pod-1",)), 2, 3000)),
                kv(KEYS.failure(2, "id-1"), failed),
            ],
        )
    )


def test_offences_are_read_from_failure_records() -> None:
    first, second = lost_and_failed(FailureClass.SIGNAL).offences
    assert first == Offence("rack-1", datetime.fromtimestamp(2, UTC), "NodeLost")
    assert (second.node, second.what) == ("rack-1", "Signal")


def test_user_error_is_no_offence_of_the_machine() -> None:
    assert [each.what for each in lost_and_failed(FailureClass.USER_ERROR).offences] == ["NodeLost"]


def test_new_pod_avoids_machines_and_keeps_affinity_of_user() -> None:
    mine = {"weight": 5, "preference": {"matchExpressions": []}}
    required: dict[str, list[str]] = {"nodeSelectorTerms": []}
    affinity = {
        "podAffinity": {},
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [mine],
            "requiredDuringSchedulingIgnoredDuringExecution": required,
        },
    }
    container = {"name": "trainer", "image": "t", "command": ["python3", "train.py"]}
    template = {"spec": {"containers": [container], "affinity": affinity}}
    wanted, settings = job(template=template), PodSettings("sidecar:1", endpoints=("http://e:1",))
    access = Access(b"k", None, None, None)
    assert pod_of(wanted, 0, 1, settings, access)["spec"]["affinity"] == affinity
    made = pod_of(wanted, 0, 1, settings, access, ("rack-a", "rack-b"))["spec"]["affinity"]
    *first, added = made["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert first == [mine]
    assert added["weight"] == 100
    assert added["preference"]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": ["rack-a"]},
        {"key": "metadata.name", "operator": "NotIn", "values": ["rack-b"]},
    ]
    assert made["podAffinity"] == {}
    assert made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == required


def busy(*milliseconds: int) -> RendezvousView:
    view = final_round(len(milliseconds))
    members = zip(view.members, milliseconds, strict=True)
    return replace(view, members=tuple(replace(m, busy_ms=ms) for m, ms in members))


def test_straggler_is_named_with_its_start() -> None:
    (slow,) = stragglers(busy(100, 110, 170), Status(), NOW)
    assert slow == Straggler(pod="job-2", node="node-2", round=1, since=NOW)
    again = stragglers(busy(100, 110, 190), Status(stragglers=[slow]), later(5))
    assert again == [slow], "the same word is not written again"
    assert stragglers(busy(100, 110, 140), Status(stragglers=[slow]), later(5)) == []


def test_no_straggler_without_peers_or_their_reports() -> None:
    assert stragglers(busy(100, 500), Status(), NOW) == []
    assert stragglers(busy(0, 0, 500), Status(), NOW) == []


def test_short_delay_makes_no_straggler() -> None:
    slow = Straggler(pod="job-1", round=1, since=NOW)
    assert lasting_stragglers([slow], NOW + FLAGGED_AFTER) == {"job-1"}
    assert lasting_stragglers([slow], later(1)) == frozenset()


def test_surplus_pods_on_avoided_nodes_are_deleted_first() -> None:
    gang = [pod(index).get() for index in range(4)]
    disfavored = Disfavored(frozenset({"node-1"}), frozenset({"job-0"}))
    found = surplus(gang, final_round(4), 3, disfavored=disfavored)
    assert [(victim.name, reason) for victim, reason in found] == [
        ("job-1", DeleteReason.SURPLUS_NODE_AVOIDED),
        ("job-0", DeleteReason.SURPLUS_STRAGGLER),
        ("job-3", DeleteReason.SURPLUS_HIGHEST_RANK),
    ]


def test_avoided_node_and_straggler_are_explained() -> None:
    current = RendezvousStatus(state=RendezvousState.FINAL, round=1, nodes=4, world_size=4)
    status = Status(
        phase=Phase.RUNNING,
        rendezvous=current,
        wanted_nodes=4,
        stragglers=[Straggler(pod="job-2", node="rack-c", round=1, since=NOW)],
        avoided_nodes=[AvoidedNode(node="rack-a", until=NOW, reason="2 times: it was lost")],
    )
    said = " ".join(explanation(job(status), [pod(index).get() for index in range(4)]))
    assert "job-2 on rack-c has been slower than its peers since 12:00:00 UTC" in said
    assert "New pods avoid rack-a until 12:00:00 UTC" in said
    assert "because it failed the job 2 times: it was lost." in said


@pytest.mark.parametrize("kind", sorted(FailureClass))
def test_every_offence_has_a_phrase(kind: FailureClass) -> None:
    assert {each.what for each in lost_and_failed(kind).offences} <= set(OFFENCES)
