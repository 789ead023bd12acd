"""Launch settings that torchrun does not pass to its rendezvous: slots, role, max_restarts.

A member must announce its workers before the round is sealed, but torch's `RendezvousParameters`
do not contain them. The `LaunchConfig` of the launch does; it is a local variable in a frame of
the call stack that creates the handler. Without such a frame, set `--rdzv-conf
slots=N,role=NAME`; a wrong number is detected when the agent requests its ranks
(`replies.Disagreement`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch.distributed.launcher.api import LaunchConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a launch for this node."""

    slots: int
    role: str
    max_restarts: int
    forks: bool = False
    """True if workers that are Python functions are started by fork."""

    def settings(self) -> dict[str, str | int]:
        return {"slots": self.slots, "role": self.role, "max_restarts": self.max_restarts}


def launch_of(run_id: str) -> Launch | None:
    """Return the launch settings of that run from the call stack; None if it has none."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        config = frame.f_locals.get("config")
        if isinstance(config, LaunchConfig) and config.run_id == run_id:
            forks = config.start_method == "fork"
            return Launch(config.nproc_per_node, config.role, config.max_restarts, forks)
    return None
