"""Shared state in etcd's v2 API, as in torch's `etcd-v2` rendezvous. Requires python-etcd."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any

import etcd
import urllib3

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
)
from elasticjob_rendezvous.dynamic.create import create_handler
from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend, Token
from elasticjob_rendezvous.etcd_v2.client import create_client
from elasticjob_rendezvous.etcd_v2.core.records import is_ambiguous
from elasticjob_rendezvous.etcd_v2.store import EtcdStore
from elasticjob_rendezvous.protocol.text import echoed

STATE_PREFIX = "/torch/elastic/rendezvous"
STORE_PREFIX = "/torch/elastic/store"
DEFAULT_TTL_SECONDS = 7200
READ_TIMEOUT_SECONDS = 60
_FAILURES = (etcd.EtcdException, urllib3.exceptions.HTTPError, OSError)


class EtcdRendezvousBackend(RendezvousBackend):
    """Rendezvous backend on etcd's v2 API, byte-compatible with torch's.

    The token is the key's modifiedIndex. Every write renews the key's `ttl`.

    Args:
        client: an `etcd.Client`, preferably from `etcd_v2.client`.
        run_id: id of the rendezvous.
        key_prefix: directory of the state.
        ttl: time to live in seconds; two hours unless it is positive.

    Raises:
        ValueError: the run id is empty, or its key would be that of another run.
    """

    reconnects = True
    errors = (*_FAILURES, LookupError, ValueError)

    def __init__(
        self, client: Any, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        if not run_id:
            raise ValueError("the run id must not be empty")
        if is_ambiguous(run_id):
            raise ValueError(
                "the run id must not contain ?, # or %, nor . or .. between slashes, since etcd's "
                "v2 API would use the state of another run; choose another run id on all nodes: "
                f"{echoed(run_id)}"
            )
        self._client = client
        self._key = f"{key_prefix}/{run_id}" if key_prefix else run_id
        self._ttl_seconds = ttl if ttl and ttl > 0 else DEFAULT_TTL_SECONDS

    @property
    def name(self) -> str:
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            found = self._client.read(self._key)
            if found.dir:
                found = self._client.read(self._key, recursive=True)
                states = [str(leaf.key) for leaf in found.leaves if not leaf.dir]
                raise self._occupied(states[0]) if states else self._left_over()
        except etcd.EtcdKeyNotFound:
            return None
        except _FAILURES as error:
            raise self._failed(error) from error
        return self._decoded(found)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        condition: dict[str, Any] = {"prevExist": False}
        if token:
            try:
                condition = {"prevIndex": int(token)}
            except (TypeError, ValueError):  # not a token of this backend
                return self._found(state=None)
        try:
            written = self._client.write(
                self._key, b64encode(state).decode(), self._ttl_seconds, **condition
            )
        except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
            # Our write may also have been applied, and repeated since its reply was lost.
            return self._found(state)
        except _FAILURES as error:
            raise self._failed(error) from error
        return (*self._decoded(written), True)

    def _found(self, state: bytes | None) -> tuple[bytes, Token, bool] | None:
        found = self.get_state()
        return (*found, found[0] == state) if found else None

    def _decoded(self, result: Any) -> tuple[bytes, Token]:
        try:
            return b64decode(str(result.value).encode(), validate=True), result.modifiedIndex
        except binascii.Error as error:
            raise RendezvousStateError(
                f"the rendezvous state at {self._key} is corrupt: it is not base64 ({error})"
            ) from error

    def _occupied(self, other: str) -> RendezvousStateError:
        """Return the error for a key that etcd cannot have beside the one of another run."""
        return RendezvousStateError(
            f"etcd's v2 API cannot store the rendezvous state at {self._key}: another run has its "
            f"state at {other}, and no key lies below another one; choose another run id on all "
            "nodes, which is not the other run's id with a slash and more text, nor its part "
            "before a slash"
        )

    def _left_over(self) -> RendezvousStateError:
        """Return the error for a folder whose runs have expired: etcd keeps the folder."""
        return RendezvousStateError(
            f"etcd's v2 API cannot store the rendezvous state at {self._key}: earlier runs, whose "
            "ids begin with this one and a slash, left an empty folder there; delete it with "
            f"`etcdctl rm --recursive {self._key}`, or choose another run id on all nodes"
        )

    def _failed(self, error: Exception) -> RendezvousError:
        """Return the error for a failed request."""
        if isinstance(error, etcd.EtcdNotDir):
            return self._occupied(str((error.payload or {}).get("cause")))
        return RendezvousConnectionError(f"etcd failed on {self._key}: {error}")


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Create the backend from parameters, and the store for its rounds.

    Settings: `read_timeout` (60 s), `protocol` (http or https), and the files `ssl_cert`,
    `ssl_cert_key` and `ca_cert`.

    Raises:
        ValueError: a setting or the endpoint is malformed.
        RendezvousConnectionError: no etcd with the v2 API answers.
    """
    read_timeout = params.get_as_int("read_timeout", READ_TIMEOUT_SECONDS)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError(f"the setting 'read_timeout' must be at least 1, not {read_timeout}")
    for_client = RendezvousParameters(
        params.backend,
        params.endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        protocol=str(params.get("protocol", "http")).strip().lower(),
        cert=params.get("ssl_cert"),
        key=params.get("ssl_cert_key"),
        cacert=params.get("ca_cert"),
        read_timeout=read_timeout,
    )
    client = create_client(for_client)
    backend = EtcdRendezvousBackend(client, params.run_id, STATE_PREFIX)
    return backend, EtcdStore(client, STORE_PREFIX)


def create_rdzv_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create an etcd-v2 handler from torch's parameters."""
    from elasticjob_rendezvous.c10d.stores import sharing  # requires torch only when used

    backend, store = create_backend(params)
    return create_handler(store, backend, params, sharing=sharing(params, store))
