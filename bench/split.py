"""Parts of one of our recoveries, as recorded by the rendezvous."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.keys import ROOT
from elasticjob_rendezvous.protocol.records.timings import History

SECONDS = 5.0


def split(endpoint: str) -> Mapping[str, float]:
    """Return the seconds of each phase of the newest round recorded in this etcd."""
    newest = asyncio.run(_newest(endpoint))
    if newest is None:
        return {}
    return {
        name.removesuffix("_ms"): value / 1000
        for name, value in asdict(newest).items()
        if name.endswith("_ms") and name != "final_ms" and value is not None
    }


async def _newest(endpoint: str) -> History | None:
    async with asyncio.timeout(SECONDS), Client([endpoint]) as client:
        found = await client.range(Range(ROOT, prefix=True))
    rounds = [decode(History, kv.key, kv.value) for kv in found.kvs if "/history/" in kv.key]
    return max(rounds, key=lambda each: each.number, default=None)
