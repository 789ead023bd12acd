"""Condition `RendezvousUnavailable`: a rendezvous store that cannot be used.

Its texts also appear in events and explanations. The operator's own probes and the agents find the
trouble.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from elasticjob_operator.domain.explain.phrases import clock, named
from elasticjob_operator.domain.observed.state import Observed, SeenTrouble
from elasticjob_operator.domain.plan.lifecycle import FINISHED
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.refusals import StoreRefusal
from elasticjob_operator.model.status import Condition, Status
from elasticjob_operator.model.types import Backend, ConditionStatus, ConditionType, Phase
from elasticjob_rendezvous.protocol.store_trouble import (
    C10D_STORE,
    ETCD,
    StoreFailure,
    StoreTrouble,
    failure_in,
)

STORE_CONDITION = ConditionType.RENDEZVOUS_UNAVAILABLE
ETCD_UNREACHABLE = "EtcdUnreachable"
ETCD_REFUSES_WRITES = "EtcdRefusesWrites"
STORE_UNREACHABLE = "StoreUnreachable"
STORE_AVAILABLE = "Available"
STORE_UNKNOWN = "RendezvousUnknown"

_REMEDIES: Mapping[str, str] = {
    StoreFailure.NO_SPACE: (
        "Compact and defragment etcd or raise its --quota-backend-bytes, then run "
        "`etcdctl alarm disarm`"
    ),
    StoreFailure.CORRUPT: "Replace the corrupt member of etcd, then run `etcdctl alarm disarm`",
    StoreFailure.PERMISSION_DENIED: "Grant the job's etcd user access to its keys again",
    StoreFailure.UNAUTHENTICATED: "Check the job's etcd user and its password",
    StoreFailure.NO_USER: "Give the job an etcd user and password",
    StoreFailure.NO_LEADER: ("Start etcd's missing members again: it needs more than half of them"),
}
"""Remedies by the reason for a refusal; another reason has none."""


def store_condition(
    observed: Observed, backend: Backend, phase: Phase, before: Status, now: datetime
) -> tuple[ConditionStatus, str, str]:
    """Return status, reason and message of the condition."""
    was, seen = find_store_condition(before), observed.store
    if phase in FINISHED:
        return ConditionStatus.FALSE, f"Job{phase.value}", ""
    if seen is not None:
        return _unavailable(observed, seen, backend, before)
    if was is not None and was.status is ConditionStatus.TRUE:
        seconds = max(0.0, (now - was.last_transition_time).total_seconds())
        store = C10D_STORE if backend is Backend.C10D else ETCD
        message = f"{store} can be used again after {seconds:.0f} s"
        return ConditionStatus.FALSE, STORE_AVAILABLE, message
    if not observed.rendezvous.readable:
        return ConditionStatus.UNKNOWN, STORE_UNKNOWN, ""
    message = was.message if was is not None and was.reason == STORE_AVAILABLE else ""
    return ConditionStatus.FALSE, STORE_AVAILABLE, message


def _unavailable(
    observed: Observed, seen: SeenTrouble, backend: Backend, before: Status
) -> tuple[ConditionStatus, str, str]:
    was, reason = find_store_condition(before), _condition_reason(seen.trouble, backend)
    if (
        was is not None
        and was.status is ConditionStatus.TRUE
        and was.reason == reason
        # A broken connection has many texts; the texts of a refusal are few.
        and (not seen.trouble.refuses or _is_reported(seen.trouble, was, before))
    ):
        return was.status, was.reason, was.message
    return ConditionStatus.TRUE, reason, seen.trouble.sentence + _reporters(observed, seen)


def _is_reported(refusal: StoreTrouble, condition: Condition, before: Status) -> bool:
    """Return True if the condition reports this refusal, perhaps with other reporting pods."""
    if before.store_refusal is not None:
        return before.store_refusal.message == refusal.sentence
    # The previous release wrote no `storeRefusal`, and the API server drops it with that CRD.
    reported = failure_in(condition.message)
    return reported is not StoreFailure.OTHER and reported is refusal.reason


def store_refusal(observed: Observed, phase: Phase) -> StoreRefusal | None:
    """Return the store's refusal to accept writes for the status; None if there is none."""
    seen = observed.store
    if seen is None or not seen.trouble.refuses or phase in FINISHED:
        return None
    return StoreRefusal(reason=seen.trouble.reason.value, message=seen.trouble.sentence)


def find_store_condition(status: Status) -> Condition | None:
    """Return the condition in a status, or None."""
    return next(
        (condition for condition in status.conditions if condition.type is STORE_CONDITION), None
    )


def trouble_text(status: Status) -> str:
    """Return store, endpoint and cause while the store cannot be used; empty otherwise."""
    one = find_store_condition(status)
    return one.message if one is not None and one.status is ConditionStatus.TRUE else ""


def recovered_text(status: Status) -> str:
    """Return the message that the store can be used again; empty if it had no trouble."""
    one = find_store_condition(status)
    return one.message if one is not None and one.reason == STORE_AVAILABLE else ""


def store_sentences(job: ElasticJob) -> Iterator[str]:
    """Yield the first sentences of an explanation while the store cannot be used."""
    one = find_store_condition(job.status)
    if one is None or one.status is not ConditionStatus.TRUE or job.status.phase in FINISHED:
        return
    since = clock(one.last_transition_time)
    yield (
        f"{one.message}, since {since}; workers that run go on, and no round can change until it "
        "is over"
    )
    if remedy := _remedy(one, job.status):
        yield remedy


def _reporters(observed: Observed, seen: SeenTrouble) -> str:
    """Name the reporting pods, where neither the operator nor all agents see the trouble."""
    active = [pod for pod in observed.pods if pod.active]
    names = [pod.name for pod in active if pod.uid in seen.members]
    return f" (reported by {named(names)})" if names and len(names) < len(active) else ""


def _remedy(one: Condition, status: Status) -> str:
    if one.reason == ETCD_REFUSES_WRITES:
        # The previous release wrote etcd's text only into the condition.
        refusal = status.store_refusal
        return _REMEDIES.get(refusal.reason if refusal else failure_in(one.message), "")
    if one.reason == ETCD_UNREACHABLE:
        return "Check that etcd runs at its endpoints and can be reached from the pods"
    return "The store returns with the pod that hosts it"


def _condition_reason(trouble: StoreTrouble, backend: Backend) -> str:
    if trouble.refuses:
        return ETCD_REFUSES_WRITES
    return STORE_UNREACHABLE if backend is Backend.C10D else ETCD_UNREACHABLE
