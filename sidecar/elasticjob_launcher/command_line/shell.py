"""Reader of shell lines: simple commands, the operators between them and their positions.

A construct that is only recognized, such as a loop, is reported in `Line.compound`; the commands in
it are read. See docs/decisions/0020.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticjob_launcher.command_line.shell_words import ASSIGNMENT, Scanner, Unreadable, Word

_REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "<<", ">>", "&>", "<&", ">&", ">|", "<>", "<", ">"})
_HEREDOCS = frozenset({"<<", "<<-"})
_LEADING = frozenset({"if", "then", "else", "elif", "do", "while", "until", "{", "!", "time"})
"""Reserved words before a command."""
_OPENING = frozenset({"if", "while", "until", "{", "for", "select", "case"})
"""Reserved words that begin a compound command."""
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_HEADS = frozenset({"for", "select", "case", "[[", "function", "coproc"})
"""Reserved words before words that are not a command."""
_TARGET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?=")
"""Beginning of an assignment, also of an array's element."""
_DECLARING = frozenset({"export", "declare", "readonly", "typeset", "local"})
_CLOSED = re.compile(r"\s*\)")
_ARRAY = "an array"


class Redirection(NamedTuple):
    """Operator and word of a redirection."""

    operator: str
    target: Word


@dataclass
class Simple:
    """Simple command.

    Args:
        before, after: operators around it; empty at the ends of the line.
        repeated: True in the body of a `for` loop over several words, or over unknown ones.
        conditional: True after `&&` or `||`, and in a compound command.
        joined: `before`, or for the first command of a group the operator before the group.
        chosen: True in an `if` or a `case`.
        arrays: elements of the arrays that it assigns, by name; `name+` for those it extends.
        start, end: its position in the line.
    """

    before: str
    assignments: list[Word] = field(default_factory=list)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    words: list[Word] = field(default_factory=list)
    redirections: list[Redirection] = field(default_factory=list)
    after: str = ""
    repeated: bool = False
    conditional: bool = False
    joined: str = ""
    chosen: bool = False
    start: int = 0
    end: int = 0

    @property
    def parts(self) -> list[Word]:
        """All words of the command, including those of assignments and redirections."""
        return [*self.assignments, *self.words, *(found.target for found in self.redirections)]

    @property
    def values(self) -> list[str]:
        """Values of its words."""
        return [word.value for word in self.words]

    @property
    def assigned(self) -> list[Word]:
        """Assignments that it makes in its shell; those before a program last for that program."""
        if self.words and self.words[0].value in _DECLARING:
            return [word for word in self.words[1:] if ASSIGNMENT.fullmatch(word.value)]
        return [] if self.words else self.assignments


class Line(NamedTuple):
    """Commands of a line in order; `compound` names the first loop, condition, group or function,
    and is empty for a plain sequence. `is_sequence` is True if nothing but operators and `for`
    loops decides which commands run. `loop_names` are the variables of its `for` loops."""

    commands: tuple[Simple, ...]
    compound: str
    is_sequence: bool = True
    loop_names: tuple[Word, ...] = ()


def read(text: str) -> Line:
    """Return the commands of a shell line. Raises `Unreadable`."""
    return _Reader(text).line()


class _Heredoc(NamedTuple):
    delimiter: str
    tabs: bool


