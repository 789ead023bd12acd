"""What can go wrong, one method a fault. Owns nothing; the plan says when each happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.core.events import Close
from elasticjob_rendezvous.core.failures import FailureClass
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind
from tests.sim.plan import Action

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.node import Pod
    from tests.sim.world import World

RESUME_GRACE_SECONDS = 1.5


class Faults:
    """The actions a plan may name."""

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
        """Just now something was decided: the worst moment for a fault."""
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
        """All processes of the pod end; its machine lives and refuses connections."""
        pod.die()
        self.world.controller.gone(pod)

    def power_off(self, pod: Pod, _: float) -> None:
        """The machine is silent from now on."""
        self.world.truth.trouble()
        pod.die(silent=True)
        self.world.controller.gone(pod)

    def kill_agent(self, pod: Pod, down_seconds: float) -> None:
        """The agent dies and comes back; its workers may train on.

        Without a launcher they are its children and die with it, and the member
        that comes back is another one.
        """
        if not self.world.plan.launcher:
            pod.die()
            self.world.controller.gone(pod, forget=False)
            return
        if pod.frozen:
            return  # the launcher thaws with it, unaware: two faults in one
        pod.kill_agent()
        self.world.truth.agents_gone[pod.id] = self.world.now
        self.world.at(down_seconds, pod.start_agent)

    def fail(self, pod: Pod, _: float) -> None:
        pod.fail_workers(FailureClass.USER_ERROR)

    def take_port(self, pod: Pod, _: float) -> None:
        """The port that was chosen for rank 0 is taken."""
        pod.fail_workers(FailureClass.MASTER_PORT)

    def drain(self, pod: Pod, _: float) -> None:
        pod.leave("evicted")
        self.world.controller.pods_changed()

    def evict(self, pod: Pod, head_start: float) -> None:
        """The cluster takes the pod: it hears of it, and the operator, one before the other."""
        if self.world.plan.operator:
            self.world.truth.preempted.add(pod.id)
            self.world.at(max(0.0, -head_start), self.world.controller.mark, pod, "Evicted", True)
        self.world.at(max(0.0, head_start), self._evicted, pod)

    def _evicted(self, pod: Pod) -> None:
        pod.leave("evicted")
        self.world.controller.pods_changed()

    def mark(self, pod: Pod, _: float) -> None:
        """The operator wants this pod to go: it says so first, and deletes it a little later."""
        if self.world.plan.operator:
            self.world.truth.leaves(pod)
            self.world.controller.mark(pod, "scaled down")
            self.world.at(2.0 * self.world.rng.random(), pod.leave, "scaled down")

    def join(self, _pod: Pod, _: float) -> None:
        self.world.add_pod()

    def resize(self, _pod: Pod, size: float) -> None:
        """The user changes the maximum."""
        if self.world.plan.operator:
            bounds = self.world.controller.bounds
            self.world.controller.change(max_nodes=max(bounds.min_nodes, int(size)))

    def close(self, pod: Pod, _: float) -> None:
        """Somebody closes the rendezvous through this agent."""
        if pod.agent is not None:
            self.world.truth.closed_by_hand = True
            pod.agent.deliver(Close(Outcome(OutcomeKind.STOPPED, "asked for")))

    # -- standing still -------------------------------------------------------------

    def freeze(self, pod: Pod, seconds: float) -> None:
        """The whole machine stands still, workers included."""
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
        """The agent alone stands still; its workers go on."""
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
        """Nobody reaches etcd, whose leases run out."""
        self._cut_etcd(self.world.alive(), seconds)

    def cut_peers(self, pod: Pod, seconds: float) -> None:
        self._cut_peers([pod], seconds)

    def cut_off(self, pod: Pod, seconds: float) -> None:
        """One pod reaches neither etcd nor its peers."""
        self._cut_peers([pod], seconds)
        self._cut_etcd([pod], seconds)

    def lose_touch(self, pod: Pod, seconds: float) -> None:
        """One pod is cut off, and while nobody can ask its launcher its agent dies or hangs."""
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
        """Half of the pods can't reach the other half."""
        self._cut_peers(self._half(pod), seconds)

    def rack(self, pod: Pod, seconds: float) -> None:
        """Half of the pods reach neither etcd nor the other half."""
        half = self._half(pod)
        self._cut_peers(half, seconds)
        self._cut_etcd(half, seconds)

    def half_heard(self, pod: Pod, seconds: float) -> None:
        """Lose all that this pod sends to its peers, or all that they send to it."""
        world = self.world
        others = [other for other in world.alive() if other is not pod]
        if world.rng.random() < 0.5:
            lost = {(pod.id, other.id) for other in others}
        else:
            lost = {(other.id, pod.id) for other in others}
        self._lose(lost, seconds)

    def one_way(self, pod: Pod, seconds: float) -> None:
        """Of two pods one hears the other and is not heard."""
        others = [other for other in self.world.alive() if other is not pod]
        if others:
            self._lose({(pod.id, self.world.rng.choice(others).id)}, seconds)

    def mute(self, pod: Pod, seconds: float) -> None:
        """Requests of a pod do not arrive at etcd; what etcd sends arrives."""
        self._cut_one_way(self.world.network.mute, pod, seconds)

    def deaf(self, pod: Pod, seconds: float) -> None:
        """etcd does what a pod asks for, but its answers are lost."""
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
        self.world.network.isolate(ids)
        self.world.gangs.network_changed()
        self.world.isolation.changed()
        self.world.at(seconds, self._heal_peers, ids)

    def _heal_peers(self, ids: list[str]) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "peers within reach", ids)
        self._excuse_whole_gangs()
        self.world.network.rejoin(ids)
        self.world.gangs.network_changed()
        self.world.isolation.changed()

    def _excuse_whole_gangs(self) -> None:
        """Nobody could ask a whole gang that was cut off from etcd and from all others, and what
        began meanwhile is known to it only now."""
        alive = self.world.alive()
        for pod in alive:
            apart = any(not self.world.network.joined(pod.id, other.id) for other in alive)
            if apart and self.world.running.outlives_etcd(pod):
                pod.excused_until = max(pod.excused_until, self.world.now + RESUME_GRACE_SECONDS)
                self.world.running.look_again(pod.excused_until)

    # -- etcd -----------------------------------------------------------------------

    def restart_etcd(self, _pod: Pod, seconds: float) -> None:
        """etcd is down for a while and comes back with its data."""
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
        """A new leader: etcd answers nobody for a moment, and leases start anew."""
        self.world.truth.trouble()
        self.world.etcd_up = False
        self.world.etcd_refuses = False
        self.world.at(min(seconds, 2.0), self._etcd_back)

    def wipe(self, _pod: Pod, _: float) -> None:
        """etcd comes back without its data; some watches break, others stay silent."""
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
        """etcd loses one pod's lease although it is being kept alive."""
        world = self.world
        world.truth.trouble()
        found = [kv for kv in world.checker.sessions_of(pod.id) if kv.lease]
        if found:
            pod.excused_until = max(pod.excused_until, world.now + self._lease_seconds())
            world.running.look_again(pod.excused_until)
            world.etcd.revoke(found[0].lease)

    def delete_key(self, pod: Pod, _: float) -> None:
        """The operator takes a living pod for gone, and deletes its keys."""
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
        """The quota of etcd is spent: it answers, keeps leases and takes nothing new."""
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
        """The watches of one pod tell nothing, while its requests are answered."""
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
        """One endpoint of etcd takes requests and answers none; the others serve."""
        self._spoil_endpoint(self.world.network.dead_endpoints, seconds)

    def stale_endpoint(self, _pod: Pod, seconds: float) -> None:
        """One endpoint of etcd answers, but its watches tell nothing."""
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
        """From now on nothing goes wrong any more."""
        world = self.world
        world.note("fault", "all faults end", "")
        self._excuse_whole_gangs()
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
