"""Detection of launchers in a command, by the position of commands in it.

Arguments of a program, comments and here-documents name no launcher. A script file, or a program
whose name the shell computes, may be one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest

from elasticjob_launcher.launchers import (
    Launcher,
    is_launcher_word,
    launcher_of_module,
    launcher_of_program,
    launcher_of_script,
    numbers_node,
    starts_processes,
)
from elasticjob_operator.domain.launch import shell
from elasticjob_operator.domain.launch.wrappers import (
    ASSIGNMENT,
    is_entrypoint,
    is_script,
    line_of,
    may_be_task,
    module_runs_task,
    module_wrapped,
    runs_python,
    runs_task,
    split_string,
    wrapped_at,
)

PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?d?")
PYTHON_VALUED = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_MODULE = re.compile(r"-(?:([^-cmWX][^cmWX]*)?m|-module$)(.*)", re.DOTALL)
_CODE = re.compile(r"-([^-cmWX][^cmWX]*)?c(.*)", re.DOTALL)
_IN_CODE = re.compile(
    r"torch\.distributed\.(run|launch)\b|accelerate\.commands|deepspeed\.launcher"
    r"|['\"\s/](torchrun|deepspeed|horovodrun|mpirun)['\"\s]|accelerate['\", ]+launch"
)
_TEXT_WORD = re.compile(r"[^\s;&|()'\"`$<>{}]+")
_TEXT_TOOLS = frozenset(
    {"echo", "printf", "grep", "egrep", "rg", "sed", "awk", "cat", "which", "type", "command"}
    | {"pip", "pip3", "apt", "apt-get", "ls", "cp", "mv", "rm", "mkdir", "touch", "chmod", "chown"}
    | {"export", "alias", "unset", "test", "[", ":", "true", "false", "cd", "git", "wget", "curl"}
    | {
        "ln",
        "pgrep",
        "pkill",
        "killall",
        "man",
        "hash",
        "set",
        "kill",
        "ps",
        "head",
        "tail",
    }
)
"""Programs that take names of programs as plain text."""
_IDLE = frozenset(
    {"exit", "wait", "return", "read", "tee", "sleep", "date", "sort", "uniq", "wc", "cut", "tr"}
)
"""Other programs and builtins that run no program."""
_EXECUTING = frozenset({"--", "-exec", "-execdir", "-ok", "-okdir", "--exec", "-e"})
"""Words after which a program's arguments are a command."""
_NAMING = re.compile(
    r"--?[\w.-]*(launcher|backend|engine|runner|mode|method|type|strategy|accelerator|plugin|name"
    r"|env|tag|key|note|title|label|comment|message|prompt|desc\w*)s?"
)
"""Options whose value names a launcher and runs none."""
_LAUNCHER_ARGUMENT = re.compile(r"--(n?nproc|nnodes|standalone|rdzv)[-_\w]*(=.*)?|.*\.py")
"""Argument of a launcher, unlike one of another program."""
_CONFIG_FILE = re.compile(r".*\.ya?ml")
_OFF = frozenset({"false", "no", "off", "none"})
"""Values of an option that is turned off."""
_EVALUATING = frozenset({"eval", "trap"})
_PASSING = frozenset({"exec", "command", "builtin"})
_DECLARING = frozenset({"export", "declare", "readonly", "typeset", "local"})
_SOURCING = frozenset({"source", "."})
_LEAVING = frozenset({"exit", "return"})
_ENDING = frozenset({"break", "exit"})
_CONDITIONS = frozenset({"test", "[", "command", "which", "type", "hash", "grep", "diff", "cmp"})
"""Programs whose exit code decides if the commands after them run."""
_MAX_DEPTH = 8
_MAX_BRANCHES = 8
"""Maximum number of other values of a line's variables, where a condition decides if a variable is
assigned."""
UNKNOWN = "$UNKNOWN"
"""Positional parameter that the shell computes."""


