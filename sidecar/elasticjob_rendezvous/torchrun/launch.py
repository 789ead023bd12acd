"""What torchrun was told that it does not tell its rendezvous: workers of this node, role, budget.

A member must announce its workers before the round is sealed, and torch's `RendezvousParameters`
do not hold them. The `LaunchConfig` of the launch does, in a frame of the call that asks for the
handler. Where there is none, `--rdzv-conf slots=N,role=NAME` says it; a wrong number is found when
the agent asks for its ranks (`answers.Disagreement`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch.distributed.launcher.api import LaunchConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch says of this node."""

    slots: int
    role: str
    max_restarts: int
    forks: bool = False
    """Whether workers are forked, if they are functions."""

    def settings(self) -> dict[str, str | int]:
        return {"slots": self.slots, "role": self.role, "max_restarts": self.max_restarts}


def launch_of(run_id: str) -> Launch | None:
    """The launch of that run among our callers."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        config = frame.f_locals.get("config")
        if isinstance(config, LaunchConfig) and config.run_id == run_id:
            forks = config.start_method == "fork"
            return Launch(config.nproc_per_node, config.role, config.max_restarts, forks)
    return None
