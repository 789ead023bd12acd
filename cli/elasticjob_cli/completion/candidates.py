"""Candidates for one word of a command line. No I/O, and no import of a command.

The options of the commands are in a generated table: importing a command takes longer than a user
waits for a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NAME = "NAME"
"""Metavariable of arguments that are names of jobs."""
PASSED_ON = "[ARG]"
"""Part of the metavariable of arguments that belong to a script from the first one on."""
SHELLS = ("bash", "zsh", "fish")
COMMON = (("--help", "Show the help."),)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of the jobs on a command line; None means the default."""

    cluster: bool | None = None
    context: str | None = None
    kubeconfig: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates with their descriptions; `files` if the shell may add names of files."""

    values: tuple[tuple[str, str], ...] = ()
    files: bool = False


Lookup = Callable[[str, Place], Sequence[str]]
"""Function that returns the names of a kind, `job`, `context` or `namespace`, at a place."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Words of a command before the one to complete, without values of options."""

    place: Place = Place()
    arguments: tuple[str, ...] = ()
    pending: Mapping[str, Any] | None = None
    passed_on: bool = False
    used: frozenset[str] = field(default_factory=frozenset)


def candidates(
    words: Sequence[str],
    incomplete: str,
    helps: Mapping[str, str],
    table: Mapping[str, Any],
    lookup: Lookup,
) -> Candidates:
    """Return the candidates for `incomplete` after `words`, which begin with the command.

    `helps` are the commands of the program with their descriptions, `table` the options of each.
    """
    if not words:
        values = (*helps.items(), ("--version", "Print the version."), *COMMON)
        return Candidates(_matching(values, incomplete))
    command = table.get(words[0]) if words[0] in helps else None
    if command is None:
        return Candidates()
    if words[-1] == "=":  # bash splits --option=value into three words
        words = words[:-1]
    elif incomplete == "=":
        incomplete = ""
    line = _line(words[1:], command)
    if line.passed_on:
        return Candidates(files=True)
    if line.pending is not None:
        return _values(line.pending, incomplete, line.place, lookup)
    option, equals, begun = incomplete.partition("=")
    if equals and (found := _option(command, option)) is not None and found["value"]:
        completed = _values(found, begun, line.place, lookup)
        return Candidates(
            tuple((f"{option}={value}", text) for value, text in completed.values), completed.files
        )
    if incomplete.startswith("-"):
        free = (one for one in command["options"] if line.used.isdisjoint(one["names"]))
        options = tuple((one["names"][0], one["help"]) for one in free)
        return Candidates(_matching((*options, *COMMON), incomplete))
    return _arguments(command, incomplete, line, lookup)


def _line(words: Sequence[str], command: Mapping[str, Any]) -> _Line:
    place: dict[str, Any] = {}
    arguments: list[str] = []
    used: set[str] = set()
    pending: Mapping[str, Any] | None = None
    for word in words:
        if pending is not None:
            if word != "=":
                _place_value(place, pending["names"][0], word)
                pending = None
            continue
        if word == "--":
            return _Line(Place(**place), tuple(arguments), None, True, frozenset(used))
        name, equals, value = word.partition("=")
        found = _option(command, name)
        if found is None:
            if not word.startswith("-"):
                arguments.append(word)
            if PASSED_ON in command["argument"]:
                return _Line(Place(**place), tuple(arguments), None, True, frozenset(used))
            continue
        if not found["many"]:
            used |= {*found["names"]}
        if name in ("--cluster", "--local"):
            place["cluster"] = name == "--cluster"
        elif found["value"] and equals:
            _place_value(place, found["names"][0], value)
        elif found["value"]:
            pending = found
    return _Line(Place(**place), tuple(arguments), pending, False, frozenset(used))


def _place_value(place: dict[str, Any], option: str, value: str) -> None:
    if option in ("--context", "--kubeconfig", "--namespace"):
        place[option.removeprefix("--")] = value


def _option(command: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = next(
        (option for option in command["options"] if name in option["names"]), None
    )
    return found


def _values(option: Mapping[str, Any], begun: str, place: Place, lookup: Lookup) -> Candidates:
    """Return the candidates for the value of an option."""
    name = option["names"][0]
    if option["choices"]:
        return Candidates(_matching([(choice, "") for choice in option["choices"]], begun))
    if name in ("--context", "--namespace"):
        found = lookup(name.removeprefix("--"), place)
        return Candidates(_matching([(one, "") for one in found], begun))
    return Candidates(files=True)


def _arguments(
    command: Mapping[str, Any], incomplete: str, line: _Line, lookup: Lookup
) -> Candidates:
    if command["choices"]:
        free = [(choice, "") for choice in command["choices"] if not line.arguments]
        return Candidates(_matching(free, incomplete))
    if command["argument"] != NAME:
        return Candidates(files=bool(command["argument"]))
    if line.arguments and not command["many"]:
        return Candidates()
    found = [name for name in lookup("job", line.place) if name not in line.arguments]
    return Candidates(_matching([(one, "") for one in found], incomplete))


def _matching(values: Sequence[tuple[str, str]], incomplete: str) -> tuple[tuple[str, str], ...]:
    return tuple(value for value in values if value[0].startswith(incomplete))
