"""Plans drawn from seeds: seventeen kinds of runs. No state besides a `Random(seed)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Action, Kind, Plan

Profile = Callable[[Random], Plan]


def plan(seed: int, kind: str = "") -> Plan:
    """Return the plan of one seed; its profile rotates with the seed, unless a `kind` is given."""
    found = PROFILES[kind or profile(seed)](Random(f"plan {seed}"))
    found = _saving(Random(f"saving {seed}"), found)
    # The text keeps the seeds of `test_regressions` unchanged.
    return _losing_touch(Random(f"lose touch 333 {seed}"), found)


def profile(seed: int) -> str:
    """Return the kind of run of a seed. Kinds by name alone leave those of the others unchanged."""
    rotated = sorted(PROFILES.keys() - BY_NAME)
    return rotated[seed % len(rotated)]


def _bounds(rng: Random, most: int = 5) -> RendezvousParams:
    least = rng.randint(1, 2)
    top = rng.randint(max(2, least), most)
    return RendezvousParams(
        min_nodes=least,
        max_nodes=top,
        increment=rng.choice((1, 1, 1, 2)),
        max_restarts=rng.choice((0, 1, 3)),
        last_call_seconds=rng.choice((1.0, 2.0, 4.0)),
        keep_alive_seconds=rng.choice((2.0, 3.0, 5.0)),
        confirm_seconds=rng.choice((1.0, 2.0, 5.0)),
        settle_seconds=rng.choice((0.3, 1.0, 3.0)),
        stop_grace_seconds=rng.choice((0.5, 2.0, 4.0)),
    )


def _saving(rng: Random, plan: Plan) -> Plan:
    """Add scripts that save, and newcomers that may have to wait for it."""
    wait_seconds = rng.choice((0.0, 0.0, 2.0, 6.0))
    leave_seconds = rng.choice((4.0, 7.0, 9.0))
    bounds = replace(plan.bounds, scale_up_wait_seconds=wait_seconds, leave_seconds=leave_seconds)
    return replace(
        plan,
        bounds=bounds,
        checkpoint_seconds=rng.choice((None, 0.7, 3.0)),
        asks_to_save=rng.random() < 0.5,
        save_seconds=rng.choice((0.1, 0.5, 2.0)),
        stuck_share=rng.choice((0.0, 0.0, 0.2)),
        keeps=rng.random() < 0.2,
    )


def stopping(seed: int, kind: str = "") -> Plan:
    """Return the plan of one seed with a suspension, and some of its faults around that."""
    rng = Random(f"stopping {seed}")
    base = plan(seed, kind)
    begin = 0.6 * base.quiet_at * rng.random() + 1.0
    withdrawn = rng.choice((0.0, 0.0, 0.0, 0.05, 1.5))
    stop = Action(begin, "stop", 0, withdrawn)
    faults = tuple(
        replace(action, at=begin + 2.0 * rng.random() - 0.5) if rng.random() < 0.5 else action
        for action in base.actions
    )
    actions = (*faults, stop)
    return replace(
        base,
        operator=True,
        asks_to_save=rng.random() < 0.8,
        quiet_at=max(base.quiet_at, begin + 5.0),
        actions=tuple(sorted(actions, key=lambda action: action.at)),
        saves_fail=rng.random() < 0.2,
        keeps=rng.random() < 0.1,
    )


def _losing_touch(rng: Random, plan: Plan) -> Plan:
    """Add agents that die or hang while they are cut off."""
    if plan.profile not in LOSING_TOUCH or rng.random() > 0.5:
        return plan
    kinds = (("lose_touch", 2.0, 12.0),)
    count = rng.choice((1, 1, 2))
    actions = plan.actions + _actions(rng, count, kinds, 1.0, plan.quiet_at - 4.0)
    return replace(plan, actions=tuple(sorted(actions, key=lambda action: action.at)))


def _base(rng: Random, profile: str, most: int = 5) -> Plan:
    bounds = _bounds(rng, most)
    count = rng.randint(bounds.min_nodes, bounds.max_nodes + 1)
    spread = rng.choice((0.0, 0.2, 2.0))
    return Plan(
        profile=profile,
        bounds=bounds,
        arrivals=tuple(sorted(spread * rng.random() for _ in range(count))),
        operator=rng.random() < 0.7,
        slots=rng.choice(((1,), (2,), (1, 2, 4))),
        launcher=rng.random() < 0.8,
        start_seconds=rng.choice((0.05, 0.3, 1.0)),
        hang_share=rng.choice((0.0, 0.3, 1.0)),
        stubborn=rng.choice((0.0, 0.3)),
        replaces=rng.random() < 0.7,
        orphan_seconds=rng.choice((4.0, 30.0)),
        quiet_at=4.0,
    )


def _actions(
    rng: Random, count: int, kinds: tuple[Kind, ...], begin: float, end: float
) -> tuple[Action, ...]:
    """Return `count` actions of these kinds, each with an amount in its range."""
    chosen = []
    for _ in range(count):
        name, least, most = rng.choice(kinds)
        amount = least + (most - least) * rng.random()
        at = begin + (end - begin) * rng.random()
        chosen.append(Action(at, name, rng.randrange(16), amount))
    return tuple(sorted(chosen, key=lambda action: action.at))


CHURN = (
    ("crash", 0.0, 0.0),
    ("kill_agent", 0.0, 0.01),
    ("kill_agent", 0.05, 3.0),
    ("kill_agent", 2.0, 12.0),
    ("fail", 0.0, 0.0),
    ("drain", 0.0, 0.0),
    ("mark", 0.0, 0.0),
    ("evict", -1.5, 1.5),
    ("join", 0.0, 0.0),
)
CRASHES = (
    ("crash", 0.0, 0.0),
    ("kill_agent", 0.05, 3.0),
    ("drain", 0.0, 0.0),
    ("join", 0.0, 0.0),
)
ETCD = (
    ("restart_etcd", 0.2, 9.0),
    ("elect", 0.2, 2.0),
    ("wipe", 0.0, 0.0),
    ("expire_early", 0.0, 0.0),
    ("delete_key", 0.0, 0.0),
    ("compact", 0.0, 0.0),
    ("break_watches", 0.0, 0.0),
    ("cut_all_etcd", 0.5, 9.0),
)
CUTS = (
    ("cut_etcd", 0.5, 10.0),
    ("cut_peers", 0.5, 10.0),
    ("cut_off", 0.5, 12.0),
    ("split", 0.5, 10.0),
    ("power_off", 0.0, 0.0),
)
STILL = (
    ("freeze", 0.1, 2.0),
    ("freeze", 0.5, 12.0),
    ("stop_agent", 0.5, 12.0),
    ("kill_agent", 0.0, 0.01),
    ("kill_agent", 0.05, 8.0),
)
SCALE = (
    ("join", 0.0, 0.0),
    ("mark", 0.0, 0.0),
    ("evict", -1.5, 1.5),
    ("drain", 0.0, 0.0),
    ("resize", 2.0, 6.0),
)
LOSING_TOUCH = ("chaos", "partition", "pause")
LOSSY = {"lost_request": 0.02, "lost_reply": 0.03, "late_request": 0.005}


def _quiet(rng: Random) -> Plan:
    """Draw a run without faults; there may be surplus members."""
    return _base(rng, "quiet")


def _disturbed(rng: Random, profile: str, kinds: tuple[Kind, ...], most: int, end: float) -> Plan:
    base = _base(rng, profile)
    actions = _actions(rng, rng.randint(1, most), kinds, 0.2, end)
    if rng.random() < 0.3:  # while the first round forms
        actions += _actions(rng, 1, kinds, 0.2, 1.5)
    return replace(
        base,
        actions=actions,
        quiet_at=end,
        strikes=kinds,
        strike_share=rng.choice((0.0, 0.1, 0.3)),
    )


def _churn(rng: Random) -> Plan:
    return _disturbed(rng, "churn", CHURN, 5, 12.0)


def _crashes(rng: Random) -> Plan:
    """Draw a run whose script fails repeatedly while nodes join and leave."""
    base = _disturbed(rng, "crashes", CRASHES, 3, 25.0)
    bounds = replace(base.bounds, max_restarts=rng.choice((2, 5, 9)), settle_seconds=0.3)
    return replace(
        base,
        bounds=bounds,
        crash_seconds=rng.choice((0.1, 1.0)),
        crash_steps=rng.choice(("none", "none", "same", "further")),
        strikes=CRASHES,
    )


def _etcd_trouble(rng: Random) -> Plan:
    base = _disturbed(rng, "etcd-trouble", ETCD + CHURN[:2], 4, 14.0)
    return replace(base, rates=LOSSY if rng.random() < 0.5 else {})


def _hung(rng: Random) -> Plan:
    """Draw a run with suspended agents and working peers; some launchers can be probed."""
    base = _disturbed(rng, "hung", (("stop_agent", 3.0, 12.0),), 2, 14.0)
    bounds = replace(base.bounds, min_nodes=1, increment=1)
    asked = rng.random() < 0.5
    return replace(base, bounds=bounds, launcher=asked, orphan_seconds=4.0, quiet_at=16.0)


def _outlived(rng: Random) -> Plan:
    """Draw a run with a gang that trains without etcd and a newcomer that opens a round."""
    base = _base(rng, "outlived")
    bounds = replace(
        base.bounds,
        min_nodes=1,
        max_nodes=base.bounds.max_nodes + 1,
        increment=1,
        keep_alive_seconds=rng.choice((2.0, 3.0)),
        last_call_seconds=1.0,
    )
    begin = 3.0 + rng.random()
    lapse = bounds.keep_alive_seconds + 0.7
    back = lapse + 4.0 + 5.0 * rng.random()  # about when the newcomer would lose its patience
    actions = (Action(begin, "cut_all_etcd", 0, back), Action(begin + lapse, "join"))
    return replace(
        base, bounds=bounds, replaces=False, orphan_seconds=30.0, actions=actions, quiet_at=20.0
    )


def _partition(rng: Random) -> Plan:
    base = _disturbed(rng, "partition", CUTS + CHURN[:1], 3, 14.0)
    return replace(base, rates={"late_reply": 0.3} if rng.random() < 0.3 else {})


def _pause(rng: Random) -> Plan:
    return _disturbed(rng, "pause", STILL + CHURN[:1] + CUTS[2:3], 3, 14.0)


def _finishing(rng: Random) -> Plan:
    base = _disturbed(rng, "finishing", CHURN + SCALE + STILL, 3, 12.0)
    if rng.random() < 0.5:  # only newcomers and deaths, and room for both
        bounds = replace(base.bounds, max_nodes=base.bounds.max_nodes + 2)
        kinds = (("join", 0.0, 0.0), ("join", 0.0, 0.0), ("crash", 0.0, 0.0))
        actions = _actions(rng, 2, kinds, 1.0, 12.0)
        base = replace(
            base, bounds=bounds, strikes=kinds, strike_share=0.3, actions=actions, replaces=False
        )
    return replace(
        base,
        work_seconds=rng.choice((1.0, 3.0, 6.0)),
        finish_skew_seconds=rng.choice((0.05, 1.0, 4.0)),
        late_error_share=rng.choice((0.0, 0.0, 0.3)),
    )


def _scale(rng: Random) -> Plan:
    return _disturbed(rng, "scale", SCALE, 6, 12.0)


ONE_WAY = (
    ("half_heard", 0.5, 12.0),
    ("one_way", 0.5, 12.0),
    ("mute", 0.5, 12.0),
    ("deaf", 0.5, 12.0),
)
RACK = (
    ("rack", 2.0, 14.0),
    ("rack", 6.0, 14.0),
    ("cut_off", 2.0, 14.0),
)
REFUSING = (
    ("refuse_writes", 0.5, 12.0),
    ("silent_watch", 0.5, 12.0),
    ("silent_watches", 0.5, 12.0),
)
ENDPOINTS = (
    ("dead_endpoint", 1.0, 12.0),
    ("stale_endpoint", 1.0, 12.0),
)


def _one_way(rng: Random) -> Plan:
    """Draw a run with one-way cuts."""
    return _disturbed(rng, "one-way", ONE_WAY + ONE_WAY + CHURN[:3], 4, 14.0)


def _rack(rng: Random) -> Plan:
    """Draw a run in which nodes lose etcd and the others together, and agents die or return."""
    base = _disturbed(rng, "rack", RACK + CHURN[:3], 3, 16.0)
    bounds = replace(base.bounds, max_nodes=max(4, base.bounds.max_nodes), min_nodes=1)
    arrivals = base.arrivals + (0.3,) * max(0, 4 - len(base.arrivals))
    return replace(base, bounds=bounds, arrivals=arrivals)


def _refusing(rng: Random) -> Plan:
    """Draw a run whose etcd answers, but refuses writes or sends no events."""
    base = _disturbed(rng, "refusing", REFUSING + REFUSING + CHURN, 5, 16.0)
    return replace(base, rates=LOSSY if rng.random() < 0.2 else {})


def _endpoints(rng: Random) -> Plan:
    """Draw a run in which one endpoint of etcd fails its clients, which move on to another."""
    kinds = ENDPOINTS * 3 + CHURN + ETCD[-2:] + (("take_port", 0.0, 0.0),)
    base = _disturbed(rng, "endpoints", kinds, 5, 16.0)
    return replace(base, endpoints=rng.choice((2, 3)))


def _starved(rng: Random) -> Plan:
    """Draw a run with one agent that has no processor time again and again, for over a lease."""
    base = _base(rng, "starved")
    bounds = replace(
        base.bounds,
        max_nodes=max(3, base.bounds.max_nodes),
        increment=1,
        keep_alive_seconds=rng.choice((2.0, 2.0, 3.0)),
        last_call_seconds=1.0,
        settle_seconds=0.3,
    )
    arrivals = base.arrivals + (0.3,) * max(0, 3 - len(base.arrivals))
    target, fault = rng.randrange(16), rng.choice(("stop_agent", "stop_agent", "freeze"))
    actions, at = [], 2.5
    for _ in range(5):
        seconds = bounds.keep_alive_seconds + 0.8 + 1.5 * rng.random()
        actions.append(Action(at, fault, target, seconds))
        at += seconds + 1.5 + 2.0 * rng.random()
    more = _actions(rng, rng.choice((0, 0, 1)), CHURN, 1.0, at)
    return replace(
        base,
        bounds=bounds,
        arrivals=arrivals,
        orphan_seconds=30.0,
        actions=tuple(sorted((*actions, *more), key=lambda action: action.at)),
        quiet_at=at,
    )


def _storm(rng: Random) -> Plan:
    """Draw a run with all faults together."""
    kinds = CHURN + ETCD + CUTS + STILL + SCALE + ONE_WAY + RACK + REFUSING + ENDPOINTS
    base = _disturbed(rng, "storm", kinds, 8, 18.0)
    return replace(
        base,
        endpoints=rng.choice((1, 3)),
        rates=LOSSY if rng.random() < 0.5 else {},
        work_seconds=rng.choice((None, None, 5.0)),
    )


def _chaos(rng: Random) -> Plan:
    base = _disturbed(rng, "chaos", CHURN + ETCD + CUTS + STILL + SCALE, 8, 16.0)
    return replace(
        base,
        rates=LOSSY if rng.random() < 0.7 else {},
        work_seconds=rng.choice((None, None, 5.0)),
        slow_seconds=rng.choice((0.05, 0.5)),
    )


BY_NAME = frozenset({"starved"})
"""Kinds of runs with tests of their own, which seeds do not rotate through."""
PROFILES: dict[str, Profile] = {
    "chaos": _chaos,
    "endpoints": _endpoints,
    "one-way": _one_way,
    "rack": _rack,
    "refusing": _refusing,
    "storm": _storm,
    "churn": _churn,
    "crashes": _crashes,
    "etcd-trouble": _etcd_trouble,
    "finishing": _finishing,
    "hung": _hung,
    "outlived": _outlived,
    "partition": _partition,
    "pause": _pause,
    "quiet": _quiet,
    "scale": _scale,
    "starved": _starved,
}
