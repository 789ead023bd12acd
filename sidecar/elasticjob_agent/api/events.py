"""Structured events of an agent, for machines: one JSON line each.

A destination is a name: `null` drops an event, `console` writes it to standard error, and
`register_handler` adds others.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TypeAlias

from elasticjob_rendezvous.protocol.text import echoed

EventMetadataValue: TypeAlias = str | int | float | bool | None

NOWHERE = "null"
_handlers: dict[str, Callable[[], logging.Handler]] = {
    NOWHERE: logging.NullHandler,
    "console": logging.StreamHandler,
}
_loggers: dict[str, logging.Logger] = {}


class EventSource(StrEnum):
    """Subject of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@dataclass
class Event:
    """Event of an agent or a worker. `str` gives the JSON text that `deserialize` reads.

    `timestamp` is Unix time in milliseconds; 0 is replaced by the time of recording.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        if isinstance(data, Event):
            return data
        fields = json.loads(data)
        return Event(**{**fields, "source": EventSource(fields["source"])})

    def serialize(self) -> str:
        return json.dumps(asdict(self))


def register_handler(destination: str, handler: Callable[[], logging.Handler]) -> None:
    """Register a destination; its handler is created for the first event."""
    _handlers[destination] = handler
    _loggers.pop(destination, None)


def get_logging_handler(destination: str = NOWHERE) -> logging.Handler:
    """Create the handler of a destination. Raises ValueError if it is not registered."""
    try:
        return _handlers[destination]()
    except KeyError:
        known = ", ".join(sorted(_handlers))
        raise ValueError(
            f"unknown event destination {echoed(destination)}: known are {known}"
        ) from None


def record(event: Event, destination: str = NOWHERE) -> None:
    """Send an event to a destination. Raises ValueError if it is not registered."""
    event.timestamp = event.timestamp or int(time.time() * 1000)
    _logger(destination).info("%s", event.serialize())


def _logger(destination: str) -> logging.Logger:
    known = _loggers.get(destination)
    if known is None:
        handler = get_logging_handler(destination)
        known = _loggers[destination] = logging.getLogger(f"elasticjob-events-{destination}")
        known.setLevel(logging.INFO)
        known.propagate = False  # events are for machines; each is handled once
        known.handlers = [handler]
    return known
