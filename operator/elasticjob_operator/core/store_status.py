"""Texts for an unusable rendezvous store: condition `RendezvousUnavailable`, events, sentences.

The trouble itself is reported by the operator's own probes and by the agents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from elasticjob_operator.core.lifecycle import FINISHED
from elasticjob_operator.core.observed import Observed, SeenTrouble
from elasticjob_operator.core.words import clock, named
from elasticjob_operator.model.enums import Backend, ConditionStatus, ConditionType, Phase
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import Condition, Status
from elasticjob_rendezvous.core.store_trouble import C10D_STORE, ETCD, StoreTrouble

KIND = ConditionType.RENDEZVOUS_UNAVAILABLE
ETCD_UNREACHABLE = "EtcdUnreachable"
ETCD_REFUSES_WRITES = "EtcdRefusesWrites"
STORE_UNREACHABLE = "StoreUnreachable"
AVAILABLE = "Available"
UNKNOWN = "RendezvousUnknown"

_REMEDIES = (
    (
        "database space exceeded",
        "Compact and defragment etcd or raise its --quota-backend-bytes, then run "
        "`etcdctl alarm disarm`",
    ),
    ("corrupt", "Replace the corrupt member of etcd, then run `etcdctl alarm disarm`"),
    ("permission denied", "Grant the job's etcd user access to its keys again"),
    ("authentication failed", "Check the job's etcd user and its password"),
    ("invalid auth token", "Check the job's etcd user and its password"),
    ("user name is empty", "Give the job an etcd user and password"),
    ("no leader", "Start etcd's missing members again: it needs more than half of them"),
)
"""Remedies, by a part of etcd's own text."""


def state(
    observed: Observed, backend: Backend, phase: Phase, before: Status, now: datetime
) -> tuple[ConditionStatus, str, str]:
    """Return status, reason and message of the condition."""
    was, seen = found(before), observed.store
    if phase in FINISHED:
        return ConditionStatus.FALSE, f"Job{phase.value}", ""
    if seen is not None:
        return _unavailable(observed, seen, backend, was)
    if was is not None and was.status is ConditionStatus.TRUE:
        seconds = max(0.0, (now - was.last_transition_time).total_seconds())
        store = C10D_STORE if backend is Backend.C10D else ETCD
        message = f"{store} can be used again after {seconds:.0f} s"
        return ConditionStatus.FALSE, AVAILABLE, message
    if not observed.rendezvous.readable:
        return ConditionStatus.UNKNOWN, UNKNOWN, ""
    message = was.message if was is not None and was.reason == AVAILABLE else ""
    return ConditionStatus.FALSE, AVAILABLE, message


def _unavailable(
    observed: Observed, seen: SeenTrouble, backend: Backend, was: Condition | None
) -> tuple[ConditionStatus, str, str]:
    reason, sentence = _reason(seen.trouble, backend), seen.trouble.sentence
    if was is not None and _same(was, reason, sentence, seen.trouble.refuses):
        return was.status, was.reason, was.message
    return ConditionStatus.TRUE, reason, sentence + _told_by(observed, seen)


def _same(was: Condition, reason: str, sentence: str, refuses: bool) -> bool:
    """Return whether this trouble was reported already: a broken connection has many texts."""
    if (was.status, was.reason) != (ConditionStatus.TRUE, reason):
        return False
    return not refuses or was.message.startswith(sentence)


def found(status: Status) -> Condition | None:
    """Return the condition in a status, or None."""
    return next((one for one in status.conditions if one.type is KIND), None)


def trouble_text(status: Status) -> str:
    """Return store, endpoint and cause while the store cannot be used; empty otherwise."""
    one = found(status)
    return one.message if one is not None and one.status is ConditionStatus.TRUE else ""


def over_text(status: Status) -> str:
    """Return the message that the store can be used again; empty if it had no trouble."""
    one = found(status)
    return one.message if one is not None and one.reason == AVAILABLE else ""


def sentences(job: ElasticJob) -> Iterator[str]:
    """Yield the first sentences of an explanation while the store cannot be used."""
    one = found(job.status)
    if one is None or one.status is not ConditionStatus.TRUE or job.status.phase in FINISHED:
        return
    since = clock(one.last_transition_time)
    yield (
        f"{one.message}, since {since}; workers that run go on, and no round can change until it "
        "is over"
    )
    yield from _remedy(one)


def _told_by(observed: Observed, seen: SeenTrouble) -> str:
    """Name the reporting pods, where neither the operator nor all agents see the trouble."""
    active = [pod for pod in observed.pods if pod.active]
    names = [pod.name for pod in active if pod.uid in seen.members]
    return f" (reported by {named(names)})" if names and len(names) < len(active) else ""


def _remedy(one: Condition) -> Iterable[str]:
    if one.reason == ETCD_REFUSES_WRITES:
        return [remedy for part, remedy in _REMEDIES if part in one.message][:1]
    if one.reason == ETCD_UNREACHABLE:
        return ["Check that etcd runs at its endpoints and can be reached from the pods"]
    return ["The store returns with the pod that hosts it"]


def _reason(trouble: StoreTrouble, backend: Backend) -> str:
    if trouble.refuses:
        return ETCD_REFUSES_WRITES
    return STORE_UNREACHABLE if backend is Backend.C10D else ETCD_UNREACHABLE
