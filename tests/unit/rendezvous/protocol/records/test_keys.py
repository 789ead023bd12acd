"""Key names: built and read back."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix

KEYS = Keys("/elasticjob/team/uid/3/")


def test_prefix_names_namespace_job_and_incarnation() -> None:
    assert job_prefix("team", "uid", 3) == KEYS.prefix


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (KEYS.bounds, ("bounds",)),
        (KEYS.round, ("round",)),
        (KEYS.seats, ("roster",)),
        (KEYS.session("m", "s"), ("members", "m", "s")),
        (KEYS.roster(7), ("roster", "7")),
        (KEYS.history(7), ("history", "7")),
        (KEYS.failure(7, "m"), ("failures", "7", "m")),
        (KEYS.done(7, "m"), ("done", "7", "m")),
        ("/elasticjob/team/uid/30/state/round", ()),
        ("/elasticjob/team/other/3/state/round", ()),
    ],
)
def test_built_key_is_parsed_back(key: str, parts: tuple[str, ...]) -> None:
    assert KEYS.parts(key) == parts


def test_prefixes_cover_their_keys_only() -> None:
    assert Range(KEYS.sessions("m"), prefix=True).covers(KEYS.session("m", "s"))
    assert not Range(KEYS.sessions("m"), prefix=True).covers(KEYS.session("m2", "s"))
    assert Range(KEYS.failures(1), prefix=True).covers(KEYS.failure(1, "m"))
    assert not Range(KEYS.failures(1), prefix=True).covers(KEYS.failure(10, "m"))
    assert not Range(KEYS.dones(1), prefix=True).covers(KEYS.done(12, "m"))


@pytest.mark.parametrize("key", [KEYS.bounds, KEYS.round, KEYS.seats])
def test_keys_followed_by_every_member_share_one_prefix(key: str) -> None:
    assert Range(KEYS.state, prefix=True).covers(key)
    assert not Range(KEYS.members, prefix=True).covers(key)
    assert not Range(KEYS.state, prefix=True).covers(KEYS.roster(1))


def test_prefix_without_slash_is_refused() -> None:
    with pytest.raises(ValueError, match="must end with '/'"):
        Keys("/elasticjob/team/uid/3")
