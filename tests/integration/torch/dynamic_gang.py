"""Members of a dynamic rendezvous as real processes: ElasticJob's and torch's own.

They are forked from one server process that has imported torch once, and are controlled through a
pipe. Every call runs in a thread of its own, so that a member can be shut down while it joins.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from tests.integration.torch.forked_gang import fork_server

CALL_SECONDS = 120.0


class Kind(StrEnum):
    OURS = "ours"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a member: `store` is tcp, file or etcd-v2.

    `sharing`: torch's agents host the workers' store, as by default.
    """

    kind: Kind
    store: str
    endpoint: str
    address: str
    min_nodes: int
    max_nodes: int
    settings: dict[str, Any] = field(default_factory=dict)
    sharing: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """Round as a member sees it."""

    rank: int
    world_size: int
    master: tuple[str, int]
    round: int


# -- in the member's process ---------------------------------------------------------------


class Node:
    """Operations of a member."""

    def __init__(self, plan: Plan) -> None:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(not plan.sharing))
        self._kind = plan.kind
        self._handler = _HANDLERS[plan.kind, plan.store](plan)
        self._store: Any = None

    def join(self) -> Joined:
        info = self._handler.next_rendezvous()
        self._store = info.store
        master = info.bootstrap_store_info
        number = getattr(info, "round", -1)
        return Joined(info.rank, info.world_size, (master.master_addr, master.master_port), number)

    def participants(self) -> int:
        """Return the number of nodes in the round of the last state that the member read."""
        theirs = self._kind is Kind.TORCH
        state = (self._handler._state_holder if theirs else self._handler._actor.shared).state
        return len(state.participants)

    def hosts(self) -> list[str]:
        """Return the addresses in the round of the last state that a member of ours read."""
        return [node.host for node in self._handler._actor.shared.state.participants]

    def awaited_store(self) -> str:
        """Return the error of the torch agent's store for which the member waits, if any."""
        return str(self._handler._masters.silent)

    def waiting(self) -> int:
        return int(self._handler.num_nodes_waiting())

    def closed(self) -> bool:
        return bool(self._handler.is_closed())

    def close(self) -> None:
        self._handler.set_closed()

    def leave(self) -> None:
        self._handler.leave()

    def shutdown(self) -> bool:
        return bool(self._handler.shutdown())

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))


