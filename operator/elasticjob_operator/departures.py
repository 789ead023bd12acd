"""Cleanup of deleted jobs: closes their rendezvous at once and deletes their keys later.

There is no finalizer, so deletion does not wait for this; the resync finds missed jobs. An
unreadable etcd is skipped, so it does not delay work on the others.
"""

from __future__ import annotations

from datetime import datetime

from elasticjob_operator.core.mirrored import outcome_record
from elasticjob_operator.core.rendezvous_view import StopReason
from elasticjob_operator.etcd_access import forget_job
from elasticjob_operator.etcds import Etcds
from elasticjob_operator.mirror import Contended, close
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.core.records import OutcomeKind
from elasticjob_rendezvous.etcd.errors import EtcdError

TROUBLE = (EtcdError, Contended)
"""Errors that closing and clearing may raise."""


async def close_departed(etcds: Etcds, namespace: str, uid: str, now: datetime) -> bool:
    """Close a deleted job's rendezvous, so that its agents start no further round.

    Return True if everything is closed; the resync retries the rest. Raises `TROUBLE`.
    """
    etcds.agents.forget(uid)
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.DELETED)
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
    """Delete all etcd data of a closed job without pods. Raises `TROUBLE`."""
    for etcd in etcds.all():
        if etcd.users is not None or etcd.newest(namespace, uid) is not None:
            await forget_job(etcd.client, etcd.users, namespace, uid)
