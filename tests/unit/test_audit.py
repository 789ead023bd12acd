"""Vulnerability audit: findings, accepted findings with expiry, missing data."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from scripts import audit
from scripts.audit import Accepted, AuditError, NoData, Report, accepted, findings

TODAY = datetime.date(2026, 11, 23)
ENTRY = {
    "id": "PYSEC-1",
    "aliases": ["CVE-2026-1"],
    "fixed_in": ["1.1"],
    "link": "https://osv.example/PYSEC-1",
    "withdrawn": None,
}
THING = ("thing", "1.0")


def answer(*entries: dict[str, Any], version: str = "1.0") -> dict[str, Any]:
    return {"info": {"version": version}, "vulnerabilities": list(entries)}


def known(name: str = "PYSEC-1", package: str = "thing", days: int = 0) -> Accepted:
    return Accepted(name, package, "not called", TODAY + datetime.timedelta(days))


def report(answers: dict[str, Any], *entries: Accepted) -> Report:
    def find(package: audit.Package) -> list[audit.Finding]:
        return findings(package, answers[package[0]])

    return audit.audit([(name, "1.0") for name in answers], list(entries), TODAY, find)


def test_package_without_findings_passes() -> None:
    found = report({"thing": answer()})
    assert found.status == 0
    assert found.lines == ["1 of 1 packages audited"]


def test_finding_fails_and_names_the_fixed_version() -> None:
    found = report({"thing": answer(ENTRY)})
    assert found.status == 1
    assert found.lines[0] == (
        "vulnerable: thing 1.0: PYSEC-1 CVE-2026-1: fixed in 1.1: https://osv.example/PYSEC-1"
    )


def test_withdrawn_finding_does_not_count() -> None:
    assert report({"thing": answer({**ENTRY, "withdrawn": "2026-01-01"})}).status == 0


def test_entry_of_another_database_is_no_further_finding() -> None:
    other = {**ENTRY, "id": "CVE-2026-1", "aliases": ["PYSEC-1"]}
    assert len(findings(THING, answer(ENTRY, other))) == 1
    another = {**ENTRY, "id": "PYSEC-2", "aliases": []}
    assert len(findings(THING, answer(ENTRY, another))) == 2


def test_index_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    assert audit.index() == "https://index.example/pypi"


@pytest.mark.parametrize("name", ["PYSEC-1", "CVE-2026-1"])
def test_accepted_finding_passes_until_its_last_day(name: str) -> None:
    assert report({"thing": answer(ENTRY)}, known(name)).status == 0
    expired = report({"thing": answer(ENTRY)}, known(name, days=-1))
    assert expired.status == 1
    assert expired.lines[0].endswith("(accepted until 2026-11-22, expired)")


@pytest.mark.parametrize("entry", [known("PYSEC-2"), known(package="other"), known("CVE-2026-2")])
def test_unused_entry_fails(entry: Accepted) -> None:
    found = report({"thing": answer()}, entry)
    assert found.status == 1
    assert f"unused: {entry.package} {entry.id}: remove it from accepted.toml" in found.lines


def test_entry_of_another_package_does_not_accept_a_finding() -> None:
    found = report({"thing": answer(ENTRY), "other": answer()}, known(package="other"))
    assert any(line.startswith("vulnerable: thing") for line in found.lines)


@pytest.mark.parametrize(
    ("one", "cause"),
    [
        (answer(version="2.0"), "newest version alone"),
        ({"info": {"version": "1.0"}}, "serves no vulnerabilities"),
        ({}, "serves no vulnerabilities"),
    ],
)
def test_missing_data_is_neither_clean_nor_a_finding(one: dict[str, Any], cause: str) -> None:
    found = report({"thing": one, "other": answer()})
    assert found.status == 2
    assert cause in found.lines[1] or cause in found.lines[0]
    assert found.lines[-1] == "1 of 2 packages audited"
    assert report({"thing": one, "other": answer(ENTRY)}).status == 1


def test_missing_data_leaves_accepted_entries_alone() -> None:
    assert report({"thing": {}}, known()).status == 2


def test_unreachable_index_is_missing_data() -> None:
    with pytest.raises(NoData, match="refused"):
        audit.query("http://127.0.0.1:9/pypi", THING)


@pytest.mark.parametrize(
    ("simple", "api"),
    [
        ("https://index.example/simple", "https://index.example/pypi"),
        ("https://index.example/mirror/simple/", "https://index.example/mirror/pypi"),
    ],
)
def test_api_lies_beside_the_configured_index(simple: str, api: str) -> None:
    assert audit.json_api(simple) == api


def test_present_list_of_accepted_findings_is_valid() -> None:
    accepted(audit.ACCEPTED.read_text())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accepted = 1\n", "tables alone"),
        ("[other]\n", "tables alone"),
        ('[[accepted]]\nid = "a"\n', "entry 1: expected the fields id, package, reason, expires"),
        (
            '[[accepted]]\nid = "a"\npackage = "b"\nreason = " "\nexpires = 2026-01-01\n',
            "entry 1: reason",
        ),
        (
            '[[accepted]]\nid = "a"\npackage = "b"\nreason = "c"\nexpires = "2026-01-01"\n',
            "entry 1: expires is not a date",
        ),
        ("[[accepted]\n", "requirements/accepted.toml: "),
    ],
)
def test_malformed_entry_is_refused(text: str, said: str) -> None:
    with pytest.raises(AuditError, match=said):
        accepted(text)
