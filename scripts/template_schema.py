"""Generator of the pod template's schema: `python -m scripts.template_schema [OPENAPI]`.

OPENAPI is the document that an API server serves at /openapi/v3/api/v1. Without it, the API server
of the tests is started, whose version `scripts/cluster/kubernetes` pins.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticjob_operator.model.template_schema import SCHEMA_FILE

Schema = dict[str, Any]

OPENAPI_PATH = "/openapi/v3/api/v1"
ROOT_TYPE = "io.k8s.api.core.v1.PodTemplateSpec"
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_METADATA_FIELDS = (
    "annotations",
    "creationTimestamp",
    "generateName",
    "labels",
    "name",
    "namespace",
)
"""Fields of a template's metadata. The API server sets the others, or nobody does in a template."""
_POD_SPEC = "io.k8s.api.core.v1.PodSpec"
_NOT_IN_TEMPLATES = ("ephemeralContainers",)
"""Fields of a pod's spec that only a running pod may have."""
QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
_SPECIAL: dict[str, Schema] = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {
        "x-kubernetes-int-or-string": True,
        "pattern": QUANTITY,
    },
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"x-kubernetes-int-or-string": True},
}
_EMPTY_IS_ABSENT = {
    "Container": ("imagePullPolicy", "terminationMessagePolicy"),
    "ContainerPort": ("protocol",),
    "HTTPGetAction": ("scheme",),
    "PodSpec": ("dnsPolicy",),
    "Toleration": ("effect", "operator"),
}
"""Enumerations whose empty value the API server takes as an absent one, by type."""
_KEPT = (
    "type",
    "format",
    "default",
    "enum",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)


def reduced(openapi: Mapping[str, Any]) -> Schema:
    """Return the definitions that a pod template uses, by short name, with the root's name."""
    known = openapi["components"]["schemas"]
    definitions: dict[str, Schema] = {}
    pending = [ROOT_TYPE]
    while pending:
        name = pending.pop()
        if _short(name) in definitions:
            continue
        source = _own_fields(name, known[name])
        pending += _references(source)
        definitions[_short(name)] = _SPECIAL.get(name) or _node(source)
    for name, fields in _EMPTY_IS_ABSENT.items():
        for field in fields:
            definitions[name]["properties"][field]["enum"].insert(0, "")
    return {
        "kubernetes": openapi["info"]["version"],
        "root": _short(ROOT_TYPE),
        "definitions": dict(sorted(definitions.items())),
    }


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _own_fields(name: str, source: Schema) -> Schema:
    """Return a definition without the fields that a template cannot have."""
    fields: Schema = source.get("properties", {})
    if name == _METADATA:
        fields = {field: fields[field] for field in _METADATA_FIELDS}
    elif name == _POD_SPEC:
        fields = {field: node for field, node in fields.items() if field not in _NOT_IN_TEMPLATES}
    else:
        return source
    return {**source, "properties": fields}


def _references(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        if "$ref" in node:
            return [node["$ref"].rpartition("/")[2]]
        return [name for child in node.values() for name in _references(child)]
    if isinstance(node, list):
        return [name for child in node for name in _references(child)]
    return []


def _node(source: Schema) -> Schema:
    node: Schema = {}
    if text := _first_sentence(source.get("description", "")):
        node["description"] = text
    node |= {key: copy.copy(source[key]) for key in _KEPT if source.get(key)}
    if source.get("allOf"):
        [source_of] = source["allOf"]
        node["$ref"] = _short(source_of["$ref"])
    elif "$ref" in source:
        node["$ref"] = _short(source["$ref"])
    if "properties" in source:
        node["properties"] = {name: _node(one) for name, one in source["properties"].items()}
    for part in ("items", "additionalProperties"):
        if isinstance(source.get(part), Mapping):
            node[part] = _node(source[part])
    return node


def _first_sentence(text: str) -> str:
    """Return the first sentence of a description: the CRD must fit into an annotation."""
    first = re.split(r"(?<=[a-z)\]\"`'])\.(?:\s|$)|\n", text)[0]
    text = " ".join(first.replace("`", "").split())
    return f"{text}." if text and not text.endswith((".", ":")) else text


def render(openapi: Mapping[str, Any]) -> str:
    """Return the text of the file."""
    return json.dumps(reduced(openapi), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(prog="template_schema", description=__doc__)
    parser.add_argument("openapi", type=Path, nargs="?", help="the API server's document")
    given: Path | None = parser.parse_args(arguments).openapi
    text = served() if given is None else given.read_text(encoding="utf-8")
    SCHEMA_FILE.write_text(render(json.loads(text)), encoding="utf-8")
    return 0


def served() -> str:
    """Return the document of the API server that the tests build."""
    from tests.integration.apiserver import ApiServer

    with tempfile.TemporaryDirectory() as folder:
        server = ApiServer(Path(folder))
        try:
            return server.start().fetch("GET", OPENAPI_PATH).decode()
        finally:
            server.close()


if __name__ == "__main__":
    sys.exit(main())
