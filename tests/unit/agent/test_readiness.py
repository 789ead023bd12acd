"""Readiness of a node."""

from __future__ import annotations

from elasticjob_agent.status_server import can_take_part
from elasticjob_rendezvous.protocol.directives import Left, Refused
from tests.unit.agent.builders import Driven, directed, finish, ready, running


def test_agent_can_take_part_with_launcher_and_lease() -> None:
    assert not can_take_part(Driven().state, registered=True)
    assert not can_take_part(ready().state, registered=False)
    assert can_take_part(ready().state, registered=True)
    assert can_take_part(running().state, registered=True)


def test_left_or_refused_agent_cannot_take_part() -> None:
    for directive in (Left(), Refused("bounds differ")):
        driven = running()
        driven.feed(directed(directive))
        assert not can_take_part(driven.state, registered=True)


def test_normal_end_passes_probes() -> None:
    """A failed probe would make the kubelet post a warning about a pod that succeeded."""
    driven = running()
    driven.feed(finish())
    assert can_take_part(driven.state, registered=False), "its lease goes before it does"


def test_agent_that_came_after_the_end_is_not_ready() -> None:
    driven = ready()
    driven.feed(finish())
    assert not can_take_part(driven.state, registered=True)
