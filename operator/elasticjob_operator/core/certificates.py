"""What is due for etcd's certificates: what to make, renew or leave, and why.

An authority of our own signs one certificate, which etcd shows its clients and its members show
each other. An authority that grows old is replaced in two steps: first everyone learns to trust
the next one beside it, a day later the next one signs. So nobody ever meets a signature that it
does not know yet, and the bundle holds an authority until that has expired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

AUTHORITY_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=365)
BACKDATED = timedelta(minutes=5)
"""Certificates begin a little before they are made: clocks differ."""
LEARNING_TIME = timedelta(hours=24)
"""How long everyone has to learn of an authority before it signs."""


class Work(StrEnum):
    """One thing to do."""

    MAKE_AUTHORITY = "made a certificate authority"
    ANNOUNCE_AUTHORITY = "made the next certificate authority, to be trusted beside the present one"
    PROMOTE_AUTHORITY = "let the next certificate authority sign from now on"
    DROP_AUTHORITY = "took an authority out of the bundle"
    SIGN = "made etcd's certificate"
    MAKE_PASSWORD = "made the root password"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is decided on. Keys are named by the hash of their public half."""

    key: str
    issuer_key: str
    begins: datetime
    ends: datetime
    names: frozenset[str] = frozenset()

    def ageing(self, now: datetime) -> bool:
        """Whether less than a third of its life is left."""
        return (self.ends - now) * 3 < self.ends - self.begins


@dataclass(frozen=True, slots=True)
class Held:
    """What there is. A certificate that is unreadable, or whose key is not there, is None.

    Args:
        bundle: the authorities that are trusted.
        signing: the key that signs.
        following: the key that will sign next; its authority is in the bundle.
        leaf: etcd's certificate.
        password: whether there is a user, root, and its password.
    """

    bundle: tuple[Certificate, ...] = ()
    signing: str | None = None
    following: str | None = None
    leaf: Certificate | None = None
    password: bool = False

    def authority(self, key: str | None, now: datetime) -> Certificate | None:
        """The valid authority with this key."""
        found = (one for one in self.bundle if one.key == key and one.ends > now)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The names that etcd is reached by. `learnt`: its members trust each authority already."""

    names: frozenset[str]
    learnt: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done, and the reason."""

    work: Work
    reason: str


def changes(held: Held, wanted: Wanted, now: datetime) -> tuple[Change, ...]:
    """What is due now, in the order in which it is to be done."""
    return tuple(_changes(held, wanted, now))


def _changes(held: Held, wanted: Wanted, now: datetime) -> Iterator[Change]:
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
    fault = _fault(held.leaf, issuer, wanted.names, now)
    if fault:
        yield Change(Work.SIGN, fault)
    if not held.password:
        yield Change(Work.MAKE_PASSWORD, "there was none")


def _authority_change(held: Held, wanted: Wanted, now: datetime) -> Change | None:
    signing = held.authority(held.signing, now)
    following = held.authority(held.following, now)
    if signing is None and following is None:
        reason = "none in the bundle is valid and has its key" if held.bundle else "there was none"
        return Change(Work.MAKE_AUTHORITY, reason)
    if signing is None:
        return Change(Work.PROMOTE_AUTHORITY, "the present one has expired or lost its key")
    if following is not None:
        known_since = following.begins + BACKDATED
        if now - known_since < LEARNING_TIME or not wanted.learnt:
            return None
        return Change(Work.PROMOTE_AUTHORITY, f"it has been trusted since {_day(known_since)}")
    if signing.ageing(now):
        return Change(Work.ANNOUNCE_AUTHORITY, f"the present one ends on {_day(signing.ends)}")
    return None


def _fault(
    leaf: Certificate | None, issuer: str | None, names: frozenset[str], now: datetime
) -> str:
    """Why a certificate must be made anew; empty when it is good."""
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
