"""Generator of the CustomResourceDefinition and its structural schema from the models.

`python -m elasticjob_operator.model.crdgen` writes it; with `--check` it fails if the file is
out of date. A structural schema gives every node one type and has no references: no `$ref`,
no `anyOf`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from elasticjob_operator.model.immutable import IMMUTABLE, IMMUTABLE_BY_STATUS, Immutable
from elasticjob_operator.model.job import GROUP, KIND, PLURAL, VERSION, ElasticJob
from elasticjob_operator.model.problems import Location
from elasticjob_operator.model.rules import RULES, Rule
from elasticjob_operator.model.template_schema import template_schema

Schema = dict[str, Any]

_KEPT = (
    "type",
    "format",
    "description",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "pattern",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-validations",
)


def structural_schema() -> Schema:
    """Return the whole `openAPIV3Schema`."""
    root = ElasticJob.model_json_schema(by_alias=True, mode="validation")
    schema = _structural(root, root.get("$defs", {}))
    fields = schema["properties"]
    for name in ("apiVersion", "kind"):
        fields[name] = {"type": "string"}
    name = fields["metadata"]["properties"]["name"]
    # A CRD may restrict only name and generateName in metadata.
    fields["metadata"] = {
        "type": "object",
        "properties": {"name": {key: name[key] for key in ("type", "maxLength", "pattern")}},
    }
    spec = fields["spec"]["properties"]
    spec["template"] = _restricted(template_schema(), spec["template"])
    fields["spec"]["x-kubernetes-validations"] = _validations((*RULES, *IMMUTABLE))
    schema["x-kubernetes-validations"] = _validations(IMMUTABLE_BY_STATUS)
    fields["status"] = _without_defaults(fields["status"])
    schema["required"] = ["spec"]
    schema.pop("default", None)
    return schema


def _without_defaults(schema: Schema) -> Schema:
    """Remove defaults: the API server must not add values that the operator has not observed."""
    plain: Schema = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in plain:
        fields = plain["properties"].items()
        plain["properties"] = {name: _without_defaults(value) for name, value in fields}
    if "items" in plain:
        plain["items"] = _without_defaults(plain["items"])
    return plain


def _restricted(kubernetes: Schema, ours: Schema) -> Schema:
    """Return Kubernetes' schema of a node with the restrictions that the models add."""
    node = {**kubernetes, **{key: value for key, value in ours.items() if key not in _SHAPE}}
    required = {*kubernetes.get("required", ()), *ours.get("required", ())}
    if required:
        node["required"] = sorted(required)
    for name, child in ours.get("properties", {}).items():
        node["properties"][name] = _restricted(node["properties"][name], child)
    for part in ("items", "additionalProperties"):
        if part in ours:
            node[part] = _restricted(node[part], ours[part])
    return node


_SHAPE = (
    "properties",
    "items",
    "additionalProperties",
    "required",
    "x-kubernetes-preserve-unknown-fields",
)


def _validations(rules: Sequence[Rule | Immutable]) -> list[Schema]:
    return [
        {"rule": rule.cel, "message": rule.message, "fieldPath": _cel_path(rule.field)}
        for rule in rules
    ]


def _cel_path(location: Location) -> str:
    return "".join(f".{step}" for step in location)


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    node = _resolved(node, definitions)
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    if schema.get("default") is None:
        schema.pop("default", None)
    elif schema.get("type") == "object":
        # The defaults of its fields apply; repeating them here would let them drift apart.
        schema["default"] = {}
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    if "enum" in schema and "type" not in schema:
        schema["type"] = "string"
    if schema.get("type") == "integer":
        schema.setdefault("format", "int32")
    if schema.get("type") == "array":
        schema["items"] = _structural(node["items"], definitions)
    if schema.get("type") == "object":
        _add_fields(schema, node, definitions)
    return schema


def _add_fields(schema: Schema, node: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    extra = node.get("additionalProperties")
    if "properties" in node:
        schema["properties"] = {
            name: _structural(value, definitions) for name, value in node["properties"].items()
        }
        if extra is True:
            schema["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(extra, Mapping):
        schema["additionalProperties"] = _structural(extra, definitions)
    else:
        schema["x-kubernetes-preserve-unknown-fields"] = True


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node with `$ref` resolved and `X or null` reduced to an optional X."""
    resolved = dict(node)
    while True:
        if "$ref" in resolved:
            name = resolved.pop("$ref").removeprefix("#/$defs/")
            # A field's own description takes precedence over that of its type.
            resolved = {**definitions[name], **resolved}
        elif "anyOf" in resolved:
            choices = [one for one in resolved.pop("anyOf") if one.get("type") != "null"]
            if len(choices) != 1:
                raise ValueError(f"a field must have one type besides null; got {choices}")
            resolved = {**choices[0], **resolved}
        elif "const" in resolved:
            resolved["enum"] = [resolved.pop("const")]
        else:
            return resolved


NAME = f"{PLURAL}.{GROUP}"
DEFAULT_FILE = Path("crds") / f"{NAME}.yaml"
HEADER = """\
# Generated from elasticjob_operator.model by `make generate`. Do not edit.
"""

_COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("Phase", "string", ".status.phase", 0),
    ("Rendezvous", "string", ".status.rendezvous.state", 0),
    ("Round", "integer", ".status.rendezvous.round", 0),
    ("Nodes", "integer", ".status.nodes", 0),
    ("Wanted", "integer", ".status.wantedNodes", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Min", "integer", ".spec.minNodes", 1),
    ("Max", "integer", ".spec.maxNodes", 1),
    ("Master", "string", ".status.rendezvous.master", 1),
    ("Cause", "string", ".status.rendezvous.cause.kind", 1),
    ("Failure", "string", ".status.lastFailure.class", 1),
    ("Losses", "integer", ".status.interruptions.losses", 1),
    ("Preemptions", "integer", ".status.interruptions.preemptions", 1),
    ("Recovery ms", "integer", ".status.rounds[-1:].recoveryMs", 1),
)
"""Name, type, path and priority of printer columns; `-o wide` shows those with priority 1."""


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition as a document."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "elasticjob",
                "shortNames": ["ej"],
                "categories": ["all", "elasticjob"],
            },
            "scope": "Namespaced",
            "versions": [_version(structural_schema())],
        },
    }


def _version(schema: Schema) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path}
            | ({"priority": priority} if priority else {})
            for name, kind, path, priority in _COLUMNS
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes",
                "statusReplicasPath": ".status.pods.active",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": schema},
    }


class _Dumper(yaml.SafeDumper):
    """YAML dumper without anchors, which would tie equal parts of the schema together."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    """Return the CustomResourceDefinition as the text of its file."""
    text = yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return HEADER + text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or with `--check` print its differences; return the exit status."""
    parser = argparse.ArgumentParser(prog="crdgen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the file is not current")
    parser.add_argument("--output", type=Path, default=DEFAULT_FILE, help="the file to write")
    options = parser.parse_args(arguments)
    wanted = render()
    if not options.check:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(wanted, encoding="utf-8")
        return 0
    found = options.output.read_text(encoding="utf-8") if options.output.exists() else ""
    if found == wanted:
        return 0
    names = (str(options.output), "generated from the models")
    difference = difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), *names)
    sys.stdout.writelines(difference)
    sys.stderr.write(f"{options.output} must be generated again: run `make generate`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
