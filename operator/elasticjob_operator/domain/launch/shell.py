"""Reader of shell command lines: simple commands, their operators and their positions in the text.

Covers the grammar common to POSIX shells and bash, as far as the position of commands depends on
it. A construct that is only recognized, such as a loop, is reported in `Line.compound`.
See docs/decisions/0020.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_OPERATORS = (
    *("&>>", "<<<", "<<-", ";;&"),
    *("&&", "||", ";;", ";&", "|&", "<<", ">>", "&>", "<&", ">&", ">|", "<>"),
    *("&", ";", "|", "(", ")", "<", ">", "\n"),
)
_REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "<<", ">>", "&>", "<&", ">&", ">|", "<>", "<", ">"})
_HEREDOCS = frozenset({"<<", "<<-"})
_LEADING = frozenset({"if", "then", "else", "elif", "do", "while", "until", "{", "!", "time"})
"""Reserved words before a command."""
_OPENING = frozenset({"if", "while", "until", "{", "for", "select", "case"})
"""Reserved words that begin a compound command."""
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_HEADS = frozenset({"for", "select", "case", "[[", "function", "coproc"})
"""Reserved words before words that are not a command."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?=")
_PLAIN = frozenset(" \t\n&;|()<>")
_ARRAY = "an array"
_NAME = re.compile(r"\$(?:\{[#!]?)?([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!_-])")


class Unreadable(Exception):
    """Text that is not a complete shell command line."""


@dataclass(frozen=True, slots=True)
class Word:
    """Word of a command.

    Args:
        raw: text as written.
        value: text without quotes; expansions stay as written.
        expands: True if the shell replaces parts of it.
        substitutions: texts of the command substitutions in it.
        start, end: position in the line.
    """

    raw: str
    value: str
    expands: bool
    substitutions: tuple[str, ...]
    start: int
    end: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the variables in it; nothing for single-quoted text."""
        return tuple(_NAME.findall(_without_single_quotes(self.raw)))


@dataclass(frozen=True, slots=True)
class Redirection:
    operator: str
    target: Word


@dataclass(slots=True)
class Simple:
    """Simple command.

    Args:
        before, after: operators around it; empty at the ends of the line.
        repeated: True in the body of a `for` loop over several words, or over unknown ones.
        conditional: True after `&&` or `||`, and in a compound command.
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
    start: int = 0
    end: int = 0

    @property
    def parts(self) -> list[Word]:
        """All words of the command, including those of assignments and redirections."""
        return [*self.assignments, *self.words, *(found.target for found in self.redirections)]


@dataclass(frozen=True, slots=True)
class Line:
    """Commands of a line in order; `compound` names the first loop, condition, group or function,
    and is empty for a plain sequence. `is_sequence` is True if nothing but operators and `for`
    loops decides which commands run."""

    commands: tuple[Simple, ...]
    compound: str
    is_sequence: bool = True


def read(text: str) -> Line:
    """Return the commands of a shell line. Raises `Unreadable`."""
    return _Reader(text).line()


def single_quoted(text: str) -> str:
    """Return the text as one single-quoted word."""
    return "'" + text.replace("'", "'\\''") + "'"


def _without_single_quotes(raw: str) -> str:
    """Return the word without its single-quoted parts, in which the shell expands nothing."""
    kept, index, double = [], 0, False
    while index < len(raw):
        letter = raw[index]
        if letter == "\\":
            index += 2
            continue
        if letter == "'" and not double:
            closing = raw.find("'", index + 1)
            index = len(raw) if closing < 0 else closing + 1
            continue
        if letter == '"':
            double = not double
        kept.append(letter)
        index += 1
    return "".join(kept)


