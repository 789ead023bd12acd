"""Reference pages, alerts and runbook: complete, current, and about things that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from elasticjob_cli.main import COMMANDS
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.crdgen import structural_schema
from scripts import reference
from tests.paths import ROOT

MANIFEST: dict[str, Any] = yaml.safe_load(reference.EXAMPLE.read_text())
ALERTS = reference.alerts()
NAMES = [rule["alert"] for rule in ALERTS]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in RUNBOOK.split("\n## ")[1:]}


def spec_fields() -> list[tuple[str, dict[str, Any]]]:
    schema = structural_schema()["properties"]["spec"]
    found = reference.fields(schema, "spec")
    return [(path, dict(field)) for path, field, _ in found if path not in reference.LEFT_OUT]


def test_pages_are_current() -> None:
    stale = [path for path, text in reference.wanted().items() if path.read_text() != text]
    assert stale == [], "run `make generate`"


def test_manifest_with_all_fields_is_valid() -> None:
    assert ElasticJob.model_validate(MANIFEST).metadata.name == "all-fields"


@pytest.mark.parametrize("path", [path for path, _ in spec_fields()])
def test_field_has_type_meaning_and_an_example_that_is_no_default(path: str) -> None:
    field = dict(spec_fields())[path]
    assert field["description"]
    shown = reference.example(MANIFEST, path)
    assert shown is not None, f"add {path} to examples/all-fields.yaml"
    enforced = path.rpartition(".")[2] == "backend"  # no other one has users and certificates
    if "default" in field and not enforced:
        assert shown != json.dumps(field["default"])


def test_every_command_has_a_section_with_its_options() -> None:
    text = reference.commands()
    assert re.findall(r"^## ([a-z]+)", text, re.M) == list(COMMANDS)
    sections = dict(re.findall(r"^## ([a-z]+)(.*?)(?=^## |\Z)", text, re.M | re.S))
    for name, section in sections.items():
        assert f"Usage: elasticjob {name} " in section
        assert "-h, --help" in section
    assert "--nproc-per-node" in sections["run"]


def test_every_metric_has_a_row_with_its_labels() -> None:
    text = reference.metrics()
    for family in Metrics().registry.collect():
        assert re.search(rf"^\| `{family.name}(_total)?` \| {family.type} \|", text, re.M)
    assert "| `elasticjob_recovery_seconds` | histogram | `part`, `cause` |" in text
    assert "| `elasticjob_jobs` | gauge | `phase` |" in text


def test_alerts_have_distinct_names() -> None:
    assert len(set(NAMES)) == len(NAMES) > 0


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_alert_has_a_section_with_meaning_effect_and_steps(rule: dict[str, Any]) -> None:
    section = SECTIONS[rule["alert"]]
    for part in ("**Meaning.**", "**Effect.**", "**Steps.**"):
        assert section.count(part) == 1
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["annotations"]["summary"].endswith(".")


def test_runbook_has_no_section_of_a_removed_alert() -> None:
    assert {name for name in SECTIONS if name.startswith("ElasticJob")} == set(NAMES)


def test_alerts_query_existing_metrics() -> None:
    series = {
        sample
        for family in Metrics().registry.collect()
        for sample in (family.name, f"{family.name}_total", f"{family.name}_bucket")
    }
    asked = {name for rule in ALERTS for name in re.findall(r"\belasticjob_\w+", rule["expr"])}
    assert asked
    assert asked <= series


def test_commands_of_the_runbook_name_existing_objects() -> None:
    """Values of the chart that the steps name exist."""
    values = yaml.safe_load((ROOT / "charts" / "elasticjob" / "values.yaml").read_text())
    named = set(re.findall(r"`((?:etcd|operator|metrics|externalEtcd)\.[A-Za-z.]+)`", RUNBOOK))
    assert named
    for path in named:
        found = values
        for part in path.split("."):
            assert part in found, path
            found = found[part]
