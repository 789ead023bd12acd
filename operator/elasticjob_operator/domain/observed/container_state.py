"""State of containers: obstacles to a container's start, and a container's end, as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob_operator.domain.observed.state import Obstacle

Raw = Mapping[str, Any]

MAX_MESSAGE = 1000
"""Maximum length of a message of a container or its runtime, in characters."""

_WAITING = {
    "ErrImagePull": Obstacle.IMAGE,
    "ImagePullBackOff": Obstacle.IMAGE,
    "InvalidImageName": Obstacle.IMAGE,
    "ErrImageNeverPull": Obstacle.IMAGE,
    "ImageInspectError": Obstacle.IMAGE,
    "RegistryUnavailable": Obstacle.IMAGE,
    "SignatureValidationFailed": Obstacle.IMAGE,
    "CreateContainerConfigError": Obstacle.CONFIG,
    "CreateContainerError": Obstacle.CONFIG,
    "PreCreateHookError": Obstacle.CONFIG,
    "PreStartHookError": Obstacle.CONFIG,
    "PostStartHookError": Obstacle.CONFIG,
    "RunContainerError": Obstacle.CONFIG,
}
_PREPARING = ("ContainerCreating", "PodInitializing", "Pulling", "")
"""Reasons of a container that waits for its kubelet alone."""
_NEVER_RAN = ("StartError", "ContainerCannotRun", "CreateContainerError", "RunContainerError")
_LOST_TRACK = "ContainerStatusUnknown"  # the start is unknown too
_LAST_SIGNAL = 64  # exit code 255 is that of a container whose end is unknown, or of exit(-1)
_EPOCH = "1970-"  # a start in 1970 means that the container never started
_EXECUTABLE = re.compile(r'exec: "(?P<file>[^"]+)": (?P<why>.*?)(: unknown)?$', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Obstacle that keeps a container from running."""

    obstacle: Obstacle
    message: str


def statuses(raw: Raw, field: str) -> dict[str, Raw]:
    """Return the container statuses in `field` (such as initContainerStatuses) by container name,
    in the pod's order.

    A container without a status from the kubelet is absent.
    """
    return {found["name"]: found for found in (raw.get("status") or {}).get(field) or ()}


def ended(status: Raw | None) -> Raw | None:
    """Return the container's `terminated` state, or None if it is in another state."""
    found: Raw | None = ((status or {}).get("state") or {}).get("terminated")
    return found


def running(status: Raw | None) -> Raw | None:
    """Return the container's `running` state, or None if it is in another state."""
    found: Raw | None = ((status or {}).get("state") or {}).get("running")
    return found


def has_run(status: Raw) -> bool:
    """Return True if the container runs, or has ended at least once."""
    states = (status.get("state") or {}, status.get("lastState") or {})
    return any(state.get("running") or state.get("terminated") for state in states)


def message_of(state: Raw) -> str:
    """Return the message of the container or its runtime; the end of it if it is long."""
    message = (state.get("message") or "").strip()
    return message if len(message) <= MAX_MESSAGE else f"[…]{message[-MAX_MESSAGE:]}"


def never_ran(terminated: Raw) -> bool:
    """Return True if the container ended before its process started."""
    if terminated.get("reason") == _LOST_TRACK:
        return False
    started = terminated.get("startedAt") or _EPOCH
    return terminated.get("reason") in _NEVER_RAN or started.startswith(_EPOCH)


def waiting_trouble(status: Raw) -> Blocked | None:
    """Return the obstacle of a waiting container; None if it waits for no known obstacle."""
    waiting = ((status.get("state") or {}).get("waiting")) or {}
    reason, message = waiting.get("reason") or "", message_of(waiting)
    obstacle = _WAITING.get(reason)
    if obstacle is None:
        return None
    named = f"container {status['name']}"
    if obstacle is Obstacle.IMAGE:
        named += f" with image {status.get('image') or 'unknown'}"
    return Blocked(obstacle, f"{named}: {reason}: {message}" if message else f"{named}: {reason}")


def init_trouble(status: Raw) -> Blocked | None:
    """Return the obstacle of an init container or native sidecar, including repeated failures."""
    if trouble := waiting_trouble(status):
        return trouble
    # Between two attempts the end is in lastState.
    last = ended(status) or (status.get("lastState") or {}).get("terminated")
    if last is None or running(status) or (last["exitCode"] == 0 and not _backs_off(status)):
        return None
    return Blocked(Obstacle.INIT, f"init container {status['name']}: {ending(last)}")


def is_preparing(status: Raw) -> bool:
    """Return True if the container runs, has succeeded, or waits for its image, its creation or
    an earlier container. One that failed before may fail again and again."""
    last = (status.get("lastState") or {}).get("terminated")
    if last is not None and last["exitCode"] != 0:
        return False
    waiting = (status.get("state") or {}).get("waiting")
    return waiting is None or (waiting.get("reason") or "") in _PREPARING


def _backs_off(status: Raw) -> bool:
    waiting = (status.get("state") or {}).get("waiting") or {}
    return waiting.get("reason") == "CrashLoopBackOff"


def ending(terminated: Raw, memory_limit: str | None = None) -> str:
    """Return the end of a container in one sentence, with the fix if one is known."""
    reason, message = terminated.get("reason") or "", message_of(terminated)
    if never_ran(terminated):
        return _not_started(message or reason)
    code = terminated["exitCode"]
    text = f"exit code {code}"
    if 128 < code <= 128 + _LAST_SIGNAL:
        text += f" (signal {code - 128})"
    if reason == "OOMKilled":
        limit = f"its memory limit is {memory_limit}" if memory_limit else "it has no memory limit"
        text = f"out of memory, {limit}: {text}"
    elif reason not in ("", "Error", "Completed"):
        text += f", {reason}"
    return f"{text}: {message}" if message else text


def _not_started(message: str) -> str:
    """Return the reason for a failed start of a container's command, from the runtime's message."""
    found = _EXECUTABLE.search(message)
    if found is None:
        return f"could not be started: {message}"
    file, cause = found["file"], found["why"]
    if "permission denied" in cause:
        fix = "it must be executable for the container's user"
    elif "python" in file:
        fix = f"the image must have {file}, or command must begin with the Python that it has"
    else:
        fix = f"the image must have {file}"
    return f"could not be started: {file}: {cause}; {fix}"
