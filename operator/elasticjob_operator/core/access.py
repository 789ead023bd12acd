"""Credentials of a job's pods, for etcd and for each other, and the Secret that holds them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass

from elasticjob_operator.core.json import Json

JOB_KEY = "job-key"
CA = "ca.crt"
USER = "user"
PASSWORD = "password"
CERT = "tls.crt"
KEY = "tls.key"
GIVEN_USER = "username"
"""Key of the user name in a Secret written by the job's author; the key of Kubernetes'
basic-auth Secrets."""


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials of the agents of one job.

    Args:
        job_key: key that signs the connections between the agents.
        ca: PEM, the authorities that may sign etcd's certificate; None for plain HTTP.
        user, password: etcd user of this job; None if etcd runs without authentication.
        cert, key: PEM, client certificate and key if etcd requires them.
    """

    job_key: bytes
    ca: bytes | None
    user: str | None
    password: str | None
    cert: bytes | None = None
    key: bytes | None = None


def data_of(access: Access) -> dict[str, str]:
    """Return the `data` of the job's Secret; absent values have no key in it."""
    given = {
        JOB_KEY: access.job_key,
        CA: access.ca,
        USER: _bytes(access.user),
        PASSWORD: _bytes(access.password),
        CERT: access.cert,
        KEY: access.key,
    }
    return {name: b64encode(value).decode() for name, value in given.items() if value is not None}


def access_of(secret: Json) -> Access | None:
    """Return the access in a job's Secret; None if its job key is absent or malformed."""
    job_key = _value(secret, JOB_KEY)
    return _access(secret, job_key, USER) if job_key else None


def given_access(secret: Json, job_key: bytes) -> Access:
    """Return the access in the Secret that `spec.rendezvous.secretName` names."""
    return _access(secret, job_key, GIVEN_USER)


def _access(secret: Json, job_key: bytes, user_key: str) -> Access:
    return Access(
        job_key=job_key,
        ca=_value(secret, CA),
        user=_text(_value(secret, user_key)),
        password=_text(_value(secret, PASSWORD)),
        cert=_value(secret, CERT),
        key=_value(secret, KEY),
    )


def _value(secret: Json, name: str) -> bytes | None:
    """Return the decoded value of a key; None if it is absent, empty or not base64."""
    text = (secret.get("data") or {}).get(name)
    try:
        return b64decode(text, validate=True) or None if isinstance(text, str) else None
    except ValueError:
        return None


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _text(value: bytes | None) -> str | None:
    """Decode a value as the agent decodes its files."""
    return None if value is None else value.decode(errors="replace").strip()
