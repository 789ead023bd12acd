"""Schema of Kubernetes' PodTemplateSpec, and the faults of a template against it.

`pod_template.json` is generated from the API server's OpenAPI document by `make template-schema`.
The CRD contains the same schema, so the API server finds the same faults.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from elasticjob_operator.model.problems import (
    Location,
    Problem,
    field_path,
    got,
    not_a_string,
    not_an_integer,
    not_of_type,
    not_one_of,
    unknown_field,
)
from elasticjob_rendezvous.protocol.text import echoed

Schema = dict[str, Any]
SCHEMA_FILE = Path(__file__).with_name("pod_template.json")


@lru_cache(maxsize=1)
def _document() -> Schema:
    found: Schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return found


def kubernetes_version() -> str:
    """Return the Kubernetes version of the schema, such as `1.36`."""
    return str(_document()["kubernetes"])


@lru_cache(maxsize=1)
def _template() -> Schema:
    return _inlined({"$ref": _document()["root"]})


def template_schema() -> Schema:
    """Return the structural schema of a PodTemplateSpec, without references."""
    return copy.deepcopy(_template())


def _inlined(source: Schema, keys: Sequence[str] = ()) -> Schema:
    """Return a node without references; `keys` are the fields by which its list is merged."""
    node = dict(source)
    if "$ref" in node:
        # A field's own description takes precedence over that of its type.
        return _inlined({**_document()["definitions"][node.pop("$ref")], **node}, keys)
    # The API server would write defaults into users' objects.
    node.pop("default", None)
    if fields := node.get("properties"):
        node["properties"] = {name: _inlined(one) for name, one in fields.items()}
        # A key of a list must be present: given, or by the default that it has in a pod.
        defaults = {key: fields[key]["default"] for key in keys if "default" in fields[key]}
        for key, value in defaults.items():
            node["properties"][key]["default"] = value
        required = {*node.get("required", ()), *keys} - set(defaults)
        if required:
            node["required"] = sorted(required)
    if "items" in node:
        node["items"] = _inlined(node["items"], node.get("x-kubernetes-list-map-keys", ()))
    if "additionalProperties" in node:
        node["additionalProperties"] = _inlined(node["additionalProperties"])
    return node


def template_problems(template: Any, location: Location) -> list[Problem]:
    """Return the faults of a template's fields and types; `location` is the template's own.

    Nulls are absent fields, as for the API server.
    """
    return [Problem.at(at, message) for at, message in _faults(_template(), template, location, ())]


Fault = tuple[Location, str]
_Parents = tuple[tuple[Location, Schema], ...]
"""Location and schema of the objects around a value, from the outside."""


def _faults(node: Schema, value: Any, location: Location, parents: _Parents) -> Iterator[Fault]:
    if node.get("x-kubernetes-int-or-string"):
        yield from _int_or_string_faults(node, value, location)
        return
    match node["type"]:
        case "object":
            yield from _object_faults(node, value, location, parents)
        case "array":
            yield from _array_faults(node, value, location, parents)
        case "string":
            yield from _string_faults(node, value, location)
        case "integer":
            yield from _integer_faults(node, value, location)
        case "boolean":
            if not isinstance(value, bool):
                yield location, not_of_type("true or false", value)
        case other:
            raise ValueError(f"{SCHEMA_FILE.name} has a field of unknown type {other}")


def _object_faults(
    node: Schema, value: Any, location: Location, parents: _Parents
) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield location, not_of_type("a mapping", value)
        return
    fields: Schema = node.get("properties", {})
    values: Schema | None = node.get("additionalProperties")
    around = (*parents, (location, node))
    for name, child in value.items():
        if name in fields:
            if child is not None:
                yield from _faults(fields[name], child, (*location, name), around)
        elif values is not None:
            yield from _faults(values, child, (*location, name), around)
        else:
            place = _place_of(name, around)
            yield (*location, name), unknown_field(name, list(fields), place)
    for name in node.get("required", ()):
        if value.get(name) is None:
            yield (*location, name), "must be set"


def _place_of(name: str, around: _Parents) -> str:
    """Return the path of an object that has a field of this name: one around, or a part of the
    innermost; empty if there is none."""
    for location, node in reversed(around[:-1]):
        if name in node.get("properties", ()):
            return field_path(location)
    location, node = around[-1]
    for part, child in node.get("properties", {}).items():
        inside = child.get("items", child)
        if name in inside.get("properties", ()):
            return field_path((*location, part)) + ("[]" if inside is not child else "")
    return ""


def _array_faults(
    node: Schema, value: Any, location: Location, parents: _Parents
) -> Iterator[Fault]:
    if not isinstance(value, list):
        yield location, not_of_type("a list", value)
        return
    for index, item in enumerate(value):
        yield from _faults(node["items"], item, (*location, index), parents)
    if keys := node.get("x-kubernetes-list-map-keys"):
        yield from _repeated(value, keys, node["items"]["properties"], location)


def _repeated(
    items: list[Any], keys: Sequence[str], fields: Schema, location: Location
) -> Iterator[Fault]:
    """Yield the items of a list whose keys an earlier item has."""
    seen: set[str] = set()
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            continue
        given = [(item[key], key) for key in keys if item.get(key) is not None]
        found = repr([item.get(key) or fields[key].get("default") for key in keys])
        if found in seen:
            shown = " and ".join(f"{key} {echoed(value)}" for value, key in given)
            yield (*location, index), f"must not repeat {shown}: each may be given once"
        seen.add(found)


def _string_faults(node: Schema, value: Any, location: Location) -> Iterator[Fault]:
    words: list[str] = [word for word in node.get("enum", ()) if word]
    if not isinstance(value, str):
        yield location, not_one_of(words, value) if words else not_a_string(value)
    elif words and value not in node["enum"]:
        yield location, not_one_of(words, value)


_BITS = {"int32": 31, "int64": 63}


def _integer_faults(node: Schema, value: Any, location: Location) -> Iterator[Fault]:
    if not _is_integer(value):
        yield location, not_an_integer(value)
        return
    most = 2 ** _BITS[node["format"]]
    if not -most <= value < most:
        bound = f"at most {most - 1}" if value > 0 else f"at least {-most}"
        yield location, f"must be {bound}; {got(value)}"


def _is_integer(value: Any) -> bool:
    """Return True for integers, also such as 2.0, which JSON does not distinguish."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def _int_or_string_faults(node: Schema, value: Any, location: Location) -> Iterator[Fault]:
    pattern: str | None = node.get("pattern")
    if isinstance(value, str):
        if pattern and not re.search(pattern.replace("$", r"\Z"), value):
            yield location, f"must be a quantity such as 2, 500m or 4Gi; {got(value)}"
    elif isinstance(value, float) and not value.is_integer():
        yield location, f"must be an integer or a string; {got(value)}: put it in quotes"
    elif not _is_integer(value):
        expected = "a quantity such as 2, 500m or 4Gi" if pattern else "an integer or a string"
        yield location, not_of_type(expected, value)
