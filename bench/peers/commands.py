"""Commands that start one agent with one worker of each system under comparison."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

WORKER = Path(__file__).with_name("worker.py")
OURS = "elasticjob"
MOST_MEMBERS = 64  # the gang may always grow
MAX_RESTARTS = 100  # high enough that no budget ends the gang

_TORCHRUN = ("-m", "torch.distributed.run")
_OURS = ("-m", "elasticjob_cli", "agent")
# Otherwise the restarted gang finds the process-group keys of the previous world in the store that
# the rendezvous shares with the workers, and often never recovers (pytorch#135712).
OWN_STORE = MappingProxyType({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

_TUNED = MappingProxyType({"last_call_timeout": "1"})


@dataclass(frozen=True, slots=True)
class Peer:
    """System with its settings.

    Args:
        name: name of the system with its settings.
        mode: start of workers: `cold`, each in a new interpreter, or `warm`.
    """

    name: str
    launcher: Sequence[str]
    backend: str
    etcd_version: str | None  # None: needs no etcd
    etcd_v2: bool = False  # uses the v2 API, which etcd must be configured to serve
    conf: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    mode: str = "cold"
    options: Sequence[str] = ()
    conf_of_member: Callable[[int], Mapping[str, str]] = lambda member: {}

    @property
    def ours(self) -> bool:
        """True for our system, the reference of all ratios."""
        return self.launcher is _OURS

    def command(self, endpoint: str, run_id: str, member: int) -> list[str]:
        """Return the command line of one member's agent."""
        conf = {**self.conf, **self.conf_of_member(member)}
        options = [
            f"--nnodes=1:{MOST_MEMBERS}",
            "--nproc-per-node=1",
            f"--max-restarts={MAX_RESTARTS}",
            f"--rdzv-backend={self.backend}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={run_id}",
            "--local-addr=127.0.0.1",
            *self.options,
        ]
        if conf:
            options.append("--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in conf.items()))
        return [sys.executable, *self.launcher, *options, str(WORKER)]


def peers(ours_etcd: str, their_etcd: str) -> dict[str, Peer]:
    """Return all systems by name, ours first."""
    known = [
        Peer(OURS, _OURS, "etcd", ours_etcd, mode="warm"),
        Peer(f"{OURS}-cold", _OURS, "etcd", ours_etcd, options=("--warm-start=never",)),
        Peer("etcd", _TORCHRUN, "etcd", their_etcd, etcd_v2=True),
        Peer(
            "etcd-tuned",
            _TORCHRUN,
            "etcd",
            their_etcd,
            etcd_v2=True,
            conf={"last_call_timeout": "1"},
        ),
        # The store's host is explicit: the first member, which no fault hits.
        Peer(
            "c10d",
            _TORCHRUN,
            "c10d",
            None,
            environment=OWN_STORE,
            conf_of_member=lambda member: {"is_host": str(member == 0).lower()},
        ),
    ]
    return {peer.name: peer for peer in known}
