"""Hang detection: time without progress, and the stack of a hanging worker. Pure.

Applies only to scripts that report steps: without reports, work cannot be distinguished from a
hang. The criterion is that no worker of this node reports anything new. In synchronous training one
hanging worker blocks all others, so every node detects it at about the same time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticjob_agent.core.error_reports import encodable
from elasticjob_agent.core.state import State, WorkerGroup
from elasticjob_rendezvous.protocol.records.failures import STACK_HEADER

DUMP_SECONDS = 3.0
"""Grace period for workers to write their stacks."""
START_SECONDS = 120.0
"""Extra time for a start, from the order to the first report: imports, loading a checkpoint."""
ALMOST = 0.5
"""Fraction of `hang_seconds` after which no progress counts as a hang once a peer has failed."""

_DUMP = "Fatal Python error: "
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$')
# Frames of a rank that waits for its peers: in a collective, in the backward pass whose gradients
# are reduced, or at the first access to a result of the device.
_WAITING = re.compile(
    r"torch/distributed/|torch/nn/parallel/|torch/autograd/graph\.py|torch/_tensor\.py"
    r"|torch/cuda/__init__\.py.* in synchronize|torch/cuda/streams\.py"
)
_LAUNCHER = re.compile(r"/elasticjob_launcher/")
_COMMAND = "<string>"
"""File name of code given with `-c`, as the launcher gives its own."""
_PACKAGES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d[^/]*/|^<frozen ")


def hangs_at(state: State) -> float | None:
    """Return the monotonic time from which the group counts as hanging; None if not applicable."""
    since = _still_since(state)
    return None if since is None else since + state.facts.hang_seconds


def makes_no_progress(state: State, now: float) -> bool:
    """Return True if no progress for a while suggests that this group caused a peer's failure."""
    since = _still_since(state)
    return since is not None and now >= since + state.facts.hang_seconds * ALMOST


def _still_since(state: State) -> float | None:
    group = state.group
    if not state.facts.hang_seconds or group is None or not group.started or group.exits:
        return None
    if group.succeeded:
        return None  # the rest of a node's command reports nothing
    if group.request is not None:
        return None  # the group awaits its stop, which has a deadline
    if group.advanced_at is None and state.reported_progress is None:
        return None  # the script may never report progress
    return group.began + START_SECONDS if group.advanced_at is None else group.advanced_at


def last_step(group: WorkerGroup) -> int:
    """Return the highest step that any worker has reported; -1 before the first."""
    return max((worker.step for worker in group.progress.values()), default=-1)


@dataclass(frozen=True, slots=True)
class HangingStack:
    """Stack of a hanging worker's interrupted thread.

    Args:
        frames: file, line and function, innermost first.
    """

    frames: tuple[tuple[str, int, str], ...]

    @property
    def waits(self) -> bool:
        """True if the worker was waiting for its peers."""
        named = (f"{file} in {function}" for file, _, function in self.frames)
        return any(_WAITING.search(name) for name in named)

    @property
    def after_program(self) -> bool:
        """True if the program had ended, and the launcher's own code ran in its process."""
        files = [file for file, _, _ in self.frames]
        rest = all(file == _COMMAND or _LAUNCHER.search(file) for file in files)
        return rest and any(file != _COMMAND for file in files)

    @property
    def _of_program(self) -> tuple[tuple[str, int, str], ...]:
        """Frames without those of the launcher below the program's first line, if it was forked."""
        ours = [n for n, frame in enumerate(self.frames) if _LAUNCHER.search(frame[0])]
        return (self.frames[: ours[0]] if ours else self.frames) or self.frames

    @property
    def place(self) -> str:
        """Innermost line of the user's code, such as `read_batch (train.py, line 12)`."""
        frames = self._of_program
        own = (frame for frame in frames if not _PACKAGES.search(frame[0]))
        file, line, function = next(own, frames[0])
        return f"{function} ({file.rpartition('/')[2]}, line {line})"

    @property
    def traceback(self) -> str:
        """Stack in Python's format, innermost call last."""
        frames = self._of_program
        lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in frames]
        return "\n".join([STACK_HEADER, *reversed(lines)])


def before_dump(stderr: str) -> str:
    """Return the part of standard error before the stack dump."""
    return stderr.partition(_DUMP)[0]


def parse_stack(stderr: str) -> HangingStack | None:
    """Parse the output of Python's faulthandler at the end of standard error, or return None.

    The main thread is the one that received the signal, or else the last one listed.
    """
    stacks: list[tuple[bool, list[tuple[str, int, str]]]] = []
    for line in encodable(stderr).splitlines():
        if found := _THREAD.match(line):
            stacks.append((found[1] == "Current thread", []))
        elif stacks and (frame := _FRAME.match(line)):
            stacks[-1][1].append((frame["file"], int(frame["line"]), frame["function"]))
    with_frames = [(current, frames) for current, frames in stacks if frames]
    chosen = [frames for current, frames in with_frames if current] or [
        frames for _, frames in with_frames
    ]
    return HangingStack(tuple(chosen[-1])) if chosen else None
