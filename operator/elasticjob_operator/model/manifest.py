"""Reader of manifests from files or standard input: jobs, or all problems with line and column.

PyYAML's loader drops positions and silently takes the last of two equal keys; the reader
therefore walks the node graph. Scalars have the same meaning as in kubectl: PyYAML's, except
that dates stay strings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from elasticjob_operator.model.job import API_VERSION, GROUP, KIND, ElasticJob
from elasticjob_operator.model.parse import parse_strictly
from elasticjob_operator.model.problems import InvalidManifest, Location, Problem, field_path
from elasticjob_rendezvous.protocol.text import bounded, echoed

MAX_NODES = 200_000
"""Maximum number of values in one document, counting each use of an alias: bounds the cost of an
alias bomb."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Position in a file; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class YamlFault:
    """Fault in the YAML text."""

    place: Place
    location: Location
    message: str


@dataclass(slots=True)
class YamlDocument:
    """YAML document: its value, the place of each part, and the faults of the text."""

    start: Place
    value: Any = None
    places: dict[Location, Place] = field(default_factory=dict)
    faults: list[YamlFault] = field(default_factory=list)

    def place_of(self, location: Location) -> Place:
        """Return the place of a location, or of its nearest existing parent."""
        for length in range(len(location), -1, -1):
            if location[:length] in self.places:
                return self.places[location[:length]]
        return self.start


class _Loader(yaml.SafeLoader):
    """SafeLoader without dates: `2026-01-31` is a string to Kubernetes."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def documents(text: str) -> Iterator[YamlDocument]:
    """Yield the documents of a text, up to the first that is not YAML; its fault has the reason."""
    try:
        loader = _Loader(text)
    except ReaderError as error:
        before = text[: error.position].splitlines() or [""]
        place = Place(len(before), len(before[-1]) + 1)
        yield _bad_character(place, f"character {error.character:#04x} is not allowed")
        return
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield _Reader(loader, node).document
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        yield _syntax_fault(error)
    finally:
        loader.dispose()


def _syntax_fault(error: Exception) -> YamlDocument:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, RecursionError):
        problem = "it is nested too deeply"
    return _bad_character(place, _plain(str(problem).splitlines()[0]))


def _plain(problem: str) -> str:
    """Return the parser's problem, in words of the file if it is a frequent one."""
    if "'\\t'" in problem:
        return "a tab cannot indent a line: use spaces"
    if "<stream end>" in problem or "end of stream" in problem:
        return "the file ends inside of a value: a bracket or quote is not closed"
    return problem


def _bad_character(place: Place, problem: str) -> YamlDocument:
    return YamlDocument(place, faults=[YamlFault(place, (), f"must be YAML: {problem}")])


