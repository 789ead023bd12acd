"""Metrics of an agent: `put_metric` and `prof` emit them, `configure` sets their handlers.

A handler is set for one group, or for all groups without a handler of their own. By default metrics
are dropped.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar, overload

GROUP = "torchelastic"

P = ParamSpec("P")
R = TypeVar("R")


class MetricData(NamedTuple):
    """Value of a metric; `timestamp` is Unix time in seconds."""

    timestamp: float
    group_name: str
    name: str
    value: int


class MetricHandler(ABC):
    """Destination of metrics."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None: ...


class NullMetricHandler(MetricHandler):
    """Handler that drops metrics."""

    def emit(self, metric_data: MetricData) -> None:
        return


class ConsoleMetricHandler(MetricHandler):
    """Handler that writes one line per metric to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        at, group, name, value = metric_data
        sys.stdout.write(f"[{at}][{group}]: {name}={value}\n")


class MetricStream:
    """Metrics of one group."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_by_group: dict[str | None, MetricHandler] = {}


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of a group; without a group, of all groups that have no handler."""
    _by_group[group] = handler


def getStream(group: str) -> MetricStream:
    """Return the stream of a group."""
    for name in (group, None):
        if name in _by_group:  # a handler that counts its metrics may be false
            return MetricStream(group, _by_group[name])
    return MetricStream(group, NullMetricHandler())


def put_metric(metric_name: str, metric_value: int, metric_group: str = GROUP) -> None:
    """Emit one value of a metric."""
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the milliseconds since a time given by `time.time()`."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[P, R], group: str = GROUP, name: str = "") -> Callable[P, R]: ...
@overload
def prof(
    fn: None = None, group: str = GROUP, name: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def prof(
    fn: Callable[P, R] | None = None, group: str = GROUP, name: str = ""
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to emit metrics of every call.

    They are `<name>.success` or `<name>.failure`, and `<name>.duration.ms`. The default name is
    `Class.method` or `module.function`.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        key = name or _name(function)

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            outcome = "failure"
            try:
                result = function(*args, **kwargs)
                outcome = "success"
                return result
            finally:
                put_metric(f"{key}.{outcome}", 1, group)
                took_ms = int((time.perf_counter() - began) * 1000)
                put_metric(f"{key}.duration.ms", took_ms, group)

        return timed

    return wrap if fn is None else wrap(fn)


def _name(function: Callable[..., object]) -> str:
    if "." in function.__qualname__:
        return function.__qualname__
    module = (function.__module__ or "").rpartition(".")[2]
    return f"{module}.{function.__qualname__}" if module else function.__qualname__
