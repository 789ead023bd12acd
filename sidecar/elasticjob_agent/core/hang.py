"""Workers that stand still: since when, and where. Pure.

Known only of scripts that tell their steps: what says nothing of its training may be doing
anything. What counts is that nothing new is told, of any worker of this node: in training that is
synchronous one that hangs stops all, so that every node sees it at about the same time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticjob_agent.core.evidence import encodable
from elasticjob_agent.core.model import Crew, State

DUMP_SECONDS = 3.0
"""What workers get to write down where they stand."""
START_SECONDS = 120.0
"""What a start may take beyond that, from the order to the first word: imports, a checkpoint."""
ALMOST = 0.5
"""The part of the time after which, once a peer has failed, standing still is a hang as well."""

_DUMP = "Fatal Python error: "
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$')
# Where a rank stands that waits for its peers: in a collective, in the backward pass whose
# gradients are reduced, or at the first look at what the device has computed.
_WAITING = re.compile(
    r"torch/distributed/|torch/nn/parallel/|torch/autograd/graph\.py|torch/_tensor\.py"
    r"|torch/cuda/__init__\.py.* in synchronize|torch/cuda/streams\.py"
)
_LAUNCHER = re.compile(r"/elasticjob_launcher/|/elasticjob_agent/launcher/")
_PACKAGES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d[^/]*/|^<frozen ")


def hangs_at(state: State) -> float | None:
    """When the crew counts as hanging, in monotonic seconds; None while that is not known."""
    since = _still_since(state)
    return None if since is None else since + state.facts.hang_seconds


def stands_still(state: State, now: float) -> bool:
    """Whether a crew whose peer failed may itself be why: it said nothing for a good while."""
    since = _still_since(state)
    return since is not None and now >= since + state.facts.hang_seconds * ALMOST


def _still_since(state: State) -> float | None:
    crew = state.crew
    if not state.facts.hang_seconds or crew is None or not crew.started or crew.exits:
        return None
    if crew.asked is not None:
        return None  # it waits for its stop, and only for so long
    if crew.advanced_at is None and state.shown is None:
        return None  # its script may be one that never tells
    return crew.began + START_SECONDS if crew.advanced_at is None else crew.advanced_at


def last_step(crew: Crew) -> int:
    """The newest step that any of the workers told; -1 before the first."""
    return max((worker.step for worker in crew.progress.values()), default=-1)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a worker stood: the stack of the thread that was interrupted.

    Args:
        frames: file, line and function, the innermost first.
    """

    frames: tuple[tuple[str, int, str], ...]

    @property
    def waits(self) -> bool:
        """Whether it waited for its peers."""
        named = (f"{file} in {function}" for file, _, function in self.frames)
        return any(_WAITING.search(name) for name in named)

    @property
    def _of_program(self) -> tuple[tuple[str, int, str], ...]:
        """Without what ran before the program's first line, where it was forked."""
        ours = [n for n, frame in enumerate(self.frames) if _LAUNCHER.search(frame[0])]
        return (self.frames[: ours[0]] if ours else self.frames) or self.frames

    @property
    def place(self) -> str:
        """The user's own line, such as `read_batch (train.py, line 12)`."""
        frames = self._of_program
        own = (frame for frame in frames if not _PACKAGES.search(frame[0]))
        file, line, function = next(own, frames[0])
        return f"{function} ({file.rpartition('/')[2]}, line {line})"

    @property
    def traceback(self) -> str:
        """As Python prints it, the innermost call last."""
        frames = self._of_program
        lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in frames]
        return "\n".join(["Stack (most recent call last):", *reversed(lines)])


def before_dump(stderr: str) -> str:
    """What stood on standard error before the stacks."""
    return stderr.partition(_DUMP)[0]


def stand(stderr: str) -> Stand | None:
    """Read what Python's faulthandler wrote at the end of a standard error; None if it did not.

    The main thread is the one that got the signal, or the last of those listed.
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
    return Stand(tuple(chosen[-1])) if chosen else None
