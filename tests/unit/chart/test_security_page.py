"""docs/security.md: each test that it names exists, and its statement of rights is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
GOLDEN = ROOT / "tests" / "unit" / "chart" / "golden" / "rbac.yaml"
"""Rights of the rendered chart: an integration test compares them."""

NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
SCOPES = {
    "ClusterRole/-/elasticjob-system-elasticjob-operator": "cluster",
    "ClusterRole/-/elasticjob-system-elasticjob-operator-jobs": "served",
    "Role/elasticjob-system/elasticjob-operator-lease": "release",
    "ClusterRole/-/elasticjob-system-elasticjob-binder": "binder",
}
"""Scope in the statement, by role."""

Right = tuple[str, str, frozenset[str]]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_named_test_exists(file: str, test: str) -> None:
    assert (ROOT / "tests" / file).is_file(), f"docs/security.md names tests/{file}"
    assert test in functions(file), f"docs/security.md names {test}, which tests/{file} lacks"


def test_every_defence_names_a_test() -> None:
    section = PAGE.partition("\n## Defences\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if line != "| claim | test |"]
    assert len(rows) > 20
    for row in rows:
        claim, shown = row.strip("| ").split(" | ")
        assert re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", shown), claim


def test_names_of_tests_have_one_form() -> None:
    assert not re.findall(r"`tests/[^`]+`", PAGE)


def rights(scope: str, rules: list[dict[str, Any]]) -> Iterator[Right]:
    """Yield each right: scope, resource as `plural.group/name`, and its verbs."""
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                plural, slash, subresource = resource.partition("/")
                full = f"{plural}.{group}" if group else plural
                full += slash + subresource
                for name in rule.get("resourceNames", [""]):
                    yield scope, f"{full}/{name}" if name else full, frozenset(rule["verbs"])


def stated() -> set[Right]:
    row = re.compile(r"\| (cluster|served|release|binder) \| `([^`]+)` \| ([a-z, ]+) \|")
    found = (row.match(line) for line in PAGE.splitlines())
    return {(m[1], m[2], frozenset(m[3].split(", "))) for m in found if m}


def test_statement_of_rights_equals_rendered_rights() -> None:
    golden = yaml.safe_load(GOLDEN.read_text())
    everywhere = golden["everywhere"]
    held = {right for role, scope in SCOPES.items() for right in rights(scope, everywhere[role])}
    assert stated() == held


def test_operator_with_namespace_list_has_no_right_beyond_the_statement() -> None:
    known = {(resource, verbs) for _, resource, verbs in stated()}
    listed = yaml.safe_load(GOLDEN.read_text())["in one namespace"]
    for role, rules in listed.items():
        if "operator" in role:
            found = {(resource, verbs) for _, resource, verbs in rights("", rules)}
            assert found <= known, role


def test_every_role_of_an_identity_with_a_token_is_stated_or_only_of_certificates() -> None:
    everywhere = yaml.safe_load(GOLDEN.read_text())["everywhere"]
    people = {
        f"ClusterRole/-/elasticjob-system-elasticjob-{role}" for role in ("view", "edit", "admin")
    }
    rest = set(everywhere) - set(SCOPES) - people
    assert rest == {
        "Role/elasticjob-system/elasticjob-certificates",
        "Role/elasticjob-system/elasticjob-certificates-hook",
    }
