"""Detection of launchers in a command, by the position of commands in it.

`find` follows a command through wrappers, shells, Python's `-m` and shell lines to the programs
that it starts. Arguments of a program, comments and here-documents name no launcher. A script file,
or a program whose name the shell computes, may be one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import (
    FOREIGN_SHELLS,
    file_name,
    invocation,
    is_python,
    is_shell,
)
from elasticjob_launcher.command_line.launchers import launcher_of_program
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT, Unreadable, Word
from elasticjob_launcher.command_line.wrappers import (
    PASSING,
    is_entrypoint,
    is_script,
    line_of,
    may_be_task,
    module_wrapped,
    runs_python,
    runs_task,
    split_string,
    wrapped_at,
)
from elasticjob_operator.domain.launch.arguments import inner_commands
from elasticjob_operator.domain.launch.findings import Finding, FindingKind, deciding
from elasticjob_operator.domain.launch.programs import (
    Place,
    in_document,
    in_options,
    in_python,
    in_text,
)
from elasticjob_operator.domain.launch.tools import TEXT_TOOLS, runs_nothing
from elasticjob_operator.domain.launch.variables import UNKNOWN, Branches, Variables

_COMPUTED = re.compile(r"[$`*?]")
_EVALUATING = frozenset({"eval", "trap"})
_SOURCING = frozenset({"source", "."})
_MAX_DEPTH = 8


def find(
    words: Sequence[str],
    values: Mapping[str, str] | None = None,
    guesses: bool = True,
    is_ignored: Callable[[Finding], bool] = lambda _: False,
) -> Finding | None:
    """Return the first launcher in a command, otherwise the first part that may be one, or None.

    Args:
        values: variables of the container with a known value.
        guesses: False ignores findings in the arguments of unknown programs.
        is_ignored: returns True for a finding that does not count.
    """
    found = _find(tuple(words), Place(Variables(dict(values or {}))))
    return deciding(found, guesses, is_ignored)


def launcher_started(command: shell.Simple, known: Variables) -> str:
    """Return the launcher that a command of a line starts and that joins the job's rendezvous;
    empty if there is none."""
    found = _in_simple(command, (), Place(known, depth=1))
    return next(
        (
            finding.name
            for finding in found
            if finding.launcher is not None and finding.launcher.joins
        ),
        "",
    )


def _find(words: tuple[str, ...], at: Place) -> list[Finding]:
    if not words or at.depth > _MAX_DEPTH:
        return []
    program, name = words[0], file_name(words[0])
    if _is_computed(words):
        return [Finding(FindingKind.COMPUTED, program, None, at.inside)]
    if launcher := launcher_of_program(program, words[1:]):
        return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    if is_python(program):
        return in_python(words[1:], at)
    if is_shell(program):
        return _in_shell(words, at)
    if name in FOREIGN_SHELLS:
        return _in_foreign_shell(words, at)
    if split := split_string(words):
        return _find(split, at.within(program))
    if (line := line_of(words)) is not None:
        return _in_line(line, (), at.within(program))
    if (run := module_wrapped(name, words[1:])) is not None:
        return in_python(run, at.within(program))
    if (index := wrapped_at(words)) is not None:
        return _in_wrapper(words, index, at)
    if is_script(program) or is_entrypoint(program) or runs_task(name, words[1:]):
        return [Finding(FindingKind.SCRIPT, program, None, at.inside)]
    known = program.startswith("-")  # an option of the reserved word `time`
    found = [replace(finding, guessed=not known) for finding in _in_arguments(words, at)]
    return found or in_options(program, words[1:], at)


def _is_computed(words: tuple[str, ...]) -> bool:
    """Return True for a program whose name the kubelet computes from an unknown variable."""
    name = file_name(words[0])
    is_known = is_python(name) or launcher_of_program(words[0], words[1:]) is not None
    return "$(" in words[0] and not is_known and (not name or "$(" in name)


def _in_wrapper(words: tuple[str, ...], index: int, at: Place) -> list[Finding]:
    if runs_python(words, index):
        return in_python(words[index:], at.within(words[0]))
    found = _find(words[index:], at.within(words[0]))
    if not found and may_be_task(words, index) and _is_unknown(words[index:]):
        task = f"{file_name(words[0])} {words[index]}"
        return [Finding(FindingKind.SCRIPT, task, None, at.inside)]
    return found


def _is_unknown(words: tuple[str, ...]) -> bool:
    """Return True if nothing is known of a program."""
    known = is_python(words[0]) or is_shell(words[0]) or wrapped_at(words) is not None
    return not known and not words[0].endswith(".py") and not words[0].startswith("-")


def _in_arguments(words: tuple[str, ...], at: Place) -> list[Finding]:
    """Return the findings of the command that an unknown program runs, judging from its
    arguments."""
    if file_name(words[0]) in TEXT_TOOLS or ASSIGNMENT.fullmatch(words[0]):
        return []
    for inner in inner_commands(words):
        found = _find(inner.words, at.within(words[0]))
        if inner.is_last or (found and found[0].kind is FindingKind.LAUNCHER):
            return found
    return []


def _in_shell(words: tuple[str, ...], at: Place) -> list[Finding]:
    call = invocation(words)
    if call.line_at is None:
        script = call.script
        if not script and at.depth and not at.followed:
            script = f"the standard input of {file_name(words[0])}"
        return [Finding(FindingKind.SCRIPT, script, None, at.inside)] if script else []
    return _in_line(words[call.line_at], words[call.line_at + 1 :], at.within(words[0]))


def _in_foreign_shell(words: tuple[str, ...], at: Place) -> list[Finding]:
    """Return the findings of a shell whose grammar is not read: a launcher in its text, otherwise
    its script."""
    inner = at.within(words[0])
    if found := [finding for word in words[1:] for finding in in_text(word, inner)]:
        return found
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    is_line = any(re.fullmatch(r"-\w*[ce]|-Command", word) for word in words[1:])
    return [] if is_line or not script else [Finding(FindingKind.SCRIPT, script, None, at.inside)]


def _in_line(text: str, positional: tuple[str, ...], at: Place) -> list[Finding]:
    if at.depth > _MAX_DEPTH:
        return []
    try:
        line = shell.read(text)
    except Unreadable:
        return in_text(text, at)
    branches = Branches(at.known, at.branches)
    branches.taken.values.update({str(number): word for number, word in enumerate(positional)})
    findings: list[Finding] = []
    last = max((at for at, one in enumerate(line.commands) if not runs_nothing(one)), default=-1)
    for number, command in enumerate(line.commands):
        branches.assign(command)
        positional = _positional(command, positional)
        followed = at.followed or number < last
        inner = replace(at, known=branches.taken, depth=at.depth + 1, followed=followed)
        findings += _in_command(command, positional, inner)
        if any(word.expands for word in command.parts):
            for known in branches.others:
                other = replace(inner, known=known, branches=False)
                found = _in_command(command, positional, other)
                findings += [
                    finding for finding in found if finding.kind is not FindingKind.COMPUTED
                ]
        findings += in_document(command, text)
    return findings


def _in_command(command: shell.Simple, positional: tuple[str, ...], at: Place) -> list[Finding]:
    """Return the findings of a command in a line, and the launchers in its substitutions."""
    findings = _in_simple(command, positional, at)
    if _sources(command) and not at.followed:
        findings.append(Finding(FindingKind.SCRIPT, command.words[1].value, None, at.inside))
    substitutions = (text for word in command.parts for text in word.substitutions)
    inner = (finding for text in substitutions for finding in _in_line(text, positional, at))
    return [*findings, *_launchers(inner)]


def _launchers(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.kind is FindingKind.LAUNCHER]


def _positional(command: shell.Simple, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the positional parameters after a command, of which `set --` makes new ones."""
    words = command.words
    if len(words) < 3 or words[0].value != "set" or words[1].value != "--":
        return before
    known = [UNKNOWN if word.expands else word.value for word in words[2:]]
    return (before[0] if before else "", *known)


