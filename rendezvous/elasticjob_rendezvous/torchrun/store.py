"""Store of torch's agent for a round: values from the roster, exit barrier from the protocol.

Only agents use it. The workers have a separate store, as in every round: the worker of rank 0
hosts it at MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store

from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from elasticjob_rendezvous.torchrun.replies import ALL_FINISHED, FINISHED, Answers

TIMEOUT = timedelta(seconds=300)


class Barrier(Protocol):
    """Exit barrier of the agents, such as `etcd.handler.EtcdV3RendezvousHandler`."""

    def report_done(self) -> None:
        """Report that every worker of this node succeeded."""

    def wait_end(self, seconds: float) -> Outcome | None:
        """Return the run's outcome; None if a newer round began. Raises TimeoutError."""


class RosterStore(Store):  # type: ignore[misc]
    """torch `Store` with only the keys that torch's agents use; any other key is an error."""

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
        """Increment the counter of finished agents, the only counter torch's agent uses."""
        if key != FINISHED:
            raise _unknown(key)
        if amount > 0:
            self._barrier.report_done()
        return amount

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._answers.get(key) is not None for key in keys)

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. All exist from the start except the exit barrier's, set at the run's end.

        Raises:
            LookupError: the run did not end within the timeout, or did not succeed.
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
            raise LookupError(
                f"round {number} did not succeed; a newer one began without this node"
            )
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            raise LookupError(f"the run is closed: {outcome.kind} {outcome.detail}".strip())


def _unknown(key: str) -> NotImplementedError:
    return NotImplementedError(
        f"the agents' store of backend elasticjob has no key {key!r}: it holds only the keys of "
        "torch's own agent; workers have a full store at MASTER_ADDR:MASTER_PORT"
    )
