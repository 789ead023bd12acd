"""Command `python -m elasticjob_operator certs`: issues and renews a bundled etcd's certificates.

Owns two Secrets: one with etcd's certificates and the password of etcd's root, which etcd and the
operator mount, and one with the keys of the authority, which nothing mounts. The second also has
the bundle of trusted authorities, and is written first: the bundle in the first one is a copy. Safe
to run at any time and concurrently: it writes only what is due, and only if the Secrets are
unchanged since they were read.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum

from elasticjob_operator.etcd_tls.certificate_rotation import (
    CertificateState,
    Change,
    Wanted,
    Work,
    due_changes,
)
from elasticjob_operator.etcd_tls.certificates import (
    BUNDLE,
    FOLLOWING_KEY,
    SIGNING_KEY,
    Data,
    apply_changes,
    parse_data,
)
from elasticjob_operator.kubernetes.client import (
    SECRETS,
    AlreadyExists,
    Conflict,
    Json,
    Kind,
    Kube,
    KubeError,
    NotFound,
)
from elasticjob_operator.model.job import GROUP

STATEFULSETS = Kind("apps", "v1", "statefulsets")
MANAGED_BY = {"app.kubernetes.io/managed-by": "elasticjob"}
BUNDLE_ANNOTATION = f"{GROUP}/ca-bundle"
"""Annotation on etcd's pods: fingerprint of the bundle at their start. etcd does not reload the
bundle by which it trusts peers and clients."""

SECRET_KEYS = frozenset((SIGNING_KEY, FOLLOWING_KEY))
"""Keys of data that only the authority's Secret has."""
AUTHORITY_KEYS = SECRET_KEYS | {BUNDLE}
AUTHORITY_WORK = frozenset(
    (
        Work.MAKE_AUTHORITY,
        Work.ANNOUNCE_AUTHORITY,
        Work.PROMOTE_AUTHORITY,
        Work.DROP_AUTHORITY,
    )
)
"""Changes of the authority's Secret."""

LOCAL_NAMES = ("localhost", "127.0.0.1")
ATTEMPTS = 5
PAUSE_SECONDS = 0.2

Clock = Callable[[], datetime]


class Exit(IntEnum):
    """Exit codes of the command; argparse exits with 2 on wrong usage."""

    DONE = 0
    TRY_AGAIN = 1
    REFUSED = 3


class ForeignSecret(Exception):
    """Secret that this command did not create."""


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of the command.

    Args:
        names: DNS names and IP addresses that etcd is reached by.
        members: etcd's StatefulSet, restarted for a new authority; None leaves restarts to others.
    """

    namespace: str
    secret: str
    names: tuple[str, ...]
    members: str | None = None

    @property
    def authority(self) -> str:
        """Name of the Secret with the authority's keys."""
        return f"{self.secret}-authority"


async def renew(kube: Kube, request: Request, clock: Clock) -> list[str]:
    """Apply the due changes; return one line with the reason for each.

    Raises:
        ForeignSecret: a Secret of this name exists that this command did not create.
        KubeError: the API server refused, or every attempt met a concurrent write.
    """
    lines: list[str] = []
    for _ in range(ATTEMPTS - 1):
        try:
            return await _attempt(kube, request, clock(), lines)
        except (AlreadyExists, Conflict):
            await asyncio.sleep(PAUSE_SECONDS)  # decide again from the current state
    return await _attempt(kube, request, clock(), lines)


async def _attempt(kube: Kube, request: Request, now: datetime, lines: list[str]) -> list[str]:
    """Apply the due changes; append a line for each to `lines`, which keeps those of a conflict."""
    secret = await _find_own(kube, request.namespace, request.secret)
    authority = await _find_own(kube, request.namespace, request.authority)
    data, kept = _data(secret), _data(authority)
    if authority is None:  # the first run, or the release before kept all in one Secret
        kept = {key: value for key, value in data.items() if key in AUTHORITY_KEYS}
    held = {key: value for key, value in data.items() if key not in AUTHORITY_KEYS} | kept
    before = parse_data(held)
    members = None
    if request.members:
        members = await _find(kube, STATEFULSETS, request.namespace, request.members)
    copied = data.get(BUNDLE) == kept.get(BUNDLE)
    wanted = Wanted(
        frozenset(request.names + LOCAL_NAMES), trusted=copied and _trust(members, data)
    )
    due = due_changes(before, wanted, now)
    after = apply_changes(held, due, wanted, now)
    keys = {key: value for key, value in after.items() if key in AUTHORITY_KEYS}
    if authority is None or keys != kept:
        await _write(kube, request.namespace, request.authority, authority, keys)
    lines += [_line(change) for change in due if change.work in AUTHORITY_WORK]
    public = {key: value for key, value in after.items() if key not in SECRET_KEYS}
    if public != data:
        await _write(kube, request.namespace, request.secret, secret, public)
    lines += [_line(change) for change in due if change.work not in AUTHORITY_WORK]
    if data.keys() & SECRET_KEYS:
        lines.append(f"moved the authority's key to secret {request.authority}")
    elif secret is not None and not copied:
        lines.append(f"copied the trusted authorities from secret {request.authority}")
    if members is not None and _needs_trust(before, due) and not _trust(members, after):
        await _restart(kube, members, after)
        lines.append("restarted etcd's members one by one: they must trust the new authority")
    return lines or [_unchanged(before)]


