"""Consistency of the chart's files with each other and with their sources; no helm needed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model.crdgen import render
from scripts.chart import (
    BEGIN,
    CHART,
    DEFINITION,
    END,
    main,
    table,
    values,
    with_table,
    with_version,
)
from tests.paths import ROOT

VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES: dict[str, Any] = yaml.safe_load(VALUES_TEXT)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
KUBERNETES = ("#/$defs/podSecurityContext", "#/$defs/resources")
DASHBOARD: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def schema_paths(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield every value in the schema; types defined by Kubernetes count as one value."""
    for name, found in schema["properties"].items():
        here = f"{path}.{name}".lstrip(".")
        inner = resolve(found)
        if found.get("$ref") in KUBERNETES or "properties" not in inner:
            yield here
        else:
            yield from schema_paths(inner, here)


def test_schema_values_and_documented_values_are_equal() -> None:
    assert {value.path for value in values(VALUES_TEXT)} == set(schema_paths(SCHEMA)) - {"global"}


def test_schema_is_valid_and_accepts_the_defaults() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA, cls=jsonschema.Draft202012Validator)


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            yield path, schema
        for name, inner in schema.items():
            yield from objects(inner, f"{path}/{name}")


def test_schema_closes_every_object_with_known_fields() -> None:
    # Kubernetes fields that the schema does not name must remain possible here.
    allowed = {"/$defs/topologySpreadConstraints/items"}
    left_open = {
        p for p, found in objects(SCHEMA) if found.get("additionalProperties") is not False
    }
    assert left_open == allowed


def test_chart_crd_is_generated_from_the_models() -> None:
    assert (CHART / "files" / DEFINITION).read_text() == render()


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_chart_and_images_have_the_product_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    for path in ROOT.glob("Dockerfile.*"):
        assert f"\nARG VERSION={version}\n" in path.read_text()


def test_version_replaces_the_versions_of_chart_and_image_alone() -> None:
    assert with_version("apiVersion: v2\nversion: 0\nappVersion: 0\n", "1.2") == (
        "apiVersion: v2\nversion: 1.2\nappVersion: 1.2\n"
    )
    assert with_version("ARG BASE=a\nARG VERSION=0\n", "1.2") == "ARG BASE=a\nARG VERSION=1.2\n"
    with pytest.raises(ValueError, match="must have a line of the product's version"):
        with_version("FROM a\n", "1.2")


def test_value_is_documented_by_comment_above_it() -> None:
    source = "# About the file.\na:\n  # -- Said of b,\n  # on two lines.\n  b: {c: 1}\n  d: x\n"
    assert [(v.path, v.default, v.text) for v in values(source)] == [
        ("a.b", '{"c": 1}', "Said of b, on two lines.")
    ]


def test_comment_above_no_key_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"values\.yaml:2: a comment must stand above a key"):
        list(values("# -- Lost.\n\na: 1\n"))


def test_values_table_is_replaced_between_its_markers_only() -> None:
    readme = f"before\n{BEGIN}old\n{END}after\n"
    made = with_table(readme, "# -- One | two.\na: 1\n")
    assert made == (f"before\n{BEGIN}\n{table('# -- One | two.' + chr(10) + 'a: 1')}\n{END}after\n")
    assert "| `a` | `1` | One \\| two. |" in made
    with pytest.raises(ValueError, match=r"README\.md must have the lines"):
        with_table("nothing\n", "a: 1\n")


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def exposed() -> set[str]:
    """Return the series of the operator's metrics, by the names that Prometheus stores."""
    return {
        name
        for family in Metrics().registry.collect()
        for name in {
            "counter": [f"{family.name}_total"],
            "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
        }.get(family.type, [family.name])
    }


def test_dashboard_queries_existing_metrics() -> None:
    asked = {name for query in queries() for name in re.findall(r"\belasticjob_\w+", query)}
    variables = " ".join(v.get("query", "") for v in DASHBOARD["templating"]["list"])
    asked |= set(re.findall(r"\belasticjob_\w+", variables))
    assert asked <= exposed(), asked - exposed()


def test_dashboard_shows_every_metric() -> None:
    families = {family.name for family in Metrics().registry.collect()}
    assert {f for f in families if not any(f in query for query in queries())} == set()


def test_dashboard_shows_jobs_rounds_recovery_and_reconcile_time() -> None:
    asked = " ".join(queries())
    assert "by (phase) (elasticjob_jobs" in asked
    assert re.search(r"sum by \(cause\) \(rate\(elasticjob_rounds_total", asked)
    for name in ("recovery", "reconcile"):
        for quantile in (0.5, 0.9, 0.99):
            assert re.search(
                rf"histogram_quantile\({quantile}, sum by \(le\) \(rate\(elasticjob_{name}_", asked
            )


def test_dashboard_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + line)
        for panel in panels
        for column in range(panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24
