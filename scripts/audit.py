"""Audit of the locked packages for known vulnerabilities: `python -m scripts.audit`.

The data is the field `vulnerabilities` of the index's JSON API, which PyPI fills from the Python
Packaging Advisory Database. A finding is accepted only by an entry of `requirements/accepted.toml`,
with a reason and a date at which it expires. Exit status: 0 nothing found, 1 findings or expired
entries, 2 no data for some package.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import os
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.environment import LOCKS
from scripts.lock import LockError, read

ACCEPTED = LOCKS / "accepted.toml"
_SECONDS = 30.0
# pip has no option that prints its default.
_DEFAULT_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
_FIELDS = {"id": str, "package": str, "reason": str, "expires": datetime.date}

Package = tuple[str, str]  # name and version
Json = dict[str, Any]


class AuditError(Exception):
    """File that cannot be used; the text names the place and the remedy."""


class NoData(Exception):
    """Missing data about a package; the text is the cause."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Known vulnerability of a locked package."""

    package: str
    version: str
    names: tuple[str, ...]  # its id and aliases
    fixed_in: tuple[str, ...]
    link: str

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed version"
        return f"{self.package} {self.version}: {' '.join(self.names)}: {fix}: {self.link}"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted finding of one package."""

    id: str
    package: str
    reason: str
    expires: datetime.date


@dataclass(frozen=True, slots=True)
class Report:
    """Lines to print, and the exit status."""

    lines: list[str]
    status: int


def accepted(text: str) -> list[Accepted]:
    """Parse the list of accepted findings. Raise AuditError."""
    where = f"requirements/{ACCEPTED.name}"
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AuditError(f"{where}: {error}") from None
    entries = found.pop("accepted", [])
    if found or not isinstance(entries, list):
        raise AuditError(f"{where}: expected [[accepted]] tables alone")
    return [_entry(entry, f"{where}: entry {number}") for number, entry in enumerate(entries, 1)]


def _entry(entry: Any, where: str) -> Accepted:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
        raise AuditError(f"{where}: expected the fields {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind or not str(entry[name]).strip():
            raise AuditError(f"{where}: {name} is not a {kind.__name__}")
    return Accepted(**entry)


def findings(package: Package, answer: Json) -> list[Finding]:
    """Return the findings in the index's answer about this version. Raise NoData."""
    name, version = package
    entries = answer.get("vulnerabilities")
    if not isinstance(entries, list):
        raise NoData("the index serves no vulnerabilities")
    if answer.get("info", {}).get("version") != version:
        raise NoData("the index serves data about the newest version alone")
    found: list[Finding] = []
    for entry in entries:
        names = (entry["id"], *entry.get("aliases", ()))
        same = any(entry["id"] in one.names for one in found)  # of another database
        if not same and not entry.get("withdrawn"):
            fixed = tuple(entry.get("fixed_in") or ())
            found.append(Finding(name, version, names, fixed, entry.get("link") or ""))
    return found


def audit(
    packages: Iterable[Package],
    known: list[Accepted],
    today: datetime.date,
    find: Callable[[Package], list[Finding]],
) -> Report:
    """Return the report about these packages. `find` returns findings or raises NoData."""
    lines, used, missing = [], set(), 0
    wanted = sorted(set(packages))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [(package, pool.submit(find, package)) for package in wanted]
    faulty = False
    for (name, version), answer in answers:
        try:
            found = answer.result()
        except NoData as error:
            lines.append(f"no data: {name} {version}: {error}")
            missing += 1
            continue
        for finding in found:
            entry = next((e for e in known if e.package == name and e.id in finding.names), None)
            if entry is not None and entry.expires >= today:
                used.add(entry)
                lines.append(f"accepted until {entry.expires}: {finding}")
                continue
            expired = f" (accepted until {entry.expires}, expired)" if entry else ""
            lines.append(f"vulnerable: {finding}{expired}")
            faulty = True
            used |= {entry} if entry else set()
        for entry in known:
            if entry.package == name and entry not in used:
                lines.append(f"unused: {name} {entry.id}: remove it from {ACCEPTED.name}")
                faulty = True
    lines.append(f"{len(wanted) - missing} of {len(wanted)} packages audited")
    for entry in known:
        if entry.package not in {name for name, _ in wanted}:
            lines.append(f"unused: {entry.package} {entry.id}: remove it from {ACCEPTED.name}")
            faulty = True
    return Report(lines, 1 if faulty else 2 if missing else 0)


def json_api(simple: str) -> str:
    """Return the address of the JSON API that belongs to a simple index."""
    return f"{simple.rstrip('/').removesuffix('/simple')}/pypi"


def query(index: str, package: Package) -> list[Finding]:
    """Return the findings that the index knows for a package. Raise NoData.

    Some mirrors serve no answer for a version, only for the project, about its newest version.
    """
    name, version = package
    try:
        return findings(package, _get(f"{index}/{name}/{version}/json"))
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise NoData(f"the index answers {error.code}") from None
    except (OSError, ValueError) as error:
        raise NoData(str(error)) from None
    try:
        return findings(package, _get(f"{index}/{name}/json"))
    except urllib.error.HTTPError as error:
        raise NoData(f"the index answers {error.code}") from None
    except (OSError, ValueError) as error:
        raise NoData(str(error)) from None


def _get(address: str) -> Json:
    request = urllib.request.Request(address, headers={"Accept": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        found = json.load(answer)
    if not isinstance(found, dict):
        raise ValueError("the index's answer is not an object")
    return found


def index() -> str:
    """Return the address of the JSON API of the index that pip is configured to use."""
    configured = os.environ.get("PIP_INDEX_URL") or _output(
        "-m", "pip", "config", "get", "global.index-url", check=False
    )
    return json_api(configured or _output("-c", _DEFAULT_INDEX))


def _output(*words: str, check: bool = True) -> str:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout.strip()


def locked() -> set[Package]:
    """Return every package of the lock files."""
    return {(name, pin.version) for lock in _locks() for name, pin in read(lock).items()}


def _locks() -> list[Path]:
    return [LOCKS / f"{name}.txt" for name in ("operator", "sidecar", "build", "dev", "cuda")]


def main() -> int:
    """Print the report."""
    try:
        known = accepted(ACCEPTED.read_text())
        address = index()
        today = datetime.datetime.now(datetime.UTC).date()
        report = audit(locked(), known, today, lambda package: query(address, package))
    except (AuditError, LockError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*report.lines, sep="\n")
    if report.status == 2:
        print("the audit is incomplete: run it where the index serves its JSON API")
    return report.status


if __name__ == "__main__":
    sys.exit(main())
