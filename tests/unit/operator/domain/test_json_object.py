"""Fields of JSON objects that were sent and are not stored."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.json_object import Json, dropped_fields, is_part

ROUNDS: Json = {"rounds": [{"round": 1, "cause": "start"}, {"round": 2, "cause": "loss"}]}
PRUNED: Json = {"rounds": [{"round": 1}, {"round": 2}]}


@pytest.mark.parametrize(
    ("patch", "stored", "paths"),
    [
        ({"nodes": 2}, {"nodes": 2}, []),
        ({"nodes": 2}, {}, ["nodes"]),
        ({"nodes": None, "pods": {"ready": None}}, {"pods": {"failed": 1}}, []),
        ({"pods": {"ready": 1}}, {"pods": {"failed": 1}}, ["pods.ready"]),
        (ROUNDS, PRUNED, ["rounds[].cause"] * 2),
        (ROUNDS, {"rounds": []}, []),
    ],
)
def test_fields_that_a_patch_sets_and_the_object_lacks_are_named(
    patch: Json, stored: Json, paths: list[str]
) -> None:
    assert list(dropped_fields(patch, stored)) == paths


@pytest.mark.parametrize(
    ("stored", "part"),
    [
        (ROUNDS, True),
        (PRUNED, True),
        ({}, True),
        ({"rounds": PRUNED["rounds"][:1]}, False),
        ({"rounds": [{"round": 1}, {"round": 3}]}, False),
        ({**ROUNDS, "nodes": 0}, False),
        (None, False),
    ],
)
def test_part_of_an_object_lacks_only_fields(stored: object, part: bool) -> None:
    assert is_part(stored, ROUNDS) is part
