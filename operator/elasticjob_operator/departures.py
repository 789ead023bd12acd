"""Jobs that are gone: their rendezvous is closed at once, their keys are cleared later.

There is no finalizer, so nothing waits for this; the sweep finds what was missed.
"""

from __future__ import annotations

from datetime import datetime

from elasticjob_operator.core.rendezvous_view import StopReason
from elasticjob_operator.etcd_access import forget_job
from elasticjob_operator.etcds import Etcds
from elasticjob_operator.mirror import close
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind


async def close_departed(etcds: Etcds, namespace: str, uid: str, now: datetime) -> None:
    """Close what a deleted job has: its agents start no further round."""
    etcds.agents.forget(uid)
    outcome = Outcome(OutcomeKind.STOPPED, StopReason.DELETED.value)
    for etcd in etcds.all():
        newest = etcd.newest(namespace, uid)
        if newest is not None:
            prefix = job_prefix(namespace, uid, newest)
            await close(etcd.client, prefix, outcome, int(now.timestamp() * 1000))


async def forget_departed(etcds: Etcds, namespace: str, uid: str) -> None:
    """Remove all that etcd holds of a job of which no pod is left."""
    for etcd in etcds.all():
        if etcd.users is not None or etcd.newest(namespace, uid) is not None:
            await forget_job(etcd.client, etcd.users, namespace, uid)
