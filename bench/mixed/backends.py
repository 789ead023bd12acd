"""Backends of mixed gangs, and the commands that start a node of each side on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from bench.mixed.plan import Side
from bench.settings import OUR_ETCD_VERSION, PEERS_ETCD_VERSION

LEAST, MOST = 1, 8
MAX_RESTARTS = 100  # high enough that no budget ends the gang

_KEEP_ALIVE = MappingProxyType({"keep_alive_interval": "1", "keep_alive_max_attempt": "3"})
_OWN_STORE = MappingProxyType({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@dataclass(frozen=True, slots=True)
class MixedBackend:
    """Backend with its settings, the same on both sides.

    Args:
        torchrun: its name in torchrun; ours is the same.
        etcd_version: version of its etcd; None if it needs none.
        etcd_v2: set if it uses etcd's v2 API.
        first_hosts: set if the first node hosts the backend's store.
        spares_first: set if the first node must stay because it hosts a store that all need.
    """

    name: str
    torchrun: str
    etcd_version: str | None
    etcd_v2: bool = False
    first_hosts: bool = False
    spares_first: bool = False
    conf: Mapping[str, str] = field(default_factory=dict)
    theirs: Mapping[str, str] = field(default_factory=dict)

    def environment(self, side: Side) -> dict[str, str]:
        return dict(self.theirs) if side is Side.THEIRS else {}

    def command(
        self,
        side: Side,
        endpoint: str,
        run_id: str,
        name: str,
        first: bool,
        script: Sequence[str],
    ) -> list[str]:
        """Return a node's command line after the interpreter."""
        conf = dict(self.conf)
        if self.first_hosts:
            conf["is_host"] = str(first).lower()
        directed = self.torchrun == "elasticjob"
        if directed and side is Side.THEIRS:  # our agent names itself after pod, or host and pid
            conf["node_name"] = name
        if side is Side.OURS and not directed:
            given = {
                "backend": self.torchrun,
                "endpoint": endpoint,
                "run_id": run_id,
                "least": LEAST,
                "most": MOST,
                "settings": conf,
                "max_restarts": MAX_RESTARTS,
                "command": list(script),
            }
            return ["-m", "bench.peers.node", json.dumps(given)]
        program = ["-m", "elasticjob_cli", "agent"]
        if side is Side.THEIRS:
            program = ["-m", "torch.distributed.run"]
        options = [
            f"--nnodes={LEAST}:{MOST}",
            "--nproc-per-node=1",
            f"--max-restarts={MAX_RESTARTS}",
            f"--rdzv-backend={self.torchrun}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={run_id}",
            "--local-addr=127.0.0.1",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
        ]
        return [*program, *options, *script]


BACKENDS = {
    backend.name: backend
    for backend in (
        MixedBackend(
            "etcd", "etcd", PEERS_ETCD_VERSION, etcd_v2=True, conf={"last_call_timeout": "3"}
        ),
        MixedBackend(
            "etcd-v2",
            "etcd-v2",
            PEERS_ETCD_VERSION,
            etcd_v2=True,
            spares_first=True,
            conf={"last_call_timeout": "1", **_KEEP_ALIVE},
        ),
        MixedBackend(
            "c10d",
            "c10d",
            None,
            first_hosts=True,
            spares_first=True,
            conf={"last_call_timeout": "1", **_KEEP_ALIVE},
        ),
        MixedBackend(
            "c10d-own-store",
            "c10d",
            None,
            first_hosts=True,
            spares_first=True,
            conf={"last_call_timeout": "1", **_KEEP_ALIVE},
            theirs=_OWN_STORE,
        ),
        MixedBackend(
            "etcd-v2-own-store",
            "etcd-v2",
            PEERS_ETCD_VERSION,
            etcd_v2=True,
            conf={"last_call_timeout": "1", **_KEEP_ALIVE},
            theirs=_OWN_STORE,
        ),
        MixedBackend(
            "elasticjob",
            "elasticjob",
            OUR_ETCD_VERSION,
            conf={"last_call_timeout": "10", "settle": "0.3", "keep_alive_seconds": "3"},
        ),
    )
}
"""Backends by name. c10d and etcd-v2 have torchrun's defaults: an agent hosts the workers' store
for all rounds; `…-own-store` sets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
