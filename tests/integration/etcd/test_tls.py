"""TLS and mutual TLS against every supported etcd version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob_rendezvous.etcd.client import Client, Tls
from elasticjob_rendezvous.etcd.errors import EtcdError, InvalidConfiguration, Unavailable
from elasticjob_rendezvous.protocol.kv import Put, Range
from tests.integration.certificates import Certificates, make_certificates
from tests.integration.conftest import StartEtcd
from tests.integration.etcd.watches import events_of
from tests.integration.etcd_server import NEWEST, VERSIONS, EtcdServer


@pytest.fixture(scope="module", params=VERSIONS)
def mutual_etcd(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: Certificates,
) -> Iterator[EtcdServer]:
    """Yield a server that requires a client certificate."""
    server = EtcdServer(
        tmp_path_factory.mktemp("etcd"),
        request.param,
        certificates=certificates,
        client_certificates=True,
    )
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="module")
def tls_etcd(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), NEWEST, certificates=certificates)
    try:
        yield server.start()
    finally:
        server.close()


def mutual(certificates: Certificates) -> Tls:
    client = certificates.client
    return Tls(certificates.ca_file, client.cert_file, client.key_file)


def outcome(url: str, tls: Tls | None) -> EtcdError | None:
    """Put a key; return None on success, otherwise the error."""

    async def main() -> EtcdError | None:
        async with Client([url], tls=tls, request_timeout_seconds=1) as client:
            try:
                await client.range(Range("/tls"))
                await client.put(Put("/tls", b""))
            except EtcdError as error:
                return error
        return None

    return asyncio.run(main())


def test_mutual_tls_connects(
    mutual_etcd: EtcdServer, certificates: Certificates, prefix: str
) -> None:
    async def main() -> None:
        async with Client([mutual_etcd.url], tls=mutual(certificates)) as client:
            revision = await client.put(Put(f"{prefix}k", b""))
            lease = await client.grant(30)
            assert await client.keep_alive(lease.id) == 30
            (event,) = await events_of(client.watch([Range(prefix, True)], revision), 1)
            assert event.mod_revision == revision

    asyncio.run(main())


def test_missing_client_certificate_is_refused(
    mutual_etcd: EtcdServer, certificates: Certificates
) -> None:
    error = outcome(mutual_etcd.url, Tls(certificates.ca_file))
    assert isinstance(error, Unavailable), error


def test_client_certificate_of_another_authority_is_refused(
    mutual_etcd: EtcdServer, certificates: Certificates, tmp_path: Path
) -> None:
    stranger = make_certificates(tmp_path).client
    tls = Tls(certificates.ca_file, stranger.cert_file, stranger.key_file)
    assert isinstance(outcome(mutual_etcd.url, tls), Unavailable)


def test_tls_connects(tls_etcd: EtcdServer, certificates: Certificates) -> None:
    assert outcome(tls_etcd.url, Tls(certificates.ca_file)) is None


def test_server_certificate_is_verified(tls_etcd: EtcdServer, tmp_path: Path) -> None:
    strangers = make_certificates(tmp_path)
    for tls in (Tls(strangers.ca_file), Tls()):
        error = outcome(tls_etcd.url, tls)
        assert isinstance(error, Unavailable)
        assert "certificate" in error.detail.lower()


def test_server_name_is_verified_and_configurable(
    tls_etcd: EtcdServer, certificates: Certificates
) -> None:
    named = Tls(certificates.ca_file, server_name="server.test")
    assert outcome(tls_etcd.url, named) is None
    wrong = Tls(certificates.ca_file, server_name="other.test")
    assert isinstance(outcome(tls_etcd.url, wrong), Unavailable)


def test_wrong_scheme_is_unavailable(
    tls_etcd: EtcdServer, newest_etcd: EtcdServer, certificates: Certificates
) -> None:
    plain_to_tls = outcome(tls_etcd.url.replace("https", "http"), None)
    assert isinstance(plain_to_tls, Unavailable)
    tls_to_plain = outcome(newest_etcd.url.replace("http", "https"), Tls(certificates.ca_file))
    assert isinstance(tls_to_plain, Unavailable)
    assert "scheme" in str(tls_to_plain)


def test_rotated_certificates_are_reloaded_after_failed_connection(
    start_etcd: StartEtcd, tmp_path: Path
) -> None:
    """The authority is replaced: the certificates in the client's memory no longer work."""
    folder = tmp_path / "mounted"
    server = start_etcd(certificates=make_certificates(folder), client_certificates=True)
    tls = Tls(folder / "ca.pem", folder / "client.pem", folder / "client-key.pem")

    async def main() -> None:
        async with Client([server.url], tls=tls) as client:
            await client.put(Put("/k", b"1"))
            server.kill()
            shutil.rmtree(folder)
            make_certificates(folder)
            await asyncio.to_thread(server.start)
            assert (await client.range(Range("/k"))).kvs[0].value == b"1"

    asyncio.run(main())


def test_unusable_certificate_files_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"absent\.pem"):
        Client(["127.0.0.1"], tls=Tls(tmp_path / "absent.pem"))
    with pytest.raises(InvalidConfiguration, match="must be given together"):
        Client(["127.0.0.1"], tls=Tls(cert_file=tmp_path / "client.pem"))
    with pytest.raises(InvalidConfiguration, match="scheme must be https"):
        Client(["http://127.0.0.1"], tls=Tls())
