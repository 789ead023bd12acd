"""Words of a command that only a shell would understand, in a command without a shell.

A container's command is a list of words that no shell reads: `["python", "t.py", "&&", "echo"]`
gives the program an argument `&&`, and `["cd", "x"]` starts a program that does not exist. Such a
command runs, or ends at once, without doing what its author meant. So does an interpreter that is
given nothing to run: the standard input of a container is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticjob_launcher.launchers import is_launcher_word, launcher_of_program
from elasticjob_operator.domain.launch import shell
from elasticjob_operator.domain.launch.detection import is_python, python_target
from elasticjob_operator.domain.launch.wrappers import split_string, wrapped_at

_OPERATORS = frozenset({"&&", "||", "|&", "2>&1", "1>&2", "&>", "&>>", "2>", "2>>"})
"""Words that are no sensible argument of a program."""
_AMBIGUOUS = frozenset({"|", ">", ">>", "<", ";", "&"})
"""Words that may be the value of an option, such as a separator."""
_EXECUTING = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
"""Options of find whose value is a command that ends with `;`."""
_SHELL_COMMANDS = frozenset(
    {"cd", "source", ".", "export", "set", "unset", "eval", "exec", "alias", "ulimit", "umask"}
    | {"if", "for", "while", "until", "case", "{", "[[", "trap", "declare", "pushd", "popd"}
)
"""Commands and reserved words of shells that are no programs."""


def misplaced(words: Sequence[str]) -> str:
    """Return a description of the first word that needs a shell and has none, and the remedy; empty
    if there is none."""
    at = 0
    while (
        at < len(words)
        and not split_string(words[at:])
        and _name(words[at]) not in shell.SHELLS
        and (index := wrapped_at(words[at:])) is not None
    ):
        at += index
    rest = words[at:]
    if not rest:
        return ""
    program = rest[0]
    if nothing := _nothing(rest):
        return f"{nothing}: name what it is to run"
    if program in _SHELL_COMMANDS:
        return f"{program} is a command of a shell, not a program: {_REMEDY}"
    first = program.split()
    if len(first) > 1 and (_is_command(first[0]) or first[1].startswith("-")):
        return (
            f"the program {program!r} contains spaces: write each word as an item of its own, or "
            f"{_REMEDY}"
        )
    begin = 1
    if _name(program) in shell.SHELLS:
        call = shell.invocation(rest)
        begin = len(rest) if call.line_at is None else call.line_at + 1
        if rest[begin : begin + 1] and rest[begin] in _OPERATORS | _AMBIGUOUS:
            return (
                f"{_name(program)} -c runs one word, and {rest[begin]!r} stands after it: write "
                "the whole line as one word"
            )
    executes = False
    for before, word in zip(rest[begin - 1 :], rest[begin:], strict=False):
        executes = before in _EXECUTING or (executes and before != ";")
        if word == ";" and executes:
            continue
        if word in _OPERATORS or (word in _AMBIGUOUS and not before.startswith("-")):
            return f"{word!r} is an argument here, because no shell reads the command: {_REMEDY}"
    return ""


_REMEDY = 'write the line as one word for a shell: ["bash", "-c", "…"]'


def _nothing(words: Sequence[str]) -> str:
    """Return a description of an interpreter that is given nothing to run, or nothing."""
    name = _name(words[0])
    if is_python(name) and python_target(words[1:]) is None:
        told = any(word in ("-", "-V", "-VV", "--version", "-h", "--help") for word in words)
        return "" if told else f"{name} is given no script and no module"
    if name in shell.SHELLS:
        call = shell.invocation(words)
        if call.line_at is None:
            return "" if call.script else f"{name} is given no script and no line after -c"
        line = words[call.line_at].strip()
        comment = all(one.lstrip().startswith("#") for one in line.splitlines())
        return f"the line of {name} -c has no command" if not line or comment else ""
    return ""


def _is_command(word: str) -> bool:
    """Return True if the first part of a word with spaces is a command rather than the beginning of
    a path."""
    if "/" not in word:
        return True
    known = is_python(word) or _name(word) in shell.SHELLS or wrapped_at((word, "x")) is not None
    return known or is_launcher_word(word) or launcher_of_program(word, ("launch",)) is not None


def _name(program: str) -> str:
    return program.rpartition("/")[2]
