"""Data of the Secret with etcd's certificates: parsing, and the changes `core` decided on.

The only module that spells the names of its keys.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import assert_never

from elasticjob_operator import authority
from elasticjob_operator.authority import Pair
from elasticjob_operator.core.certificates import Change, Held, Wanted, Work
from elasticjob_rendezvous.etcd.users import ROOT

BUNDLE = "ca.crt"
"""Key of the bundle of all trusted authorities."""
SIGNING_KEY = "ca.key"
FOLLOWING_KEY = "ca-next.key"
"""Key of the next authority's private key; present only while that authority is trusted but does
not sign yet."""
CERT, KEY = "tls.crt", "tls.key"
USER, PASSWORD = "user", "password"
"""Keys of the credentials of etcd's root user, which the operator reads."""

PASSWORD_BYTES = 32

Data = dict[str, bytes]


def held(data: Mapping[str, bytes]) -> Held:
    """Parse a Secret's data."""
    leaf = authority.read(data.get(CERT, b""))
    if leaf is not None and leaf.key != authority.key_of(data.get(KEY, b"")):
        leaf = None
    read = (authority.read(block) for block in authority.blocks(data.get(BUNDLE, b"")))
    return Held(
        bundle=tuple(one for one in read if one is not None),
        signing=authority.key_of(data.get(SIGNING_KEY, b"")),
        following=authority.key_of(data.get(FOLLOWING_KEY, b"")),
        leaf=leaf,
        password=data.get(USER) == ROOT.encode() and bool(data.get(PASSWORD)),
    )


def applied(
    data: Mapping[str, bytes], due: Sequence[Change], wanted: Wanted, now: datetime
) -> Data:
    """Return a copy of the data with the due changes applied."""
    after = dict(data)
    for change in due:
        _apply(after, change.work, wanted, now)
    return after


def _apply(data: Data, work: Work, wanted: Wanted, now: datetime) -> None:
    bundle = authority.blocks(data.get(BUNDLE, b""))
    match work:
        case Work.MAKE_AUTHORITY:
            made = authority.new_authority(now)
            data[BUNDLE] = b"".join([made.cert, *bundle])
            data[SIGNING_KEY] = made.key
            data.pop(FOLLOWING_KEY, None)
        case Work.ANNOUNCE_AUTHORITY:
            made = authority.new_authority(now)
            data[BUNDLE] = b"".join([*bundle, made.cert])
            data[FOLLOWING_KEY] = made.key
        case Work.PROMOTE_AUTHORITY:
            data[SIGNING_KEY] = data.pop(FOLLOWING_KEY)
        case Work.DROP_AUTHORITY:
            data[BUNDLE] = b"".join(block for block in bundle if not _expired(block, now))
        case Work.SIGN:
            pair = authority.sign(_signing(data), wanted.names, now)
            data[CERT], data[KEY] = pair.cert, pair.key
        case Work.MAKE_PASSWORD:
            data[USER] = ROOT.encode()
            data[PASSWORD] = secrets.token_urlsafe(PASSWORD_BYTES).encode()
        case _:
            assert_never(work)


def _signing(data: Data) -> Pair:
    key = data[SIGNING_KEY]
    wanted = authority.key_of(key)
    for block in authority.blocks(data[BUNDLE]):
        found = authority.read(block)
        if found is not None and found.key == wanted:
            return Pair(block, key)
    raise AssertionError("the bundle always holds the authority that signs")


def _expired(block: bytes, now: datetime) -> bool:
    found = authority.read(block)
    return found is None or found.ends <= now
