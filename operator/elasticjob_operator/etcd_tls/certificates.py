"""Certificates and keys of etcd: issued and signed in PEM, and kept in Secrets.

`certificate_rotation` decides which changes are due. Formats follow RFC 5280; keys are on P-256,
which every etcd and gRPC accepts. The names of the Secrets' keys are spelled in this module alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from typing import assert_never

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elasticjob_operator.etcd_tls.certificate_rotation import (
    AUTHORITY_LIFE,
    BACKDATED,
    LEAF_LIFE,
    Certificate,
    CertificateState,
    Change,
    Wanted,
    Work,
)
from elasticjob_rendezvous.etcd.users import ROOT

_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
"""Extended key usages: etcd members act as both server and client."""

_AGENTS = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "elasticjob agents")

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


@dataclass(frozen=True, slots=True)
class Pair:
    """Certificate and its private key in PEM."""

    cert: bytes
    key: bytes


def new_authority(now: datetime) -> Pair:
    """Return a new authority with a unique name, which distinguishes two trusted authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"elasticjob etcd authority {_key_id(key.public_key())[:16]}")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, now, now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def sign_certificate(authority: Pair, names: Iterable[str], now: datetime) -> Pair:
    """Return a certificate of etcd's members for these DNS names and IP addresses; it never
    outlives its issuer."""
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in sorted(names)])
    return _sign(authority, _name("elasticjob etcd"), _USAGES, now, alternatives)


def sign_client_certificate(authority: Pair, user: str, now: datetime) -> Pair:
    """Return a certificate of a client of etcd, which is this user there.

    For a request without a token etcd reads the user from the common name. Without a user the name
    is empty, which no user of etcd can have: the certificate permits a connection and no request.
    """
    name = _name(user) if user else x509.Name([_AGENTS])
    return _sign(authority, name, (ExtendedKeyUsageOID.CLIENT_AUTH,), now, None)


