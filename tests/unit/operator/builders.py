"""Fluent builders of jobs, pods and views for the tests of the plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from elasticjob_operator.domain.observed.state import (
    NodeState,
    Observed,
    Pod,
    PodEnd,
    PodPhase,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.model import ElasticJob, RendezvousState, parse_manifest
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
)
from elasticjob_rendezvous.protocol.records.timings import History

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def manifest(**spec: Any) -> dict[str, Any]:
    """Return a valid manifest with these fields of the spec set."""
    container = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    fields = {"minNodes": 1, "maxNodes": 4, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "job", "uid": "job-uid", "generation": 3},
        "spec": copy.deepcopy({**fields, **spec}),
    }


def job(status: Status | None = None, deleted: bool = False, **spec: Any) -> ElasticJob:
    """Return a job with these fields of the spec (camelCase); `nodes` is maxNodes unless given."""
    spec.setdefault("nodes", spec.get("maxNodes", 4))
    parsed = parse_manifest(manifest(**spec))
    if deleted:
        metadata = parsed.metadata.model_copy(update={"deletion_timestamp": NOW})
        parsed = parsed.model_copy(update={"metadata": metadata})
    return parsed.model_copy(update={"status": status or Status()})


class PodBuilder:
    """Builder of a pod that, by default, runs, is Ready and is on a healthy node."""

    def __init__(self, index: int, generation: int = 0) -> None:
        name = f"job-{index}"
        self.pod = Pod(
            index=index,
            name=name,
            uid=f"uid-{index}-{generation}",
            created_at=ago(300),
            phase=PodPhase.RUNNING,
            ready=True,
            node=f"node-{index}",
            launcher_since=ago(290),
        )

    def _with(self, **changes: Any) -> Self:
        self.pod = replace(self.pod, **changes)
        return self

    def pending(self, seconds: float = 0, **changes: Any) -> Self:
        return self._with(
            phase=PodPhase.PENDING,
            ready=False,
            created_at=ago(seconds),
            **{"launcher_since": None, **changes},
        )

    def failed(self, seconds: float = 300) -> Self:
        return self._with(phase=PodPhase.FAILED, ready=False, created_at=ago(seconds))

    def stillborn(self, seconds: float = 0, message: str = "") -> Self:
        """Make the pod end this long ago, without having been able to start."""
        return self._with(
            phase=PodPhase.FAILED,
            ready=False,
            over=True,
            launch_failed=True,
            created_at=ago(seconds + 1),
            ended_at=ago(seconds),
            end_message=message,
        )

    def over(self) -> Self:
        return self._with(phase=PodPhase.FAILED, ready=False, over=True)

    def succeeded(self) -> Self:
        return self._with(phase=PodPhase.SUCCEEDED, ready=False)

    def lingering(self) -> Self:
        return self._with(lingering=True)

    def terminating(self) -> Self:
        return self._with(terminating=True)

    def taken(self, end: PodEnd, message: str) -> Self:
        """Set the disruption that ended the pod, and its message."""
        return self._with(end=end, end_message=message)

    def on(self, state: NodeState) -> Self:
        return self._with(node_state=state)

    def get(self) -> Pod:
        return self.pod


def pod(index: int, generation: int = 0) -> PodBuilder:
    return PodBuilder(index, generation)


def running(count: int) -> tuple[Pod, ...]:
    return tuple(pod(index).get() for index in range(count))


def history(
    number: int,
    cause: str = "start",
    nodes: int = 2,
    *,
    members: tuple[str, ...] = (),
    detail: str = "",
    final_at: datetime | None = None,
    **costs: Any,
) -> History:
    """Return the record of a round with these costs, such as `stop_ms`."""
    final_ms = 0 if final_at is None else round(final_at.timestamp() * 1000)
    cause_with_reasons = Cause(CauseKind(cause), members, detail)
    return History(number, cause_with_reasons, nodes, final_ms, **costs)


def failure(
    number: int,
    pod: str,
    kind: FailureClass = FailureClass.USER_ERROR,
    *,
    rank: int = 0,
    node: str = "",
    **changes: Any,
) -> Failure:
    """Return the record of a worker's failure in a round, with these other fields."""
    return Failure(number, f"uid-{pod}", pod, rank, 0, kind, at_ms=1, node=node, **changes)


def member(name: str, state: str = "waiting", **changes: Any) -> Member:
    """Return the record of the member of the first pod with this name, such as `job-2`."""
    uid = f"uid-{name.rpartition('-')[2]}-0"
    base = Member(uid, "session", name, "10.0.0.1", 0, state=MemberState(state))
    return replace(base, **changes)


def final_round(count: int, number: int = 1, **changes: Any) -> RendezvousView:
    """Return a final round of job-0 … in order of rank."""
    members = tuple(
        member(f"job-{index}", "running", node=f"node-{index}", round=number)
        for index in range(count)
    )
    return replace(
        RendezvousView(
            state=RendezvousState.FINAL,
            round=number,
            nodes=count,
            world_size=count,
            master="job-0",
            cause=Cause(CauseKind.START),
            since=ago(60),
            members=members,
            ranks={one.id: rank for rank, one in enumerate(members)},
        ),
        **changes,
    )


def closed(kind: OutcomeKind, detail: str = "", reason: StopReason | None = None) -> RendezvousView:
    outcome = Outcome(kind, detail, reason=reason or "")
    return RendezvousView(state=RendezvousState.CLOSED, round=2, nodes=2, outcome=outcome)


def observed(*pods: Pod, view: RendezvousView | None = None, **changes: Any) -> Observed:
    return Observed(pods=pods, rendezvous=view or RendezvousView(), **changes)