@dataclass(slots=True)
class _Heredoc:
    delimiter: str
    tabs: bool


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._commands: list[Simple] = []
        self._compound = ""
        self._is_sequence = True
        self._loops: list[str] = []
        self._open = 0
        self._heredocs: list[_Heredoc] = []
        self._depth = 0

    def line(self) -> Line:
        current = Simple(before="")
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                break
            operator = self._operator()
            if operator in _REDIRECTIONS:
                self._redirection(current, operator)
            elif operator:
                current = self._control(current, operator)
            else:
                self._word_of(current)
        self._finish(current, "")
        return Line(tuple(self._commands), self._compound, self._is_sequence)

    def _finish(self, current: Simple, after: str) -> None:
        current.after = after
        current.repeated = "for" in self._loops
        nested = self._open > 0 or self._depth > 0
        current.conditional = nested or current.before in ("&&", "||")
        if current.parts:
            current.start = min(word.start for word in current.parts)
            current.end = max(word.end for word in current.parts)
            self._commands.append(current)

    def _control(self, current: Simple, operator: str) -> Simple:
        if operator == "(" and current.words:  # f() { … }
            self._mark("a function")
            if self._text[self._at :].lstrip().startswith(")"):
                self._at = self._text.index(")", self._at) + 1
                return Simple(before="\n")
        if operator == "(":
            self._mark("a subshell")
            self._depth += 1
        elif operator == ")":
            if self._depth == 0:  # the pattern of a case
                self._mark("case")
                return Simple(before=";")
            self._depth -= 1
        self._finish(current, operator)
        if operator == "\n":
            self._skip_heredocs()
        if operator == "\n" and not current.parts and self._commands:
            return Simple(before=current.before or "\n")
        return Simple(before=operator)

    def _redirection(self, current: Simple, operator: str) -> None:
        if operator in ("<", ">") and self._text.startswith("(", self._at):
            self._mark("a process substitution")
            return
        self._skip_blanks()
        if self._text.startswith((">(", "<("), self._at):  # > >(tee log)
            self._mark("a process substitution")
            self._at += 1
            return
        target = self._word()
        if not target.raw:
            raise Unreadable(f"{operator} must be followed by a word")
        current.redirections.append(Redirection(operator, target))
        if operator in _HEREDOCS:
            self._heredocs.append(_Heredoc(target.value, operator == "<<-"))

    def _skip_heredocs(self) -> None:
        for heredoc in self._heredocs:
            while True:
                if self._at >= len(self._text):
                    break
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                if (line.lstrip("\t") if heredoc.tabs else line) == heredoc.delimiter:
                    break
        self._heredocs = []

    def _word_of(self, current: Simple) -> None:
        word = self._word()
        following = self._text[self._at : self._at + 1]
        if word.raw.isdigit() and following in ("<", ">"):  # the number of a descriptor
            return
        if not current.words and not current.redirections:
            if word.raw in _LEADING and not current.assignments:
                self._mark(word.raw)
                self._open += word.raw in _OPENING
                current.before = current.before if word.raw in ("!", "time") else ";"
                return
            if word.raw in _CLOSING and not current.assignments:
                self._mark(word.raw)
                self._open -= 1
                return
            if word.raw in _HEADS and not current.assignments:
                self._mark(word.raw)
                self._open += word.raw in _OPENING
                self._skip_head(word.raw)
                return
        if not current.words and _ASSIGNMENT.match(word.raw):
            if word.raw.endswith("=") and following == "(":
                current.arrays[word.raw[:-1]] = self._array()
            current.assignments.append(word)
        elif following == "(" and word.raw.endswith("=") and _ASSIGNMENT.match(word.raw):
            current.arrays[word.raw[:-1]] = self._array()  # declare -a NAME=(…)
            current.words.append(word)
        else:
            current.words.append(word)

    def _array(self) -> list[Word]:
        """Read the elements of an array. Raises `Unreadable`."""
        self._mark(_ARRAY)
        self._at += 1
        elements: list[Word] = []
        while True:
            self._skip_blanks()
            if self._text.startswith("\n", self._at):
                self._at += 1
            elif self._text.startswith(")", self._at):
                self._at += 1
                return elements
            else:
                elements.append(self._word())
                if not elements[-1].raw:
                    raise Unreadable("an array is not closed")

    def _skip_head(self, head: str) -> None:
        """Skip the words after `for`, `case`, `[[` and `function`, which run nothing."""
        words: list[Word] = []
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                return
            if head == "[[":
                if self._operator():
                    continue
                if self._word().raw == "]]":
                    return
            elif head in ("for", "select"):
                if self._text[self._at] in ";\n":
                    if head == "for" and _is_one_word(words):
                        self._loops[-1] = "once"
                    return
                if self._operator():
                    words = []
                    continue
                words.append(self._word())
            elif head == "case":
                if self._operator():
                    continue
                if self._word().raw == "in":
                    return
            else:
                start = self._at
                self._word()
                self._skip_blanks()
                if head == "coproc" and self._text[self._at : self._at + 1] not in ("{", "("):
                    self._at = start  # no name, but the command itself
                return

    def _mark(self, name: str) -> None:
        self._compound = self._compound or name
        self._is_sequence &= name in (_ARRAY, "for", "do", "done")
        if name in ("for", "select", "while", "until"):
            self._loops.append(name)
        elif name == "done" and self._loops:
            self._loops.pop()

    def _skip_blanks(self) -> None:
        text = self._text
        while self._at < len(text):
            if text[self._at] in " \t\r":
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif text[self._at] == "#":  # only at the start of a word
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            else:
                return

    def _operator(self) -> str:
        for operator in _OPERATORS:
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                return operator
        return ""

    def _word(self) -> Word:
        start, value, expands = self._at, [], False
        substitutions: list[str] = []
        text = self._text
        while self._at < len(text) and text[self._at] not in _PLAIN:
            letter = text[self._at]
            if letter == "\\":
                if self._at + 1 < len(text) and text[self._at + 1] != "\n":
                    value.append(text[self._at + 1])
                self._at += 2
            elif letter == "'":
                value.append(self._until("'", self._at + 1))
            elif letter == '"':
                expands |= self._double_quoted(value, substitutions)
            elif letter in "$`":
                expands |= self._expansion(value, substitutions)
            else:
                expands = expands or letter in "*?["
                value.append(letter)
                self._at += 1
        raw = text[start : self._at]
        return Word(raw, "".join(value), expands, tuple(substitutions), start, self._at)

    def _until(self, closing: str, start: int) -> str:
        end = self._text.find(closing, start)
        if end < 0:
            raise Unreadable(f"{closing} is not closed")
        self._at = end + 1
        return self._text[start:end]

    def _double_quoted(self, value: list[str], substitutions: list[str]) -> bool:
        text, expands = self._text, False
        self._at += 1
        while self._at < len(text):
            letter = text[self._at]
            if letter == '"':
                self._at += 1
                return expands
            if letter == "\\" and text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                value.append(text[self._at + 1].replace("\n", ""))
                self._at += 2
            elif letter in "$`":
                expands |= self._expansion(value, substitutions)
            else:
                value.append(letter)
                self._at += 1
        raise Unreadable('" is not closed')

    def _expansion(self, value: list[str], substitutions: list[str]) -> bool:
        text, start = self._text, self._at
        following = text[start + 1 : start + 2]
        if text[start] == "`":
            substitutions.append(self._until("`", start + 1))
        elif following == "(":
            self._at = _closing(text, start + 1)
            inner = text[start + 2 : self._at - 1]
            if not inner.startswith("("):
                substitutions.append(inner)
        elif following == "{":
            self._at = _closing(text, start + 1)
        elif following == "'":
            value.append(self._until("'", start + 2))
            return False
        elif following and (following.isalnum() or following in "_@*#?$!-"):
            self._at += 2
            if following.isalpha() or following == "_":
                while self._at < len(text) and (text[self._at].isalnum() or text[self._at] == "_"):
                    self._at += 1
        else:
            value.append("$")
            self._at += 1
            return False
        value.append(text[start : self._at])
        return True


