"""Single run: starts a gang, applies the plan's cut and fault, and checks the result."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path

from elasticjob_rendezvous.protocol.records.members import OutcomeKind, RoundState
from tests.partitions.journal import Journal, Overlap, Writer, overlaps, writing
from tests.partitions.network import Cut, Network
from tests.partitions.nodes import ETCD, EtcdHost, Node, Process, bounds
from tests.partitions.plan import Fault, Mode, Plan, Role, Scope, Way

_START_SECONDS = 60.0
_SETTLE_SECONDS = 60.0  # more than an orphan's 30 s and two leases
_FINISH_SECONDS = 30.0
_RECENT_SECONDS = 0.5
_STEADY_SECONDS = 1.0
_QUIET_SECONDS = 5.0  # beyond a lease: any new round has begun by then


class Stopped(Exception):
    """Request to end the runner."""


@dataclass
class Outcome:
    """Outcome of a run. `findings` are the violated guarantees; empty when all held."""

    plan: Plan
    overlaps: list[Overlap] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    stopped_after: float | None = None
    """Seconds from the cut to the last write of a cut worker of round 1."""
    resumed_after: float | None = None
    """Seconds from the cut to the first write of the next round."""
    settled_after: float | None = None
    """Seconds from the plan's last action until the run had settled."""

    @property
    def spare_seconds(self) -> float | None:
        """Seconds from the end of round 1's last worker to the start of the next round's first."""
        if self.stopped_after is None or self.resumed_after is None:
            return None
        return self.resumed_after - self.stopped_after

    def text(self) -> str:
        lines = [f"seed {self.plan.seed}: {self.plan}", *self.timeline, "writers:", *self.writers]
        return "\n".join([*lines, "findings:", *(self.findings or ["none"]), ""])


