"""Destinations of the workers' output: files, this process's streams, and the prefix of lines.

Also `virtual_local_rank`, the other change of a start order that torch's options ask for. No I/O
but the environment's CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntFlag
from string import Template

from elasticjob_agent.settings import visible_devices
from elasticjob_agent.worker_runtime import WorkerStart
from elasticjob_rendezvous.protocol.text import echoed

_STD = re.compile(r"[0-3]")
_STD_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class Std(IntFlag):
    """Set of standard streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse `"3"` (both streams of all workers) or `"0:1,1:2"` (streams by local rank).

        Raises:
            ValueError: any other text.
        """
        if _STD.fullmatch(vm):
            return cls(int(vm))
        if _STD_BY_RANK.fullmatch(vm):
            pairs = (part.split(":") for part in vm.split(","))
            return {int(local_rank): cls(int(value)) for local_rank, value in pairs}
        raise ValueError(
            f"streams must be 0 to 3, or such as 0:1,1:3 by local rank, not {echoed(vm)}"
        )


def streams_of(choice: Std | Mapping[int, Std], local_rank: int) -> Std:
    """Return the streams chosen for one worker. Accepts torch's `Std`."""
    return Std(int(choice if isinstance(choice, int) else choice.get(local_rank, Std.NONE)))


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Destination of the workers' streams; without `redirects` and `tee` it is the order's own.

    Args:
        redirects: streams that go to files only.
        tee: streams that go to files and to the console; overrides `redirects`.
        local_ranks_filter: local ranks whose output is shown on the console; None shows all.
        prefix_template: prefix of every line on the console, in which `${role_name}`,
            `${local_rank}` and `${rank}` are replaced; None is the order's own.
        role: role of the workers.
    """

    redirects: Std | Mapping[int, Std] | None = None
    tee: Std | Mapping[int, Std] | None = None
    local_ranks_filter: Collection[int] | None = None
    prefix_template: str | None = None
    role: str = ""

    @property
    def needs_files(self) -> bool:
        """True if a stream of any worker goes to a file."""
        chosen = (self.redirects, self.tee)
        return any(any(each.values()) if isinstance(each, Mapping) else each for each in chosen)

    def adjust(self, worker: WorkerStart) -> WorkerStart:
        """Return a worker's start parameters with these destinations."""
        local_rank, shown, unlogged = worker.local_rank, Std.ALL, worker.unlogged
        if self.redirects is not None or self.tee is not None:
            tee = streams_of(self.tee or Std.NONE, local_rank)
            kept = tee | streams_of(self.redirects or Std.NONE, local_rank)
            shown, unlogged = tee | ~kept, _numbers(~kept)
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            shown = Std.NONE
        prefix = self._prefix(worker)
        return replace(worker, prefix=prefix, unlogged=unlogged, silent=_numbers(~shown))

    def _prefix(self, worker: WorkerStart) -> str:
        if self.prefix_template is None:
            return worker.prefix
        return Template(self.prefix_template).safe_substitute(
            role_name=self.role, local_rank=worker.local_rank, rank=worker.env["RANK"]
        )


def _numbers(streams: Std) -> tuple[int, ...]:
    """Return the descriptors of the streams."""
    return tuple(number for number, std in ((1, Std.OUT), (2, Std.ERR)) if std & streams)


def single_device(local_rank: int) -> dict[str, str]:
    """Return the variables of a worker that sees one device, with `virtual_local_rank`.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES has no device for it.
    """
    visible = visible_devices()
    if visible is None:
        return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local_rank)}
    named = [part.strip() for part in visible.split(",")]
    if local_rank >= len(named):
        raise ValueError(
            f"virtual_local_rank: CUDA_VISIBLE_DEVICES={visible} has no device for local "
            f"rank {local_rank}"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": named[local_rank]}