def _line(change: Change) -> str:
    return f"{change.work}: {change.reason}"


def _needs_trust(before: CertificateState, due: Sequence[Change]) -> bool:
    """Return True if a new authority exists that running members do not trust yet."""
    works = {change.work for change in due}
    return bool(works & {Work.MAKE_AUTHORITY, Work.ANNOUNCE_AUTHORITY}) or (
        before.following is not None and Work.PROMOTE_AUTHORITY not in works
    )


def _trust(members: Json | None, data: Data) -> bool:
    """Return True if all of etcd's members run with every authority of the bundle."""
    if members is None:
        return True  # a member that joins later starts with the current bundle
    annotations = members["spec"]["template"]["metadata"].get("annotations") or {}
    status = members.get("status") or {}
    rolled_out = status.get("currentRevision") == status.get("updateRevision")
    return annotations.get(BUNDLE_ANNOTATION) == _fingerprint(data) and rolled_out


async def _restart(kube: Kube, members: Json, data: Data) -> None:
    found = members["metadata"]
    template = {"metadata": {"annotations": {BUNDLE_ANNOTATION: _fingerprint(data)}}}
    body = {"metadata": {"uid": found["uid"]}, "spec": {"template": template}}
    await kube.patch(STATEFULSETS, found["namespace"], found["name"], body)


def _fingerprint(data: Data) -> str:
    return hashlib.sha256(data.get(BUNDLE, b"")).hexdigest()[:32]


def _unchanged(before: CertificateState) -> str:
    ends = [one.ends for one in (*before.bundle, before.leaf) if one is not None]
    return f"nothing is due: the first to expire does so on {min(ends).date().isoformat()}"


async def _find_own(kube: Kube, namespace: str, name: str) -> Json | None:
    """Return the Secret, None if there is none. Raises `ForeignSecret`."""
    secret = await _find(kube, SECRETS, namespace, name)
    if secret is not None and not _is_ours(secret):
        raise ForeignSecret(
            f"secret {namespace}/{name} exists and was not made by this command; "
            "delete it, or name another"
        )
    return secret


async def _find(kube: Kube, kind: Kind, namespace: str, name: str) -> Json | None:
    try:
        return await kube.get(kind, namespace, name)
    except NotFound:
        return None


def _is_ours(secret: Json) -> bool:
    labels = secret["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in MANAGED_BY.items())


def _data(secret: Json | None) -> Data:
    held = (secret or {}).get("data") or {}
    return {key: base64.b64decode(value) for key, value in held.items()}


async def _write(kube: Kube, namespace: str, name: str, secret: Json | None, after: Data) -> None:
    encoded = {key: base64.b64encode(value).decode() for key, value in after.items()}
    if secret is None:
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": MANAGED_BY},
            "type": "Opaque",
            "data": encoded,
        }
        await kube.create(SECRETS, namespace, body)
        return
    found = secret["metadata"]
    removed = {key: None for key in secret.get("data") or {} if key not in after}
    patch = {
        "metadata": {"uid": found["uid"], "resourceVersion": found["resourceVersion"]},
        "data": encoded | removed,
    }
    await kube.patch(SECRETS, namespace, name, patch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    request = _parsed(arguments)
    try:
        lines = asyncio.run(_connected(request))
    except ForeignSecret as error:
        return _failed(str(error), Exit.REFUSED)
    except KubeError as error:
        retryable = error.retryable or isinstance(error, AlreadyExists | Conflict)
        return _failed(str(error), Exit.TRY_AGAIN if retryable else Exit.REFUSED)
    for line in lines:
        sys.stdout.write(f"secret {request.namespace}/{request.secret}: {line}\n")
    return Exit.DONE


async def _connected(request: Request) -> list[str]:
    async with Kube.connect() as kube:
        return await renew(kube, request, lambda: datetime.now(UTC))


def _failed(problem: str, status: Exit) -> int:
    sys.stderr.write(f"error: {problem}\n")
    return status


def _parsed(arguments: Sequence[str] | None) -> Request:
    parser = argparse.ArgumentParser(
        prog="python -m elasticjob_operator certs",
        description="Issue etcd's certificates into a Secret, or renew those that are due. "
        "The authority's keys are in a second Secret, NAME-authority.",
        epilog="Exit codes: 0 success, 1 temporary failure (retry), 2 wrong usage, 3 refused.",
    )
    parser.add_argument("--namespace", required=True, help="namespace of etcd and of the Secret")
    parser.add_argument("--secret", required=True, help="name of the Secret to create and renew")
    parser.add_argument(
        "--dns-name",
        action="append",
        required=True,
        help="DNS name (or *.domain, or IP address) that etcd is reached by; may be repeated",
    )
    parser.add_argument(
        "--statefulset",
        help="etcd's StatefulSet; its pods are restarted one by one to trust a new authority",
    )
    given = parser.parse_args(arguments)
    return Request(given.namespace, given.secret, tuple(given.dns_name), given.statefulset)