class Run:
    """State of one run while it lasts."""

    def __init__(
        self, plan: Plan, folder: Path, launcher: Path, stop: threading.Event, serial: str
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.outcome = Outcome(plan)
        self._launcher = launcher
        self._stop = stop
        names = [f"n{index}" for index in range(plan.nodes)]
        self._network = Network(serial, (ETCD, *names))
        (folder / "journal").mkdir(parents=True)
        self._journal = Journal(folder / "journal")
        self._nodes: dict[str, Node] = {}
        self._paused: set[str] = set()
        self._origin = time.monotonic()

    def execute(self) -> Outcome:
        """Execute the run; remove everything that it started."""
        with ExitStack() as stack:
            stack.enter_context(self._network.up())
            self._begin(stack)
            victims = self._victims()
            self._trouble(victims)
            self._settle(victims)
            self._judge(victims)
        return self.outcome

    # Waiting

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(max(0.0, seconds)):
            raise Stopped

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return True if the condition holds within that time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._sleep(0.05)
        return True

    def _note(self, text: str) -> None:
        self.outcome.timeline.append(f"{time.monotonic() - self._origin:+8.3f} s: {text}")

    # Phases of the run

    def _begin(self, stack: ExitStack) -> None:
        """Start everything and wait until all workers of round 1 write."""
        self._etcd = EtcdHost(self._network, self.folder, self.plan.etcd)
        stack.callback(self._etcd.process.reap)
        if not self._until(self._etcd.serves, _START_SECONDS):
            raise TimeoutError("etcd does not serve")
        if self.plan.mode is Mode.POD:
            self._etcd.put_bounds(bounds(self.plan))
        for index in range(self.plan.nodes):
            name = f"n{index}"
            node = Node(self._network, name, self.plan, self._etcd, self.folder, self._launcher)
            self._nodes[name] = node
            stack.callback(node.close)

        def all_write() -> bool:
            now = writing(self._journal.writers(), _RECENT_SECONDS)
            return {one.node for one in now if one.round == 1} == set(self._nodes)

        if not self._until(all_write, _START_SECONDS):
            raise TimeoutError("the workers of round 1 do not all run")

    def _victims(self) -> list[str]:
        """Return the nodes to cut off, first the one whose agent gets the fault."""
        now = self._etcd.round()
        names = self._etcd.names()
        coordinator = names.get(now.coordinator, "")
        successor = names.get(now.successor, "")
        rank_0 = next(one.node for one in self._journal.writers() if one.rank == 0)
        others = [name for name in self._nodes if name not in (coordinator, successor, rank_0)]
        first = {
            Role.COORDINATOR: coordinator,
            Role.SUCCESSOR: successor,
            Role.RANK_0: rank_0,
            Role.OTHER: (others or list(self._nodes))[-1],
        }[self.plan.role]
        first = first or next(iter(self._nodes))
        rest = [name for name in self._nodes if name != first]
        victims = [first, *rest][: self.plan.victims]
        self._note(f"coordinator {coordinator}, successor {successor}, rank 0 on {rank_0}")
        return victims

    def _cuts(self, victims: list[str]) -> Iterator[Cut]:
        plan = self.plan
        others = [name for name in self._nodes if name not in victims]
        if plan.scope is Scope.PEERS and not others:
            yield from permutations(victims, 2)
            return
        targets = [] if plan.scope is Scope.PEERS else [ETCD]
        targets += [] if plan.scope is Scope.ETCD else others
        for victim in victims:
            for target in targets:
                if plan.way is not Way.RECEIVED:
                    yield victim, target
                if plan.way is not Way.SENT:
                    yield target, victim

    def _trouble(self, victims: list[str]) -> None:
        """Cut, inject the fault and heal, each at its planned time."""
        plan, hurt = self.plan, self._nodes[victims[0]]

        def cut() -> None:
            self._network.cut(self._cuts(victims))
            self._note(f"cut off: {', '.join(victims)}")

        def fault() -> None:
            name = signal.SIGKILL if plan.fault is Fault.KILL else signal.SIGSTOP
            _send(hurt.agent, name)
            self._paused |= {hurt.name} if name is signal.SIGSTOP else set()
            self._note(f"{name.name} to the agent of {hurt.name}")

        def fate() -> None:
            name = signal.SIGKILL if plan.fault is Fault.STOP_KILL else signal.SIGCONT
            _send(hurt.agent, name)
            self._paused.discard(hurt.name)
            self._note(f"{name.name} to the agent of {hurt.name}")

        def restart() -> None:
            hurt.start_agent()
            self._note(f"the agent of {hurt.name} is started again")

        def heal() -> None:
            self._network.heal()
            self._note("healed")

        actions: list[tuple[float, Callable[[], None]]] = [(0.0, cut)]
        if plan.heal_at is not None:
            actions.append((plan.heal_at, heal))
        if plan.fault is not Fault.NONE:
            actions.append((plan.fault_at, fault))
        if plan.fate_at is not None:
            actions.append((plan.fate_at, fate))
        if plan.restart_after is not None:
            killed_at = plan.fault_at if plan.fate_at is None else plan.fate_at
            actions.append((killed_at + plan.restart_after, restart))
        actions.sort(key=lambda action: action[0])
        self._origin = time.monotonic() + max(plan.cut_after, -actions[0][0])
        for at, act in actions:
            self._sleep(self._origin + at - time.monotonic())
            act()

    def _healthy(self) -> set[str]:
        """Return the nodes whose agent runs."""
        return {
            name
            for name, node in self._nodes.items()
            if node.agent.code is None and name not in self._paused
        }

    def _settle(self, victims: list[str]) -> None:
        """Wait until all nodes that can train together have done so, in one round, for a while."""
        since: float | None = None
        healed = self.plan.heal_at is not None
        required = self._healthy() - (set() if healed else set(victims))
        silenced = not healed and self.plan.scope is Scope.ALL and len(victims) < len(self._nodes)

        def steady() -> bool:
            nonlocal since
            now = writing(self._journal.writers(), _RECENT_SECONDS)
            newest = max((one.round for one in now), default=0)
            there = {one.node for one in now if one.round == newest}
            ok = required <= there and all(one.round == newest for one in now)
            if silenced and there & set(victims):
                ok = False
            if not ok:
                since = None
            elif since is None:
                since = time.monotonic()
            return since is not None and time.monotonic() - since >= _STEADY_SECONDS

        began = time.monotonic()
        self._until(lambda: steady() and False, self.plan.lease_seconds + _QUIET_SECONDS)
        if self._until(steady, _SETTLE_SECONDS):
            assert since is not None
            self.outcome.settled_after = since - began
            self._note("settled")
            return
        now = ", ".join(map(str, writing(self._journal.writers(), _RECENT_SECONDS)))
        ought = f"{', '.join(sorted(required))} ought to"
        self._find(f"not settled after {_SETTLE_SECONDS:g} s: there write {now or 'none'}; {ought}")

    def _find(self, text: str) -> None:
        self._note(f"FOUND: {text}")
        self.outcome.findings.append(text)

    def _judge(self, victims: list[str]) -> None:
        if self._healthy() == set(self._nodes) and (
            self.plan.heal_at is not None and not self.outcome.findings
        ):
            self._finish()
        else:
            self._left_over()
        record = self._etcd.round()
        if record.charged:
            self._find(f"charged: rounds {record.charged} of {record.counts}")
        if record.outcome is not None and record.outcome.kind is not OutcomeKind.SUCCEEDED:
            self._find(f"the job ended: {record.outcome}")
        for node in self._nodes.values():
            for process in node.processes:
                if "Traceback (most recent call last)" in process.log.read_text(errors="replace"):
                    self._find(f"a traceback in {process.log.name}")
        self._times(self._journal.writers(), victims)

    def _finish(self) -> None:
        """Finish the workers with success; check that the job succeeds and leaves nothing."""
        self._journal.finish()
        self._note("the workers are told to finish")

        def all_gone() -> bool:
            return all(one.code is not None for node in self._nodes.values() for one in _last(node))

        if not self._until(all_gone, _FINISH_SECONDS):
            left = [
                one.log.name for n in self._nodes.values() for one in _last(n) if one.code is None
            ]
            self._find(f"after success {', '.join(left)} did not end in {_FINISH_SECONDS:g} s")
        codes = {one.log.name: one.code for n in self._nodes.values() for one in _last(n)}
        if any(codes.values()):
            self._find(f"after success there are exit codes: {codes}")
        if self._etcd.round().state is not RoundState.CLOSED:
            self._find("after success the round is not closed")
        if not self._until(lambda: not any(n.left() for n in self._nodes.values()), 5.0):
            left_over = {name: node.left() for name, node in self._nodes.items()}
            self._find(f"after success processes are left: {left_over}")

    def _left_over(self) -> None:
        """Report processes that outlive the agent of a bare node."""
        dead = [node for node in self._nodes.values() if node.agent.code is not None]
        if self.plan.mode is Mode.POD:
            return
        if not self._until(lambda: not any(node.left() for node in dead), 5.0):
            left = {node.name: node.left() for node in dead}
            self._find(f"processes outlive their agent: {left}")

    def _times(self, writers: list[Writer], victims: list[str]) -> None:
        outcome = self.outcome
        for one in writers:
            begin, end = one.first - self._origin, one.last - self._origin
            outcome.writers.append(f"{begin:+8.3f} … {end:+8.3f} s: {one}")
        first = [one for one in writers if one.round == 1 and one.node in victims]
        later = [one for one in writers if one.round > 1]
        if first and later:
            outcome.stopped_after = max(one.last for one in first) - self._origin
            outcome.resumed_after = min(one.first for one in later) - self._origin
        outcome.overlaps = overlaps(writers)
        for overlap in outcome.overlaps[:8]:
            what = "two rank 0 wrote side by side" if overlap.both_rank_0 else "rounds overlapped"
            self._find(f"{what} for {overlap.seconds:.3f} s: {overlap.older}, {overlap.newer}")


def _send(process: Process, number: signal.Signals) -> None:
    """Send a signal; return once a killed process is gone."""
    process.signal(number)
    if number is signal.SIGKILL:
        process.reap()


def _last(node: Node) -> list[Process]:
    """Return the processes whose exit ends the node."""
    return [node.agent, *([node.launcher] if node.launcher else [])]


def execute(
    plan: Plan, folder: Path, launcher: Path, stop: threading.Event, keep: bool = False
) -> Outcome:
    """Execute a plan in a folder of its own, which is kept if there are findings."""
    place = folder / f"seed-{plan.seed}"
    shutil.rmtree(place, ignore_errors=True)
    run = Run(plan, place, launcher, stop, str(plan.seed))
    try:
        outcome = run.execute()
    except Stopped:
        raise
    except Exception as error:
        run.outcome.findings.append(f"the run itself failed: {error!r}")
        outcome = run.outcome
    (place / "outcome.txt").write_text(outcome.text())
    (place / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    if not outcome.findings and not keep:
        shutil.rmtree(place)
    return outcome
