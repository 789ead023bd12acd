"""V2 rendezvous during process stops and deaths, and restarts or replacement of etcd."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
    RendezvousUnsupportedError,
)
from elasticjob_rendezvous.etcd_v2 import create_rdzv_handler
from elasticjob_rendezvous.etcd_v2.core.delays import Retries
from elasticjob_rendezvous.etcd_v2.steps import leader_seconds
from tests.integration.certificates import Certificates
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.etcd_v2_rig import SECONDS, Run, StartRun, agreed, together

ENABLE_V2 = ("--enable-v2",)


@dataclass
class Process:
    """Member run by `etcd_v2_member`."""

    popen: subprocess.Popen[str]
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.put(line)

    def say(self, command: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(command + "\n")
        self.popen.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self.lines.get(timeout=SECONDS))

    def ask(self, command: str) -> Any:
        self.say(command)
        return self.answer()

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(SECONDS)
        self._reader.join(SECONDS)
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start_process(run: Run) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts members of the run in processes of their own."""
    with ExitStack() as stack:

        def start(smallest: int, greatest: int) -> Process:
            url = (
                f"etcd://127.0.0.1:{run.server.port}/{run.run_id}?min_workers={smallest}"
                f"&max_workers={greatest}&last_call_timeout=1&local_addr=127.0.0.1"
            )
            script = Path(__file__).with_name("etcd_v2_member.py")
            popen = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, str(script), url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            process = Process(popen)
            stack.callback(process.end)
            assert process.answer() == {}
            return process

        yield start


@pytest.fixture
def run(v2_etcd: EtcdServer, start_v2_run: StartRun) -> Run:
    """Return a run on each of the shared servers."""
    return start_v2_run(v2_etcd)


StartProcess = Callable[..., Process]


def test_paused_member_is_replaced_and_rejoins(run: Run, start_process: StartProcess) -> None:
    member, paused = run.ours(1, 2, last_call_timeout=1), start_process(1, 2)
    member.enter()
    assert paused.ask("enter")["world"] == 2
    member.done()
    paused.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: member.handler.num_nodes_waiting() == 1, "the loss to be told", SECONDS)
    assert together([member])[0].round == 2
    paused.popen.send_signal(signal.SIGCONT)
    assert paused.ask("waiting") == {"waiting": 1}
    paused.say("enter")
    wait_until(lambda: member.handler.num_nodes_waiting() == 1, "the return to be told", SECONDS)
    assert member.enter().done().world_size == paused.answer()["world"] == 2


def test_undetected_pause_has_no_effect(run: Run, start_process: StartProcess) -> None:
    paused = start_process(1, 1)
    assert paused.ask("enter") == {"rank": 0, "world": 1, "round": 1}
    key = run.path("/rdzv/v_1/rank_0")
    paused.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: key not in run.client, "the key to run out", SECONDS)
    paused.popen.send_signal(signal.SIGCONT)
    wait_until(lambda: key in run.client, "the key to be back", SECONDS)
    assert paused.ask("waiting") == {"waiting": 0}


def test_killed_joiner_releases_its_place(run: Run, start_process: StartProcess) -> None:
    """torch's keeps it until the version is frozen, and ten seconds more."""
    killed = start_process(3, 3)
    killed.say("enter")
    run.await_text('"participants": [0]')
    member = run.ours(3, 3).enter()
    run.await_text('"participants": [0, 1]')
    key = run.path("/rdzv/v_1/rank_0")
    wait_until(lambda: key in run.client, "its key, by which it is missed", SECONDS)
    killed.popen.kill()
    run.await_text('"version": "2"', '"participants": [0]')
    others = [run.ours(3, 3).enter() for _ in range(2)]
    assert agreed([m.done() for m in [member, *others]])[0].round == 2


def test_terminated_joiner_releases_its_place(run: Run, start_process: StartProcess) -> None:
    process = start_process(2, 2)
    process.say("enter")
    run.await_text('"participants": [0]')
    wait_until(lambda: run.path("/rdzv/v_1/rank_0") in run.client, "its key", SECONDS)
    process.popen.terminate()
    assert process.popen.wait(SECONDS) == 128 + signal.SIGTERM
    assert run.text() == '{"status": "joinable", "version": "1", "participants": []}'
    assert run.path("/rdzv/v_1/rank_0") not in run.client


def sockets_to(port: int) -> int:
    """Return the number of this process's connections to that port."""
    ours = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            ours.add(str(entry.readlink()))
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(
        int(remote.rpartition(":")[2], 16) == port and f"socket:[{inode}]" in ours
        for _, _, remote, _, _, _, _, _, _, inode, *_ in lines
    )


@pytest.mark.parametrize("waits", [True, False])
def test_left_member_has_no_thread_and_no_connection(
    start_etcd: StartEtcd, start_v2_run: StartRun, waits: bool
) -> None:
    run = start_v2_run(start_etcd("3.5.35", arguments=ENABLE_V2))
    member = run.ours(2, 2) if waits else run.ours(1, 1)
    if waits:
        member.enter()
        run.await_text('"participants": [0]')
    else:
        member.enter().done().store.set("key", "value")
    member.handler.leave()
    if waits:
        with pytest.raises(RendezvousGracefulExitError):
            member.done()
    run.client.http.clear()

    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if run.run_id in one.name]

    wait_until(lambda: not threads(), f"the threads {threads()} to end", SECONDS)
    wait_until(lambda: sockets_to(run.server.port) == 0, "its connections to end", SECONDS)