def _sources(command: shell.Simple) -> bool:
    return len(command.words) > 1 and command.words[0].value in _SOURCING


def _in_simple(command: shell.Simple, positional: tuple[str, ...], at: Place) -> list[Finding]:
    words = list(command.words)
    while words and words[0].value in PASSING:
        if words[0].value == "command" and len(words) > 1 and words[1].value in ("-v", "-V"):
            return []
        del words[0]
        while words and words[0].value.startswith("-"):  # exec -a NAME, command -p
            del words[: 2 if words[0].value == "-a" else 1]
    if not words:
        return []
    name = words[0].value
    if name in _EVALUATING:
        return _in_line(" ".join(_values(words[1:])), positional, at.within(name))
    if name == "alias":
        values = [word.value.partition("=")[2] for word in words[1:]]
        return [finding for value in values for finding in _in_line(value, (), at.within("alias"))]
    if name in _SOURCING:
        return []
    begin = _expansion_at(words, at)
    if begin is not None:
        inner = at.within(words[0].value) if begin else at
        return _in_expanded(words[begin:], positional, inner)
    return _find(_values(words), at)


def _values(words: Sequence[Word]) -> tuple[str, ...]:
    return tuple(word.value for word in words)


def _expansion_at(words: list[Word], at: Place) -> int | None:
    """Return the index of a program that the shell computes, behind wrappers; None if it is written
    out. Known variables that hold wrappers or the program are replaced in the list."""
    begin, resolves = 0, 0
    while begin < len(words):
        if words[begin].expands:
            head = at.known.words(words[begin])
            if not head or _COMPUTED.search(head[0]) or resolves >= _MAX_DEPTH:
                return begin
            resolves += 1
            plain = words[begin]._replace(raw="", expands=False, substitutions=())
            words[begin : begin + 1] = [plain._replace(value=word) for word in head]
        left = _values(words[begin:])
        own = is_shell(left[0]) or split_string(left) or line_of(left) is not None
        index = None if own else wrapped_at(left)
        if index is None or runs_python(left, index):
            return None
        begin += index
    return None


def _in_expanded(words: list[Word], positional: tuple[str, ...], at: Place) -> list[Finding]:
    """Return the findings of a command whose program the shell computes."""
    program, values = words[0].value, _values(words)
    if words[0].raw.strip('"') in ("$@", "$*", "${@}", "${*}"):
        if positional[1:2] == (UNKNOWN,):
            return [Finding(FindingKind.COMPUTED, words[0].raw, None, at.inside)]
        return _find(tuple(positional[1:]), at) if positional[1:] else []
    head = at.known.words(words[0])
    if not head or not _COMPUTED.search(head[0]):
        return _find((*head, *values[1:]), at)
    if found := [finding for finding in _in_arguments(values, at) if finding.launcher is not None]:
        return [replace(finding, guessed=True) for finding in found]
    if found := in_text(program, at, values[1:]):
        return found
    ending = file_name(program)
    if "$" not in ending and "`" not in ending and "*" not in ending:
        return _find((ending, *values[1:]), at)  # ${VENV}/bin/python
    return [Finding(FindingKind.COMPUTED, words[0].raw, None, at.inside)]
