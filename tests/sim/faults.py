"""Faults of the simulation, one method each. Stateless; the plan sets the time of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.events import Close
from elasticjob_rendezvous.protocol.liveness.failure_detector import TRUST_SECONDS
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from tests.sim.plan import Action

if TYPE_CHECKING:
    from tests.sim.processes.agent import Agent
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

RESUME_GRACE_SECONDS = 1.5
FENCED_SECONDS = TRUST_SECONDS + 0.5
"""Time in which the members of a gang that is no longer whole stop their workers."""
WRITING_SECONDS = 5.0
"""Minimum duration of an attack that also writes into links."""


class Faults:
    """Actions that a plan may name."""

    def __init__(self, world: World) -> None:
        self.world = world

    def do(self, action: Action) -> None:
        pods = [pod for pod in self.world.alive() if not pod.leaving]
        if not pods or self.world.calm or self.world.checker.closed_at is not None:
            return
        pod = pods[action.target % len(pods)]
        self.world.note("fault", action.name, f"{pod.name} {action.amount:g}")
        getattr(self, action.name)(pod, action.amount)

    def strike(self) -> None:
        """Inject a fault right after a decision, which is the worst moment."""
        world, plan = self.world, self.world.plan
        if world.calm or not plan.strikes or world.rng.random() >= plan.strike_share:
            return
        name, least, most = world.rng.choice(plan.strikes)
        amount = least + (most - least) * world.rng.random()
        delay = world.rng.choice((0.004, 0.05)) * world.rng.random() ** 2
        target = world.rng.randrange(16)
        world.at(delay, self.do, Action(world.now + delay, name, target, amount))

    # -- pods -----------------------------------------------------------------------

    def crash(self, pod: Pod, _: float) -> None:
        """End all processes of the pod; its machine lives and refuses connections."""
        self._excuse_whole_gangs(FENCED_SECONDS)
        pod.die()
        self.world.controller.gone(pod)

    def power_off(self, pod: Pod, _: float) -> None:
        """Power the machine off: it is silent from now on."""
        self.world.truth.trouble()
        self._excuse_whole_gangs(FENCED_SECONDS)
        pod.die(silent=True)
        self.world.controller.gone(pod)

    def kill_agent(self, pod: Pod, down_seconds: float) -> None:
        """Kill the agent and restart it later; its workers may train on.

        Without a launcher the workers are the agent's children and die with it, and the returning
        member is another one.
        """
        if not self.world.plan.launcher:
            pod.die()
            self.world.controller.gone(pod, forget=False)
            return
        if pod.frozen:
            return  # the launcher freezes with the pod and would not notice: two faults in one
        # What the agent had granted its workers lasts that long; nothing proves the gang whole now.
        self._excuse_whole_gangs(FENCED_SECONDS)
        pod.kill_agent()
        self.world.truth.agents_gone[pod.id] = self.world.now
        self.world.at(down_seconds, pod.start_agent)

    def fail(self, pod: Pod, _: float) -> None:
        pod.fail_workers(FailureClass.USER_ERROR)

    def take_port(self, pod: Pod, _: float) -> None:
        """Fail the workers because the port chosen for rank 0 is taken."""
        pod.fail_workers(FailureClass.MASTER_PORT)

    def drain(self, pod: Pod, _: float) -> None:
        pod.leave("evicted")
        self.world.controller.pods_changed()

    def evict(self, pod: Pod, head_start: float) -> None:
        """Evict the pod: the pod and the operator learn of it, one before the other."""
        if self.world.plan.operator:
            self.world.truth.preempted.add(pod.id)
            self.world.at(max(0.0, -head_start), self.world.controller.mark, pod, "Evicted", True)
        self.world.at(max(0.0, head_start), self._evicted, pod)

    def _evicted(self, pod: Pod) -> None:
        pod.leave("evicted")
        self.world.controller.pods_changed()

    def mark(self, pod: Pod, _: float) -> None:
        """Have the operator mark the pod for removal, and delete it a little later."""
        if self.world.plan.operator:
            self.world.truth.leaves(pod)
            self.world.controller.mark(pod, "scaled down")
            self.world.at(2.0 * self.world.rng.random(), pod.leave, "scaled down")

    def join(self, _pod: Pod, _: float) -> None:
        self.world.add_pod()

    def resize(self, _pod: Pod, size: float) -> None:
        """Change the maximum size, as the user would."""
        if self.world.plan.operator:
            bounds = self.world.controller.bounds
            self.world.controller.change(max_nodes=max(bounds.min_nodes, int(size)))

    def close(self, pod: Pod, _: float) -> None:
        """Close the rendezvous through this agent."""
        if pod.agent is not None:
            self.world.truth.closed_by_hand = True
            pod.agent.deliver(Close(Outcome(OutcomeKind.STOPPED, "asked for")))

    def stop(self, _pod: Pod, withdrawn_after: float) -> None:
        """Suspend the job, as the user would; resume it later unless `withdrawn_after` is 0."""
        if self.world.plan.operator and self.world.controller.stop_asked_at is None:
            self.world.truth.closed_by_hand = True
            self.world.controller.stop(withdrawn_after)

    def attack(self, _pod: Pod, seconds: float) -> None:
        """Let the adversary forge links; for a long attack it also writes into those of others."""
        self.world.adversary.attack(seconds, writes=seconds >= WRITING_SECONDS)

    # -- suspended processes --------------------------------------------------------

    def freeze(self, pod: Pod, seconds: float) -> None:
        """Freeze the whole machine, workers included."""
        self.world.truth.trouble()
        if pod.agent is not None:
            pod.agent.pause()
        pod.frozen = True
        self.world.at(seconds, self._thaw, pod)

    def _thaw(self, pod: Pod) -> None:
        self.world.truth.trouble()
        if pod.frozen:
            pod.frozen = False
            pod.excused_until = max(pod.excused_until, self.world.now + RESUME_GRACE_SECONDS)
            self.world.running.look_again(pod.excused_until)
        self._resumed(pod)

    def stop_agent(self, pod: Pod, seconds: float) -> None:
        """Stop the agent alone; its workers go on."""
        self.world.truth.trouble()
        if pod.agent is not None:
            pod.agent.pause()
            pod.agent.resumes_at = self.world.now + seconds
            self.world.at(seconds, self._resumed, pod)

    def _resumed(self, pod: Pod) -> None:
        self.world.note("fault", "goes on", pod.name)
        if pod.agent is not None:
            pod.agent.resume()

    # -- cuts -----------------------------------------------------------------------

    def cut_etcd(self, pod: Pod, seconds: float) -> None:
        self._cut_etcd([pod], seconds)

    def cut_all_etcd(self, _pod: Pod, seconds: float) -> None:
        """Cut all pods off from etcd, so that leases expire."""
        self._cut_etcd(self.world.alive(), seconds)

    def cut_peers(self, pod: Pod, seconds: float) -> None:
        self._cut_peers([pod], seconds)

    def cut_off(self, pod: Pod, seconds: float) -> None:
        """Cut one pod off from etcd and from its peers."""
        self._cut_peers([pod], seconds)
        self._cut_etcd([pod], seconds)

    def lose_touch(self, pod: Pod, seconds: float) -> None:
        """Cut one pod off; its agent dies or hangs while its launcher cannot be probed."""
        world = self.world
        world.rng.choice((self.cut_off, self.cut_off, self.cut_etcd, self.cut_peers))(pod, seconds)
        moment = world.rng.random() * (world.plan.bounds.keep_alive_seconds + 1.0)
        world.at(moment, self._lose_agent, pod, 0.05 + seconds * world.rng.random())

    def _lose_agent(self, pod: Pod, seconds: float) -> None:
        if not pod.alive or pod.frozen or self.world.calm:
            return
        self.world.note("fault", "loses its agent", f"{pod.name} {seconds:g}")
        if self.world.plan.launcher and self.world.rng.random() < 0.5:
            self.kill_agent(pod, seconds)
        else:
            self.stop_agent(pod, seconds)

    def split(self, pod: Pod, seconds: float) -> None:
        """Cut one half of the pods off from the other half."""
        self._cut_peers(self._half(pod), seconds)

    def rack(self, pod: Pod, seconds: float) -> None:
        """Cut half of the pods off from etcd and from the other half."""
        half = self._half(pod)
        self._cut_peers(half, seconds)
        self._cut_etcd(half, seconds)

    def half_heard(self, pod: Pod, seconds: float) -> None:
        """Lose all packets that this pod sends to its peers, or all that they send to it."""
        world = self.world
        others = [other for other in world.alive() if other is not pod]
        if world.rng.random() < 0.5:
            lost = {(pod.id, other.id) for other in others}
        else:
            lost = {(other.id, pod.id) for other in others}
        self._lose(lost, seconds)

    def one_way(self, pod: Pod, seconds: float) -> None:
        """Lose the packets from one pod to another, in that direction alone."""
        others = [other for other in self.world.alive() if other is not pod]
        if others:
            self._lose({(pod.id, self.world.rng.choice(others).id)}, seconds)

    def mute(self, pod: Pod, seconds: float) -> None:
        """Lose a pod's requests to etcd; etcd's messages arrive."""
        self._cut_one_way(self.world.network.mute, pod, seconds)

    def deaf(self, pod: Pod, seconds: float) -> None:
        """Lose etcd's answers to a pod; etcd executes its requests."""
        self._cut_one_way(self.world.network.deaf, pod, seconds)

    def _half(self, pod: Pod) -> list[Pod]:
        alive = self.world.alive()
        begin = alive.index(pod)
        return (alive + alive)[begin : begin + max(1, len(alive) // 2)]

    def _lose(self, lost: set[tuple[str, str]], seconds: float) -> None:
        self.world.truth.trouble()
        self.world.network.lost |= lost
        self.world.gangs.network_changed()
        self.world.isolation.changed()
        self.world.at(seconds, self._found, lost)

    def _found(self, lost: set[tuple[str, str]]) -> None:
        self.world.truth.trouble()
        self.world.network.lost -= lost
        self.world.gangs.network_changed()
        self.world.isolation.changed()

    def _cut_one_way(self, cut: set[str], pod: Pod, seconds: float) -> None:
        self.world.truth.trouble()
        cut.add(pod.id)
        if pod.agent is not None:
            pod.agent.wire.cut()
        self.world.isolation.changed()
        self.world.at(seconds, self._mend_one_way, cut, pod)

    def _mend_one_way(self, cut: set[str], pod: Pod) -> None:
        self.world.truth.trouble()
        cut.discard(pod.id)
        if pod.agent is not None:
            pod.agent.wire.healed()
        self.world.isolation.changed()

    def _cut_etcd(self, pods: list[Pod], seconds: float) -> None:
        self.world.truth.trouble()
        for pod in pods:
            self.world.network.no_etcd.add(pod.id)
            if pod.agent is not None:
                pod.agent.wire.cut()
        self.world.isolation.changed()
        self.world.at(seconds, self._heal_etcd, pods)

    def _heal_etcd(self, pods: list[Pod]) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "etcd within reach", [pod.name for pod in pods])
        for pod in pods:
            self.world.network.no_etcd.discard(pod.id)
            if pod.agent is not None:
                pod.agent.wire.healed()
        self.world.isolation.changed()

    def _cut_peers(self, pods: list[Pod], seconds: float) -> None:
        self.world.truth.trouble()
        ids = [pod.id for pod in pods]
        self._excuse_whole_gangs(FENCED_SECONDS)
        self.world.network.isolate(ids)
        self.world.gangs.network_changed()
        self.world.isolation.changed()
        self.world.at(seconds, self._heal_peers, ids)

    def _heal_peers(self, ids: list[str]) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "peers within reach", ids)
        self._excuse_whole_gangs(RESUME_GRACE_SECONDS)
        self.world.network.rejoin(ids)
        self.world.gangs.network_changed()
        self.world.isolation.changed()

    def _excuse_whole_gangs(self, seconds: float) -> None:
        """Excuse whole gangs that were cut off from etcd and from all other pods: nobody could
        probe them, and they learn only now of rounds begun meanwhile, or that they are divided.
        If etcd lost its data nobody knows of them, so those within reach are not probed either.
        """
        alive = self.world.alive()
        for pod in alive:
            apart = any(not self.world.network.joined(pod.id, other.id) for other in alive)
            if (apart or self.world.truth.robbed) and self.world.running.outlives_etcd(pod):
                pod.excused_until = max(pod.excused_until, self.world.now + seconds)
                self.world.running.look_again(pod.excused_until)

    # -- etcd -----------------------------------------------------------------------

    def restart_etcd(self, _pod: Pod, seconds: float) -> None:
        """Stop etcd for a while and restart it with its data."""
        self.world.truth.trouble()
        self.world.etcd_up = False
        self.world.etcd_refuses = self.world.rng.random() < 0.7
        self._break_watches("etcd went down")
        self.world.at(seconds, self._etcd_back)

    def _etcd_back(self) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "etcd is back", "")
        self.world.etcd_up = True
        self.world.etcd.elect(self.world.now)
        self.world.lease_moved()

    def elect(self, _pod: Pod, seconds: float) -> None:
        """Elect a new etcd leader: no answers for a moment, and leases restart in full."""
        self.world.truth.trouble()
        self.world.etcd_up = False
        self.world.etcd_refuses = False
        self.world.at(min(seconds, 2.0), self._etcd_back)

    def wipe(self, _pod: Pod, _: float) -> None:
        """Bring etcd back without its data; some watches break, others stay silent."""
        world = self.world
        world.truth.trouble()
        world.truth.robbed = True
        for pod in world.alive():
            pod.excused_until = max(pod.excused_until, world.now + self._lease_seconds())
            if pod.agent is not None and world.rng.random() < 0.5:
                pod.agent.wire.watches.break_all("connection lost")
        world.running.look_again(world.now + self._lease_seconds())
        world.etcd.wipe()
        world.checker.wiped()
        world.controller.wiped()

    def expire_early(self, pod: Pod, _: float) -> None:
        """Expire one pod's lease in etcd although it is being kept alive."""
        world = self.world
        world.truth.trouble()
        found = [kv for kv in world.checker.sessions_of(pod.id) if kv.lease]
        if found:
            pod.excused_until = max(pod.excused_until, world.now + self._lease_seconds())
            world.running.look_again(pod.excused_until)
            world.etcd.revoke(found[0].lease)

    def delete_key(self, pod: Pod, _: float) -> None:
        """Delete a living pod's keys, as an operator that assumes it is gone."""
        world = self.world
        if world.etcd_up and world.plan.operator:
            world.truth.trouble()
            pod.excused_until = max(pod.excused_until, world.now + self._lease_seconds())
            world.running.look_again(pod.excused_until)
            world.controller.forget(pod)

    def compact(self, _pod: Pod, _: float) -> None:
        self.world.etcd.compact(self.world.etcd.revision)
        if self.world.rng.random() < 0.5:
            self._break_watches("connection lost")

    def break_watches(self, _pod: Pod, _: float) -> None:
        self._break_watches("connection lost")

    def _break_watches(self, error: str) -> None:
        for pod in self.world.alive():
            if pod.agent is not None:
                pod.agent.wire.watches.break_all(error)

    def refuse_writes(self, _pod: Pod, seconds: float) -> None:
        """Exhaust etcd's quota: it answers and keeps leases, but refuses writes."""
        world = self.world
        world.truth.trouble()
        world.etcd_full = True
        world.etcd_spends = world.rng.random() < 0.5
        world.at(seconds, self._space)

    def _space(self) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "etcd takes writes again", "")
        self.world.etcd_full = False

    def silent_watch(self, pod: Pod, seconds: float) -> None:
        """Silence the watches of one pod; its requests are still answered."""
        self._silence([pod], seconds)

    def silent_watches(self, _pod: Pod, seconds: float) -> None:
        self._silence(self.world.alive(), seconds)

    def _silence(self, pods: list[Pod], seconds: float) -> None:
        self.world.truth.trouble()
        for pod in pods:
            if pod.agent is not None:
                pod.agent.wire.watches.stick()
                self.world.at(seconds, self._unsilence, pod.agent)

    def _unsilence(self, agent: Agent) -> None:
        self.world.truth.trouble()
        agent.wire.watches.give_up_stuck()

    def dead_endpoint(self, _pod: Pod, seconds: float) -> None:
        """Make one endpoint of etcd accept requests without answering; the others serve."""
        self._spoil_endpoint(self.world.network.dead_endpoints, seconds)

    def stale_endpoint(self, _pod: Pod, seconds: float) -> None:
        """Silence the watches of one endpoint of etcd; it answers requests."""
        self._spoil_endpoint(self.world.network.stale_endpoints, seconds)

    def _spoil_endpoint(self, spoilt: set[int], seconds: float) -> None:
        world = self.world
        world.truth.trouble()
        endpoint = world.rng.randrange(world.plan.endpoints)
        spoilt.add(endpoint)
        for pod in world.alive():
            if pod.agent is not None and spoilt is world.network.dead_endpoints:
                pod.agent.wire.watches.lose_endpoint(endpoint)
        world.at(seconds, self._mend_endpoint, spoilt, endpoint)

    def _mend_endpoint(self, spoilt: set[int], endpoint: int) -> None:
        self.world.truth.trouble()
        spoilt.discard(endpoint)
        for pod in self.world.alive():
            if pod.agent is not None:
                pod.agent.wire.watches.healed()

    def _lease_seconds(self) -> float:
        return max(2.0, self.world.plan.bounds.keep_alive_seconds) + RESUME_GRACE_SECONDS

    # -- the end of all faults ------------------------------------------------------

    def heal_everything(self) -> None:
        """End all faults, for the rest of the run."""
        world = self.world
        world.note("fault", "all faults end", "")
        self._excuse_whole_gangs(RESUME_GRACE_SECONDS)
        world.calm = True
        if not world.etcd_up:
            self._etcd_back()
        world.etcd_full = False
        network = world.network
        for cut in (network.mute, network.deaf, network.lost):
            cut.clear()
        network.dead_endpoints.clear()
        network.stale_endpoints.clear()
        for pod in world.alive():
            if pod.agent is not None:
                pod.agent.wire.watches.give_up_stuck()
        self._heal_etcd(world.alive())
        self._heal_peers([pod.id for pod in world.pods])
        for pod in world.alive():
            if pod.frozen or (pod.agent is not None and pod.agent.paused):
                self._thaw(pod)
            pod.start_agent()