class Host:
    """Host of a TCPStore, without a member."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def port(self) -> int:
        return int(self._store.port)


def _parameters(plan: Plan, kind: Any) -> Any:
    settings: dict[str, Any] = {"last_call_timeout": 1, "keep_alive_interval": 1, **plan.settings}
    if plan.store != "etcd-v2":
        settings["store_type"] = plan.store
    backend = "etcd-v2" if plan.store == "etcd-v2" else "c10d"
    sizes = (plan.min_nodes, plan.max_nodes)
    return kind(backend, plan.endpoint, "gang", *sizes, plan.address, **settings)


def _ours(plan: Plan) -> Any:
    from elasticjob_rendezvous import c10d
    from elasticjob_rendezvous.api import RendezvousParameters

    return c10d.create_rdzv_handler(_parameters(plan, RendezvousParameters))


def _ours_etcd(plan: Plan) -> Any:
    from elasticjob_rendezvous.api import RendezvousParameters
    from elasticjob_rendezvous.dynamic.etcd_backend import create_rdzv_handler

    return create_rdzv_handler(_parameters(plan, RendezvousParameters))


def _torchs(plan: Plan) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(_parameters(plan, RendezvousParameters))


_HANDLERS: dict[tuple[Kind, str], Callable[[Plan], Any]] = {
    (Kind.OURS, "tcp"): _ours,
    (Kind.OURS, "file"): _ours,
    (Kind.OURS, "etcd-v2"): _ours_etcd,
    (Kind.TORCH, "tcp"): _torchs,
    (Kind.TORCH, "file"): _torchs,
    (Kind.TORCH, "etcd-v2"): _torchs,
}


def _serve(pipe: Connection, plan: Plan | None) -> None:
    lock = threading.Lock()

    def answer(number: int, call: Callable[[], Any]) -> None:
        result: tuple[int, str | None, Any]
        try:
            result = (number, None, call())
        except Exception as error:
            result = (number, type(error).__name__, str(error))
        with lock:
            pipe.send(result)

    made: dict[str, Any] = {}

    def make() -> None:
        made["node"] = Host() if plan is None else Node(plan)

    answer(0, make)
    while True:
        try:
            number, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        call = getattr(made["node"], name)
        threading.Thread(
            target=answer, args=(number, lambda c=call, a=arguments: c(*a)), daemon=True
        ).start()


# -- in the test ---------------------------------------------------------------------------


class Failed(Exception):
    """Exception raised by a member's call: `name` is the error's class."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Call:
    """Call in progress."""

    def __init__(self, member: Member, number: int) -> None:
        self._member = member
        self._number = number

    def done(self) -> bool:
        self._member.receive(0)
        return self._number in self._member.answers

    def result(self, seconds: float = CALL_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while self._number not in self._member.answers:
            left = deadline - time.monotonic()
            assert left > 0, f"no answer of process {self._member.pid} within {seconds:g} s"
            self._member.receive(left)
        error, value = self._member.answers[self._number]
        if error is not None:
            raise Failed(error, value)
        return value


class Member:
    """Process of a member; with None as the plan it hosts a TCPStore."""

    def __init__(self, plan: Plan | None) -> None:
        context = fork_server()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, plan), daemon=True)
        self._process.start()
        theirs.close()
        self.answers: dict[int, tuple[str | None, Any]] = {}
        self._calls = 0
        self.made = Call(self, 0)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, name: str, *arguments: Any) -> Call:
        self._calls += 1
        self._pipe.send((self._calls, name, arguments))
        return Call(self, self._calls)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.start(name, *arguments).result()

    def receive(self, seconds: float) -> None:
        while self._pipe.poll(seconds):
            number, error, value = self._pipe.recv()
            self.answers[number] = (error, value)
            seconds = 0

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._process.kill()
        self._process.join(60)
        assert not self._process.is_alive()
        self._pipe.close()


class Gang:
    """Members on one store."""

    def __init__(self, store: str, endpoint: str, min_nodes: int, max_nodes: int) -> None:
        self._plan = Plan(Kind.OURS, store, endpoint, "", min_nodes, max_nodes)
        self._host: Member | None = None
        if store == "tcp" and not endpoint:
            self._host = Member(None)
            self._host.made.result()
            self.endpoint = f"127.0.0.1:{self._host.call('port')}"
        else:
            self.endpoint = endpoint
        self.members: list[Member] = []

    def add(self, *kinds: Kind, sharing: bool = False, **settings: Any) -> list[Member]:
        """Start members with consecutive addresses; do not wait for them."""
        added: list[Member] = []
        for kind in kinds:
            address = f"127.0.0.{len(self.members) + 1}"
            if self._plan.store == "tcp":
                settings.setdefault("is_host", False)
            plan = Plan(
                kind,
                self._plan.store,
                self.endpoint,
                address,
                self._plan.min_nodes,
                self._plan.max_nodes,
                settings,
                sharing,
            )
            added.append(Member(plan))
            self.members.append(added[-1])
        for member in added:
            member.made.result()
        return added

    @property
    def host(self) -> Member:
        assert self._host is not None
        return self._host

    def close(self) -> None:
        for member in [*self.members, *([self._host] if self._host else [])]:
            member.kill()


def join(*members: Member) -> list[Joined]:
    """Join all members at once; return their views of the round."""
    calls = [member.start("join") for member in members]
    return [call.result() for call in calls]


def agree(rounds: list[Joined]) -> int:
    """Check that these are all members of one round, and return its number."""
    assert sorted(each.rank for each in rounds) == list(range(len(rounds)))
    assert {each.world_size for each in rounds} == {len(rounds)}
    assert len({each.master for each in rounds}) == 1
    numbers = {each.round for each in rounds} - {-1}  # torch does not report it
    assert len(numbers) <= 1
    return max(numbers, default=-1)


def until(condition: Callable[[], bool], what: str, seconds: float = CALL_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
