"""Namespaces that the operator serves, and its access to each of them.

With a list of namespaces the operator's rights in each are a Role there, and end with the
namespace. A namespace without access is left out until the rights are back: the others are served
on, and its jobs do not count as deleted. kopf ends on a watch that is refused for a minute, so its
watches follow the access.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

# `kopf.spawn_tasks` takes them as an argument, but kopf has no public name for them.
from kopf._cogs.structs.references import Insights, NamespaceName

from elasticjob_operator.kubernetes.client import (
    ELASTICJOBS,
    PODS,
    Forbidden,
    Kube,
    KubeError,
    NotFound,
)

log = logging.getLogger(__name__)

CHECK_SECONDS = 20.0
"""Pause between two checks; less than the time for which kopf retries a refused watch."""
_NO_OBJECT = "metadata.name=elasticjob-access-check"
"""Field selector without a match: the check requires access and reads no objects."""


class ServedNamespaces:
    """Namespaces to serve. No `names` stand for all namespaces, which None represents."""

    def __init__(self, kube: Kube, names: Iterable[str] = ()) -> None:
        self._kube = kube
        self.configured: tuple[str | None, ...] = tuple(names) or (None,)
        self.accessible = self.configured
        """Namespaces with access at the last check."""

    async def to_list(self) -> tuple[str | None, ...]:
        """Return the namespaces whose objects may be listed, for one set of lists.

        None is not checked: a list of all namespaces fails by itself without access.

        Raises:
            Forbidden, NotFound, KubeError: as `check`.
        """
        return self.configured if self.configured == (None,) else await self.check()

    async def check(self) -> tuple[str | None, ...]:
        """Check the access to each namespace; return those with access.

        Raises:
            Forbidden, NotFound: there is access to none of them.
            KubeError: the check failed for another reason.
        """
        refusals = {name: await self._refusal(name) for name in self.configured}
        accessible = tuple(name for name, refusal in refusals.items() if refusal is None)
        for refusal in refusals.values():
            if refusal is not None and not accessible:
                raise refusal
        for name, refusal in refusals.items():
            if refusal is not None and name in self.accessible:
                log.warning("no access to namespace %s, serving the others: %s", name, refusal)
            elif refusal is None and name not in self.accessible:
                log.warning("access to namespace %s is back, serving it again", name)
        self.accessible = accessible
        return accessible

    async def follow(self, insights: Insights) -> None:
        """Keep kopf's watches to the namespaces with access, until cancelled.

        Without access to any namespace the watches stay, and kopf ends with the error.
        """
        await insights.ready_namespaces.wait()
        while self.configured != (None,):
            with suppress(KubeError):  # the resync logs it
                await self.check()
            watched = {NamespaceName(name) for name in self.accessible if name is not None}
            if insights.namespaces != watched:
                async with insights.revised:
                    insights.namespaces.clear()
                    insights.namespaces.update(watched)
                    insights.revised.notify_all()
            await asyncio.sleep(CHECK_SECONDS)

    async def _refusal(self, name: str | None) -> Forbidden | NotFound | None:
        """Return the error if the jobs or pods of a namespace may not be listed."""
        try:
            for kind in (ELASTICJOBS, PODS):
                await self._kube.list(kind, name, metadata_only=True, field=_NO_OBJECT)
        except (Forbidden, NotFound) as error:
            return error
        return None
