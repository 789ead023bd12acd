"""Etcd's certificates: kept in a Secret of a real API server, and used by real etcd servers."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from elasticjob_operator.etcd_tls import certificates as authority
from elasticjob_operator.etcd_tls.certificate_rotation import (
    AUTHORITY_LIFE,
    TRUST_TIME,
    Change,
    Wanted,
    Work,
    due_changes,
)
from elasticjob_operator.etcd_tls.certificates import (
    BUNDLE,
    CERT,
    KEY,
    SIGNING_KEY,
    Data,
    apply_changes,
    parse_data,
)
from elasticjob_operator.etcd_tls.certs_command import (
    BUNDLE_ANNOTATION,
    Exit,
    ForeignSecret,
    Request,
    renew,
)
from elasticjob_rendezvous.etcd.client import Client, Tls
from elasticjob_rendezvous.etcd.errors import Unavailable
from elasticjob_rendezvous.protocol.kv import Put, Range
from tests.integration.apiserver import NOBODY, ApiServer, Json
from tests.integration.certificates import Certificates, KeyPair
from tests.integration.etcd_server import NEWEST, VERSIONS, EtcdServer, Ports

SECRET = "etcd"
AUTHORITY = "etcd-authority"
NAMES = ("etcd.ns.svc", "*.etcd.ns.svc")
HOUR = timedelta(hours=1)
NOW = datetime.now(UTC)
OLD = NOW - AUTHORITY_LIFE * 0.7
"""Creation time of an authority due for replacement; etcd and gRPC use the real clock."""


def command(
    api_server: ApiServer, namespace: str, *more: str, user: str = "admin", secret: str = SECRET
) -> subprocess.CompletedProcess[str]:
    arguments = [f"--namespace={namespace}", f"--secret={secret}"]
    arguments += [f"--dns-name={name}" for name in NAMES]
    return subprocess.run(
        [sys.executable, "-m", "elasticjob_operator", "certs", *arguments, *more],
        env=os.environ | {"KUBECONFIG": str(api_server.kubeconfig(user))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def secret_of(api_server: ApiServer, namespace: str, name: str = SECRET) -> Json:
    return api_server.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")


def both_of(api_server: ApiServer, namespace: str) -> Data:
    """Return the data of both Secrets, which have the same bundle."""
    public, kept = (data_of(secret_of(api_server, namespace, n)) for n in (SECRET, AUTHORITY))
    assert public[BUNDLE] == kept[BUNDLE]
    return public | kept


def data_of(secret: Json) -> Data:
    return {key: base64.b64decode(value) for key, value in secret["data"].items()}


def run(api_server: ApiServer, request: Request, now: datetime, times: int = 1) -> list[list[str]]:
    """Run the command at that time, `times` times in parallel; return the output lines."""

    async def main() -> list[list[str]]:
        async with api_server.connect() as kube:
            runs = (renew(kube, request, lambda: now) for _ in range(times))
            return await asyncio.gather(*runs)

    return asyncio.run(main())


def works(lines: list[str]) -> list[Work]:
    return [work for line in lines for work in Work if line.startswith(f"{work}: ")]


def test_command_reports_changes_and_repeats_without_change(
    api_server: ApiServer, namespace: str
) -> None:
    first = command(api_server, namespace)
    assert (first.returncode, first.stderr) == (Exit.DONE, "")
    assert first.stdout.count(f"secret {namespace}/{SECRET}: made ") == 3
    made = secret_of(api_server, namespace)
    clients = {"operator.crt", "operator.key", "agents.crt", "agents.key"}
    assert set(data_of(made)) == {BUNDLE, CERT, KEY, "user", "password"} | clients
    assert set(data_of(secret_of(api_server, namespace, AUTHORITY))) == {BUNDLE, SIGNING_KEY}
    for name in (SIGNING_KEY, KEY, "operator.key", "agents.key", "password"):
        assert both_of(api_server, namespace)[name].decode() not in first.stdout

    second = command(api_server, namespace)
    assert (second.returncode, second.stderr) == (Exit.DONE, "")
    assert "nothing is due" in second.stdout
    assert secret_of(api_server, namespace) == made

    another_name = command(api_server, namespace, "--dns-name=etcd.example.org")
    assert (
        "made the certificates of etcd and its clients: the present one is not for etcd.example.org"
        in (another_name.stdout)
    )


def test_command_reports_reason_of_failure(api_server: ApiServer, namespace: str) -> None:
    body = {"metadata": {"name": SECRET}, "stringData": {CERT: "mine"}}
    api_server.request("POST", f"/api/v1/namespaces/{namespace}/secrets", body)
    before = secret_of(api_server, namespace)
    refusals = {
        "was not made by this command": command(api_server, namespace),
        "forbidden": command(api_server, namespace, user=NOBODY, secret="other"),
        "not found": command(api_server, "absent", secret="other"),
    }
    for words, done in refusals.items():
        assert (done.returncode, done.stdout) == (Exit.REFUSED, "")
        assert words in done.stderr
    wrong = command(api_server, namespace, "--replicas=3")
    assert wrong.returncode == 2
    assert secret_of(api_server, namespace) == before
    with pytest.raises(ForeignSecret):
        run(api_server, Request(namespace, SECRET, NAMES), NOW)


def test_concurrent_commands_create_one_secret(api_server: ApiServer, namespace: str) -> None:
    request = Request(namespace, SECRET, NAMES)
    runs = run(api_server, request, OLD, times=4)
    assert sum(len(works(lines)) for lines in runs) == 3
    runs = run(api_server, request, NOW, times=4)  # each would announce an authority of its own
    assert sum(len(works(lines)) for lines in runs) == 2
    data = both_of(api_server, namespace)
    assert len(authority.pem_blocks(data[BUNDLE])) == 2
    assert due_changes(parse_data(data), Wanted(frozenset(NAMES)), NOW) == ()


def test_key_of_an_earlier_release_is_moved_to_its_own_secret(
    api_server: ApiServer, namespace: str
) -> None:
    request = Request(namespace, SECRET, NAMES)
    run(api_server, request, NOW)
    before = both_of(api_server, namespace)
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    encoded = {key: base64.b64encode(value).decode() for key, value in before.items()}
    api_server.patch(f"{secrets}/{SECRET}", {"data": encoded})
    for kept in (False, True):  # also if the command ended between its two writes
        if not kept:
            api_server.request("DELETE", f"{secrets}/{AUTHORITY}")
        else:
            api_server.patch(f"{secrets}/{SECRET}", {"data": encoded})
        (lines,) = run(api_server, request, NOW)
        assert lines == [f"moved the authority's key to secret {AUTHORITY}"]
        assert SIGNING_KEY not in data_of(secret_of(api_server, namespace))
        assert both_of(api_server, namespace) == before
    assert "nothing is due" in run(api_server, request, NOW)[0][0]


def test_next_authority_signs_only_after_its_copy_in_the_mounted_secret(
    api_server: ApiServer, namespace: str
) -> None:
    """The command may end between the write of the authority and that of its copy."""
    request = Request(namespace, SECRET, NAMES)
    run(api_server, request, OLD)
    old = secret_of(api_server, namespace)["data"][BUNDLE]
    assert works(run(api_server, request, NOW)[0]) == [Work.ANNOUNCE_AUTHORITY, Work.SIGN]
    path = f"/api/v1/namespaces/{namespace}/secrets/{SECRET}"
    api_server.patch(path, {"data": {BUNDLE: old}})
    late = NOW + 2 * TRUST_TIME
    assert run(api_server, request, late)[0] == [
        f"copied the trusted authorities from secret {AUTHORITY}"
    ]
    assert works(run(api_server, request, late)[0]) == [Work.PROMOTE_AUTHORITY, Work.SIGN]
    both_of(api_server, namespace)


def test_leaked_authority_is_trusted_no_longer_once_its_secret_is_emptied(
    api_server: ApiServer, namespace: str
) -> None:
    request = Request(namespace, SECRET, NAMES)
    run(api_server, request, NOW)
    before = both_of(api_server, namespace)
    path = f"/api/v1/namespaces/{namespace}/secrets/{AUTHORITY}"
    api_server.patch(path, {"data": {BUNDLE: None, SIGNING_KEY: None}})
    done = run(api_server, request, NOW)[0]
    assert works(done) == [Work.MAKE_AUTHORITY, Work.SIGN]
    after = both_of(api_server, namespace)
    assert len(authority.pem_blocks(after[BUNDLE])) == 1
    assert after[BUNDLE] != before[BUNDLE]
    assert after["password"] == before["password"]


def test_etcd_members_trust_new_authority_before_it_signs(
    api_server: ApiServer, namespace: str
) -> None:
    request = Request(namespace, SECRET, NAMES, members="etcd")
    assert len(works(run(api_server, request, OLD)[0])) == 3
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
    api_server.request("POST", path, statefulset(3))

    def annotation() -> str | None:
        template = api_server.request("GET", f"{path}/etcd")["spec"]["template"]
        found: str | None = template["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION)
        return found

    def rolled_out(current: str, update: str) -> None:
        revisions = {"currentRevision": current, "updateRevision": update, "replicas": 3}
        body = {"status": revisions}
        content_type = "application/merge-patch+json"
        api_server.request("PATCH", f"{path}/etcd/status", body, content_type=content_type)

    rolled_out("one", "one")
    run(api_server, request, OLD + HOUR)
    assert annotation() is None  # nothing is due: no restart
    lines = run(api_server, request, NOW)[0]
    assert works(lines) == [Work.ANNOUNCE_AUTHORITY, Work.SIGN]
    assert "restarted" in lines[-1]
    assert annotation()
    rolled_out("one", "two")
    late = NOW + 2 * TRUST_TIME
    assert works(run(api_server, request, late)[0]) == []
    rolled_out("two", "two")
    # The annotation was removed: the members' current certificates are unknown.
    api_server.patch(f"{path}/etcd", {"spec": {"template": {"metadata": {"annotations": None}}}})
    lines = run(api_server, request, late)[0]
    assert works(lines) == []
    assert "restarted" in lines[-1]
    assert works(run(api_server, request, late)[0]) == [Work.PROMOTE_AUTHORITY, Work.SIGN]
    assert "nothing is due" in run(api_server, request, late)[0][0]


def statefulset(replicas: int) -> Json:
    labels = {"app": "etcd"}
    containers = [{"name": "etcd", "image": "etcd"}]
    return {
        "metadata": {"name": "etcd"},
        "spec": {
            "serviceName": "etcd",
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
        },
    }


@dataclass
class Mounted:
    """Secret's data as the kubelet mounts it: all files change at once."""

    folder: Path
    versions: int = 0

    def put(self, data: Data) -> None:
        self.versions += 1
        version = self.folder / f"..{self.versions}"
        version.mkdir(parents=True)
        for name in (BUNDLE, CERT, KEY):
            (version / name).write_bytes(data[name])
            link = self.folder / name
            if not link.is_symlink():
                link.symlink_to(Path("..data") / name)
        fresh = self.folder / "..new"
        fresh.symlink_to(version.name)
        fresh.replace(self.folder / "..data")

    @property
    def certificates(self) -> Certificates:
        pair = KeyPair(self.folder / CERT, self.folder / KEY)
        return Certificates(self.folder / BUNDLE, pair, pair)

    @property
    def tls(self) -> Tls:
        return Tls(self.folder / BUNDLE)


