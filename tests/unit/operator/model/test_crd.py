"""Generated CRD: current, structural, and as strict as the models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elasticjob_operator.model.crdgen import DEFAULT_FILE, definition, main, render
from elasticjob_operator.model.immutable import IMMUTABLE
from elasticjob_operator.model.rules import RULES
from tests.paths import ROOT

Schema = dict[str, Any]
FORBIDDEN = {
    "$ref", "anyOf", "oneOf", "allOf", "not", "$defs", "definitions", "const", "title",
    "additionalItems", "patternProperties", "dependencies", "uniqueItems", "nullable",
}  # fmt: skip


@cache
def schema() -> Schema:
    """Return the schema, generated once for all tests, which do not change it."""
    found: Schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@cache
def validator() -> jsonschema.Draft202012Validator:
    """Return a validator of the schema, which is checked once for all documents."""
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if part in node:
            yield from nodes(node[part], f"{path}[]")


def at(path: str) -> Schema:
    return next(node for found, node in nodes(schema()) if found == path)


def test_crd_file_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--output", str(ROOT / DEFAULT_FILE)]) == 0, capsys.readouterr().out


def test_check_prints_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "crd.yaml"
    assert main(["--output", str(file)]) == 0
    assert main(["--check", "--output", str(file)]) == 0
    file.write_text(render().replace("ElasticJobList", "Wrong"))
    assert main(["--check", "--output", str(file)]) == 1
    shown = capsys.readouterr()
    assert "-    listKind: Wrong" in shown.out
    assert "+    listKind: ElasticJobList" in shown.out
    assert "make generate" in shown.err


def test_rendered_crd_is_the_definition_with_a_generated_header() -> None:
    text = render()
    assert yaml.safe_load(text) == definition()
    assert text.startswith("# Generated")


def test_schema_is_structural() -> None:
    for path, node in nodes(schema()):
        assert not FORBIDDEN & set(node), path
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
        else:
            types = {"object", "array", "string", "integer", "number", "boolean"}
            assert node.get("type") in types, path
        assert ("items" in node) == (node.get("type") == "array"), path
        assert not {"properties", "additionalProperties"} <= set(node), path
        assert set(node.get("required", ())) <= set(node.get("properties", ())), path
        if node.get("type") == "object":
            shape = {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"}
            assert shape & set(node), path


def test_no_unknown_field_is_kept() -> None:
    """CEL would compare objects with unknown fields only in part."""
    for path, node in nodes(schema()):
        assert "x-kubernetes-preserve-unknown-fields" not in node, path


def test_template_is_whole_and_without_defaults_but_those_of_keys() -> None:
    template = {path: node for path, node in nodes(schema()) if path.startswith(".spec.template")}
    assert len(template) > 1000
    defaults = {path for path, node in template.items() if "default" in node}
    kinds = ("containers", "initContainers")
    assert defaults == {f".spec.template.spec.{kind}[].ports[].protocol" for kind in kinds}


MERGED = {
    ".spec.template.spec.containers": ["name"],
    ".spec.template.spec.initContainers": ["name"],
    ".spec.template.spec.containers[].env": ["name"],
    ".spec.template.spec.containers[].ports": ["containerPort", "protocol"],
    ".spec.template.spec.containers[].volumeMounts": ["mountPath"],
    ".spec.template.spec.volumes": ["name"],
    ".spec.template.spec.imagePullSecrets": ["name"],
    ".status.conditions": ["type"],
    ".status.rounds": ["round"],
}


def test_lists_are_merged_by_their_keys() -> None:
    for path, keys in MERGED.items():
        node = at(path)
        assert (node["x-kubernetes-list-type"], node["x-kubernetes-list-map-keys"]) == ("map", keys)
    for path in (".spec.rendezvous.endpoints", ".spec.recovery.warmStartModules"):
        assert at(path)["x-kubernetes-list-type"] == "set"
    for path, node in nodes(schema()):
        for key in node.get("x-kubernetes-list-map-keys", ()):
            item = node["items"]
            known = key in item["required"] or "default" in item["properties"][key]
            assert known, f"{path} needs {key} in each item"


def test_crd_fits_into_an_annotation() -> None:
    """`kubectl apply` keeps the whole object in one, of at most 262,144 bytes."""
    assert len(json.dumps(definition(), separators=(",", ":"))) < 200_000


def test_every_field_is_described() -> None:
    described = [path for path, node in nodes(schema()) if "description" in node]
    top = {f".spec.{name}" for name in at(".spec")["properties"]}
    assert top <= set(described)
    assert "`" not in "".join(node.get("description", "") for _, node in nodes(schema()))


def test_defaults_are_valid_and_only_in_the_spec() -> None:
    found = 0
    for path, node in nodes(schema()):
        if "default" in node:
            found += 1
            jsonschema.validate(node["default"], node)
            assert path.startswith(".spec"), path
    assert found > 20


def test_api_server_validates_every_rule_with_its_field() -> None:
    validations = at(".spec")["x-kubernetes-validations"]
    assert len(validations) == len(RULES) + len(IMMUTABLE)
    for validation in validations:
        assert "must" in validation["message"]
        assert "\n" not in validation["message"]
        path = ".spec" + validation["fieldPath"]
        assert any(found == path for found, _ in nodes(schema())), path
    for validation in at("")["x-kubernetes-validations"]:
        assert any(found == validation["fieldPath"] for found, _ in nodes(schema()))
    for name in ("template", "nprocPerNode", "trainer", "rendezvous"):
        [rule] = [
            one["rule"]
            for one in validations
            if "oldSelf" in one["rule"] and one["fieldPath"] == f".{name}"
        ]
        assert rule.endswith("|| self.runPolicy.suspend || oldSelf.runPolicy.suspend")


READ_BY_YAML = yaml.SafeLoader.yaml_implicit_resolvers
"""Patterns by which a YAML parser takes an unquoted word for something else than a text."""


def test_values_of_the_spec_are_camel_case_and_plain_in_yaml() -> None:
    values = {
        value
        for path, node in nodes(at(".spec"))
        if not path.startswith(".template")
        for value in node.get("enum", ())
    }
    assert values >= {"Auto", "Never", "Etcd", "EtcdV2", "C10d", "PerNode", "AfterCheckpoint"}
    for value in values:
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", value), value
        assert yaml.safe_load(value) == value
        traps = READ_BY_YAML.get(value[0], [])
        assert not any(pattern.fullmatch(value) for _, pattern in traps), value


def test_machines_are_called_node_name_and_pods_nodes() -> None:
    own = [
        path.rpartition(".")[2]
        for path, _ in nodes(schema())
        if not path.startswith(".spec.template")
    ]
    assert {"nodeName", "nodes", "minNodes", "maxNodes", "wantedNodes"} <= set(own)
    assert not {"node", "machine", "machineName", "host", "hostName"} & set(own)


def test_rules_name_only_existing_fields() -> None:
    known = {path for path, _ in nodes(schema())}
    for validation in at(".spec")["x-kubernetes-validations"]:
        for path in re.findall(r"(?:self|oldSelf)((?:\.[a-zA-Z]+)+)", validation["rule"]):
            field = re.sub(r"\.(size|all|exists|exists_one)$", "", path)
            assert f".spec{field}" in known, (validation["rule"], field)


def test_lists_and_strings_walked_by_rules_are_bounded() -> None:
    for path in (".spec.template.spec.containers", ".spec.template.spec.initContainers"):
        assert at(path)["maxItems"] == 16
        assert at(f"{path}[].name")["maxLength"] == 63
        assert at(f"{path}[].env")["maxItems"] == 512
        assert at(f"{path}[].env[].name")["maxLength"] == 256
    assert at(".spec.rendezvous.endpoints")["maxItems"] == 16
    assert at(".spec.rendezvous.endpoints[]")["maxLength"] == 260


def test_name_length_is_bounded() -> None:
    assert at(".metadata") == {"type": "object", "properties": {"name": at(".metadata.name")}}
    assert at(".metadata.name")["maxLength"] == 55


def test_subresources_columns_and_names() -> None:
    spec = definition()["spec"]
    version = spec["versions"][0]
    assert version["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.nodes",
            "statusReplicasPath": ".status.pods.active",
            "labelSelectorPath": ".status.selector",
        },
    }
    columns = version["additionalPrinterColumns"]
    names = [column["name"] for column in columns if not column.get("priority")]
    wide = [column["name"] for column in columns if column.get("priority") == 1]
    assert names == ["Phase", "Rendezvous", "Round", "Nodes", "Wanted", "Restarts", "Age"]
    assert wide == [
        "Min",
        "Max",
        "Master",
        "Cause",
        "Failure",
        "Losses",
        "Preemptions",
        "Recovery ms",
    ]
    known = {path for path, _ in nodes(schema())} | {".metadata.creationTimestamp"}
    assert {column["jsonPath"].replace("[-1:]", "[]") for column in columns} <= known
    assert spec["names"]["shortNames"] == ["ej"]
    assert "elasticjob" in spec["names"]["categories"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_fits_the_schema(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        validator().validate(document)
