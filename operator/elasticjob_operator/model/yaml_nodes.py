"""YAML reader that records line and column of each value.

PyYAML's loader drops positions and silently takes the last of two equal keys; this reader walks
the node graph instead. Scalars have the same meaning as in kubectl: PyYAML's, except that dates
stay strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import ReaderError

from elasticjob_operator.model.problems import Location
from elasticjob_rendezvous.core.typed import echoed

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
        yield _unreadable(place, f"character {error.character:#04x} is not allowed")
        return
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield _Reader(loader, node).document
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        yield _malformed(error)
    finally:
        loader.dispose()


def _malformed(error: Exception) -> YamlDocument:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, RecursionError):
        said = "it is nested too deeply"
    return _unreadable(place, str(said).splitlines()[0])


def _unreadable(place: Place, said: str) -> YamlDocument:
    return YamlDocument(place, faults=[YamlFault(place, (), f"must be YAML: {said}")])


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
            said = getattr(error, "problem", None) or str(error)
            return self._fault(node, location, f"must be a plain YAML value: {said}")
        if isinstance(value, str | int | float | bool) or value is None:
            return value
        return self._fault(node, location, f"must be a plain YAML value, not {node.tag}")

    def _fault(self, node: yaml.Node, location: Location, message: str) -> None:
        self.document.faults.append(YamlFault(_place(node), location, message))


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)
