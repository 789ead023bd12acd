"""Copy of the training state during the next step, until an optimizer changes what is copied.

Forward and backward of the next step read parameters and the optimizers' state, and change neither.
So a thread copies them meanwhile, and `optimizer.step` waits for the rest of the copy. All other
tensors, such as the statistics of batch normalization, are copied before `save` returns. From a GPU
the copy goes over a stream of its own into pinned memory; there `optimizer.step` waits on the
device, not on the host.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from elasticjob.train.snapshots.core.interval import Cost
from elasticjob.train.snapshots.state.codec import dense
from elasticjob.train.snapshots.state.held_state import new_seed, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    import torch

    from elasticjob.train.snapshots.core.interval import Interval, Losses

Owner = TypeVar("Owner")
_SMALL_BYTES = 1 << 16
"""Tensors up to this size are copied at once: the wait would cost as much."""


class Optimizers:
    """All optimizers of a script, or a function that returns them.

    Args:
        given: one, an iterable of them, or a function, called by the first `save` after a restore;
            None for none.
    """

    def __init__(self, given: Any) -> None:
        self.all: list[torch.optim.Optimizer] = []
        given = () if given is None else given
        self._function = given if callable(given) and not _is_object(given) else None
        self._is_current = False
        self._hooks: list[tuple[weakref.ReferenceType[Any], Callable[[Any], object]]] = []
        if self._function is None:
            self._take(given)

    def __bool__(self) -> bool:
        return bool(self.all) or self._function is not None

    def before_steps(self, owner: Owner, call: Callable[[Owner], object]) -> None:
        """Call a method of an object before each step, as long as the object lives.

        The optimizers may outlive it, with other objects for the next ones.
        """
        self._hooks.append((weakref.ref(owner), call))
        for optimizer in self.all:
            _add_hook(optimizer, owner, call)

    def restored(self) -> None:
        """Let the next `save` call the function again: a restore may precede a new model."""
        self._is_current = False

    def created(self) -> None:
        """Take the optimizers from the function, once they must exist."""
        if self._function is not None and not self._is_current:
            self._take(self._function())

    def _take(self, given: Any) -> None:
        former = {id(each) for each in self.all}
        taken = [given] if _is_object(given) else list(given)
        for reference, call in self._hooks:
            owner = reference()
            for optimizer in taken if owner is not None else ():
                if id(optimizer) not in former:
                    _add_hook(optimizer, owner, call)
        self.all, self._is_current = taken, True


class Overlap:
    """Background copies of state that only the steps of the optimizers change."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._executor = _executor()
        self._pid = os.getpid()
        self._copy: Future[None] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._pinned: dict[tuple[Any, ...], torch.Tensor] = {}
        self._used: dict[tuple[Any, ...], torch.Tensor] = {}
        self._sources: frozenset[int] = frozenset()
        self._is_live = False
        self._marked: list[torch.Tensor] = []
        self._seed = 0.0
        self._marks: tuple[list[int], list[bytes]] = ([], [])
        self.is_possible = True
        """False once something other than the optimizers has changed the state during a copy."""
        self._waited_seconds = self._copied_seconds = 0.0
        optimizers.before_steps(self, Overlap.before_step)

    def begin(self) -> None:
        """Wait for the last copy; then `stage` collects the tensors of the next one."""
        self.wait()
        self._events, self._is_live = [], False
        self._pinned, self._used = self._used, {}
        self._sources = frozenset(
            tensor.untyped_storage().data_ptr() for tensor in _changed_by(self._optimizers.all)
        )

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense tensor in CPU memory that holds the value once `start`'s work runs."""
        is_source = tensor.untyped_storage().data_ptr() in self._sources
        if tensor.device.type == "cuda":
            return self._from_device(tensor, is_source)
        made = dense(tensor)
        if made.data_ptr() != tensor.data_ptr():
            return made
        if not is_source or made.numel() * made.element_size() <= _SMALL_BYTES:
            return made.clone()
        self._is_live = True
        return made

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which reads the staged tensors, in the background."""
        self._marked = list(_changed_by(self._optimizers.all)) if self._is_live else []
        self._seed = new_seed()
        self._marks = self._marks_now()
        self._copy = self._executor.submit(self._run, work)

    def has_changed(self) -> bool:
        """Return True if the staged tensors no longer hold the values that they had at `start`.

        Changes through `data` show only in samples of the elements.
        """
        return self._marks_now() != self._marks

    def _marks_now(self) -> tuple[list[int], list[bytes]]:
        """Return the numbers of changes in place, and samples of the tensors in CPU memory."""
        versions = [0 if each.is_inference() else each._version for each in self._marked]
        return versions, samples(self._marked, self._seed)

    def wait(self) -> None:
        """Wait until the last copy is complete; raise its error."""
        if self._pid != os.getpid():  # the thread and its copy are not in a fork
            self._executor, self._pid, self._copy = _executor(), os.getpid(), None
        copy = self._copy
        if copy is not None:
            began = time.perf_counter()
            try:
                copy.result()
            finally:
                self._waited_seconds += time.perf_counter() - began
                if copy.done():  # not after an exception of a signal handler
                    self._copy = None

    def settle(self, seconds: float) -> None:
        """Wait up to `seconds` for the last copy, from another thread; `wait` raises its error."""
        copy = self._copy
        if copy is not None and self._pid == os.getpid():
            concurrent.futures.wait([copy], timeout=seconds)

    @property
    def is_copying(self) -> bool:
        """True while a copy is in progress."""
        copy = self._copy
        return copy is not None and self._pid == os.getpid() and not copy.done()

    @property
    def is_on_device(self) -> bool:
        """True if the last copy was from a GPU, whose steps the host does not wait for."""
        return bool(self._events)

    def spent_seconds(self) -> tuple[float, float]:
        """Return the time of waiting and the processor time of the copy since the last call."""
        spent = self._waited_seconds, self._copied_seconds
        self._waited_seconds = self._copied_seconds = 0.0
        return spent

    def _run(self, work: Callable[[], None]) -> None:
        began = time.thread_time()
        try:
            for _, event in self._events:
                event.synchronize()
            work()
        finally:
            self._marked, self._marks = [], ([], [])  # the optimizers may have replaced them
            self._copied_seconds += time.thread_time() - began

    def before_step(self) -> None:
        """Let the step of an optimizer wait for the last copy."""
        for device, event in self._events:
            _cuda().current_stream(device).wait_event(event)
        if self._is_live:
            self.wait()

    def _from_device(self, tensor: torch.Tensor, is_source: bool) -> torch.Tensor:
        """Copy over the stream of the device, behind the work that computes the value."""
        cuda, device = _cuda(), tensor.device
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        stream, current = self._streams[device], cuda.current_stream(device)
        source = tensor.detach().resolve_conj().resolve_neg().contiguous()
        form = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        key = (tensor.data_ptr(), *form)  # not that of another view of the same memory
        if key in self._used:
            return self._used[key]
        made = self._pinned.get(key)
        if made is None:
            made = _pinned_like(source)
        self._used[key] = made
        stream.wait_stream(current)
        with cuda.stream(stream):
            _copy(source, made, stream)
        event = cuda.Event()
        event.record(stream)
        self._events.append((device, event))
        if not is_source:  # the next forward may change it
            current.wait_event(event)
        return made


class Pace:
    """Interval of one rank's snapshots, with the measurements of their copies and of the steps."""

    def __init__(self, interval: Interval, overlap: Overlap | None) -> None:
        self._interval = interval
        self._overlap = overlap
        self._cost: float | None = None
        self._left: tuple[int, float, bool, bool] | None = None  # the last call of `save`

    @property
    def is_measured(self) -> bool:
        """True if the ranks may propose different numbers."""
        return self._interval.is_measured or self._overlap is not None

    @property
    def follows_faults(self) -> bool:
        """True if the interval is shorter while faults repeat steps."""
        return self._interval.follows_faults

    @property
    def cost(self) -> float:
        """Cost of a snapshot in seconds; 0 as long as it is unknown."""
        return self._interval.cost

    def start(
        self, step: int, known: int, losses: Losses, step_seconds: float, *, is_held: bool
    ) -> int:
        """Begin to measure after a restore; return the steps until the first snapshot.

        Args:
            known, losses, step_seconds, is_held: as for `Interval.start`.
        """
        now = time.monotonic()
        self._interval.start(step, now, known, losses, step_seconds, is_held=is_held)
        self._cost = self._left = None
        return self._interval.first

    def entered(self, step: int) -> None:
        """Measure the time since the last call of `save`, unless the copy is a GPU's."""
        if self._left is not None and not (self._overlap and self._overlap.is_on_device):
            last, left, copied, is_replicating = self._left
            seconds = time.perf_counter() - left
            self._interval.stepped(
                step - last, seconds, copied=copied, is_replicating=is_replicating
            )

    def left(self, step: int, *, copied: bool, is_replicating: bool = False) -> None:
        """Begin to measure the time until the next call of `save`.

        Args:
            copied: True if this call took a snapshot.
            is_replicating: True if its copies on other nodes are in progress.
        """
        self._left = step, time.perf_counter(), copied, is_replicating

    def took(self, seconds: float) -> None:
        """Record the time that a snapshot took in `save`."""
        self._cost = seconds

    def proposed(self, step: int, spent: float, *, is_held: bool) -> int:
        """Return the steps until the snapshot after this one, as `Interval` does.

        The last snapshot must be complete.
        """
        cost = None
        if self._cost is not None:
            waited, copied = self._overlap.spent_seconds() if self._overlap else (0.0, 0.0)
            cost = Cost(self._cost + waited, self._cost, copied)
        return self._interval.proposed(step, time.monotonic(), cost, spent, is_held=is_held)