class _Reader:
    """Reader of one node graph. A value that refers to itself yields a fault, not a loop."""

    def __init__(self, loader: _Loader, root: yaml.Node) -> None:
        self._loader = loader
        self._open: set[int] = set()
        self._count = 0
        self.document = YamlDocument(_place(root))
        self.document.value = self._value(root, ())

    def _value(self, node: yaml.Node, location: Location) -> Any:
        self.document.places.setdefault(location, _place(node))
        self._count += 1
        if id(node) in self._open:
            return self._fault(node, location, "must not refer to itself")
        if self._count > MAX_NODES:
            if self._count == MAX_NODES + 1:
                self._fault(node, (), f"must hold at most {MAX_NODES:,} values")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, location)
            if isinstance(node, yaml.SequenceNode):
                items = enumerate(node.value)
                return [self._value(item, (*location, index)) for index, item in items]
            return self._scalar(node, location)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged = {**self._merge(value_node, location), **merged}
                continue
            key = self._key(key_node, location)
            if key is None:
                continue
            if key in values:
                text = f"must be given once: {echoed(key)} is repeated here"
                self._fault(key_node, (*location, key), text)
                continue
            self.document.places[(*location, key)] = _place(key_node)
            values[key] = self._value(value_node, (*location, key))
            if isinstance(value_node, yaml.ScalarNode):
                self.document.places[(*location, key)] = _place(value_node)
        return {**merged, **values}

    def _merge(self, node: yaml.Node, location: Location) -> dict[str, Any]:
        """Return the mapping merged by `<<:`, from one mapping or a list; the first one wins."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for part in nodes:
            value = self._value(part, location)
            if isinstance(value, dict):
                merged = {**value, **merged}
            else:
                self._fault(part, location, "must merge a mapping")
        return merged

    def _key(self, node: yaml.Node, location: Location) -> str | None:
        key = self._scalar(node, location) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str):
            return key
        shown = node.value if isinstance(node, yaml.ScalarNode) else "a collection"
        self._fault(node, location, f"must have strings as keys; got {shown}: put it in quotes")
        return None

    def _scalar(self, node: yaml.Node, location: Location) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or str(error)
            return self._fault(node, location, f"must be a plain YAML value: {problem}")
        if isinstance(value, str | int | float | bool) or value is None:
            return value
        return self._fault(node, location, f"must be a plain YAML value, not {node.tag}")

    def _fault(self, node: yaml.Node, location: Location, message: str) -> None:
        self.document.faults.append(YamlFault(_place(node), location, message))


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


DEFAULT_NAMESPACE = "default"
"""Namespace of a manifest without one, or with an empty one."""
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
    if file == "":
        return "''"
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
        if isinstance(error, IsADirectoryError):
            reason = "it is a folder; name a file in it"
        raise _unreadable(file, f"must be a readable file: {reason}") from error
    except ValueError as error:
        raise _unreadable(file, f"must be a readable file: {error}") from error
    if len(content) > MOST_BYTES:
        raise _unreadable(file, f"must be at most {MOST_BYTES >> 20} MiB long to be a manifest")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(
            file, f"must be UTF-8 text: byte {error.start} is not; save it as UTF-8"
        ) from error


def _content(file: Path | str) -> bytes:
    """Read at most one byte more than `MOST_BYTES`, which suffices to detect an excess."""
    if file == "":
        raise ValueError("its name is empty, as that of a variable without a value")
    if file != STANDARD_INPUT:
        with Path(file).open("rb") as opened:
            return opened.read(MOST_BYTES + 1)
    if sys.stdin is None:
        raise ValueError("it is closed")
    return sys.stdin.buffer.read(MOST_BYTES + 1)


@dataclass(slots=True)
class CheckedFile:
    """Content of a file: its jobs, all problems in order of lines, warnings for the jobs, and notes
    on objects of other kinds beside them."""

    jobs: list[ElasticJob] = field(default_factory=list)
    problems: list[FileProblem] = field(default_factory=list)
    warnings: list[FileProblem] = field(default_factory=list)
    text: str = ""
    """Content of the file; empty if it is unreadable."""
    notes: list[FileProblem] = field(default_factory=list)


def load_file(file: Path | str) -> list[ElasticJob]:
    """Return the jobs in a file, in order, at least one.

    Raises:
        InvalidFile: the file has problems; lists those of all its documents.
    """
    checked = read_file(file)
    if checked.problems:
        raise InvalidFile(checked.problems)
    return checked.jobs


Check = Callable[[ElasticJob], Iterable[Problem]]
"""Function that yields further problems, or warnings, of a job."""


def _nothing(_job: ElasticJob) -> Iterable[Problem]:
    return ()


def check_file(file: Path | str, check: Check = _nothing) -> list[FileProblem]:
    """Return all problems of a file, in order of lines; [] if it is valid. `check` yields further
    problems of each job."""
    return read_file(file, check).problems


def read_file(
    file: Path | str, check: Check = _nothing, warnings_of: Check = _nothing
) -> CheckedFile:
    """Return the jobs of a file, its problems and its warnings; `check` yields further problems of
    each job, `warnings_of` the warnings of each valid job."""
    try:
        text = read_text(file)
    except InvalidFile as error:
        return CheckedFile(problems=list(error.problems))
    name = shown(file)
    checked = CheckedFile(text=text)
    given = [one for one in documents(text) if one.value is not None or one.faults]
    others = [] if all(map(_is_other, given)) else [one for one in given if _is_other(one)]
    for document in given:
        if document in others:
            checked.notes += _placed(name, [_note(document)])
            continue
        known = len(checked.jobs)
        checked.problems += _placed(name, _judge(document, checked.jobs, check))
        for job in checked.jobs[known:]:
            if job_name(job) in map(job_name, checked.jobs[:known]):
                at: Location = ("metadata", "name")
                message = (
                    f"warning (NameRepeated): a job before is {job_name(job)}, too: applied after "
                    "it, this one changes that job"
                )
                checked.warnings += _placed(name, [(document.place_of(at), at, message)])
            checked.warnings += _placed(
                name,
                (
                    (document.place_of(warning.location), warning.location, warning.message)
                    for warning in warnings_of(job)
                ),
            )
    if not given:
        checked.problems.append(FileProblem(name, 1, 1, "", f"must hold an {KIND}; it is empty"))
    return checked


def job_name(job: ElasticJob) -> str:
    """Return the namespace and name of a job, by which a cluster knows it."""
    return f"{job.metadata.namespace or DEFAULT_NAMESPACE}/{job.metadata.name}"


def _is_other(document: YamlDocument) -> bool:
    """Return True for an object of another kind, such as the ConfigMap that a job mounts."""
    value = document.value
    foreign = isinstance(value, Mapping) and value.get("kind") != KIND and _is_foreign(value)
    return foreign and not document.faults and not _holds_jobs(value)


def _note(document: YamlDocument) -> tuple[Place, Location, str]:
    assert isinstance(document.value, Mapping)
    text = f"{_kind(document.value)} is not checked: it is not an {KIND}"
    return document.place_of(("kind",)), ("kind",), text


_CONVERTED = frozenset({"PyTorchJob"})
"""Kinds that `elasticjob convert` reads."""


def _placed(file: str, found: Iterable[tuple[Place, Location, str]]) -> list[FileProblem]:
    problems = [
        FileProblem(file, place.line, place.column, field_path(location), message)
        for place, location, message in found
    ]
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def _unreadable(file: Path | str, message: str) -> InvalidFile:
    return InvalidFile([FileProblem(shown(file), 0, 0, "", message)])


def _judge(
    document: YamlDocument, jobs: list[ElasticJob], check: Check
) -> Iterator[tuple[Place, Location, str]]:
    """Yield the problems of one document; if there are none, add its job to `jobs`."""
    for fault in document.faults:
        yield fault.place, fault.location, fault.message
    value = document.value
    if value is None:
        return
    if not isinstance(value, Mapping):
        message = f"must be a manifest, a mapping with apiVersion: {API_VERSION} and kind: {KIND}"
        yield document.start, (), message
        return
    if _is_foreign(value):
        if _holds_jobs(value):
            message = (
                f"must not hold an {KIND} in its items, which are not checked there: write it as a "
                "document of its own, after a line with ---"
            )
            yield document.place_of(("items",)), ("items",), message
            return
        if document.faults and value.get("kind") not in (KIND, *_CONVERTED):
            return  # an object beside a job may have any kind
        message = f"must be {KIND} of {API_VERSION}; this document is {_kind(value)}"
        if value.get("kind") in _CONVERTED:
            message += ", which `elasticjob convert` turns into one"
        yield document.place_of(("kind",)), ("kind",), message
        return
    try:
        job = parse_strictly(value, check)
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


def _holds_jobs(value: Mapping[str, object]) -> bool:
    """Return True for a list, such as kubectl prints, with a job among its items."""
    items = value.get("items")
    given = items if str(value.get("kind")).endswith("List") and isinstance(items, list) else []
    return any(isinstance(item, Mapping) and item.get("kind") == KIND for item in given)


def _kind(value: Mapping[str, object]) -> str:
    kind, version = str(value["kind"]), str(value["apiVersion"])
    return f"{_shown_name(kind)} of {_shown_name(version)}"


def _shown_name(name: str) -> str:
    """Return the name of a kind or a version; in quotes if it is neither."""
    return name if re.fullmatch(r"[\w./-]{1,100}", name) else echoed(name)
