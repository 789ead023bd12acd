"""One look at a job: its rendezvous, then its pods, live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from elasticjob_operator.core.children import is_owned
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.names import INCARNATION_LABEL, pod_name, uid_selector
from elasticjob_operator.core.observed import Observed, Pod
from elasticjob_operator.core.podview import observed_pod
from elasticjob_operator.core.rendezvous_view import UNREADABLE
from elasticjob_operator.etcds import Etcd
from elasticjob_operator.jobs import JobMemory
from elasticjob_operator.kube import PODS, Json, Kube, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen. `incarnation_known` is false while it is only guessed to be the first."""

    observed: Observed
    incarnation_known: bool = True


class Observer:
    """Looks at jobs."""

    def __init__(self, kube: Kube, nodes: Nodes) -> None:
        self._kube = kube
        self._nodes = nodes

    async def look(self, job: ElasticJob, memory: JobMemory, etcd: Etcd | None) -> Sight:
        """See a job. The rendezvous comes first: a member of it without a pod is really gone."""
        namespace, uid = job.metadata.namespace, job.metadata.uid
        mirrored = etcd.newest(namespace, uid) if etcd else None
        newest = max(mirrored or 0, memory.incarnation or 0)
        found = etcd.records(namespace, uid, newest) if etcd and newest else None
        listed = await self._kube.list(PODS, namespace, uid_selector(uid))
        own = [raw for raw in listed if is_owned(job, raw)]
        labelled = max((_incarnation(raw) for raw in own), default=0)
        if labelled > newest or newest == 0:
            # Etcd has lost the job's records, or never had any: the pods know better.
            newest = max(labelled, 1)
            found = etcd.records(namespace, uid, newest) if etcd else None
        readable = etcd is not None and etcd.mirror.known
        known = readable or labelled > 0 or memory.incarnation is not None
        if known:
            memory.incarnation = newest
        await self._check_foreign(job, memory)
        pods = tuple(pod for raw in own if (pod := self.pod(job, raw)) is not None)
        memory.nodes = frozenset(pod.node for pod in pods if pod.node)
        return Sight(observed(memory, newest, found, pods), known)

    def pod(self, job: ElasticJob, raw: Json) -> Pod | None:
        """A Pod object as the plan sees it."""
        return observed_pod(raw, job.trainer().name, self._nodes.known)

    async def _check_foreign(self, job: ElasticJob, memory: JobMemory) -> None:
        """A stranger's pod that has gone gives its name free again."""
        for index in tuple(memory.foreign):
            name = pod_name(job.metadata.name, index)
            try:
                raw = await self._kube.get(PODS, job.metadata.namespace, name)
            except NotFound:
                memory.foreign.discard(index)
                continue
            if is_owned(job, raw):
                memory.foreign.discard(index)


def observed(
    memory: JobMemory, incarnation: int, found: Records | None, pods: tuple[Pod, ...]
) -> Observed:
    """What was seen and what is remembered, as the plan takes it."""
    return Observed(
        pods=pods,
        rendezvous=UNREADABLE if found is None else rendezvous_view(found),
        bounds=memory.bounds if found is None else found.bounds,
        incarnation=incarnation,
        refusal=memory.refusal,
        foreign=frozenset(memory.foreign),
    )


def seen_again(
    before: Observed,
    memory: JobMemory,
    etcd: Etcd | None,
    job: ElasticJob,
    created: tuple[Pod, ...],
    deleted: frozenset[str],
) -> Observed:
    """The same after a plan was applied: the rendezvous anew, the pods as the answers told."""
    incarnation = memory.incarnation or before.incarnation
    found = None
    if etcd is not None:
        found = etcd.records(job.metadata.namespace, job.metadata.uid, incarnation)
    kept = (replace(pod, terminating=True) if pod.uid in deleted else pod for pod in before.pods)
    return observed(memory, incarnation, found, (*kept, *created))


def due_seconds(wake_at: datetime | None, now: datetime) -> float | None:
    """How long from now until a plan changes by itself."""
    return None if wake_at is None else max((wake_at - now).total_seconds(), 0.0)


def _incarnation(raw: Json) -> int:
    text = (raw["metadata"].get("labels") or {}).get(INCARNATION_LABEL, "")
    return int(text) if text.isascii() and text.isdigit() else 0
