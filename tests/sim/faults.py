"""What can go wrong, one method a fault. Owns nothing; the plan says when each happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.core.events import Close
from elasticjob_rendezvous.core.failures import FailureClass
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind
from tests.sim.plan import Action

if TYPE_CHECKING:
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
        self.world.at(down_seconds, pod.start_agent)

    def fail(self, pod: Pod, _: float) -> None:
        pod.fail_workers(FailureClass.USER_ERROR)

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
        alive = self.world.alive()
        begin = alive.index(pod)
        half = (alive + alive)[begin : begin + max(1, len(alive) // 2)]
        self._cut_peers(half, seconds)

    def _cut_etcd(self, pods: list[Pod], seconds: float) -> None:
        self.world.truth.trouble()
        for pod in pods:
            self.world.network.no_etcd.add(pod.id)
            if pod.agent is not None:
                pod.agent.wire.cut()
        self.world.at(seconds, self._heal_etcd, pods)

    def _heal_etcd(self, pods: list[Pod]) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "etcd within reach", [pod.name for pod in pods])
        for pod in pods:
            self.world.network.no_etcd.discard(pod.id)
            if pod.agent is not None:
                pod.agent.wire.healed()

    def _cut_peers(self, pods: list[Pod], seconds: float) -> None:
        self.world.truth.trouble()
        ids = [pod.id for pod in pods]
        self.world.network.isolate(ids)
        self.world.gangs.network_changed()
        self.world.at(seconds, self._heal_peers, ids)

    def _heal_peers(self, ids: list[str]) -> None:
        self.world.truth.trouble()
        self.world.note("fault", "peers within reach", ids)
        self.world.network.rejoin(ids)
        self.world.gangs.network_changed()

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

    def _lease_seconds(self) -> float:
        return max(2.0, self.world.plan.bounds.keep_alive_seconds) + RESUME_GRACE_SECONDS

    # -- the end of all faults ------------------------------------------------------

    def heal_everything(self) -> None:
        """From now on nothing goes wrong any more."""
        world = self.world
        world.note("fault", "all faults end", "")
        world.calm = True
        if not world.etcd_up:
            self._etcd_back()
        self._heal_etcd(world.alive())
        self._heal_peers([pod.id for pod in world.pods])
        for pod in world.alive():
            if pod.frozen or (pod.agent is not None and pod.agent.paused):
                self._thaw(pod)
            pod.start_agent()
