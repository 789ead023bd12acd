"""Packages and programs of the corpus: the script that uses one package, or several together."""

from __future__ import annotations

import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent / "environments"
MANIFEST = Path(__file__).parent / "manifest.toml"
PROGRAMS = Path(__file__).parent / "programs"

SCRIPT = """\
import corpus_probe
{imports}

corpus_probe.imported()


def use(folder):
{use}


if __name__ == "__main__":
    corpus_probe.run(use)
"""


@dataclass(frozen=True)
class Package:
    """Package of the corpus: the imports and the use that make up its script."""

    name: str
    pip: str
    imports: str
    use: str
    suite: bool
    environment: str = "large"

    def script(self) -> str:
        """Return the training script's source, with plain imports at its top."""
        body = self.use.strip() or "pass"
        return SCRIPT.format(imports=self.imports.strip(), use=textwrap.indent(body, "    "))

    @property
    def root(self) -> str:
        """Top-level module; warm start's refusal of this module counts as the package's own."""
        found = re.search(r"(?:from|import)\s+(\w+)", self.imports)
        assert found, self.imports
        return found[1]


@dataclass(frozen=True)
class Program:
    """Training program in `programs/<name>.py` that combines the packages `pips`."""

    name: str
    pips: tuple[str, ...]
    environment: str = "large"

    def script(self) -> str:
        """Return the program's source."""
        return (PROGRAMS / f"{self.name}.py").read_text()


Subject = Package | Program
"""Subject of a cold and a warm job that are compared."""


def programs() -> list[Program]:
    """Return every program."""
    return [
        Program(one["name"], tuple(one["pips"]), one.get("environment", "large"))
        for one in tomllib.loads(MANIFEST.read_text())["program"]
    ]


def packages() -> list[Package]:
    """Return every package, the most used ones first."""
    return [
        Package(
            one["name"],
            one.get("pip", one["name"]).lower(),
            one.get("imports", f"import {one['name']}"),
            one.get("use", ""),
            one.get("suite", False),
            one.get("environment", "large"),
        )
        for one in tomllib.loads(MANIFEST.read_text())["package"]
    ]


def pins(*files: Path) -> dict[str, str]:
    """Return the pinned version of each package, by its lower-case name; a later file wins."""
    found = {}
    for file in files:
        for line in file.read_text().splitlines():
            name, equals, version = line.partition("==")
            if equals and not name.startswith("#"):
                found[name.lower()] = version.split()[0]
    return found
