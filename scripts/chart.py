"""Generator of the Helm chart's generated parts: `python scripts/chart.py [--check]`.

These are the chart's copy of the CRD in `crds/`, which is generated from the models, the table of
values in its README, generated from the comments of values.yaml, and the version, which the chart
and the images have from pyproject.toml.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "elasticjob"
DEFINITION = "elasticjobs.elasticjob.dev.yaml"
BEGIN = "<!-- values: generated from values.yaml by `make generate` -->\n"
END = "<!-- end of values -->\n"
MARK = "# -- "

VERSIONED = (CHART / "Chart.yaml", ROOT / "Dockerfile.operator", ROOT / "Dockerfile.sidecar")
_VERSION = re.compile(r"^(version: |appVersion: |ARG VERSION=).+$", re.M)
_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):(?: |$)")


@dataclass(frozen=True, slots=True)
class Value:
    """Documented value: its dotted path, its default as JSON, and its description."""

    path: str
    default: str
    text: str


def values(source: str) -> Iterator[Value]:
    """Yield the documented values of a values.yaml in order.

    A comment that begins with `--` describes the key below it. Raises ValueError if no key follows.
    """
    defaults: Any = yaml.safe_load(source)
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            if stripped.startswith(MARK):
                comment = [stripped.removeprefix(MARK)]
            elif comment:
                comment.append(stripped.removeprefix("#").strip())
            continue
        if match := _KEY.match(line):
            indent = len(match[1])
            path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[2])]
            if comment:
                keys = [key for _, key in path]
                yield Value(".".join(keys), json.dumps(_at(defaults, keys)), " ".join(comment))
        elif comment:
            raise ValueError(f"values.yaml:{number}: a comment must stand above a key: {comment}")
        comment = []


def _at(defaults: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        defaults = defaults[key]
    return defaults


def table(source: str) -> str:
    """Return the values as a Markdown table."""
    rows = ["| value | default | |\n", "|---|---|---|\n"]
    for value in values(source):
        text = value.text.replace("|", "\\|")
        rows.append(f"| `{value.path}` | `{value.default}` | {text} |\n")
    return "".join(rows)


def with_table(readme: str, source: str) -> str:
    """Return the README with this table between its marks. Raises ValueError without the marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table(source)}\n{END}{after}"


def with_version(text: str, version: str) -> str:
    """Return a Chart.yaml or Dockerfile with this version. Raises ValueError if it names none."""
    changed, count = _VERSION.subn(lambda found: f"{found[1]}{version}", text)
    if not count:
        raise ValueError("the file must have a line of the product's version")
    return changed


def wanted() -> dict[Path, str]:
    """Return the content of each generated file."""
    readme, source = CHART / "README.md", CHART / "values.yaml"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return {
        **{path: with_version(path.read_text(), version) for path in VERSIONED},
        CHART / "files" / DEFINITION: (ROOT / "crds" / DEFINITION).read_text(),
        readme: with_table(readme.read_text(), source.read_text()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with `--check` print the differences; return the exit status."""
    parser = argparse.ArgumentParser(prog="chart.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    options = parser.parse_args(arguments)
    stale = 0
    for path, text in wanted().items():
        found = path.read_text() if path.exists() else ""
        if found == text:
            continue
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            continue
        stale = 1
        names = (str(path.relative_to(ROOT)), "generated")
        sys.stdout.writelines(
            difflib.unified_diff(found.splitlines(True), text.splitlines(True), *names)
        )
        sys.stderr.write(f"{names[0]} is out of date: run `make generate`\n")
    return stale


if __name__ == "__main__":
    sys.exit(main())
