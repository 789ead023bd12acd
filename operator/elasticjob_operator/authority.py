"""Certificates and keys in PEM: issue, sign and read. `core.certificates` decides what is due.

Formats follow RFC 5280; keys are on P-256, which every etcd and gRPC accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elasticjob_operator.core.certificates import (
    AUTHORITY_LIFE,
    BACKDATED,
    LEAF_LIFE,
    Certificate,
)

_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
"""Extended key usages: etcd members act as both server and client."""

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key in PEM."""

    cert: bytes
    key: bytes


def new_authority(now: datetime) -> Pair:
    """Return a new authority with a unique name, which tells two trusted authorities apart."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"elasticjob etcd authority {_id(key.public_key())[:16]}")
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


def sign(authority: Pair, names: Iterable[str], now: datetime) -> Pair:
    """Return a certificate for these DNS names and IP addresses; it never outlives its issuer."""
    issuer = x509.load_pem_x509_certificate(authority.cert)
    issuer_key = _load_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(now + LEAF_LIFE, issuer.not_valid_after_utc)
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in sorted(names)])
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = (
        _builder(_name("elasticjob etcd"), issuer.subject, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.ExtendedKeyUsage(_USAGES), critical=False)
        .add_extension(signer, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def blocks(bundle: bytes) -> list[bytes]:
    """Return the readable certificates of a bundle, one PEM each."""
    return [block for block in _BLOCK.findall(bundle) if read(block) is not None]


def read(pem: bytes) -> Certificate | None:
    """Return the first certificate in a PEM; None if unreadable."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        names: frozenset[str] = frozenset()
        issuer_key = _id(found.public_key()) if found.subject == found.issuer else ""
        for extension in found.extensions:
            match extension.value:
                case x509.SubjectAlternativeName() as alternatives:
                    names = frozenset(str(one.value) for one in alternatives)
                case x509.AuthorityKeyIdentifier(key_identifier=bytes() as identifier):
                    issuer_key = identifier.hex()
        key = _id(found.public_key())
    except _UNREADABLE:
        return None
    return Certificate(
        key, issuer_key, found.not_valid_before_utc, found.not_valid_after_utc, names
    )


def key_of(pem: bytes) -> str | None:
    """Return the key identifier of a private key's public half; None if unreadable."""
    try:
        return _id(_load_key(pem).public_key())
    except _UNREADABLE:
        return None


def _id(key: object) -> str:
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
