"""Applier of plans: performs the actions in order, up to the first failure.

Actions on pods of one kind are handed to the cluster together.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from typing import assert_never

from elasticjob_operator.domain.plan.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.planner import Plan
from elasticjob_operator.kubernetes.errors import KubeError
from elasticjob_operator.reconcile.cluster import Applied, Cluster, NameTaken, ReconcileContext
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.informer_cache import Contended
from elasticjob_rendezvous.etcd.errors import EtcdError

EXPECTED = (KubeError, EtcdError, Contended, NameTaken, Retry)
"""Errors of a pass that are not bugs in this program."""


class Applier:
    """Applier of plans to a cluster and to the rendezvous. `now` is UTC."""

    def __init__(self, cluster: Cluster, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._now = now

    async def apply(self, context: ReconcileContext, planned: Plan) -> Applied:
        """Apply the plan. Return `EXPECTED` errors in the result instead of raising them."""
        applied = Applied(refusal=context.memory.refusal)
        creates = any(isinstance(action, CreatePod) for action in planned.actions)
        if not creates and context.source.usable:
            applied.refusal = None  # it concerned pods that are no longer wanted
        try:
            for kind, group in groupby(planned.actions, key=type):
                if applied.unfinished:
                    break
                await self._apply_alike(context, planned, kind, list(group), applied)
            if not creates:
                await self._cluster.update_owned(context, planned, applied)
        except EXPECTED as error:
            applied.error = error
        return applied

    async def _apply_alike(
        self,
        context: ReconcileContext,
        planned: Plan,
        kind: type,
        actions: list[Action],
        applied: Applied,
    ) -> None:
        """Apply consecutive actions of one kind."""
        if kind is CreatePod:
            creations = [one for one in actions if isinstance(one, CreatePod)]
            await self._cluster.create_pods(context, planned, creations, applied)
        elif kind is DeletePod:
            deletions = [one for one in actions if isinstance(one, DeletePod)]
            await self._cluster.delete_pods(context, deletions, applied)
        else:
            for action in actions:
                await self._do(context, action)
                applied.actions.append(action)

    async def _do(self, context: ReconcileContext, action: Action) -> None:
        match action:
            case WriteNodes(nodes):
                await self._cluster.write_nodes(context.job, nodes)
            case WriteParams(incarnation, bounds, revision):
                await context.source.write_params(context.memory, incarnation, bounds, revision)
            case CloseRendezvous(incarnation):
                now_ms = int(self._now().timestamp() * 1000)
                await context.source.close(incarnation, action.outcome, now_ms)
            case RemoveMembers(incarnation, members):
                await context.source.remove_members(incarnation, members)
            case DeleteJob():
                await self._cluster.delete_job(context.job)
            case CreatePod() | DeletePod():
                raise AssertionError(f"{action} is applied with its like")
            case _:
                assert_never(action)