class _Reader(Scanner):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._commands: list[Simple] = []
        self._compound = ""
        self._is_sequence = True
        self._loops: list[str] = []
        self._loop_names: list[Word] = []
        self._open = 0
        self._choices = 0
        self._heredocs: list[_Heredoc] = []
        self._depth = 0

    def line(self) -> Line:
        current = Simple(before="")
        while True:
            self.skip_blanks()
            if self.is_at_end:
                break
            operator = self.operator()
            if operator in _REDIRECTIONS:
                self._redirection(current, operator)
            elif operator:
                current = self._control(current, operator)
            else:
                self._word_of(current)
        self._finish(current, "")
        names = tuple(self._loop_names)
        return Line(tuple(self._commands), self._compound, self._is_sequence, names)

    def _finish(self, current: Simple, after: str) -> None:
        current.after = after
        current.repeated = "for" in self._loops
        nested = self._open > 0 or self._depth > 0
        current.conditional = nested or current.before in ("&&", "||")
        current.chosen = self._choices > 0
        if current.parts:
            current.start = min(word.start for word in current.parts)
            current.end = max(word.end for word in current.parts)
            self._commands.append(current)

    def _control(self, current: Simple, operator: str) -> Simple:
        if operator == "(" and current.words:  # f() { … }
            self._mark("a function")
            if closing := _CLOSED.match(self.text, self.at):
                self.at = closing.end()
                return Simple(before="\n", joined="\n")
        if operator == "(":
            self._mark("a subshell")
            self._depth += 1
        elif operator == ")":
            if self._depth == 0:  # the pattern of a case
                self._mark("case")
                return Simple(before=";", joined=";")
            self._depth -= 1
        self._finish(current, operator)
        if operator == "\n":
            self._skip_heredocs()
        if operator == "\n" and not current.parts and self._commands:
            return Simple(before=current.before or "\n", joined=current.joined or "\n")
        return Simple(before=operator, joined=current.joined if operator == "(" else operator)

    def _redirection(self, current: Simple, operator: str) -> None:
        if operator in ("<", ">") and self.begins("("):
            self._mark("a process substitution")
            return
        self.skip_blanks()
        if self.begins(">(", "<("):  # > >(tee log)
            self._mark("a process substitution")
            self.at += 1
            return
        target = self.word()
        if not target.raw:
            raise Unreadable(f"{operator} must be followed by a word")
        current.redirections.append(Redirection(operator, target))
        if operator in _HEREDOCS:
            self._heredocs.append(_Heredoc(target.value, operator == "<<-"))

    def _skip_heredocs(self) -> None:
        for heredoc in self._heredocs:
            while not self.is_at_end:
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if heredoc.tabs else line) == heredoc.delimiter:
                    break
        self._heredocs = []

    def _word_of(self, current: Simple) -> None:
        word = self.word()
        if word.raw.isdigit() and self.begins("<", ">"):  # the number of a descriptor
            return
        begins = not (current.words or current.redirections or current.assignments)
        if begins and self._reserved(current, word.raw):
            return
        is_array = word.raw.endswith("=") and self.begins("(")
        if not current.words and _TARGET.match(word.raw):
            if is_array:
                current.arrays[word.raw[:-1]] = self._array()
            current.assignments.append(word)
            return
        if is_array and _TARGET.match(word.raw):
            current.arrays[word.raw[:-1]] = self._array()  # declare -a NAME=(…)
        current.words.append(word)

    def _reserved(self, current: Simple, word: str) -> bool:
        """Return True if a word at the beginning of a command is a reserved word; skip the words
        after it that are not a command."""
        if word in _LEADING:
            self._mark(word)
            self._open += word in _OPENING
            self._choices += word == "if"
            current.before = current.before if word in ("!", "time") else ";"
            current.joined = current.joined if word in ("!", "time", "{") else ";"
        elif word in _CLOSING:
            self._mark(word)
            self._open -= 1
            self._choices -= word in ("fi", "esac")
        elif word in _HEADS:
            self._mark(word)
            self._open += word in _OPENING
            self._choices += word == "case"
            self._skip_head(word)
        else:
            return False
        return True

    def _array(self) -> list[Word]:
        """Read the elements of an array. Raises `Unreadable`."""
        self._mark(_ARRAY)
        self.at += 1
        elements: list[Word] = []
        while True:
            self.skip_blanks()
            if self.begins("\n"):
                self.at += 1
            elif self.begins(")"):
                self.at += 1
                return elements
            else:
                elements.append(self.word())
                if not elements[-1].raw:
                    raise Unreadable("an array is not closed")

    def _skip_head(self, head: str) -> None:
        """Skip the words after `for`, `case`, `[[` and `function`, which run nothing."""
        if head in ("for", "select"):
            self._skip_loop_head(head)
        elif head in ("[[", "case"):
            last = "]]" if head == "[[" else "in"
            while True:
                self.skip_blanks()
                if self.is_at_end:
                    return
                if not self.operator() and self.word().raw == last:
                    return
        else:
            self.skip_blanks()
            if self.is_at_end:
                return
            start = self.at
            self.word()
            self.skip_blanks()
            if head == "coproc" and not self.begins("{", "("):
                self.at = start  # no name, but the command itself

    def _skip_loop_head(self, head: str) -> None:
        words: list[Word] = []
        while True:
            self.skip_blanks()
            if self.is_at_end:
                break
            if self.begins(";", "\n"):
                if head == "for" and _is_one_word(words):
                    self._loops[-1] = "once"
                break
            if self.operator():
                words = []
                continue
            words.append(self.word())
        self._loop_names += [word for word in words[:1] if word.raw.isidentifier()]

    def _mark(self, name: str) -> None:
        self._compound = self._compound or name
        self._is_sequence &= name in (_ARRAY, "for", "do", "done")
        if name in ("for", "select", "while", "until"):
            self._loops.append(name)
        elif name == "done" and self._loops:
            self._loops.pop()


def _is_one_word(head: Sequence[Word]) -> bool:
    """Return True if the words after `for` are a name, `in` and one word that stays as it is."""
    return len(head) == 3 and head[1].raw == "in" and not (head[2].expands or "{" in head[2].raw)