def _is_one_word(head: Sequence[Word]) -> bool:
    """Return True if the words after `for` are a name, `in` and one word that stays as it is."""
    return len(head) == 3 and head[1].raw == "in" and not (head[2].expands or "{" in head[2].raw)


def _closing(text: str, opening: int) -> int:
    """Return the position after the bracket that closes the one at `opening`."""
    pairs, stack = {"(": ")", "{": "}"}, [text[opening]]
    index = opening + 1
    quoted = ""
    while index < len(text):
        letter = text[index]
        if letter == "\\" and quoted != "'":
            index += 1
        elif quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "'\"":
            quoted = letter
        elif letter in pairs and (letter == "(" or stack[-1] == "{" or text[index - 1] == "$"):
            stack.append(letter)
        elif letter == pairs[stack[-1]]:
            stack.pop()
            if not stack:
                return index + 1
        index += 1
    raise Unreadable(f"{text[opening]} is not closed")


FOREIGN_SHELLS = frozenset(
    {"csh", "tcsh", "fish", "xonsh", "nu", "pwsh", "rc", "elvish"}
    | {"perl", "ruby", "node", "tclsh", "expect"}
)
"""Shells and script interpreters with a grammar of their own."""
_FOREIGN_LINE = re.compile(r"-\w*[ce]|-Command")


def foreign_line(words: Sequence[str]) -> str:
    """Return the text after `-c`, `-e` or `-Command` of a foreign shell; empty if there is none."""
    for option, text in pairwise(words[1:]):
        if not option.startswith("-"):
            break
        if _FOREIGN_LINE.fullmatch(option):
            return text
    return ""


SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "rbash"})
_VALUED = frozenset({"--rcfile", "--init-file"})


@dataclass(frozen=True, slots=True)
class Invocation:
    """Command line of a shell.

    Args:
        line_at: index of the text after `-c` among the words; None for a script or standard input.
        script: script file; empty for standard input.
    """

    line_at: int | None
    script: str = ""


def invocation(words: Sequence[str]) -> Invocation:
    """Return the parts of a shell's command line; `words` begin with the shell."""
    at, has_line, reads_input = 1, False, False
    while at < len(words):
        word = words[at]
        if word in ("--", "-"):
            at += 1
            break
        if word.startswith("--"):
            at += 2 if word in _VALUED else 1
        elif word[:1] in "-+" and len(word) > 1:
            has_line |= word[0] == "-" and "c" in word
            reads_input |= word[0] == "-" and "s" in word
            at += 1 + word.count("o") + word.count("O")
        else:
            break
    if at >= len(words):
        return Invocation(None)
    if has_line:
        return Invocation(at)
    return Invocation(None, "" if reads_input else words[at])
