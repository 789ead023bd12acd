"""Schema of Kubernetes' PodTemplateSpec, and the faults of a template against it.

`pod_template.json` is generated from the API server's OpenAPI document by `make template-schema`. The
CRD contains the same schema, so a template without faults here is accepted there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
SCHEMA_FILE = Path(__file__).with_name("pod_template.json")


@lru_cache(maxsize=1)
def _document() -> Schema:
    found: Schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return found


def kubernetes_version() -> str:
    """Return the Kubernetes version of the schema, such as `v1.36.3`."""
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
