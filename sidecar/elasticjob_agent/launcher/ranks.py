"""Which environment variables differ between the workers of a job, or between its rounds."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_RANKS = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip
# One device for each worker, where somebody asks for that. Read when a driver starts, not before.
_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES",
    }
)  # fmt: skip
_PREFIXES = ("TORCHELASTIC_", "ELASTICJOB_")


def is_rank(name: str) -> bool:
    """Whether it tells a worker who it is, or in which round."""
    return name in _RANKS or name.startswith(_PREFIXES)


def differs(name: str) -> bool:
    """Return whether the variable's value may differ by worker or by round."""
    return is_rank(name) or name in _DEVICES


def shared(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is the same for all workers in all rounds."""
    return {n: value for n, value in env.items() if not differs(n)}


def with_changes(env: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """`env` as the start of Python and imports would have made it, which made `here` of the same.

    Who a worker is, is not theirs to say: they were perhaps imported later, or not at all.
    """
    own = env.keys() - shared(env).keys()
    kept = {name: value for name, value in env.items() if name in own or name in here}
    return {**kept, **{name: value for name, value in here.items() if name not in own}}


def put(env: MutableMapping[str, str], values: Mapping[str, str | None]) -> None:
    """Set these variables; remove those that are None."""
    for name, value in values.items():
        if value is not None:
            env[name] = value
        elif name in env:
            del env[name]
