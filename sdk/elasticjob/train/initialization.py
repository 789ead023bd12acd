"""Models whose parameters get restored values and need no random ones first.

Random values for all parameters of a large model take longer than the read of a snapshot in memory.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_RANDOM = ("kaiming_uniform_", "normal_", "uniform_")
"""Functions of `torch.nn.init` that torch lets a mode replace, and methods that the others call."""
_MAX_NAMED = 3
_MARKED = (0, -1)
"""Indices of the elements that are NaN until a parameter is given a value."""

_skipped: list[weakref.ReferenceType[torch.nn.Parameter]] = []
"""Parameters without a value, until they are checked."""
_checks: list[Any] = []
"""Registration of the check, for all optimizers of the process."""


@contextlib.contextmanager
def skip_initialization(enabled: object = True) -> Iterator[None]:
    """Let the modules that the block creates leave their parameters without random values.

    For a model whose parameters are all restored: `with skip_initialization(found is not None):`.
    No random numbers are drawn for them, so restore the state of the generator, or set its seed,
    after the block. Constant values, buffers, and tensors that are not parameters are unaffected.

    The first step of an optimizer, and `Snapshots.save`, raise RuntimeError if such a parameter has
    been given no value since.

    Args:
        enabled: no effect if false.
    """
    if not enabled:
        yield
        return
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.overrides import TorchFunctionMode

    class Skip(TorchFunctionMode):  # type: ignore[misc]
        """Mode without the functions that fill a parameter with random numbers."""

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if getattr(function, "__name__", "") in _RANDOM:
                filled = args[0] if args else kwargs.get("tensor")
                if type(filled) is torch.nn.Parameter and filled.is_floating_point():
                    _mark(filled)
                    return filled
            return function(*args, **kwargs)

    if not _checks:
        _checks.append(register_optimizer_step_pre_hook(check_values))
    with Skip():
        yield


def _mark(parameter: torch.nn.Parameter) -> None:
    """Make the first and the last element NaN, which touches two pages of the memory, not all.

    Two, because an embedding fills the row of its padding after the random values.
    """
    import torch

    if parameter.numel() and not parameter.is_meta:
        with torch.no_grad():
            for at in _MARKED:
                parameter[(at,) * parameter.dim()] = torch.nan
        _skipped.append(weakref.ref(parameter))


def check_values(*_: object) -> None:
    """Raise RuntimeError if a parameter without a random value was given none; once for each."""
    if not _skipped:
        return
    alive = [found for each in _skipped if (found := each()) is not None]
    _skipped.clear()
    left = [each for each in alive if _is_marked(each)]
    if left:
        shapes = ", ".join(str(list(each.shape)) for each in left[:_MAX_NAMED])
        raise RuntimeError(
            f"{len(left)} parameters created in skip_initialization() were given no value since, "
            f"or NaN, of shape {shapes}{', ...' * (len(left) > _MAX_NAMED)}: load all parameters "
            "of the model, or create it without skip_initialization()"
        )


def _is_marked(parameter: torch.nn.Parameter) -> bool:
    """Return True for a parameter that has still NaN; it may have no memory left."""
    values = parameter.detach()
    if not values.numel() or not values.untyped_storage().size():
        return False
    return any(bool(values[(at,) * values.dim()].isnan()) for at in _MARKED)
