"""Sections of CHANGELOG.md: `python -m scripts.changelog cut|notes VERSION`.

`cut` turns the section of unreleased changes into that of a version with today's date; `notes`
prints the section of a version, which becomes the text of its release.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys

from scripts.dist import version
from scripts.environment import ROOT

PAGE = ROOT / "CHANGELOG.md"
UNRELEASED = "## Unreleased\n"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_SECTION = re.compile(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d\n(.*?)(?=^## |\Z)", re.M | re.S)


class ChangelogError(Exception):
    """Section that is missing, empty or there twice; the text names the remedy."""


def notes(text: str, wanted: str) -> str:
    """Return the changes of a version. Raise ChangelogError."""
    found: dict[str, str] = dict(_SECTION.findall(text))
    if wanted not in found:
        raise ChangelogError(
            f"CHANGELOG.md has no section of {wanted}: "
            f"run `python -m scripts.changelog cut {wanted}`"
        )
    return found[wanted].strip() + "\n"


def cut(text: str, wanted: str, day: datetime.date) -> str:
    """Return the changelog with its unreleased changes as those of a version.

    Raise ChangelogError.
    """
    before, found, after = text.partition(UNRELEASED)
    changes = after.partition("\n## ")[0].strip()
    if not found or not changes:
        raise ChangelogError("CHANGELOG.md has no unreleased changes")
    if wanted in dict(_SECTION.findall(text)):
        raise ChangelogError(f"CHANGELOG.md has a section of {wanted} already")
    return f"{before}{UNRELEASED}\n## {wanted} - {day.isoformat()}\n{after}"


def main() -> int:
    """Cut a section or print one; the version must be that of pyproject.toml."""
    parser = argparse.ArgumentParser(prog="python -m scripts.changelog", description=__doc__)
    parser.add_argument("action", choices=("cut", "notes"))
    parser.add_argument("version")
    options = parser.parse_args()
    try:
        if not _VERSION.fullmatch(options.version) or options.version != version():
            raise ChangelogError(f"pyproject.toml has version {version()}, not {options.version}")
        text = PAGE.read_text()
        if options.action == "notes":
            print(notes(text, options.version), end="")
        else:
            today = datetime.datetime.now(datetime.UTC).date()
            PAGE.write_text(cut(text, options.version, today))
    except ChangelogError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
