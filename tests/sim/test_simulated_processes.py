"""Regression tests of the simulated processes where they once differed from real ones."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_launcher.watchdog import SILENT_SECONDS
from elasticjob_rendezvous.protocol.engine import Engine
from tests.sim import schedule
from tests.sim.world import World


def test_agent_stopped_twice_has_been_silent_since_the_first_stop() -> None:
    """No beat lies between the pauses, so the real launcher's timer would not restart."""
    world = World(0, replace(schedule.plan(0), strikes=()), Engine)
    world.add_pod()
    world.run(1.0)
    agent = world.pods[0].agent
    assert agent is not None
    agent.pause()
    world.run(1.0 + SILENT_SECONDS / 2)
    agent.pause()
    assert not agent.silent
    world.run(1.0 + SILENT_SECONDS)
    assert agent.silent
    agent.resume()
    assert not agent.silent
