"""The store that torch's agent gets with a round: the roster answers, the protocol is its barrier.

It is the agents' store alone. The workers' store is another one, as in every gang of ours: the
worker of rank 0 hosts it at MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store

from elasticjob_rendezvous.core.records import Outcome, OutcomeKind
from elasticjob_rendezvous.torchrun.answers import ALL_FINISHED, FINISHED, Answers

TIMEOUT = timedelta(seconds=300)


class Barrier(Protocol):
    """How agents wait for each other's end; `etcd.handler.EtcdV3RendezvousHandler` is one."""

    def report_done(self) -> None:
        """Every worker of this node ended with success."""

    def wait_end(self, seconds: float) -> Outcome | None:
        """How the run ended; None when a newer round began. Raises TimeoutError."""


class RosterStore(Store):  # type: ignore[misc]
    """A torch `Store` of the keys that torch's agents use; others are refused with an error."""

    def __init__(self, answers: Answers, barrier: Barrier) -> None:
        super().__init__()  # torch finds these methods only on an initialized Store
        self._answers = answers
        self._barrier = barrier
        self._timeout = TIMEOUT

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        given = value.encode() if isinstance(value, str) else value
        if not self._answers.check(key, given):
            raise _unknown(key)

    def get(self, key: str) -> bytes:
        value = self._answers.get(key)
        if value is None:
            raise _unknown(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """The one counter: torch's agent counts itself as finished when its workers are."""
        if key != FINISHED:
            raise _unknown(key)
        if amount > 0:
            self._barrier.report_done()
        return amount

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._answers.get(key) is not None for key in keys)

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Wait for keys: all are there but the exit barrier's, which ends with the run.

        Raises:
            LookupError: the run did not end in time, or not with success.
        """
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:
            if key == ALL_FINISHED:
                self._wait_end(max(0.1, deadline - time.monotonic()))
            elif self._answers.get(key) is None:
                raise _unknown(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def _wait_end(self, seconds: float) -> None:
        number = self._answers.roster.number
        try:
            outcome = self._barrier.wait_end(seconds)
        except TimeoutError as error:
            raise LookupError(f"round {number} did not end within {seconds:.0f} s") from error
        if outcome is None:
            raise LookupError(f"round {number} ended without success; a newer one forms without us")
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            raise LookupError(f"the run is closed: {outcome.kind} {outcome.detail}".strip())


def _unknown(key: str) -> NotImplementedError:
    return NotImplementedError(
        f"the agents' store of backend elasticjob has no key {key!r}: it answers what torch's own "
        "agent asks. Workers have a whole store at MASTER_ADDR:MASTER_PORT"
    )
