"""Reader of manifests from files or standard input: jobs, or all problems with line and column."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticjob_operator.model.job import API_VERSION, GROUP, KIND, ElasticJob
from elasticjob_operator.model.parse import parse_manifest
from elasticjob_operator.model.problems import InvalidManifest, Location, field_path
from elasticjob_operator.model.yaml_nodes import Place, YamlDocument, documents
from elasticjob_rendezvous.core.typed import bounded

STANDARD_INPUT = "-"
"""File name that stands for standard input; a file of this name is `./-`."""
MOST_BYTES = 16 << 20
"""Maximum size of a manifest; a longer file is a device or the wrong file."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Problem in a file. `line` and `column` count from 1 and are 0 if the file is unreadable."""

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class InvalidFile(ValueError):
    """Error for a file with anything but valid ElasticJobs; holds all problems."""

    def __init__(self, problems: list[FileProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def shown(file: Path | str) -> str:
    """Return the name of a file for messages."""
    return "standard input" if file == STANDARD_INPUT else bounded(str(Path(file)))


def read_text(file: Path | str) -> str:
    """Return the text of a file or of standard input.

    Raises:
        InvalidFile: the file is unreadable, too long, or not UTF-8.
    """
    try:
        content = _content(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unreadable(file, f"must be a readable file: {reason}") from error
    except ValueError as error:
        raise _unreadable(file, f"must be a readable file: {error}") from error
    if len(content) > MOST_BYTES:
        raise _unreadable(file, f"must be at most {MOST_BYTES >> 20} MiB long to be a manifest")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"must be UTF-8 text: byte {error.start} is not") from error


def _content(file: Path | str) -> bytes:
    """Read at most one byte more than `MOST_BYTES`, which suffices to detect an excess."""
    if file != STANDARD_INPUT:
        with Path(file).open("rb") as opened:
            return opened.read(MOST_BYTES + 1)
    if sys.stdin is None:
        raise ValueError("it is closed")
    return sys.stdin.buffer.read(MOST_BYTES + 1)


def load_file(file: Path | str) -> list[ElasticJob]:
    """Return the jobs in a file, in order, at least one.

    Raises:
        InvalidFile: the file has problems; lists those of all its documents.
    """
    jobs, problems = _read(file)
    if problems:
        raise InvalidFile(problems)
    return jobs


def check_file(file: Path | str) -> list[FileProblem]:
    """Return all problems of a file, in order of lines; [] if it is valid."""
    return _read(file)[1]


def _read(file: Path | str) -> tuple[list[ElasticJob], list[FileProblem]]:
    try:
        text = read_text(file)
    except InvalidFile as error:
        return [], list(error.problems)
    name = shown(file)
    jobs: list[ElasticJob] = []
    problems: list[FileProblem] = []
    seen = 0
    for document in documents(text):
        if document.value is None and not document.faults:
            continue
        seen += 1
        found = [
            FileProblem(name, place.line, place.column, field_path(location), message)
            for place, location, message in _judge(document, jobs)
        ]
        problems += sorted(found, key=lambda problem: (problem.line, problem.column))
    if not seen:
        problems.append(FileProblem(name, 1, 1, "", f"must hold an {KIND}; it is empty"))
    return jobs, problems


def _unreadable(file: Path | str, message: str) -> InvalidFile:
    return InvalidFile([FileProblem(shown(file), 0, 0, "", message)])


def _judge(document: YamlDocument, jobs: list[ElasticJob]) -> Iterator[tuple[Place, Location, str]]:
    """Yield the problems of one document; if there are none, add its job to `jobs`."""
    for fault in document.faults:
        yield fault.place, fault.location, fault.message
    value = document.value
    if value is None:
        return
    if not isinstance(value, Mapping):
        message = f"must be a mapping with apiVersion: {API_VERSION} and kind: {KIND}"
        yield document.start, (), message
        return
    if _is_foreign(value):
        message = f"must be {KIND} of {API_VERSION}; this document is {_kind(value)}"
        yield document.place_of(("kind",)), ("kind",), message
        return
    try:
        job = parse_manifest(value)
    except InvalidManifest as error:
        for problem in error.problems:
            yield document.place_of(problem.location), problem.location, problem.message
    else:
        if not document.faults:
            jobs.append(job)


def _is_foreign(value: Mapping[str, object]) -> bool:
    """Return True for an object of another kind, whose fields are not checked."""
    kind, version = value.get("kind"), value.get("apiVersion")
    if kind == KIND:
        return isinstance(version, str) and version.split("/")[0] != GROUP
    return isinstance(kind, str) and isinstance(version, str) and not version.startswith(GROUP)


def _kind(value: Mapping[str, object]) -> str:
    return f"{value['kind']} of {value['apiVersion']}"
