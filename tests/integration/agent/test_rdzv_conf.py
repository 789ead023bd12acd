"""Settings in `--rdzv-conf` of agents on torch's backends, on real stores."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import etcd
import pytest

from tests.integration.agent_rig import TORCHS, Gang, gang, until
from tests.integration.certificates import Certificates
from tests.integration.conftest import StartEtcd
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SECONDS = 60.0
V2 = ("--rdzv-backend=etcd-v2", "--local-addr=127.0.0.1")


def etcd_client(host: str, port: int, certificates: Certificates) -> etcd.Client:
    pair = certificates.client
    files = (str(pair.cert_file), str(pair.key_file))
    ca = str(certificates.ca_file)
    return etcd.Client(host, port, protocol="https", cert=files, ca_cert=ca)


@pytest.fixture
def unused_port() -> Iterator[int]:
    """Yield a port without a listener."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a store may listen over it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("backend", ["etcd-v2", "c10d"])
def test_unreachable_store_fails_after_connect_timeout(
    gang: Gang, unused_port: int, backend: str
) -> None:
    host = ",is_host=false" if backend == "c10d" else ""
    agent = gang.agent(
        "1:1",
        *(f"--rdzv-backend={backend}", "--local-addr=127.0.0.1"),
        f"--rdzv-endpoint=127.0.0.1:{unused_port}",
        conf=f"connect_timeout=1{host}",
    )
    assert agent.wait(SECONDS) == 3, agent.output()
    assert "cannot reach the rendezvous within 1 s" in agent.output()


def test_late_etcd_is_found_without_connect_timeout(gang: Gang, start_etcd: StartEtcd) -> None:
    server = start_etcd("3.4", arguments=("--enable-v2",))
    server.kill()
    agent = gang.agent("1:1", *V2, f"--rdzv-endpoint=127.0.0.1:{server.port}", conf=TORCHS)
    agent.says("no rendezvous yet, trying again")
    server.start()
    gang.finish()
    assert agent.wait(SECONDS) == 0, agent.output()


def test_torch_tls_options_and_etcd_prefix_are_accepted(
    gang: Gang, start_etcd: StartEtcd, certificates: Certificates
) -> None:
    more = {"certificates": certificates, "client_certificates": True}
    server = start_etcd("3.4", arguments=("--enable-v2",), **more)
    pair = certificates.client
    tls = (
        f"protocol=https,ca_cert={certificates.ca_file},ssl_cert={pair.cert_file},"
        f"ssl_cert_key={pair.key_file}"
    )
    gang.finish()
    agent = gang.agent(
        "1:1",
        *V2,
        f"--rdzv-endpoint=127.0.0.1:{server.port}",
        conf=f"{TORCHS},{tls},etcd_prefix=/own,read_timeout=2",
    )
    assert agent.wait(SECONDS) == 0, agent.output()
    client = etcd_client("127.0.0.1", server.port, certificates)
    assert f"/own/run_{gang.run_id}/rdzv/active_version" in client


def test_silent_node_is_lost_after_keep_alive_attempts(gang: Gang, unused_port: int) -> None:
    options = (
        *("--rdzv-backend=c10d", "--local-addr=127.0.0.1"),
        f"--rdzv-endpoint=127.0.0.1:{unused_port}",
    )
    conf = "last_call_timeout=20,settle=0.3,keep_alive_interval=1,keep_alive_max_attempt=2,is_host="
    for host in ("true", "false"):
        gang.agent("1:2", *options, conf=f"{conf}{host}")
    gang.started(1, 2, SECONDS)
    gang.agents[1].process.kill()
    killed = time.monotonic()
    until(lambda: "no heartbeat from" in gang.outputs(), "the loss")
    assert time.monotonic() - killed < 15, "by default a silent node is lost after 15 s"
    gang.started(2, 1, SECONDS)
    gang.finish()
    assert gang.agents[0].wait(SECONDS) == 0, gang.outputs()