@dataclass
class Rotation:
    """Data before an authority is replaced, once the next is announced, and once it signs."""

    before: Data
    announced: Data
    promoted: Data


@pytest.fixture(scope="module")
def rotation() -> Rotation:
    """Return the command's data, with the dates of a rotation that ends now."""

    def after(data: Data, now: datetime, *works: Work) -> Data:
        due = [Change(work, "") for work in works]
        return apply_changes(data, due, Wanted(frozenset({"localhost", "127.0.0.1"})), now)

    before = after(after({}, OLD, Work.MAKE_AUTHORITY), NOW, Work.SIGN)
    announced = after(before, NOW - TRUST_TIME, Work.ANNOUNCE_AUTHORITY)
    promoted = after(announced, NOW, Work.PROMOTE_AUTHORITY, Work.SIGN)
    return Rotation(before, announced, promoted)


@pytest.mark.parametrize("version", VERSIONS)
def test_running_etcd_and_clients_survive_certificate_rotation(
    version: str, rotation: Rotation, tmp_path: Path, start_etcd: Callable[..., EtcdServer]
) -> None:
    servers, early, late = (Mounted(tmp_path / name) for name in ("etcd", "early", "late"))
    for mounted in (servers, early, late):
        mounted.put(rotation.before)
    server = start_etcd(version, certificates=servers.certificates)

    async def connects(mounted: Mounted) -> bool:
        async with Client([server.url], tls=mounted.tls, request_timeout_seconds=2) as client:
            try:
                await client.put(Put("/k", b""))
            except Unavailable:
                return False
            return True

    async def main() -> None:
        async with Client([server.url], tls=late.tls) as lasting:
            await lasting.put(Put("/k", b""))
            for mounted in (servers, early):
                mounted.put(rotation.announced)
            assert await connects(early)
            assert await connects(late)  # it does not know the next one yet
            servers.put(rotation.promoted)
            assert await connects(early)
            assert not await connects(late)  # so etcd shows the new certificate, without a restart
            await lasting.put(Put("/k", b""))  # existing connections stay
            late.put(rotation.promoted)
            assert await connects(late)
            await asyncio.to_thread(server.restart)
            await lasting.put(Put("/k", b""))  # its files were read again

    asyncio.run(main())


