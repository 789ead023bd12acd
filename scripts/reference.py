"""Generator of the reference pages: `python -m scripts.reference [--check]`.

`docs/api.md` has every field of the spec and the status, from the models; `docs/commands.md` every
command, from its own help; `docs/metrics.md` every metric of the operator and every alert of the
chart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model.crdgen import structural_schema
from scripts.environment import ROOT

DOCS = ROOT / "docs"
EXAMPLE = ROOT / "examples" / "all-fields.yaml"
ALERTS = ROOT / "charts" / "elasticjob" / "files" / "alerts.yaml"
WIDTH = 96
TEMPLATE = "template"
LEFT_OUT = ("spec.runPolicy.schedulingPolicy.queue", "spec.runPolicy.schedulingPolicy.minAvailable")
"""Fields that must be absent, so that no example has them."""
_MARK = "Written by `make generate`; do not edit.\n"

Schema = Mapping[str, Any]


def fields(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    """Yield each field below a schema: its path, its own schema, True if it is required.

    The pod template is one field: Kubernetes documents its parts.
    """
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, field, name in required
        if here != f"spec.{TEMPLATE}":
            yield from fields(field, here)
            yield from fields(field.get("items", {}), f"{here}[]")
            if isinstance(inner := field.get("additionalProperties"), Mapping):
                yield from fields(inner, f"{here}.*")


def kind(field: Schema) -> str:
    """Return the type of a field, with its legal values."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    name = str(field["type"])
    if name == "array":
        return f"list of {kind(field['items'])}"
    if isinstance(inner := field.get("additionalProperties"), Mapping):
        return f"map of {kind(inner)}"
    least, most = field.get("minimum"), field.get("maximum")
    if least is not None or most is not None:
        name += f", {'' if least is None else least} to {'' if most is None else most}".rstrip()
    return f"{field['format']}" if field.get("format") == "date-time" else name


ALTERNATIVES = {
    "spec.recovery.snapshots.intervalSeconds": 30,
    "spec.recovery.snapshots.storage.path": "/data/snapshots",
}
"""Examples of fields that exclude another one of the manifest with all fields."""


def example(document: Any, path: str) -> str | None:
    """Return the value of a field in a manifest as YAML, None if the manifest lacks it."""
    if path in ALTERNATIVES:
        return json.dumps(ALTERNATIVES[path])
    for name in path.split("."):
        if not isinstance(document, dict) or name not in document:
            return None
        document = document[name]
    return "" if isinstance(document, dict) else json.dumps(document)


def cell(text: str) -> str:
    """Return a text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def code(text: str | None) -> str:
    """Return a value as code, nothing for an empty one."""
    return f"`{cell(text)}`" if text else ""


def api() -> str:
    """Return the page of the fields."""
    schema = structural_schema()["properties"]
    manifest = yaml.safe_load(EXAMPLE.read_text())
    lines = [
        "# Fields of an ElasticJob\n\nFields of `spec` and `status`, `elasticjob.dev/v1alpha1`. ",
        _MARK,
        "\n`kubectl explain elasticjob.spec` has the same texts, and all fields of the pod ",
        "template. Bounds and rules between fields are enforced by the API server. The examples ",
        "are from [all-fields.yaml](../examples/all-fields.yaml).\n\n## Spec\n\n",
        "| field | type | default | example | meaning |\n|---|---|---|---|---|\n",
    ]
    for path, field, is_required in fields(schema["spec"], "spec"):
        default = "required" if is_required else ""
        if field.get("default") not in (None, {}, []):
            default = code(json.dumps(field["default"]))
        shown = code(example(manifest, path))
        text = cell(field.get("description", ""))
        lines.append(f"| `{path}` | {kind(field)} | {default} | {shown} | {text} |\n")
    lines.append("\n## Status\n\nThe operator writes it.\n\n| field | type | meaning |\n")
    lines.append("|---|---|---|\n")
    for path, field, _ in fields(schema["status"], "status"):
        lines.append(f"| `{path}` | {kind(field)} | {cell(field.get('description', ''))} |\n")
    return "".join(lines)


def commands() -> str:
    """Return the page of the commands: the help of each, at a fixed width."""
    os.environ["TERMINAL_WIDTH"] = str(WIDTH)  # read when typer is imported
    os.environ.pop("COLUMNS", None)
    from typer.main import get_command

    from elasticjob_cli.main import CLUSTER_COMMANDS, COMMANDS, HELPS, application

    lines = [
        "# Commands\n\nEvery command of `elasticjob` with its options. ",
        _MARK,
        "\n[cli.md](cli.md) has the jobs on which they act. `kubectl elasticjob` has those marked ",
        "with a star, for jobs of a cluster.\n",
    ]
    for name in COMMANDS:
        group: Any = get_command(application(name))
        command = group.commands[name]
        options = {"resilient_parsing": True, "terminal_width": WIDTH, "max_content_width": WIDTH}
        parent = group.make_context("elasticjob", [name], **options)
        context = command.make_context(name, [], parent=parent, **options)
        star = " \\*" if name in CLUSTER_COMMANDS else ""
        text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        lines.append(f"\n## {name}{star}\n\n{HELPS[name]}\n\n```text\n{text.strip()}\n```\n")
    return "".join(lines)


def alerts() -> list[dict[str, Any]]:
    """Return the alerts of the chart's PrometheusRule."""
    found = yaml.safe_load(ALERTS.read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def metrics() -> str:
    """Return the page of the metrics and alerts."""
    lines = [
        "# Metrics and alerts\n\n",
        "Metrics of the operator's port `metrics`, and the chart's alerts. ",
        _MARK,
        "\n| value of the chart | object |\n|---|---|\n",
        "| `metrics.serviceMonitor.enabled` | ServiceMonitors: Prometheus scrapes the metrics |\n",
        "| `metrics.dashboard.enabled` | ConfigMap: Grafana [dashboard](dashboard.md#grafana) |\n",
        "| `metrics.prometheusRule.enabled` | PrometheusRule: the alerts |\n",
        "\n## Metrics\n\n",
        "[explain.md](explain.md#terms) has the meaning of causes, parts and results.\n\n",
        "| metric | type | labels | meaning |\n|---|---|---|---|\n",
    ]
    found = Metrics()
    labels = {
        metric.describe()[0].name: metric._labelnames
        for metric in vars(found).values()
        if hasattr(metric, "_labelnames")
    }
    for family in found.registry.collect():
        names = labels.get(family.name, getattr(family, "_labelnames", ()))
        suffix = "_total" if family.type == "counter" else ""
        shown = ", ".join(f"`{name}`" for name in names)
        about = cell(family.documentation)
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {shown} | {about} |\n")
    lines.append("\n## Alerts\n\n| alert | severity | for | meaning |\n|---|---|---|---|\n")
    for rule in alerts():
        name, about = rule["alert"], rule["annotations"]["summary"]
        link = f"[{name}](runbook.md#{name.lower()})"
        lines.append(f"| {link} | {rule['labels']['severity']} | {rule['for']} | {cell(about)} |\n")
    return "".join(lines)


def wanted() -> dict[Path, str]:
    """Return the content of each page."""
    pages = {"api.md": api, "commands.md": commands, "metrics.md": metrics}
    return {DOCS / name: page() for name, page in pages.items()}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    check = parser.parse_args().check
    failed = 0
    for path, text in wanted().items():
        if path.exists() and path.read_text() == text:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run `make generate`", file=sys.stderr)
            failed = 1
        else:
            path.write_text(text)
    return failed


if __name__ == "__main__":
    sys.exit(main())
