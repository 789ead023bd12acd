"""Execution of one seed, from its plan to its result."""

from __future__ import annotations

import gc

from elasticjob_rendezvous.protocol.engine import Engine
from tests.sim import schedule
from tests.sim.invariants import liveness
from tests.sim.invariants.checker import Violation
from tests.sim.plan import Plan
from tests.sim.world import EngineFactory, Line, Result, World


def simulate(seed: int, new_engine: EngineFactory = Engine, plan: Plan | None = None) -> Result:
    """Run one seed to its end or to the first violation."""
    plan = plan or schedule.plan(seed)
    world = World(seed, plan, new_engine)
    violation = None
    gc.disable()  # a short run makes little garbage; collecting it takes a third of the time
    try:
        _run(world, plan)
    except Violation as found:
        violation = found
    except Exception as error:
        # The engine must survive every possible event.
        violation = Violation("no exception", f"{type(error).__name__}: {error}", world.now)
        violation.__cause__ = error
    finally:
        gc.enable()
    return Result(seed, plan, violation, world.trace, world)


def _run(world: World, plan: Plan) -> None:
    world.controller.start()
    for arrival in plan.arrivals:
        world.at(arrival, world.add_pod)
    for action in plan.actions:
        world.at(action.at, world.faults.do, action)
    world.at(plan.quiet_at, world.faults.heal_everything)
    end = plan.quiet_at + plan.recovery_seconds
    if any(action.name == "stop" for action in plan.actions):
        end += world.controller.stop_seconds + plan.recovery_seconds
    world.run(plan.quiet_at)
    while world.now < end and not liveness.steady(world):
        world.run(min(end, world.now + 1.0))
    liveness.settled(world)


def lines(trace: list[Line]) -> list[str]:
    """Format a trace, one line per entry."""
    return [f"{at:9.4f}  {who:<9} {what:<14} {detail}" for at, who, what, detail in trace]


def report(result: Result, last: int = 60) -> str:
    """Return the text needed to understand and replay a violation."""
    head = [
        f"seed {result.seed} ({result.plan.profile}): {result.violation}",
        f"replay: python -m tests.sim --kind {result.plan.profile} --seed {result.seed} --trace",
        f"bounds: {result.plan.bounds}",
    ]
    return "\n".join(head + lines(result.trace[-last:]))