class FindingKind(StrEnum):
    """Reason for which a command has or may have a launcher."""

    LAUNCHER = "Launcher"
    OPTION = "Option"
    SCRIPT = "Script"
    COMPUTED = "Computed"


@dataclass(frozen=True, slots=True)
class Finding:
    """Launcher, or a part of the command that may be one.

    Args:
        name: the launcher, the script file or the text of the part; of an option, the program and
            the option.
        inside: program that contains it; empty if it is the command itself.
        guessed: True if only the arguments of an unknown program show it.
    """

    kind: FindingKind
    name: str
    launcher: Launcher | None = None
    inside: str = ""
    guessed: bool = False

    @property
    def numbers(self) -> bool:
        """True for an option that only numbers the node."""
        return self.kind is FindingKind.OPTION and numbers_node(self.name.rpartition(" ")[2])


_UNCERTAIN = (FindingKind.SCRIPT, FindingKind.COMPUTED)


@dataclass(frozen=True, slots=True)
class _Context:
    """Place in a command: variables whose value is known at least in part, arrays, the enclosing
    program, True in `followed` if other programs than tools run after it, and False in `branches`
    if assignments below a condition count as made."""

    values: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inside: str = ""
    depth: int = 0
    followed: bool = False
    branches: bool = True

    def within(self, program: str) -> _Context:
        return replace(self, inside=self.inside or _name(program), depth=self.depth + 1)


def find(
    words: Sequence[str],
    values: Mapping[str, str] | None = None,
    guesses: bool = True,
    is_ignored: Callable[[Finding], bool] = lambda _: False,
) -> Finding | None:
    """Return the first launcher in a command, otherwise the first part that may be one, or None.

    Args:
        values: variables of the container with a known value.
        guesses: False ignores what only the arguments of unknown programs show.
        is_ignored: returns True for a finding that does not count.
    """
    found = _find(tuple(words), _Context(values or {}))
    found = [one for one in found if (guesses or not one.guessed) and not is_ignored(one)]
    certain = [one for one in found if one.kind is FindingKind.LAUNCHER]
    options = [one for one in found if one.kind is FindingKind.OPTION and not one.numbers]
    # An option of a helper program does not decide about a script after it.
    last = max((at for at, one in enumerate(found) if one.kind in _UNCERTAIN), default=-1)
    numbering = [one for one in found[last + 1 :] if one.numbers]
    uncertain = [one for one in found if one.kind in _UNCERTAIN]
    return next(iter((*certain, *options, *numbering, *uncertain)), None)


def program_at(words: Sequence[str], strings: bool = True) -> int:
    """Return the index of the program behind wrappers, or of a shell.

    With `strings` a wrapper whose string has the words, as of `env -S`, counts as the program.
    """
    at = 0
    while at < len(words):
        left = words[at:]
        is_program = _name(left[0]) in shell.SHELLS or (strings and split_string(left))
        index = None if is_program else wrapped_at(left)
        if index is None:
            break
        at += index
    return at


def repeated_launcher(words: Sequence[str]) -> str:
    """Return the launcher that a shell line certainly starts more than once, one after the other or
    side by side; empty if there is none."""
    at = program_at(words, strings=False)
    call = shell.invocation(words[at:]) if words and _name(words[at]) in shell.SHELLS else None
    if call is None or call.line_at is None:
        return ""
    try:
        line = shell.read(words[at + call.line_at])
    except shell.Unreadable:
        return ""
    if not line.is_sequence:
        return ""
    ends = any(word.value in _ENDING for one in line.commands for word in one.words)
    values: dict[str, str] = {}
    arrays: dict[str, tuple[str, ...]] = {}
    count, conditional = 0, False
    for command in line.commands:
        conditional &= command.before in ("&&", "||")
        _assign(command, values, arrays)
        given = [word.value for word in command.words]
        name = given[0] if given else ""
        found = _in_simple(command, (), _Context(values, arrays, depth=1))
        joining = [one for one in found if one.launcher is not None and one.launcher.joins]
        if joining and not conditional and command.before != "||" and not _prints_help(given):
            count += 2 if command.repeated and not ends else 1
            if count > 1:
                return joining[0].name
        conditional |= name in _CONDITIONS
        leaves = name in _LEAVING or (name == "exec" and len(given) > 1)
        if leaves and command.before != "||":
            break
    return ""


