"""Members of a v2 rendezvous on a real etcd: ElasticJob's and torch's, in threads."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import etcd
import pytest

from elasticjob_rendezvous.api import RendezvousInfo, RendezvousParameters
from elasticjob_rendezvous.etcd_v2 import EtcdRendezvousHandler, create_rdzv_handler
from elasticjob_rendezvous.etcd_v2.core.delays import Retries
from tests.integration.etcd_server import EtcdServer, wait_until

VERSIONS = ("3.4", "3.5.35")  # 3.6 has no v2 API
SECONDS = 60.0
"""Maximum seconds of any operation on a busy machine."""


@pytest.fixture(scope="session", params=VERSIONS)
def v2_etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """Yield a shared server, one for each version; every run has a run id of its own."""
    folder = tmp_path_factory.mktemp("etcd-v2")
    server = EtcdServer(folder, request.param, arguments=("--enable-v2",))
    try:
        yield server.start()
    finally:
        server.close()


@dataclass
class Member:
    """Handler with its current or last rendezvous."""

    handler: Any
    info: RendezvousInfo | None = None
    error: BaseException | None = None
    _thread: threading.Thread | None = None

    @property
    def rendezvous(self) -> Any:
        """`EtcdRendezvous` behind the handler, ours or torch's."""
        return self.handler._rdzv_impl

    def enter(self) -> Member:
        """Begin `next_rendezvous` in a thread."""
        self.info = self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.info = self.handler.next_rendezvous()
        except BaseException as error:
            self.error = error

    @property
    def entering(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def done(self) -> RendezvousInfo:
        """Wait for the rendezvous; return its result or raise its exception."""
        assert self._thread is not None
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the rendezvous takes too long"
        if self.error is not None:
            raise self.error
        assert self.info is not None
        return self.info


@dataclass
class Run:
    """Run id on one server, with its members."""

    server: EtcdServer
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = etcd.Client("127.0.0.1", self.server.port)

    def parameters(self, smallest: int, greatest: int, **settings: Any) -> RendezvousParameters:
        settings = {"timeout": SECONDS, "last_call_timeout": 0, **settings}
        endpoint = f"127.0.0.1:{self.server.port}"
        return RendezvousParameters(
            "etcd", endpoint, self.run_id, smallest, greatest, "127.0.0.1", **settings
        )

    def ours(self, smallest: int, greatest: int, **settings: Any) -> Member:
        return self.retrying(None, smallest, greatest, **settings)

    def retrying(
        self, retries: Retries | None, smallest: int, greatest: int, **settings: Any
    ) -> Member:
        """Add a member of ours with these delays of retries, by default its own."""
        parameters = self.parameters(smallest, greatest, **settings)
        member = Member(create_rdzv_handler(parameters, retries))
        self.members.append(member)
        return member

    def torchs(self, smallest: int, greatest: int, **settings: Any) -> Member:
        """Add torch's own handler, unchanged."""
        from torch.distributed.elastic.rendezvous import RendezvousParameters as Parameters
        from torch.distributed.elastic.rendezvous.etcd_rendezvous import create_rdzv_handler

        ours = self.parameters(smallest, greatest, **settings)
        ours.config["timeout"] = int(ours.config["timeout"])
        parameters = Parameters(
            "etcd", ours.endpoint, ours.run_id, smallest, greatest, "127.0.0.1", **ours.config
        )
        member = Member(create_rdzv_handler(parameters))
        self.members.append(member)
        return member

    def path(self, path: str) -> str:
        return f"/torchelastic/p2p/run_{self.run_id}{path}"

    def text(self) -> str | None:
        """Return the content of `active_version`."""
        try:
            text: str = self.client.get(self.path("/rdzv/active_version")).value
        except etcd.EtcdKeyNotFound:
            return None
        return text

    def await_text(self, *parts: str) -> str:
        """Wait until `active_version` contains all these parts."""

        def there() -> bool:
            text = self.text()
            return text is not None and all(part in text for part in parts)

        wait_until(there, f"{parts} in {self.text()}", SECONDS)
        text = self.text()
        assert text is not None
        return text

    def close(self) -> None:
        for member in self.members:
            if isinstance(member.handler, EtcdRendezvousHandler):
                member.handler.leave()
            else:
                for stop in ("_lease_run_id_stop", "_lease_this_rank_stop"):
                    if event := getattr(member.rendezvous, stop):
                        event.set()


StartRun = Callable[..., Run]


@pytest.fixture
def start_v2_run() -> Iterator[StartRun]:
    """Yield a function that makes runs whose members end with the test."""
    with ExitStack() as stack:

        def start(server: EtcdServer) -> Run:
            run = Run(server)
            stack.callback(run.close)
            return run

        yield start


def together(members: Sequence[Member]) -> list[RendezvousInfo]:
    """Enter with all members at once; check that they agree, and return their results by rank."""
    for member in members:
        member.enter()
    return agreed([member.done() for member in members])


def agreed(infos: Sequence[RendezvousInfo]) -> list[RendezvousInfo]:
    infos = sorted(infos, key=lambda info: info.rank)
    assert [info.rank for info in infos] == list(range(len(infos)))
    assert {info.world_size for info in infos} == {len(infos)}
    masters = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        for info in infos
    }
    assert len(masters) == 1
    return list(infos)