def _sign(
    authority: Pair,
    subject: x509.Name,
    usages: Sequence[x509.ObjectIdentifier],
    now: datetime,
    alternatives: x509.SubjectAlternativeName | None,
) -> Pair:
    issuer = x509.load_pem_x509_certificate(authority.cert)
    issuer_key = _load_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(now + LEAF_LIFE, issuer.not_valid_after_utc)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = _builder(subject, issuer.subject, key, now, ends)
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(signer, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def pem_blocks(bundle: bytes) -> list[bytes]:
    """Return the readable certificates of a bundle, one PEM each."""
    return [block for block in _BLOCK.findall(bundle) if read_certificate(block) is not None]


def read_certificate(pem: bytes) -> Certificate | None:
    """Return the first certificate in a PEM; None if unreadable."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        names: frozenset[str] = frozenset()
        issuer_key = _key_id(found.public_key()) if found.subject == found.issuer else ""
        for extension in found.extensions:
            match extension.value:
                case x509.SubjectAlternativeName() as alternatives:
                    names = frozenset(str(alternative.value) for alternative in alternatives)
                case x509.AuthorityKeyIdentifier(key_identifier=bytes() as identifier):
                    issuer_key = identifier.hex()
        key = _key_id(found.public_key())
    except _UNREADABLE:
        return None
    return Certificate(
        key, issuer_key, found.not_valid_before_utc, found.not_valid_after_utc, names
    )


def public_key_id(pem: bytes) -> str | None:
    """Return the key identifier of a private key's public half; None if unreadable."""
    try:
        return _key_id(_load_key(pem).public_key())
    except _UNREADABLE:
        return None


def _key_id(key: object) -> str:
    """Return the key identifier in the form `AuthorityKeyIdentifier` uses."""
    return x509.SubjectKeyIdentifier.from_public_key(key).digest.hex()  # type: ignore[arg-type]


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(ends)
        .add_extension(own, critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"the key must be one on an elliptic curve, got {type(key).__name__}")
    return key


BUNDLE = "ca.crt"
"""Key of the bundle of all trusted authorities."""
SIGNING_KEY = "ca.key"
FOLLOWING_KEY = "ca-next.key"
"""Key of the next authority's private key; present only while that authority is trusted but does
not sign yet."""
CERT, KEY = "tls.crt", "tls.key"
OPERATOR_CERT, OPERATOR_KEY = "operator.crt", "operator.key"
"""Keys of the operator's certificate, whose user in etcd is root."""
AGENTS_CERT, AGENTS_KEY = "agents.crt", "agents.key"
"""Keys of the certificate of all agents, which has no user in etcd. The operator copies it into the
jobs' Secrets."""
_CLIENTS = ((OPERATOR_CERT, OPERATOR_KEY, ROOT), (AGENTS_CERT, AGENTS_KEY, ""))
"""Keys of each client's certificate, and its user."""
USER, PASSWORD = "user", "password"
"""Keys of the credentials of etcd's root user, which the operator reads."""

PASSWORD_BYTES = 32

Data = dict[str, bytes]


def parse_data(data: Mapping[str, bytes]) -> CertificateState:
    """Parse the data of both Secrets."""
    read = (read_certificate(block) for block in pem_blocks(data.get(BUNDLE, b"")))
    return CertificateState(
        bundle=tuple(one for one in read if one is not None),
        signing=public_key_id(data.get(SIGNING_KEY, b"")),
        following=public_key_id(data.get(FOLLOWING_KEY, b"")),
        leaf=_leaf(data, CERT, KEY),
        clients=tuple(_leaf(data, cert, key) for cert, key, _ in _CLIENTS),
        password=data.get(USER) == ROOT.encode() and bool(data.get(PASSWORD)),
    )


def _leaf(data: Mapping[str, bytes], cert: str, key: str) -> Certificate | None:
    """Return a certificate; None if it is unreadable or does not match its key."""
    found = read_certificate(data.get(cert, b""))
    if found is not None and found.key != public_key_id(data.get(key, b"")):
        return None
    return found


def apply_changes(
    data: Mapping[str, bytes], due: Sequence[Change], wanted: Wanted, now: datetime
) -> Data:
    """Return a copy of the data with the due changes applied."""
    after = dict(data)
    for change in due:
        _apply_change(after, change.work, wanted, now)
    return after


def _apply_change(data: Data, work: Work, wanted: Wanted, now: datetime) -> None:
    bundle = pem_blocks(data.get(BUNDLE, b""))
    match work:
        case Work.MAKE_AUTHORITY:
            made = new_authority(now)
            data[BUNDLE] = b"".join([made.cert, *bundle])
            data[SIGNING_KEY] = made.key
            data.pop(FOLLOWING_KEY, None)
        case Work.ANNOUNCE_AUTHORITY:
            made = new_authority(now)
            data[BUNDLE] = b"".join([*bundle, made.cert])
            data[FOLLOWING_KEY] = made.key
        case Work.PROMOTE_AUTHORITY:
            data[SIGNING_KEY] = data.pop(FOLLOWING_KEY)
        case Work.DROP_AUTHORITY:
            data[BUNDLE] = b"".join(block for block in bundle if not _is_expired(block, now))
        case Work.SIGN:
            authority = _signing_pair(data)
            pair = sign_certificate(authority, wanted.names, now)
            data[CERT], data[KEY] = pair.cert, pair.key
            for cert, key, user in _CLIENTS:
                pair = sign_client_certificate(authority, user, now)
                data[cert], data[key] = pair.cert, pair.key
        case Work.MAKE_PASSWORD:
            data[USER] = ROOT.encode()
            data[PASSWORD] = secrets.token_urlsafe(PASSWORD_BYTES).encode()
        case _:
            assert_never(work)


def _signing_pair(data: Data) -> Pair:
    key = data[SIGNING_KEY]
    wanted = public_key_id(key)
    for block in pem_blocks(data[BUNDLE]):
        found = read_certificate(block)
        if found is not None and found.key == wanted:
            return Pair(block, key)
    raise AssertionError("the bundle always holds the authority that signs")


def _is_expired(block: bytes, now: datetime) -> bool:
    found = read_certificate(block)
    return found is None or found.ends <= now
