"""Generator of the CustomResourceDefinition from the models.

`python -m elasticjob_operator.model.crdgen` writes it; with `--check` it fails if the file is out
of date.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from elasticjob_operator.model.job import GROUP, KIND, PLURAL, VERSION
from elasticjob_operator.model.schema import Schema, structural_schema

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
    ("Failure", "string", ".status.firstFailure.class", 1),
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
                "statusReplicasPath": ".status.pods",
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
    sys.stderr.write(f"{options.output} must be generated anew: run `make generate`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
