"""Candidates of shell completion for one word."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from elasticjob_cli.completion.candidates import Candidates, Place, candidates
from elasticjob_cli.main import CLUSTER_COMMANDS, HELPS
from tests.paths import ROOT

TABLE = json.loads((ROOT / "cli/elasticjob_cli/completion/table.json").read_text())
NAMES = {"job": ["digits", "digits-2", "other"], "context": ["prod"], "namespace": ["team-a"]}


class Names:
    """Lookup of fixed names that records the places it was asked for."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def __call__(self, kind: str, place: Place) -> Sequence[str]:
        self.places.append(place)
        return NAMES[kind]


def completed(line: str, lookup: Names | None = None) -> Candidates:
    *words, incomplete = line.split(" ")
    return candidates(words, incomplete, HELPS, TABLE, lookup or Names())


def values(line: str) -> list[str]:
    return [value for value, _ in completed(line).values]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("des", ["describe"]),
        ("--ver", ["--version"]),
        ("unknown ", []),
        ("get dig", ["digits", "digits-2"]),
        ("get digits ", []),
        ("delete digits ", ["digits-2", "other"]),
        ("get --out", ["--output"]),
        ("get -o y", ["yaml"]),
        ("get --output=j", ["--output=json"]),
        ("get --output = j", ["json"]),
        ("get --output =", ["wide", "json", "yaml", "name"]),
        ("get --output json --out", []),
        ("get --context ", ["prod"]),
        ("get -n team", ["team-a"]),
        ("get --cluster -n team-a oth", ["other"]),
        ("completion z", ["zsh"]),
    ],
)
def test_word_has_candidates(line: str, wanted: list[str]) -> None:
    assert values(line) == wanted


@pytest.mark.parametrize(
    "line",
    ["run tr", "run train.py --lr ", "run -- python ", "validate jo", "apply -f jo",
     "get --kubeconfig /e"],
)  # fmt: skip
def test_shell_completes_files(line: str) -> None:
    assert completed(line) == Candidates(files=True)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("get ", Place()),
        ("get --local ", Place(cluster=False)),
        ("get --cluster -n a ", Place(cluster=True, namespace="a")),
        ("get --context=prod ", Place(context="prod")),
        ("get --kubeconfig /k --context prod ", Place(context="prod", kubeconfig="/k")),
    ],
)
def test_names_are_those_of_the_place(line: str, place: Place) -> None:
    lookup = Names()
    completed(line, lookup)
    assert lookup.places == [place]


def test_plugin_has_no_local_commands() -> None:
    helps = {name: HELPS[name] for name in CLUSTER_COMMANDS}
    assert candidates(["run"], "", helps, TABLE, Names()) == Candidates()
    assert "run" not in [value for value, _ in candidates([], "", helps, TABLE, Names()).values]
