"""Requests of one agent to etcd: delays, losses, time-outs.

This module owns the requests under way between one agent process and the store. A request is
answered exactly once, independently of its effect in etcd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.effects import Grant, KeepAlive, Read, Write
from elasticjob_rendezvous.protocol.events import (
    Event,
    Granted,
    KeptAlive,
    LeaseGone,
    ReadDone,
    RequestFailed,
    StoreRefused,
    TxnAmbiguous,
    TxnDone,
)
from elasticjob_rendezvous.protocol.kv import Put, Txn
from tests.sim.etcd.agent_watches import WatchLines
from tests.sim.etcd.simulated_etcd import LeaseMissing, Refused

if TYPE_CHECKING:
    from tests.sim.processes.agent import Agent
    from tests.sim.world import World

REQUEST_TIMEOUT_SECONDS = 5.0
NO_SPACE = "etcdserver: mvcc: database space exceeded"
Request = Grant | Read | Write
Sent = tuple[float, str]
"""Send time of a request, on the sender's clock, and its author."""


class Wire:
    """Client side of etcd for one agent process."""

    def __init__(self, world: World, agent: Agent) -> None:
        self.world = world
        self.agent = agent
        self.closed = False
        self.requests = 0
        self._token = 0
        self._unanswered = 0
        self._waiting: Request | None = None
        self._held: list[tuple[int, Request, Sent]] = []
        self.endpoint = world.rng.randrange(world.plan.endpoints) if world.plan.endpoints > 1 else 0
        self.watches = WatchLines(world, agent)

    def close(self) -> None:
        """Close the client of a process that ended; etcd may still be handling its requests."""
        self.closed = True
        self._waiting = None
        self.watches.close()

    # -- requests -------------------------------------------------------------------

    def request(self, effect: Request) -> None:
        world = self.world
        if self._waiting is not None:
            world.checker.fail(
                "one request at a time",
                f"{self.agent.pod.name} sent {effect} while {self._waiting} is under way",
            )
        self._waiting = effect
        self._token += 1
        token = self._token
        self.requests += 1
        sent = (self.agent.clock(), self.agent.signature())
        world.at(REQUEST_TIMEOUT_SECONDS, self._timed_out, token)
        self._send(token, effect, sent)

    def _send(self, token: int, effect: Request, sent: Sent) -> None:
        """Send one attempt to the current endpoint; repeatable requests move on to the next one."""
        world = self.world
        if token != self._token or self._waiting is None:
            return
        if self.endpoint in world.network.dead_endpoints:
            if not isinstance(effect, Write):
                share = REQUEST_TIMEOUT_SECONDS / world.plan.endpoints
                world.at(share, self._move_on, token, effect, sent)
            return
        if self._refuses():
            world.at(0.005 + world.network.delay(), self._answer, token, RequestFailed("refused"))
        elif not world.network.asks_etcd(self.agent.pod.id):
            if world.rng.random() < 0.5:
                self._held.append((token, effect, sent))
        elif world.roll("lost_request"):
            world.note(self.agent.pod.name, "request lost", effect)
        else:
            late = REQUEST_TIMEOUT_SECONDS * (0.5 + world.rng.random())
            extra = late if world.roll("late_request") else 0.0
            world.at(world.network.delay() + extra, self._serve, token, effect, sent)

    def _move_on(self, token: int, effect: Request, sent: Sent) -> None:
        if token == self._token and self._waiting is not None:
            self.next_endpoint()
            self._send(token, effect, sent)

    def next_endpoint(self) -> None:
        """Switch to the next endpoint after one has failed the client."""
        self.endpoint = (self.endpoint + 1) % self.world.plan.endpoints

    def _refuses(self) -> bool:
        """Return True if etcd's machine refuses connections."""
        world = self.world
        down = not world.etcd_up and world.etcd_refuses
        return down and world.network.reaches_etcd(self.agent.pod.id)

    def _serve(self, token: int, effect: Request, sent: Sent) -> None:
        """Handle the request in etcd, if it is up; the answer may get lost."""
        world = self.world
        if not world.etcd_up:
            return
        answer = self._execute(effect, sent)
        world.note(self.agent.pod.name, "etcd", answer)
        reachable = world.network.hears_etcd(self.agent.pod.id)
        if not reachable or world.roll("lost_reply"):
            world.note(self.agent.pod.name, "reply lost", answer)
            if isinstance(effect, Write) and world.rng.random() < 0.5:
                world.at(world.network.delay(), self._answer, token, TxnAmbiguous())
            return
        world.at(world.network.delay(), self._answer, token, answer)

    def _execute(self, effect: Request, sent: Sent) -> Event:
        etcd, now = self.world.etcd, self.world.now
        try:
            if self.world.etcd_full and not isinstance(effect, Read):
                return self._refuse_for_space(effect, sent)
            if isinstance(effect, Grant):
                granted = etcd.grant(effect.ttl_seconds, now)
                self.world.lease_moved()
                return Granted(granted.id, sent[0] + granted.ttl_seconds)
            if isinstance(effect, Read):
                result = etcd.txn(Txn((), effect.ranges))
                return ReadDone(result.revision, result.cluster_id, result.ranges)
            return TxnDone(etcd.txn(effect.txn, sent[1]))
        except LeaseMissing as error:
            assert isinstance(effect, Write)
            leases = {op.lease for op in effect.txn.success if isinstance(op, Put) and op.lease}
            for lease in sorted(leases):
                self.world.at(0.0, self.agent.deliver, LeaseGone(lease))
            return RequestFailed(str(error))
        except Refused as error:
            self.world.checker.fail("etcd accepts", f"{self.agent.pod.name}: {error}: {effect}")
            return RequestFailed(str(error))

    def _refuse_for_space(self, effect: Grant | Write, sent: Sent) -> Event:
        """Apply a request with an exhausted quota: no put and no grant; deletions pass.

        The client cannot tell the outcome, because the write that exhausts the quota is refused and
        applied.
        """
        if isinstance(effect, Grant):
            return RequestFailed(NO_SPACE)
        txn = effect.txn
        if not any(isinstance(op, Put) for op in (*txn.success, *txn.failure)):
            return TxnDone(self.world.etcd.txn(txn, sent[1]))
        if self.world.etcd_spends:
            self.world.etcd_spends = False
            self.world.etcd.txn(txn, sent[1])
        return TxnAmbiguous()

    def _timed_out(self, token: int) -> None:
        if token == self._token and self._waiting is not None:
            self.next_endpoint()
        if token == self._token and isinstance(self._waiting, Write):
            self._answer(token, TxnAmbiguous())
        else:
            self._answer(token, RequestFailed("time-out"))

    def _answer(self, token: int, event: Event) -> None:
        if token != self._token or self._waiting is None:
            return
        self._waiting = None
        self.agent.deliver(event)

    # -- leases ---------------------------------------------------------------------

    def keep_alive(self, effect: KeepAlive) -> None:
        world = self.world
        # As in the driver: the first failed attempt continues, only later ones look at the cause.
        if self._unanswered and self._refuses():
            world.at(0.005, self.agent.deliver, StoreRefused())
        self._unanswered += 1
        if self.endpoint in world.network.dead_endpoints:
            self.next_endpoint()
            return
        if not world.etcd_up or not world.network.asks_etcd(self.agent.pod.id):
            return
        if not world.roll("lost_request"):
            world.at(world.network.delay(), self._keep_alive, effect.lease, self.agent.clock())

    def _keep_alive(self, lease: int, sent: float) -> None:
        world = self.world
        if not world.etcd_up:
            return
        ttl = world.etcd.keep_alive(lease, world.now)
        if world.roll("lost_reply"):
            return
        self._unanswered = 0
        answer: Event = KeptAlive(lease, sent + ttl) if ttl else LeaseGone(lease)
        extra = 3.0 * world.rng.random() if world.roll("late_reply") else 0.0
        world.at(world.network.delay() + extra, self._kept_alive, answer)

    def _kept_alive(self, answer: Event) -> None:
        if self.world.network.hears_etcd(self.agent.pod.id):
            self.agent.deliver(answer)

    # -- cuts -----------------------------------------------------------------------

    def cut(self) -> None:
        """Cut the pod off from etcd: after a silence its watches count as broken."""
        self.watches.cut()

    def healed(self) -> None:
        """Deliver the packets that TCP held back during a short cut, old requests included."""
        held, self._held = self._held, []
        for token, effect, sent in held:
            self.world.at(self.world.network.delay(), self._serve, token, effect, sent)
        self.watches.healed()
