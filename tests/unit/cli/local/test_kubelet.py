"""Kubelet of a local job, when its run ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elasticjob_cli.local.kubelet import Kubelet, Programs
from elasticjob_cli.local.processes import Processes


async def never() -> None:
    raise AssertionError("nothing is begun any more")


def kubelet(group: asyncio.TaskGroup, folder: Path) -> Kubelet:
    processes = cast("Processes", SimpleNamespace(pids={}))
    programs = cast("Programs", SimpleNamespace())
    return Kubelet(processes, folder, folder, programs, group, lambda _: None)


@pytest.mark.parametrize("by_error", [True, False])
def test_coroutine_spawned_during_shutdown_is_dropped_silently(
    tmp_path: Path, by_error: bool
) -> None:
    """A coroutine that is never awaited would cause a warning on the user's screen."""

    async def ends() -> None:
        async with asyncio.TaskGroup() as group:
            pods = kubelet(group, tmp_path)
            if by_error:
                pods.spawn(fails())
            else:
                pods.stop()
            try:
                await asyncio.sleep(30.0 if by_error else 0.0)  # until the group ends everything
            finally:
                pods.spawn(never())

    async def fails() -> None:
        raise LookupError

    if by_error:
        with pytest.raises(ExceptionGroup):
            asyncio.run(ends())
    else:
        asyncio.run(ends())
