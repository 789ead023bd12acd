"""List of the licences of all packages in the images: `python -m scripts.licences [--check]`.

The licences are those of the installed packages' metadata; `requirements/licences.toml` is the
policy.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, Protocol

from license_expression import ExpressionError, get_spdx_licensing

from scripts.environment import LOCKS, ROOT
from scripts.lock import LockError, read

PAGE = ROOT / "THIRD_PARTY_LICENSES.md"
POLICY = LOCKS / "licences.toml"
IMAGES = ("operator", "sidecar")
_SPDX = get_spdx_licensing()
_HEAD = """# Third-party licences

Licences of the Python packages that the images add to their base image, from the packages'
metadata. Written by `make generate`; the accepted licences are in
[requirements/licences.toml](requirements/licences.toml). Each package's licence text is in the
image, in its `.dist-info` folder; those of the base image's Debian packages are in
`/usr/share/doc`.
"""


class LicenceError(Exception):
    """Licence that is missing, unknown or not accepted; the text names the remedy."""


class Fields(Protocol):
    """Metadata of a package."""

    def get_all(self, name: str, failobj: None = None) -> list[Any] | None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Accepted licences, and licences of packages whose metadata has no SPDX expression."""

    accepted: frozenset[str]
    named: Mapping[str, str]


def policy() -> Policy:
    """Return the policy. Raise LicenceError."""
    found = tomllib.loads(POLICY.read_text())
    unknown = found.keys() - {"accepted", "named"}
    if unknown:
        raise LicenceError(f"{POLICY.name}: unknown field {min(unknown)}")
    return Policy(frozenset(found["accepted"]), found.get("named", {}))


def expression(name: str, fields: Fields, named: Mapping[str, str]) -> str | None:
    """Return the SPDX expression of a package's licence, None if its metadata has none."""
    own, old = (fields.get_all(one) or [None] for one in ("License-Expression", "License"))
    for text in (own[0], named.get(name), old[0]):
        if isinstance(text, str) and text.strip() and len(text) < 200:
            try:
                return str(_SPDX.parse(text, validate=True))
            except ExpressionError:
                continue
    return None


def is_accepted(text: str, accepted: frozenset[str]) -> bool:
    """Return True if the terms of an accepted licence apply: all of an AND, one of an OR."""
    return _holds(_SPDX.parse(text), accepted)


def _holds(tree: Any, accepted: frozenset[str]) -> bool:
    match getattr(tree, "operator", "").strip():
        case "AND":
            return all(_holds(one, accepted) for one in tree.args)
        case "OR":
            return any(_holds(one, accepted) for one in tree.args)
    return str(tree) in accepted


def licences(image: str, rules: Policy) -> list[tuple[str, str, str]]:
    """Return name, version and licence of each locked package of an image. Raise LicenceError."""
    rows = []
    for name, pin in sorted(read(LOCKS / f"{image}.txt").items()):
        try:
            found = metadata(name)
        except PackageNotFoundError:
            raise LicenceError(f"{name} of {image}.txt is not installed: run `make lock`") from None
        if found["Version"] != pin.version:
            raise LicenceError(f"{name} {found['Version']} is installed, {pin.version} locked")
        licence = expression(name, found, rules.named)
        if licence is None:
            raise LicenceError(
                f"{name}: its metadata has no SPDX licence: name it in {POLICY.name}"
            )
        if not is_accepted(licence, rules.accepted):
            raise LicenceError(f"{name}: {licence} is not accepted in {POLICY.name}")
        rows.append((name, pin.version, licence))
    return rows


def page(rules: Policy) -> str:
    """Return the page. Raise LicenceError."""
    parts = [_HEAD]
    for image in IMAGES:
        rows = [
            f"| {name} | {version} | {one} |\n" for name, version, one in licences(image, rules)
        ]
        parts.append(
            f"\n## Image of the {image}\n\n| package | version | licence |\n|---|---|---|\n"
        )
        parts += rows
    return "".join(parts)


def main() -> int:
    """Write or check the page."""
    try:
        text = page(policy())
    except (LicenceError, LockError) as error:
        print(error, file=sys.stderr)
        return 1
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE.name} is out of date: run `make generate`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
