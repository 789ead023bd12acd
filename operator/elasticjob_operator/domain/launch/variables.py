"""Values of variables in a command, as far as they are known before it runs.

The kubelet replaces `$(NAME)` in a container's words by its variables; a shell replaces `$NAME` by
those and by the assignments of its line. A part of a value that only the running shell knows stays
as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticjob_launcher.command_line.shell import Simple
from elasticjob_launcher.command_line.shell_words import Word

UNKNOWN = "$UNKNOWN"
"""Element of an array, or positional parameter, that only the running shell knows."""
_MAX_BRANCHES = 8
_MAX_VALUE = 64 * 1024
"""Maximum size of a value that is followed through assignments."""
_KUBELET_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z0-9]+)\))")
_HARMLESS = re.compile(r"[\w\s./:@%+,=-]*")
"""Values that do not change the structure of a shell line."""
_REFERENCE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*|[0-9])|\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=]([^{}$`]*))?\})"
)
_LOCATED = re.compile(r"(?:\$\(|`)(?:which|command -v|type -[pP])\s+([\w.-]+)\s*[)`]")
"""Command substitution for the path of a program."""
_WHOLE_ARRAY = re.compile(r'"?\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}"?')


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as the kubelet does: unknown names stay, `$$` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return values.get(match[2], match[0])

    return _KUBELET_REFERENCE.sub(value, text)


def structural(text: str, values: Mapping[str, str]) -> str:
    """Return the first `NAME` of a `$(NAME)` whose value would change the structure of a shell
    line; empty if there is none."""
    names = (match[2] for match in _KUBELET_REFERENCE.finditer(text))
    return next(
        (name for name in names if name and not _HARMLESS.fullmatch(values.get(name, ""))), ""
    )


@dataclass(slots=True)
class Variables:
    """Variables of a shell at one place of its line, with `arrays` by their elements."""

    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def copy(self) -> Variables:
        """Return a copy, whose assignments do not change this one."""
        return Variables(dict(self.values), dict(self.arrays))

    def resolved(self, text: str) -> str:
        """Return a text with known variables, and the defaults of unknown ones, in place of their
        references, and the name of a program in place of `$(which NAME)`."""

        def value(match: re.Match[str]) -> str:
            known = self.values.get(match[1] or match[2])
            if known is None and match[3] is not None:
                return match[3].strip("'\"")
            return match[0] if known is None else known

        found = _LOCATED.sub(r"\1", _REFERENCE.sub(value, text))
        return text if len(found) > _MAX_VALUE else found

    def words(self, word: Word) -> tuple[str, ...]:
        """Return the words that the shell makes of a word, as far as its values are known."""
        named = _WHOLE_ARRAY.fullmatch(word.raw)
        if named is not None and named[1] in self.arrays:
            return self.arrays[named[1]]
        known = self.resolved(word.value)
        return (known,) if '"' in word.raw else tuple(known.split())

    def assign(self, command: Simple) -> None:
        """Record the assignments that a command makes in its shell."""
        for word in command.assigned:
            target, _, text = word.value.partition("=")
            name = target.rstrip("+")
            if (elements := command.arrays.get(target)) is not None:
                before = self.arrays.get(name, (UNKNOWN,)) if target != name else ()
                given = (self.resolved(element.value) for element in elements)
                self.arrays[name] = (*before, *given)
                self.values[name] = self.arrays[name][0] if self.arrays[name] else ""
                continue
            self.arrays.pop(name, None)
            before_text = self.values.get(name, f"${{{name}}}") if target != name else ""
            self.values[name] = before_text + self.resolved(text)


class Branches:
    """Variables of a line in which conditions decide if a variable is assigned.

    `taken` has all assignments up to the current command. `others` are up to `_MAX_BRANCHES`
    variables without a conditional one.
    """

    def __init__(self, before: Variables, follows_others: bool) -> None:
        self.taken = before.copy()
        self.others: list[Variables] = []
        self._follows_others = follows_others

    def assign(self, command: Simple) -> None:
        """Record the assignments of the next command."""
        if not command.assigned:
            return
        if not (command.conditional and self._follows_others):
            for known in self.others:
                known.assign(command)
        elif len(self.others) < _MAX_BRANCHES and self.taken not in self.others:
            self.others.append(self.taken.copy())
        self.taken.assign(command)
