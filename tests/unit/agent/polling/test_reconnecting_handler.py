"""Late creation of a handler, and renewed search for a rendezvous."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from elasticjob_agent.polling.reconnecting_handler import ReconnectingHandler
from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousTimeoutError,
    RendezvousUnsupportedError,
)
from tests.unit.agent.memory_rendezvous import Gang


def handler(make: Callable[[], RendezvousHandler], join_seconds: float = 20.0) -> Any:
    return ReconnectingHandler(make, "c10d", "run", join_seconds, retry_seconds=0.01)


def test_connection_is_retried_until_it_succeeds() -> None:
    made, refusals = Gang().handler(), [RendezvousConnectionError("not yet")] * 3

    def make() -> RendezvousHandler:
        if refusals:
            raise refusals.pop()
        return made

    one = handler(make)
    assert (one.get_backend(), one.get_run_id()) == ("c10d", "run")
    assert (one.is_closed(), one.num_nodes_waiting()) == (False, 0), "nothing is asked before"
    assert one.setting_up()
    assert one.next_rendezvous().rank == 0
    assert not one.setting_up()
    assert not refusals
    one.set_closed()
    assert one.is_closed()
    one.leave()
    assert made.calls[-2:] == ["set_closed", "leave"]


def test_connection_retries_are_bounded() -> None:
    def make() -> RendezvousHandler:
        raise RendezvousConnectionError("nobody hosts a store")

    with pytest.raises(RendezvousTimeoutError, match="nobody hosts"):
        handler(make, 0.05).next_rendezvous()


def test_unsupported_backend_is_not_retried() -> None:
    def make() -> RendezvousHandler:
        raise RendezvousUnsupportedError("it has no v2 API")

    with pytest.raises(RendezvousUnsupportedError, match="no v2 API"):
        handler(make).next_rendezvous()


@pytest.mark.parametrize("end", ["leave", "shutdown"])
def test_leave_during_connection_retries_returns_at_once(end: str) -> None:
    tried = threading.Event()

    def make() -> RendezvousHandler:
        tried.set()
        raise RendezvousConnectionError("nobody hosts a store")

    one, ends = handler(make), []

    def join_round() -> None:
        try:
            one.next_rendezvous()
        except RendezvousGracefulExitError as error:
            ends.append(error)

    thread = threading.Thread(target=join_round)
    thread.start()
    assert tried.wait(60)
    getattr(one, end)()
    thread.join(60)
    assert len(ends) == 1


def test_leave_while_connecting_takes_no_part() -> None:
    made = Gang(wanted=2).handler()

    def make() -> RendezvousHandler:
        one.leave()
        return made

    one = handler(make)
    with pytest.raises(RendezvousGracefulExitError):
        one.next_rendezvous()
    assert made.calls == ["leave"]


def test_resources_are_released_on_close() -> None:
    closed = []
    one = ReconnectingHandler(Gang().handler, "c10d", "run", 1.0, lambda: closed.append(True))
    one.next_rendezvous()
    assert one.shutdown()
    assert not closed
    one.close()
    assert closed == [True]
