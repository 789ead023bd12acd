"""What a job's pods need to reach etcd and each other, and the Secret that holds it."""

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
"""The user's name in a Secret that the job's author wrote: Kubernetes' own word for it."""


@dataclass(frozen=True, slots=True)
class Access:
    """What the agents of one job are given.

    Args:
        job_key: signs the connections between them.
        ca: PEM, the authorities that etcd's certificate is signed by; None for plain HTTP.
        user, password: etcd's user of this job; None where etcd knows no users.
        cert, key: PEM, a client certificate where etcd asks for one.
    """

    job_key: bytes
    ca: bytes | None
    user: str | None
    password: str | None
    cert: bytes | None = None
    key: bytes | None = None


def data_of(access: Access) -> dict[str, str]:
    """The `data` of the job's Secret; what there is not has no key in it."""
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
    """What a job's Secret holds; None for one without a key, or that cannot be read."""
    job_key = _value(secret, JOB_KEY)
    return _access(secret, job_key, USER) if job_key else None


def given_access(secret: Json, job_key: bytes) -> Access:
    """The access that a Secret named by `spec.rendezvous.secretName` gives."""
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
    """An empty value is none."""
    text = (secret.get("data") or {}).get(name)
    try:
        return b64decode(text, validate=True) or None if isinstance(text, str) else None
    except ValueError:
        return None


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _text(value: bytes | None) -> str | None:
    """Decoded as the agent decodes its files."""
    return None if value is None else value.decode(errors="replace").strip()
