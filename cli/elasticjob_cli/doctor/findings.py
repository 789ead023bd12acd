"""Findings of the checks and their presentation. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Grade(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: its subject, the observation, and the remedy if there is one."""

    check: str
    grade: Grade
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Unread:
    """Fact that could not be read; `forbidden` if only the permission is missing."""

    message: str
    forbidden: bool = False
    absent: bool = False


def ok(check: str, found: str) -> Finding:
    return Finding(check, Grade.OK, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Grade.WARN, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Grade.FAIL, found, remedy)


def unread(check: str, fact: Unread) -> Finding:
    """Return the finding for a fact that could not be read: a warning, since nothing is known."""
    if fact.forbidden:
        return warn(
            check,
            f"not permitted: {fact.message}",
            "ask an administrator of the cluster to run this check",
        )
    return warn(check, f"not checked: {fact.message}", "remove the cause, then run it again")


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.grade is Grade.FAIL for finding in findings)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Format the findings, each with its remedy on a line of its own, then their numbers."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.grade:<4}  {finding.check:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<6}{'':<{width}}  -> {finding.remedy}")
    numbers = {grade: sum(one.grade is grade for one in findings) for grade in Grade}
    summary = ", ".join(f"{number} {grade}" for grade, number in numbers.items())
    return [*lines, "", summary]


def as_document(place: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as a JSON document."""
    return {
        "place": place,
        "ok": not has_failed(findings),
        "checks": [
            {
                "check": finding.check,
                "grade": finding.grade.value,
                "found": finding.found,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
    }