def test_shutdown_after_leave_does_not_close_run(run: Run) -> None:
    members = [run.ours(1, 2, last_call_timeout=1) for _ in range(2)]
    together(members)
    members[0].handler.leave()
    assert members[0].handler.shutdown()
    assert not members[1].handler.is_closed()


def test_surplus_node_does_not_disturb_full_version(run: Run) -> None:
    """The surplus node waits, and gets the place of the first lost member."""
    members = [run.ours(2, 2) for _ in range(2)]
    together(members)
    spare = run.ours(2, 2).enter()
    run.await_text('"num_workers_waiting": 1')
    assert [member.handler.num_nodes_waiting() for member in members] == [0, 0]
    time_is = time.monotonic()
    wait_until(lambda: time.monotonic() > time_is + 2, "it to be no newcomer", SECONDS)
    assert [member.handler.num_nodes_waiting() for member in members] == [0, 0]
    second = run.ours(2, 2).enter()
    run.await_text('"num_workers_waiting": 2')
    assert members[0].handler.num_nodes_waiting() == 1, "it may be the successor of one that died"
    second.handler.leave()
    run.await_text('"num_workers_waiting": 1')
    assert members[0].handler.num_nodes_waiting() == 0
    members[1].handler.leave()
    wait_until(lambda: members[0].handler.num_nodes_waiting() > 0, "the loss", SECONDS)
    agreed([members[0].enter().done(), spare.done()])


@pytest.mark.parametrize("version", ["3.4", "3.5.35"])
def test_members_and_waiting_nodes_survive_etcd_restart(
    start_etcd: StartEtcd, start_v2_run: StartRun, version: str
) -> None:
    server = start_etcd(version, arguments=ENABLE_V2)
    run = start_v2_run(server)
    members = [run.ours(2, 3, last_call_timeout=0.5) for _ in range(2)]
    together(members)
    server.kill()
    assert [member.handler.num_nodes_waiting() for member in members] == [0, 0]
    assert not members[0].handler.is_closed()
    late = run.members[0].handler  # it waits while there is no etcd
    waiting = threading.Thread(target=late.num_nodes_waiting)
    waiting.start()
    server.start()
    waiting.join(SECONDS)
    renewed = time.monotonic()
    newcomer = run.ours(2, 3, last_call_timeout=0.5).enter()
    run.await_text('"num_workers_waiting": 1')
    server.restart()  # its stream is cut
    wait_until(
        lambda: [member.handler.num_nodes_waiting() for member in members] == [1, 1],
        "the newcomer to be told of",
        SECONDS,
    )
    wait_until(lambda: time.monotonic() > renewed + 11, "the time to live to pass", SECONDS)
    keys = [run.path(f"/rdzv/v_1/rank_{rank}") for rank in range(2)]
    assert all(key in run.client for key in keys)
    assert run.text() is not None
    for member in members:
        member.enter()
    assert len(agreed([member.done() for member in [*members, newcomer]])) == 3


def test_barrier_without_etcd_times_out_with_error(
    start_etcd: StartEtcd, start_v2_run: StartRun
) -> None:
    server = start_etcd("3.4", arguments=ENABLE_V2)
    member = start_v2_run(server).ours(1, 1, timeout=2)
    server.kill()
    with pytest.raises(RendezvousTimeoutError, match="etcd does not answer"):
        member.enter().done()
    with pytest.raises(RendezvousConnectionError, match="could not close"):
        member.handler.set_closed()
    assert not member.handler.shutdown()


def test_tls_with_client_certificate_connects(
    start_etcd: StartEtcd, start_v2_run: StartRun, certificates: Certificates
) -> None:
    server = start_etcd(
        "3.5.35", arguments=ENABLE_V2, certificates=certificates, client_certificates=True
    )
    files = {
        "protocol": "https",
        "cacert": str(certificates.ca_file),
        "cert": str(certificates.client.cert_file),
        "key": str(certificates.client.key_file),
    }
    run = start_v2_run(server)
    infos = together([run.ours(2, 2, **files) for _ in range(2)])
    infos[0].store.set("k", "v")
    assert infos[1].store.get("k") == b"v"
    run.ours(1, 1, **files, server_name="server.test")
    for missing in (
        {**files, "server_name": "other.test"},
        {"protocol": "https"},
        {**files, "cert": None},
        {},
    ):
        with pytest.raises(RendezvousConnectionError):
            run.ours(2, 2, **missing)


