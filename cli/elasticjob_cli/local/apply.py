"""Applier of a plan's actions, in order, to the local cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from elasticjob_cli.local.pods import Kubelet
from elasticjob_cli.local.stored import StoredJob
from elasticjob_operator.core.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    RemoveMembers,
    WriteBounds,
    WriteNodes,
)
from elasticjob_operator.core.endings import Plan
from elasticjob_operator.core.grace import grace_seconds
from elasticjob_operator.mirror import Contended, Mirror, RendezvousWriter
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError


class Applier:
    """Applier of plans that tracks the incarnation and bounds written last.

    `etcd` is None unless the rendezvous uses etcd's v3 API: then no plan writes to it.
    """

    def __init__(
        self,
        etcd: tuple[Client, Mirror] | None,
        kubelet: Kubelet,
        prefix_of: Callable[[int], str],
        stored: StoredJob,
        note: Callable[[str], None],
    ) -> None:
        self._writer = None if etcd is None else RendezvousWriter(*etcd, prefix_of)
        self._kubelet = kubelet
        self._prefix_of = prefix_of
        self._stored = stored
        self._note = note
        self._complaint = ""
        self.incarnation = 1
        self.bounds: Bounds | None = None

    @property
    def prefix(self) -> str:
        """Key prefix of the newest incarnation."""
        return self._prefix_of(self.incarnation)

    @property
    def _rendezvous(self) -> RendezvousWriter:
        assert self._writer is not None, "no plan writes to a rendezvous outside etcd v3"
        return self._writer

    async def apply(self, planned: Plan) -> None:
        """Apply the plan; the next plan repeats writes that etcd refused."""
        try:
            for action in planned.actions:
                await self._do(action)
            self._complaint = ""
        except (EtcdError, Contended) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._note(f"cannot write to etcd, retrying: {error}")

    async def _do(self, action: Action) -> None:
        match action:
            case WriteNodes(nodes):
                self._stored.change_spec(nodes=nodes)
            case WriteBounds(incarnation, bounds):
                await self._rendezvous.write_bounds(incarnation, bounds)
                self.incarnation, self.bounds = incarnation, bounds
            case CloseRendezvous(incarnation):
                now_ms = time.time_ns() // 1_000_000
                await self._rendezvous.close(incarnation, action.outcome, now_ms)
            case RemoveMembers(incarnation, members):
                await self._rendezvous.remove_members(incarnation, members)
            case CreatePod(index, name, incarnation):
                await self._kubelet.create(index, name, incarnation)
            case DeletePod(name, uid, reason):
                self._note(f"deleting pod {name}: {reason}")
                self._kubelet.delete(uid, grace_seconds(self._stored.job))
            case DeleteJob():
                pass  # a local job's last status stays readable until its user deletes it
            case _:
                assert_never(action)
