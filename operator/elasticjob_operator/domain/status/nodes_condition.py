"""Condition NodesRefused: the API server refuses the operator's write of `spec.nodes`."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.observed.state import Observed
from elasticjob_operator.domain.status.readiness import Finding
from elasticjob_operator.enums import FINISHED
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.types import ConditionStatus, ConditionType


def nodes_finding(job: ElasticJob, observed: Observed) -> list[Finding]:
    """Return the condition, only while it is true: the previous release cannot read a status with
    it."""
    kind, refusal = ConditionType.NODES_REFUSED, observed.nodes_refusal
    if refusal is not None:
        has = "is absent" if job.spec.nodes is None else f"stays {job.spec.nodes}"
        text = (
            f"the operator cannot write spec.nodes: {refusal.nodes}, so it {has} for kubectl scale "
            f"and autoscalers: {refusal.message}; set it in the manifest, or let the policy, "
            "webhook or role admit the operator's writes of ElasticJobs"
        )
        return [Finding(kind, ConditionStatus.TRUE, kind.value, text)]
    return []


def nodes_sentences(job: ElasticJob) -> Iterator[str]:
    """Yield the message of the condition while it is true."""
    if job.status.phase in FINISHED or job.metadata.deletion_timestamp is not None:
        return
    for condition in job.status.conditions:
        refused = condition.type is ConditionType.NODES_REFUSED
        if refused and condition.status is ConditionStatus.TRUE:
            yield condition.message[:1].upper() + condition.message[1:]
