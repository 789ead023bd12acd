"""torch's `etcd` rendezvous backend over etcd's v2 API, on python-etcd and without torch.

Needs the extra `etcd-v2`, and an etcd 3.4 or 3.5 that was started with `--enable-v2`.
"""

from elasticjob_rendezvous.etcd_v2.client import create_client
from elasticjob_rendezvous.etcd_v2.errors import (
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
)
from elasticjob_rendezvous.etcd_v2.handler import (
    EtcdRendezvousHandler,
    create_rdzv_handler,
    parameters_from_url,
)
from elasticjob_rendezvous.etcd_v2.rendezvous import EtcdRendezvous
from elasticjob_rendezvous.etcd_v2.store import EtcdStore

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "EtcdStore",
    "create_client",
    "create_rdzv_handler",
    "parameters_from_url",
]
