"""Structural schema of the API object, generated from the models.

A structural schema gives every node one type and has no references: no `$ref`, no `anyOf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.problems import Location
from elasticjob_operator.model.rules import IMMUTABLE, RULES, Immutable, Rule

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
    "pattern",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
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
    fields["spec"]["x-kubernetes-validations"] = _validations()
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


def _validations() -> list[Schema]:
    rules: tuple[Rule | Immutable, ...] = (*RULES, *IMMUTABLE)
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
