"""torch's `etcd` rendezvous backend over etcd's v2 API, on python-etcd and without torch.

Requires the extra `etcd-v2`, and an etcd 3.4 or 3.5 started with `--enable-v2`.
"""

from elasticjob_rendezvous.etcd_v2.client import DEFAULT_READ_TIMEOUT_SECONDS, create_client
from elasticjob_rendezvous.etcd_v2.core import records
from elasticjob_rendezvous.etcd_v2.core.records import DEFAULT_PREFIX, Paths
from elasticjob_rendezvous.etcd_v2.core.transitions import (
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

# The names in torch's module, in its order.
CONST_ETCD_SETUP_TTL = records.SETUP_TTL_SECONDS
CONST_ETCD_FROZEN_TTL = records.FROZEN_TTL_SECONDS
CONST_ETCD_JOINABLE_EPHEMERAL_TTL = records.JOINABLE_TTL_SECONDS
CONST_WORKER_KEEPALIVE_TTL = records.KEEPALIVE_TTL_SECONDS
CONST_RUNID_SUBROOT_TTL = records.RUN_TTL_SECONDS

__all__ = [
    "CONST_ETCD_FROZEN_TTL",
    "CONST_ETCD_JOINABLE_EPHEMERAL_TTL",
    "CONST_ETCD_SETUP_TTL",
    "CONST_RUNID_SUBROOT_TTL",
    "CONST_WORKER_KEEPALIVE_TTL",
    "DEFAULT_PREFIX",
    "DEFAULT_READ_TIMEOUT_SECONDS",
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "EtcdStore",
    "Paths",
    "create_client",
    "create_rdzv_handler",
    "parameters_from_url",
]
