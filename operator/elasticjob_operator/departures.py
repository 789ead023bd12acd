"""Jobs that are gone: their rendezvous is closed at once, their keys are cleared later.

There is no finalizer, so nothing waits for this; the sweep finds what was missed. An etcd that
cannot be read at present is passed over: it must not hold up what is to be done elsewhere.
"""

from __future__ import annotations

from datetime import datetime

from elasticjob_operator.core.actions import CloseRendezvous
from elasticjob_operator.core.rendezvous_view import OutcomeKind, StopReason
from elasticjob_operator.etcd_access import forget_job
from elasticjob_operator.etcds import Etcds
from elasticjob_operator.mirror import Contended, close
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.etcd.errors import EtcdError

TROUBLE = (EtcdError, Contended)
"""What closing and clearing may raise."""


async def close_departed(etcds: Etcds, namespace: str, uid: str, now: datetime) -> bool:
    """Close what a deleted job has: its agents start no further round.

    Returns whether all is closed; the sweep comes back to what is not. Raises `TROUBLE`.
    """
    etcds.agents.forget(uid)
    outcome = CloseRendezvous(0, OutcomeKind.STOPPED, StopReason.DELETED).outcome
    whole = True
    for etcd in etcds.all():
        newest = etcd.newest(namespace, uid)
        if newest is None and etcd.users is None:
            continue
        if not etcd.mirror.known:
            whole = False
        elif newest is not None:
            prefix = job_prefix(namespace, uid, newest)
            await close(etcd.client, prefix, outcome, int(now.timestamp() * 1000))
    return whole


async def forget_departed(etcds: Etcds, namespace: str, uid: str) -> None:
    """Remove all that etcd holds of a job that is closed and has no pod left. Raises `TROUBLE`."""
    for etcd in etcds.all():
        if etcd.users is not None or etcd.newest(namespace, uid) is not None:
            await forget_job(etcd.client, etcd.users, namespace, uid)