def _executor() -> ThreadPoolExecutor:
    """Return one thread: a new one for each copy would cost more than the copy of a small state."""
    return ThreadPoolExecutor(1, "elasticjob-snapshot-copy")


def _is_object(given: Any) -> bool:
    """Return True for an optimizer, and for a module, which can be called and is refused."""
    return hasattr(given, "param_groups") or hasattr(given, "state_dict")


def _add_hook(
    optimizer: torch.optim.Optimizer, owner: Owner, call: Callable[[Owner], object]
) -> None:
    import torch

    # A compiled function that contains the step would compile the hook too, with a warning. The
    # optimizers of torch import torch._dynamo at their first step in any case.
    hook = torch.compiler.disable(functools.partial(_before_step, weakref.ref(owner), call))
    try:
        handle = optimizer.register_step_pre_hook(hook)
    except AttributeError as error:  # a wrapper that does not initialize torch's class
        kind = type(optimizer)
        raise TypeError(
            f"optimizers must be torch.optim.Optimizer objects with hooks of step(), got a "
            f"{kind.__module__}.{kind.__qualname__}: give the optimizer that it wraps, if it "
            "changes no parameter before the step of that one"
        ) from error
    weakref.finalize(owner, handle.remove)


def _before_step(
    owner: weakref.ReferenceType[Owner],
    call: Callable[[Owner], object],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call a method before the first change of a step; return the arguments of `step` to replace.

    The optimizers of torch call their closure, with forward and backward, before they change
    anything. Others may change parameters first.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
        _call(owner, call)
        return None
    called = _then_once(closure, functools.partial(_call, owner, call))
    if len(args) > 1:
        return (args[0], called, *args[2:]), kwargs
    return args, {**kwargs, "closure": called}


def _then_once(closure: Callable[[], Any], call: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure after whose first return `call` follows."""
    left = [call]

    def called() -> Any:
        result = closure()
        while left:
            left.pop()()
        return result

    return called


def _call(owner: weakref.ReferenceType[Owner], call: Callable[[Owner], object]) -> None:
    found = owner()  # a copy in progress keeps it
    if found is not None:
        call(found)


def _changed_by(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """Return the parameters, except those without a value, and the state of the optimizers."""
    import torch
    from torch.nn.parameter import is_lazy

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (_local(each) for each in group["params"] if not is_lazy(each))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (_local(v) for v in state.values() if isinstance(v, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in this process's memory: the shard of a distributed tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host that a device can write without the host's processor."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def _copy(source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> None:
    target.copy_(source, non_blocking=True)
    source.record_stream(stream)  # its memory is not reused before the copy


def _cuda() -> Any:
    import torch

    return torch.cuda