class Member(EtcdServer):
    """Member of a cluster with TLS between members, as in the chart."""

    @property
    def peer_url(self) -> str:
        return f"https://127.0.0.1:{self.ports.numbers[1]}"


def member(folder: Path, name: str, mounted: Mounted) -> Member:
    cert, key, bundle = (mounted.folder / name for name in (CERT, KEY, BUNDLE))
    arguments = [
        f"--peer-cert-file={cert}",
        f"--peer-key-file={key}",
        f"--peer-trusted-ca-file={bundle}",
        "--peer-client-cert-auth",
    ]
    return Member(folder, NEWEST, name, mounted.certificates, False, arguments, Ports(2))


@pytest.mark.parametrize("learnt", [True, False])
def test_etcd_members_trust_new_authority_only_after_restart(
    learnt: bool, rotation: Rotation, tmp_path: Path
) -> None:
    """The command therefore restarts the members and waits when it announces an authority."""
    mounted = Mounted(tmp_path / "mounted")
    mounted.put(rotation.before)
    with ExitStack() as stack:
        members = [member(tmp_path / name, name, mounted) for name in ("n0", "n1", "n2")]
        peers = ",".join(f"{one.name}={one.peer_url}" for one in members)
        for one in members:
            one.peers = peers
            stack.callback(one.close)
            one.launch()
        for one in members:
            one.wait_healthy()
        mounted.put(rotation.announced)
        if learnt:
            for one in members:
                one.restart()
        mounted.put(rotation.promoted)
        last = members[2]
        last.kill()
        last.launch()
        if learnt:
            last.wait_healthy()
            asyncio.run(read_from(last, mounted))
        else:
            with pytest.raises(Unavailable):
                asyncio.run(read_from(last, mounted))


async def read_from(server: EtcdServer, mounted: Mounted) -> None:
    async with Client([server.url], tls=mounted.tls, request_timeout_seconds=5) as client:
        await client.range(Range("/k"))
