"""Rotation of etcd's certificates: the changes that are due, with their reasons.

A certificate authority of the operator's signs one certificate, which etcd's members present to
clients and to each other, and those of etcd's clients: the operator and the agents. An ageing
authority is replaced in two steps: first the next authority is added to the trust bundle, a day
later it starts to sign. Clients and members thus always know the authority behind a certificate. An
authority stays in the bundle until it expires.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

AUTHORITY_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=365)
BACKDATED = timedelta(minutes=5)
"""Time by which notBefore precedes the creation of a certificate, to allow for clock skew."""
TRUST_TIME = timedelta(hours=24)
"""Minimum time an authority is in the trust bundle before it signs."""


class Work(StrEnum):
    """Kind of change."""

    MAKE_AUTHORITY = "made a certificate authority"
    ANNOUNCE_AUTHORITY = "made the next certificate authority, to be trusted beside the present one"
    PROMOTE_AUTHORITY = "let the next certificate authority sign from now on"
    DROP_AUTHORITY = "took an authority out of the bundle"
    SIGN = "made the certificates of etcd and its clients"
    MAKE_PASSWORD = "made the root password"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Properties of a certificate that decisions use. Keys are named by the hash of their public
    half."""

    key: str
    issuer_key: str
    begins: datetime
    ends: datetime
    names: frozenset[str] = frozenset()

    def ageing(self, now: datetime) -> bool:
        """Return True if less than a third of its lifetime is left."""
        return (self.ends - now) * 3 < self.ends - self.begins


@dataclass(frozen=True, slots=True)
class CertificateState:
    """Existing certificates and keys. A certificate that is unreadable or lacks its key is None.

    Args:
        bundle: trusted authorities.
        signing: key that signs.
        following: key that will sign next; its authority is in the bundle.
        leaf: etcd's certificate.
        password: True if the user root and its password exist.
        clients: certificates of etcd's clients.
    """

    bundle: tuple[Certificate, ...] = ()
    signing: str | None = None
    following: str | None = None
    leaf: Certificate | None = None
    password: bool = False
    clients: tuple[Certificate | None, ...] = ()

    def authority(self, key: str | None, now: datetime) -> Certificate | None:
        """Return the authority with this key, unless it is absent or expired."""
        found = (one for one in self.bundle if one.key == key and one.ends > now)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Names in etcd's certificate. `trusted`: True if its members already trust each authority."""

    names: frozenset[str]
    trusted: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """Due change and its reason."""

    work: Work
    reason: str


def due_changes(held: CertificateState, wanted: Wanted, now: datetime) -> tuple[Change, ...]:
    """Return the changes that are due at `now`, in order of execution."""
    return tuple(_changes(held, wanted, now))


def _changes(held: CertificateState, wanted: Wanted, now: datetime) -> Iterator[Change]:
    authority = _authority_change(held, wanted, now)
    if authority:
        yield authority
    for one in held.bundle:
        if one.ends <= now:
            yield Change(Work.DROP_AUTHORITY, f"it expired on {_day(one.ends)}")
    issuer = held.signing
    if authority and authority.work is Work.PROMOTE_AUTHORITY:
        issuer = held.following
    elif authority and authority.work is Work.MAKE_AUTHORITY:
        issuer = None
    faults = [_fault(held.leaf, issuer, wanted.names, now)]
    faults += [_fault(client, issuer, frozenset(), now) for client in held.clients]
    if found := next(filter(None, faults), ""):
        yield Change(Work.SIGN, found)
    if not held.password:
        yield Change(Work.MAKE_PASSWORD, "there was none")


def _authority_change(held: CertificateState, wanted: Wanted, now: datetime) -> Change | None:
    signing = held.authority(held.signing, now)
    following = held.authority(held.following, now)
    if signing is None and following is None:
        reason = "none in the bundle is valid and has its key" if held.bundle else "there was none"
        return Change(Work.MAKE_AUTHORITY, reason)
    if signing is None:
        return Change(Work.PROMOTE_AUTHORITY, "the present one has expired or lost its key")
    if following is not None:
        known_since = following.begins + BACKDATED
        if now - known_since < TRUST_TIME or not wanted.trusted:
            return None
        return Change(Work.PROMOTE_AUTHORITY, f"it has been trusted since {_day(known_since)}")
    if signing.ageing(now):
        return Change(Work.ANNOUNCE_AUTHORITY, f"the present one ends on {_day(signing.ends)}")
    return None


def _fault(
    leaf: Certificate | None, issuer: str | None, names: frozenset[str], now: datetime
) -> str:
    """Return the reason to replace a certificate; empty if it is good."""
    if leaf is None:
        return "there was none, or it and its key could not be read"
    if leaf.issuer_key != issuer:
        return "another authority signs now"
    if leaf.ageing(now):
        return f"the present one ends on {_day(leaf.ends)}"
    missing = sorted(names - leaf.names)
    if missing:
        return f"the present one is not for {', '.join(missing)}"
    return ""


def _day(moment: datetime) -> str:
    return moment.date().isoformat()
