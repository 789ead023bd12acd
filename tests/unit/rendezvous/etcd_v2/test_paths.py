"""Paths in etcd, and names that would not survive there."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.etcd_v2.core.records import Paths, is_keep_alive, rank_of


def test_paths_match_torch() -> None:
    paths = Paths.of("/torchelastic/p2p", "job-1")
    run = "/torchelastic/p2p/run_job-1"
    assert paths.run == f"{run}/"
    assert paths.rendezvous == f"{run}/rdzv"
    assert paths.counter == f"{run}/rdzv/version_counter"
    assert paths.active == f"{run}/rdzv/active_version"
    assert paths.version("3") == f"{run}/rdzv/v_3"
    assert paths.keep_alive("3", 12) == f"{run}/rdzv/v_3/rank_12"
    assert paths.extra_data("3") == f"{run}/rdzv/v_3/extra_data"
    assert paths.store("3") == f"{run}/rdzv/v_3/kv"
    assert paths.of_run("x/y") == paths.of_run("/x/y") == f"{run}/x/y"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("/a/b", "/a/b/"), ("/a/b/", "/a/b/"), ("a", "/a/"), ("/", "/"), ("", "/")],
)
def test_prefix_has_its_slashes(prefix: str, expected: str) -> None:
    assert Paths.of(prefix, "r").prefix == expected


@pytest.mark.parametrize(
    ("prefix", "run_id"),
    [
        ("/p", ""),
        ("/p", "a?b"),
        ("/p", "a\tb"),
        ("/p", "50%"),
        ("/p#", "r"),
        ("/p", "a/../b"),
        ("/p", "a/."),
        ("/p/..", "r"),
    ],
)
def test_names_changed_by_url_encoding_are_refused(prefix: str, run_id: str) -> None:
    with pytest.raises(ValueError, match=r"the (run id|etcd prefix) must not"):
        Paths.of(prefix, run_id)


def test_keep_alive_keys_are_distinguished_from_others() -> None:
    paths = Paths.of("/p", "r")
    assert is_keep_alive(paths.keep_alive("1", 0))
    assert not is_keep_alive(paths.extra_data("1"))
    assert not is_keep_alive(paths.store("1") + "/rank_0")
    assert rank_of(paths.keep_alive("1", 10)) == 10
    assert rank_of(paths.active) is None


@pytest.mark.parametrize("run_id", ["exp/", "a//b", "my run", "a.b", "..a", ".."])
def test_names_kept_by_etcd_are_allowed(run_id: str) -> None:
    assert Paths.of("/p", run_id).run == f"/p/run_{run_id}/"