@pytest.mark.parametrize("version", ["3.4", "3.5.35", "3.6", "3.7"])
def test_etcd_without_v2_api_is_reported(start_etcd: StartEtcd, version: str) -> None:
    server = start_etcd(version)
    said = rf"etcd answers at {server.url} \(etcd {version}.*--enable-v2"
    with pytest.raises(RendezvousUnsupportedError, match=said):
        create_rdzv_handler(RendezvousParameters("etcd", server.url[7:], "r", 1, 1))


def test_unreachable_endpoint_beside_one_without_v2_api_is_retried(
    start_etcd: StartEtcd, start_v2_run: StartRun
) -> None:
    away, without = start_etcd("3.4", arguments=ENABLE_V2), start_etcd("3.4")
    away.kill()
    parameters = start_v2_run(without).parameters(1, 1)
    parameters.endpoint = f"127.0.0.1:{without.port},127.0.0.1:{away.port}"
    with pytest.raises(RendezvousConnectionError) as caught:
        create_rdzv_handler(parameters)
    assert not isinstance(caught.value, RendezvousUnsupportedError)
    away.start()
    assert create_rdzv_handler(parameters).next_rendezvous().world_size == 1


def test_next_endpoint_is_used_after_server_loss(
    start_etcd: StartEtcd, start_v2_run: StartRun
) -> None:
    gone = start_etcd("3.4", arguments=ENABLE_V2)
    stays = start_etcd("3.4", arguments=ENABLE_V2)
    gone.kill()
    run = start_v2_run(stays)
    parameters = run.parameters(1, 1)
    parameters.endpoint = f"127.0.0.1:{gone.port},127.0.0.1:{stays.port}"
    handler = create_rdzv_handler(parameters)
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()


@pytest.mark.parametrize("version", ["3.4", "3.5.35"])
def test_newcomer_after_outage_lets_members_return(
    start_etcd: StartEtcd, start_v2_run: StartRun, version: str
) -> None:
    """The members' keys have expired, and a member may take seconds to notice that etcd is back."""
    late = Retries(renewal=lambda *_: 4.0)
    server = start_etcd(version, arguments=ENABLE_V2)
    run = start_v2_run(server)
    members = [run.retrying(late, 2, 3, last_call_timeout=0.5) for _ in range(2)]
    together(members)
    server.kill()
    away = time.monotonic()
    wait_until(lambda: time.monotonic() > away + 11, "the keys to run out", SECONDS)
    server.start()
    back = time.monotonic()
    keys = [run.path(f"/rdzv/v_1/rank_{rank}") for rank in range(2)]
    wait_until(lambda: not any(key in run.client for key in keys), "the keys to be gone", SECONDS)
    newcomer = run.ours(2, 2, last_call_timeout=0.5).enter()
    run.await_text('"num_workers_waiting": 1')
    wait_until(lambda: all(key in run.client for key in keys), "the members", SECONDS)
    wait_until(lambda: time.monotonic() > back + 12, "the newcomer's patience to end", SECONDS)
    text = run.text()
    assert text is not None
    assert '"version": "1"' in text
    assert newcomer.entering


def test_replacement_does_not_wait_for_old_leader(run: Run) -> None:
    wait_until(lambda: leader_seconds(run.client) > 11, "a leader of some age", SECONDS)
    members = [run.ours(2, 3, last_call_timeout=0.5) for _ in range(2)]
    together(members)
    members[1].rendezvous.close()  # as if it was killed
    run.client.delete(run.path("/rdzv/v_1/rank_1"))
    began = time.monotonic()
    newcomer = run.ours(2, 3, last_call_timeout=0.5).enter()
    run.await_text('"version": "2"')
    agreed([members[0].enter().done(), newcomer.done()])
    assert newcomer.rendezvous._failed_at < began - 10


@pytest.mark.parametrize("version", ["3.4", "3.5.35"])
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("others_keys", [0, 100], ids=["alone", "shared"])
def test_waiting_node_is_found_after_data_loss(
    start_etcd: StartEtcd,
    start_v2_run: StartRun,
    version: str,
    late: bool,
    others_keys: int,
) -> None:
    """The cluster's id is the same again, its index counts from the beginning, and a member that
    looks late finds another version 1, in which its own rank is another member's.
    """
    server = start_etcd(version, arguments=ENABLE_V2)
    run = start_v2_run(server)
    for number in range(others_keys):
        run.client.set("/elsewhere", number)
    waiting = run.retrying(Retries(watch=lambda *_: 3.0) if late else None, 3, 3).enter()
    run.await_text('"participants": [0]')
    server.kill()
    shutil.rmtree(server.folder / "data")
    server.start()
    others = [run.ours(3, 3).enter() for _ in range(2)]
    assert len(agreed([member.done() for member in [waiting, *others]])) == 3


def test_version_with_own_rank_taken_is_not_adopted(run: Run) -> None:
    """A loss of data from which others returned first has this effect."""
    members = [run.ours(2, 2) for _ in range(2)]
    together(members)
    ranks = {member.done().rank: member for member in members}
    run.client.set(run.path("/rdzv/v_1/rank_1"), "another's")
    wait_until(lambda: ranks[1].handler.num_nodes_waiting() == 1, "it to be seen", SECONDS)
    assert ranks[0].handler.num_nodes_waiting() == 0
