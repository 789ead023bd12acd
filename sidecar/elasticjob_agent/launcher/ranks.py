"""Environment variables that differ between the workers of a job or between its rounds."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_RANKS = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip
# Device assignment per worker, if configured. Read only at the start of a driver.
_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES",
    }
)  # fmt: skip
_PREFIXES = ("TORCHELASTIC_", "ELASTICJOB_")


def is_rank(name: str) -> bool:
    """Return True if the variable identifies a worker or its round."""
    return name in _RANKS or name.startswith(_PREFIXES)


def differs(name: str) -> bool:
    """Return True if the variable's value may differ by worker or by round."""
    return is_rank(name) or name in _DEVICES


def shared(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that is the same for all workers in all rounds."""
    return {n: value for n, value in env.items() if not differs(n)}


def with_changes(env: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the changes that Python's start and imports made to it in `here`.

    Variables that differ by worker keep their value: the worker may import these modules later or
    not at all.
    """
    own = env.keys() - shared(env).keys()
    kept = {name: value for name, value in env.items() if name in own or name in here}
    return {**kept, **{name: value for name, value in here.items() if name not in own}}


def put(env: MutableMapping[str, str], values: Mapping[str, str | None]) -> None:
    """Set these variables; remove those with value None."""
    for name, value in values.items():
        if value is not None:
            env[name] = value
        elif name in env:
            del env[name]
