"""Probe of etcd's v2 API: a write that is refused because its key does not exist.

The write passes through consensus and the user's permissions like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import etcd

from elasticjob_rendezvous.api import RendezvousError
from elasticjob_rendezvous.protocol.store_health import Failed
from elasticjob_rendezvous.protocol.store_trouble import (
    ETCD,
    StoreFailure,
    StoreState,
    failure_in,
)

STORE = ETCD
KEY = "elasticjob-probe"


class EtcdV2Probe:
    """Probe for `store_monitor.StoreProbe`. One call at a time.

    Args:
        make: creates a client with a short timeout.
        folder: directory in which members may write.
    """

    def __init__(self, make: Callable[[], Any], folder: str) -> None:
        self._make = make
        self._key = f"{folder}/{KEY}"
        self._client: Any = None

    def __call__(self, seconds: float) -> Failed | None:
        try:
            if self._client is None:
                self._client = self._make()
            self._client.write(self._key, "", prevExist=True)
        except etcd.EtcdKeyNotFound:
            return None
        except etcd.EtcdConnectionFailed as error:
            return Failed(StoreState.UNREACHABLE, str(error.cause or error))
        except etcd.EtcdInsufficientPermissions as error:
            return Failed(StoreState.REFUSING, str(error), StoreFailure.PERMISSION_DENIED)
        except etcd.EtcdLeaderElectionInProgress as error:
            return Failed(StoreState.REFUSING, str(error), StoreFailure.NO_LEADER)
        except etcd.EtcdException as error:
            return Failed(StoreState.REFUSING, str(error), failure_in(str(error)))
        except RendezvousError as error:
            return Failed(StoreState.UNREACHABLE, str(error))
        return None