def _prints_help(words: Sequence[str]) -> bool:
    """Return True if a launcher only prints its help or version, by an option before its script."""
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    return not {"-h", "--help", "--version"}.isdisjoint(words[:script])


def python_target(words: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Return module, script or code, and the arguments of a Python command's words after the
    interpreter; the first is `-m`, `-c` or empty for a script. None if there is no program."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "-":
            return None
        if not word.startswith("-"):
            return "", word, tuple(left)
        for option, pattern in (("-m", _MODULE), ("-c", _CODE)):
            if named := pattern.fullmatch(word):
                value = named[2] or (left.pop(0) if left else "")
                return option, value, tuple(left)
        if word in PYTHON_VALUED and left:
            left.pop(0)
    return None


def is_python(program: str) -> bool:
    """Return True if a program is a Python interpreter by its name."""
    return PYTHON.fullmatch(_name(program)) is not None


def program_file(words: Sequence[str]) -> str:
    """Return the program that a command runs, behind its wrappers and a shell that runs nothing
    else; empty if it is Python, or known only when it runs."""
    left, expands = list(words), False
    for _ in range(_MAX_DEPTH):
        while left and left[0] in _PASSING:
            del left[0]
        if not left or is_python(left[0]) or split_string(left) or expands:
            return ""
        if left[0] in shell.SHELLS or _name(left[0]) in shell.SHELLS:
            call = shell.invocation(left)
            try:
                line = shell.read("" if call.line_at is None else left[call.line_at])
            except shell.Unreadable:
                return ""
            if len(line.commands) != 1 or line.compound or not line.commands[0].words:
                return ""
            command = line.commands[0].words
            left = [word.value for word in command]
            expands = any(word.expands for word in command[:1])
        elif (index := wrapped_at(left)) is not None:
            if runs_python(left, index) or may_be_task(left, index):
                return ""
            del left[:index]
        else:
            known = left[0].startswith("-") or left[0] in _TEXT_TOOLS or "$" in left[0]
            return "" if known or left[0].endswith(".py") else left[0]
    return ""


def _find(words: tuple[str, ...], at: _Context) -> list[Finding]:
    if not words or at.depth > _MAX_DEPTH:
        return []
    program, name = words[0], _name(words[0])
    if computed := _computed(words, at):
        return computed
    if launcher := launcher_of_program(program, words[1:]):
        return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    if is_python(program):
        return _in_python(words[1:], at)
    if name in shell.SHELLS:
        return _in_shell(words, at)
    if name in shell.FOREIGN_SHELLS:
        return _in_foreign_shell(words, at)
    if split := split_string(words):
        return _find(split, at.within(program))
    if (line := line_of(words)) is not None:
        return _in_line(line, (), at.within(program))
    if (run := module_wrapped(name, words[1:])) is not None:
        return _in_python(run, at.within(program))
    index = wrapped_at(words)
    if index is not None:
        if runs_python(words, index):
            return _in_python(words[index:], at.within(program))
        found = _find(words[index:], at.within(program))
        if not found and may_be_task(words, index) and _is_unknown(words[index:]):
            task = f"{name} {words[index]}"
            return [Finding(FindingKind.SCRIPT, task, None, at.inside)]
        return found
    if is_script(program) or is_entrypoint(program) or runs_task(name, words[1:]):
        return [Finding(FindingKind.SCRIPT, program, None, at.inside)]
    known = program.startswith("-")  # an option of the reserved word `time`
    found = [replace(one, guessed=not known) for one in _in_arguments(words, at)]
    return found or _in_options(program, words[1:], at)


def _is_unknown(words: tuple[str, ...]) -> bool:
    """Return True if nothing is known of a program."""
    name = _name(words[0])
    known = is_python(name) or name in shell.SHELLS or wrapped_at(words) is not None
    return not known and not words[0].endswith(".py") and not words[0].startswith("-")


def _computed(words: tuple[str, ...], at: _Context) -> list[Finding]:
    """Return a finding for a program whose name the kubelet computes from an unknown variable."""
    if not re.search(r"\$\(", words[0]):
        return []
    if PYTHON.fullmatch(_name(words[0])):
        return []
    if launcher_of_program(words[0], words[1:]):
        return []
    if words[0].rpartition("/")[2] and "$(" not in _name(words[0]):
        return []
    return [Finding(FindingKind.COMPUTED, words[0], None, at.inside)]


def _in_python(words: tuple[str, ...], at: _Context) -> list[Finding]:
    target = python_target(words)
    if target is None:
        return []
    option, value, arguments = target
    if option == "-c":
        found = _IN_CODE.search(value)
        name = _code_name(found[0]) if found else ""
        return [Finding(FindingKind.LAUNCHER, name, None, "python -c")] if name else []
    if option == "-m":
        if launcher := launcher_of_module(value, arguments):
            return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
        if module_runs_task(value, arguments):
            return [Finding(FindingKind.SCRIPT, value, None, at.inside)]
        run = module_wrapped(value, arguments)
        if run is None:
            return _in_options(value, arguments, at)
        return _in_python(run, at.within(value))
    if launcher := launcher_of_script(value, arguments):
        return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    named = _in_text(value, at) if re.search(r"[$`]", value) else []
    return named or _in_options(value, arguments, at)


def _in_options(program: str, arguments: tuple[str, ...], at: _Context) -> list[Finding]:
    """Return a finding for each option that makes a program without a rule start or number the
    processes of a node, those that start processes first."""
    if _name(program) in _TEXT_TOOLS | _IDLE:
        return []
    found: list[Finding] = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if numbers_node(name) or (starts_processes(name) and value.lower() not in _OFF):
            text = f"{program} {name}"
            found.append(Finding(FindingKind.OPTION, text, None, at.inside, guessed=True))
    return sorted(found, key=lambda one: one.numbers)


def _in_shell(words: tuple[str, ...], at: _Context) -> list[Finding]:
    call = shell.invocation(words)
    if call.line_at is None:
        script = call.script
        if not script and at.depth and not at.followed:
            script = f"the standard input of {_name(words[0])}"
        return [Finding(FindingKind.SCRIPT, script, None, at.inside)] if script else []
    return _in_line(words[call.line_at], words[call.line_at + 1 :], at.within(words[0]))


def _in_foreign_shell(words: tuple[str, ...], at: _Context) -> list[Finding]:
    """Return the findings of a shell whose grammar is not read: a launcher in its text, otherwise
    its script."""
    inner = at.within(words[0])
    if found := [one for word in words[1:] for one in _in_text(word, inner)]:
        return found
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    is_line = any(re.fullmatch(r"-\w*[ce]|-Command", word) for word in words[1:])
    return [] if is_line or not script else [Finding(FindingKind.SCRIPT, script, None, at.inside)]


def _in_line(text: str, positional: tuple[str, ...], at: _Context) -> list[Finding]:
    if at.depth > _MAX_DEPTH:
        return []
    try:
        line = shell.read(text)
    except shell.Unreadable:
        return _in_text(text, at)
    whole, values, arrays = text, dict(at.values), dict(at.arrays)
    values.update({str(number): word for number, word in enumerate(positional)})
    others: list[tuple[dict[str, str], dict[str, tuple[str, ...]]]] = []
    findings: list[Finding] = []
    for number, command in enumerate(line.commands):
        if command.conditional and at.branches and _assigned(command):
            before = (dict(values), dict(arrays))
            others += [before] if len(others) < _MAX_BRANCHES and before not in others else []
        elif _assigned(command):
            for known, lists in others:
                _assign(command, known, lists)
        _assign(command, values, arrays)
        followed = not all(map(_runs_nothing, line.commands[number + 1 :]))
        inner = _Context(
            values, arrays, at.inside, at.depth + 1, at.followed or followed, at.branches
        )
        positional = _positional(command, positional)
        findings += _in_simple(command, positional, inner)
        if any(word.expands for word in command.words):
            for known, lists in others:
                other = replace(inner, values=known, arrays=lists, branches=False)
                found_there = _in_simple(command, positional, other)
                findings += [one for one in found_there if one.kind is not FindingKind.COMPUTED]
        if _reads_code(command) and (found := _IN_CODE.search(whole)):
            findings.append(Finding(FindingKind.LAUNCHER, _code_name(found[0]), None, "python"))
        if _sources(command) and not inner.followed:
            findings.append(Finding(FindingKind.SCRIPT, command.words[1].value, None, at.inside))
        for word in command.parts:
            for text in word.substitutions:
                findings += [
                    one
                    for one in _in_line(text, positional, inner)
                    if one.kind is FindingKind.LAUNCHER
                ]
    return findings


def _reads_code(command: shell.Simple) -> bool:
    """Return True if a command is Python that reads its program from a here-document."""
    words = [word.value for word in command.words]
    given = any(one.operator in ("<<", "<<-", "<<<") for one in command.redirections)
    return given and bool(words) and is_python(words[0]) and python_target(words[1:]) is None


def _code_name(found: str) -> str:
    """Return the name of a launcher that a program's text mentions."""
    return found.strip(" '\"/\t\n")


def _positional(command: shell.Simple, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the positional parameters after a command, of which `set --` makes new ones."""
    words = command.words
    if len(words) < 3 or words[0].value != "set" or words[1].value != "--":
        return before
    known = [UNKNOWN if word.expands else word.value for word in words[2:]]
    return (before[0] if before else "", *known)


def _sources(command: shell.Simple) -> bool:
    return len(command.words) > 1 and command.words[0].value in _SOURCING


def _runs_nothing(command: shell.Simple) -> bool:
    """Return True if a command runs no program but tools."""
    return not command.words or command.words[0].value in _TEXT_TOOLS | _IDLE


def _assign(
    command: shell.Simple, values: dict[str, str], arrays: dict[str, tuple[str, ...]]
) -> None:
    """Record the assignments that a command makes in its shell. Parts of a value that only the
    running shell knows stay as they are written."""
    for word in _assigned(command):
        target, _, text = word.value.partition("=")
        name = target.rstrip("+")
        if (elements := command.arrays.get(target)) is not None:
            before = arrays.get(name, (UNKNOWN,)) if target != name else ()
            given = (partly_resolved(one.value, values) for one in elements)
            arrays[name] = (*before, *given)
            values[name] = arrays[name][0] if arrays[name] else ""
            continue
        arrays.pop(name, None)
        before_text = values.get(name, f"${{{name}}}") if target != name else ""
        values[name] = before_text + partly_resolved(text, values)


def _assigned(command: shell.Simple) -> list[shell.Word]:
    """Return the assignments that a command makes in its shell."""
    if command.words and command.words[0].value in _DECLARING:
        return [word for word in command.words[1:] if ASSIGNMENT.fullmatch(word.value)]
    return [] if command.words else command.assignments


def _in_simple(command: shell.Simple, positional: tuple[str, ...], at: _Context) -> list[Finding]:
    words = [word.value for word in command.words]
    raw = list(command.words)
    while words and words[0] in _PASSING:
        if words[0] == "command" and len(words) > 1 and words[1] in ("-v", "-V"):
            return []
        del words[0], raw[0]
        while words and words[0].startswith("-"):  # exec -a NAME, command -p
            count = 2 if words[0] == "-a" else 1
            del words[:count], raw[:count]
    if not words:
        return []
    if words[0] in _EVALUATING:
        return _in_line(" ".join(words[1:]), positional, at.within(words[0]))
    if words[0] == "alias":
        values = [word.partition("=")[2] for word in words[1:]]
        return [one for value in values for one in _in_line(value, (), at.within("alias"))]
    if words[0] in _SOURCING:
        return []
    begin = _expansion_at(words, raw, at)
    if begin is not None:
        inner = at.within(words[0]) if begin else at
        return _in_expanded(words[begin:], raw[begin:], positional, inner)
    return _find(tuple(words), at)


def _expansion_at(words: list[str], raw: list[shell.Word], at: _Context) -> int | None:
    """Return the index of a program that the shell computes, behind wrappers; None if it is written
    out. Known variables that hold wrappers or the program are replaced in both lists."""
    begin, resolves = 0, 0
    while begin < len(words):
        if raw[begin].expands:
            head = _head(words[begin], raw[begin].raw, at)
            if not head or re.search(r"[$`*?]", head[0]) or resolves >= _MAX_DEPTH:
                return begin
            resolves += 1
            words[begin : begin + 1] = head
            plain = replace(raw[begin], raw="", expands=False, substitutions=())
            raw[begin : begin + 1] = [replace(plain, value=word) for word in head]
        left = words[begin:]
        own = _name(left[0]) in shell.SHELLS or split_string(left) or line_of(left) is not None
        index = None if own else wrapped_at(left)
        if index is None or runs_python(left, index):
            return None
        begin += index
    return None


def _head(word: str, raw: str, at: _Context) -> tuple[str, ...]:
    """Return the words that a word of the shell is replaced by, as far as its values are known."""
    if (elements := _elements(raw, at.arrays)) is not None:
        return elements
    known = partly_resolved(word, at.values)
    return (known,) if '"' in raw else tuple(known.split())


def _in_expanded(
    words: list[str], raw: list[shell.Word], positional: tuple[str, ...], at: _Context
) -> list[Finding]:
    """Return the findings of a command whose program the shell computes."""
    if raw[0].raw.strip('"') in ("$@", "$*", "${@}", "${*}"):
        if positional[1:2] == (UNKNOWN,):
            return [Finding(FindingKind.COMPUTED, raw[0].raw, None, at.inside)]
        return _find(tuple(positional[1:]), at) if positional[1:] else []
    head = _head(words[0], raw[0].raw, at)
    if not head or not re.search(r"[$`*?]", head[0]):
        return _find((*head, *words[1:]), at)
    if found := [one for one in _in_arguments(tuple(words), at) if one.launcher is not None]:
        return [replace(one, guessed=True) for one in found]
    if found := _in_text(words[0], at):
        return found
    ending = _name(words[0])
    if "$" not in ending and "`" not in ending and "*" not in ending:
        return _find((ending, *words[1:]), at)  # ${VENV}/bin/python
    return [Finding(FindingKind.COMPUTED, raw[0].raw, None, at.inside)]


_REFERENCE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*|[0-9])|\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=]([^{}$`]*))?\})"
)


_ARRAY = re.compile(r'"?\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}"?')


def _elements(raw: str, arrays: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the elements of the known array that a word consists of; None if it is none."""
    named = _ARRAY.fullmatch(raw)
    return None if named is None else arrays.get(named[1])


_MAX_VALUE = 64 * 1024
"""Maximum size of a value that is followed through assignments."""


def partly_resolved(text: str, values: Mapping[str, str]) -> str:
    """Return a text with known variables, and the defaults of unknown ones, in place of their
    references."""

    def value(match: re.Match[str]) -> str:
        known = values.get(match[1] or match[2])
        if known is None and match[3] is not None:
            return match[3].strip("'\"")
        return match[0] if known is None else known

    found = _REFERENCE.sub(value, text)
    return text if len(found) > _MAX_VALUE else found


def resolved(text: str, values: Mapping[str, str]) -> str | None:
    """Return a word with its variables replaced by known values or defaults; None if one of them
    is unknown."""
    unknown = False

    def value(match: re.Match[str]) -> str:
        nonlocal unknown
        known = values.get(match[1] or match[2])
        if known is None and match[3] is not None:
            return match[3].strip("'\"")
        unknown |= known is None
        return known or ""

    found = _REFERENCE.sub(value, text)
    return None if unknown or "$" in found or "`" in found else found


def _in_arguments(words: tuple[str, ...], at: _Context) -> list[Finding]:
    """Return the findings of the command that an unknown program runs, judging from its arguments:
    a launcher, a Python program, a shell or a script that is no value of an option."""
    if _name(words[0]) in _TEXT_TOOLS or ASSIGNMENT.fullmatch(words[0]):
        return []
    inner = at.within(words[0])
    for index in range(1, len(words)):
        before, rest = words[index - 1], words[index:]
        is_value = index > 1 and before.startswith("-") and before not in _EXECUTING
        option = before if is_value else ""
        if found := _launched(rest, option, inner):
            return found
        if " " in rest[0].strip():
            if found := _commanded(rest[0], option, inner):
                return found
            continue
        if _name(rest[0]) in shell.SHELLS and shell.invocation(rest).line_at is not None:
            return _in_shell(rest, inner)
        if is_value:
            continue
        if is_python(rest[0]):
            return _in_python(rest[1:], inner) if rest[1:] else []
        runs = _name(rest[0]) in shell.SHELLS or is_script(rest[0]) or wrapped_at(rest) is not None
        if runs and (len(rest) > 1 or is_script(rest[0])):
            return _find(rest, inner)
    return []


def _launched(words: tuple[str, ...], option: str, at: _Context) -> list[Finding]:
    """Return a finding if words, of which the first may be the value of an option, begin with a
    launcher and its arguments."""
    launcher = launcher_of_program(words[0], words[1:])
    if launcher is None and words[0] and is_launcher_word(words[0]):
        launcher = launcher_of_module(words[0], words[1:])
    if launcher is None or len(words) < 2:
        return []
    if option and (_NAMING.fullmatch(option) or not _begins(_own_arguments(words))):
        return []
    return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]


def _own_arguments(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of a launcher behind its subcommand."""
    alone = launcher_of_program(words[0], ()) or launcher_of_module(words[0], ())
    return words[1:] if alone else words[2:]


def _begins(arguments: tuple[str, ...]) -> bool:
    """Return True if arguments begin as those of a launcher, unlike those of another program."""
    if arguments[:1] == ("-m",):
        return "." in "".join(arguments[1:2])
    return any(map(_LAUNCHER_ARGUMENT.fullmatch, arguments[:1]))


def _commanded(text: str, option: str, at: _Context) -> list[Finding]:
    """Return the launchers that begin a command of a text, which may be a shell line and the value
    of an option."""
    if _NAMING.fullmatch(option):
        return []
    try:
        line = shell.read(text)
    except shell.Unreadable:
        return []
    for command in line.commands:
        words = tuple(word.value for word in command.words)
        while words and (index := wrapped_at(words)) is not None:
            words = words[index:]
        if not words:
            continue
        if launcher_of_program(words[0], words[1:]):
            runs = not option or _is_written_out(_own_arguments(words))
        else:
            runs = is_python(words[0])
        if runs:
            found = _find(words, at)
            if found and found[0].kind is FindingKind.LAUNCHER:
                return found
    return []


def _is_written_out(arguments: tuple[str, ...]) -> bool:
    """Return True if a text's words after a launcher are its arguments, and not a sentence."""
    if _begins(arguments) or any(map(_CONFIG_FILE.fullmatch, arguments[:1])):
        return True
    options = "".join(arguments[:1]).startswith("-")
    return options and any(map(_LAUNCHER_ARGUMENT.fullmatch, arguments))


def _in_text(text: str, at: _Context) -> list[Finding]:
    """Return the first launcher that a text names anywhere."""
    words = _TEXT_WORD.findall(text)
    for index, word in enumerate(words):
        launcher = launcher_of_program(word, words[index + 1 :])
        launcher = launcher or launcher_of_module(word, words[index + 1 :])
        if launcher is not None:
            return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    return []


def _name(program: str) -> str:
    return program.rpartition("/")[2]
