"""Words of a command that only a shell would understand, in a command without a shell.

A container's command is a list of words that no shell reads: `["python", "t.py", "&&", "echo"]`
gives the program an argument `&&`, and `["cd", "x"]` starts a program that does not exist. Such a
command runs, or ends immediately, without the effect that its author meant. So does an interpreter
that is given nothing to run: the standard input of a container is empty.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import (
    file_name,
    invocation,
    is_python,
    is_shell,
    python_target,
)
from elasticjob_launcher.command_line.launchers import is_launcher_word, launcher_of_program
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT, Unreadable
from elasticjob_launcher.command_line.wrappers import is_script, program_at, wrapped_at
from elasticjob_rendezvous.protocol.text import echoed

_OPERATORS = frozenset({"&&", "||", "|&", "2>&1", "1>&2", "&>", "&>>", "2>", "2>>"})
"""Words that make no sense as an argument of a program."""
_AMBIGUOUS = frozenset({"|", ">", ">>", "<", ";", "&"})
"""Words that may be the value of an option, such as a separator."""
_EXECUTING = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
"""Options of find whose value is a command that ends with `;`."""
_SHELL_COMMANDS = frozenset(
    {"cd", "source", ".", "export", "set", "unset", "eval", "exec", "alias", "ulimit", "umask"}
    | {"if", "for", "while", "until", "case", "{", "[[", "trap", "declare", "pushd", "popd"}
)
"""Commands and reserved words of shells that are not programs."""


def misplaced(words: Sequence[str]) -> str:
    """Return a description of the first word that needs a shell and has none, and the remedy; empty
    if there is none."""
    rest = words[program_at(words) :]
    if not rest:
        return ""
    program = rest[0]
    if ASSIGNMENT.fullmatch(program):
        return (
            f"{echoed(program)} is an assignment, which only a shell understands before a program: "
            "put it into the container's env"
        )
    if misspelled := _misspelled(rest):
        return misspelled
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
    if is_shell(program):
        call = invocation(rest)
        if call.script in _OPERATORS | _AMBIGUOUS:
            return _argument(call.script)
        if call.line_at is not None:
            begin = call.line_at + 1
            if lost := _lost_words(rest, begin) or _wrong_line(rest[call.line_at]):
                return lost
            if rest[begin : begin + 1] and rest[begin] in _OPERATORS | _AMBIGUOUS:
                return (
                    f"{file_name(program)} -c runs one word, and {rest[begin]!r} stands after it: "
                    "write the whole line as one word"
                )
    executes = False
    for before, word in zip(rest[begin - 1 :], rest[begin:], strict=False):
        executes = before in _EXECUTING or (executes and before != ";")
        if word == ";" and executes:
            continue
        if word in _OPERATORS or (word in _AMBIGUOUS and not before.startswith("-")):
            return _argument(word)
    return ""


def _argument(word: str) -> str:
    return f"{word!r} is an argument here, because no shell reads the command: {_REMEDY}"


def unexpanded(words: Sequence[str]) -> str:
    """Return a description of the first word with a variable that only a shell would replace, in
    the command of a Python program or a launcher, and the remedy; empty if there is none."""
    at = 0
    while at < len(words) and (index := wrapped_at(words[at:])) is not None:
        at += index
    rest = words[at:]
    if not rest:
        return ""
    known = is_python(rest[0]) or launcher_of_program(rest[0], rest[1:]) is not None
    if is_python(rest[0]):
        target = python_target(rest[1:])
        if target is None or target[0] == "-c":
            return ""
    assigned = [word for word in words[:at] if ASSIGNMENT.fullmatch(word)]
    own = [word for word in (rest if known else rest[:1]) if not _INTERPOLATED.fullmatch(word)]
    for word in (*assigned, *own):
        if named := _VARIABLE.fullmatch(word):
            name = named[1] or named[2]
            literal = f"$${name}" if named[1] else f"$${{{name}}}"
            return (
                f"{echoed(word)} is passed on as it is written, because no shell reads the "
                f"command: write $({name}), which is replaced by the container's env, or {literal} "
                f"if the program is to read it as it is, or {_REMEDY}"
            )
    return ""


_VARIABLE = re.compile(
    r"(?:--?[\w.-]+=)?[\w./:=,@-]*\$(?:([A-Z_][A-Z0-9_]+)|\{([A-Z_][A-Z0-9_]+)\})[\w./:,$@{}-]*"
)
"""Word with a variable whose name is written as those of the environment are. Names in lower case
are left alone: OmegaConf and others replace `${name}` themselves."""
_INTERPOLATED = re.compile(r"[^-=$][^=$]*=[^$]*\$\{.*", re.DOTALL)
"""Override such as `key=${NAME}`, in which OmegaConf and others replace `${NAME}` themselves."""
_TYPOGRAPHIC = re.compile(r"[\u2010-\u2015\u2212\u201c\u201d\u2018\u2019]\S*")
"""Word that begins with a typographic dash or quote."""
_TYPOGRAPHIC_OPTION = re.compile(r"[\u2010-\u2015\u2212]{1,2}-?[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_OPTION_AND_VALUE = re.compile(r"--?[A-Za-z][\w-]*\s+[^\s-]\S*")


def _misspelled(words: Sequence[str]) -> str:
    """Return a description of a word that has the spaces, quotes or backslashes of another
    syntax."""
    program = words[0]
    if not program.strip():
        return "the program is an empty word: remove it"
    if program != program.strip():
        return f"the program {program!r} begins or ends with a space: remove it"
    free = [word for before, word in pairwise(words) if not before.startswith("-")]
    if program == "\\" or "\\" in free:
        return "'\\' is an argument here, because no shell reads the command: remove it"
    begins = [word for word in (program, _script(words)) if _TYPOGRAPHIC.fullmatch(word)]
    options = [word for word in free if _TYPOGRAPHIC_OPTION.fullmatch(word)]
    if typed := next(iter((*begins, *options)), ""):
        return (
            f"{echoed(typed)} has a quote or a dash of typography, as word processors put it: "
            "write the plain character"
        )
    quoted = next((word for word in words[:2] if re.fullmatch(r"(['\"])[^'\"]*\1", word)), "")
    if quoted and not is_shell(program):
        return (
            f"the quotes in {quoted} are part of the word, because no shell reads it: remove them"
        )
    if is_python(program) and (target := python_target(words[1:])) and target[0] != "-c":
        return _python_misspelled(*target)
    if is_shell(program):
        script = invocation(words).script
        if is_script(script.split(maxsplit=1)[0] if script.split() else "") and " " in script:
            return _several(script)
    if launcher_of_program(program, words[1:]) is not None:
        at = next((at for at, one in enumerate(words) if at and one[:1] != "-"), len(words))
        before = (word for word in words[1:at] if _OPTION_AND_VALUE.fullmatch(word))
        found = next(before, "") or _unsplit_option(words[at + 1 :])
        return _several(found) if found else ""
    return ""


def _unsplit_option(arguments: Sequence[str]) -> str:
    """Return the first argument of a program that is an option and its value in one word; empty if
    there is none. Words after an option without `=` may be its values."""
    option = ""
    for word in arguments:
        if _OPTION_AND_VALUE.fullmatch(word):
            if not option:
                return word
        elif word.startswith("-"):
            option = "" if "=" in word else word
    return ""


def _script(words: Sequence[str]) -> str:
    """Return the script or module of a Python command, or the first word after a launcher or a
    shell; empty if there is none."""
    program, first = words[0], "".join(words[1:2])
    if is_python(program):
        target = python_target(words[1:])
        return target[1] if target is not None and target[0] != "-c" else ""
    known = is_shell(program) or launcher_of_program(program, words[1:]) is not None
    return first if known else ""


def _python_misspelled(option: str, target: str, arguments: Sequence[str]) -> str:
    first = target.split(maxsplit=1)[0] if target.split() else ""
    if target != target.strip() and first:
        return f"{target!r} begins or ends with a space: remove it"
    if first != target and (option or first.endswith(".py")):
        return _several(target)
    if first.startswith("~/"):
        return f"~ in {target} is a part of the name, because no shell reads it: write the folder"
    found = _unsplit_option(arguments)
    return _several(found) if found else ""


def _several(word: str) -> str:
    return f"{echoed(word)} is one word: write each part of it as an item of its own"


def _wrong_line(text: str) -> str:
    """Return a description of a shell line whose first command is quoted as a whole, or whose last
    one is not waited for."""
    try:
        commands = shell.read(text).commands
    except Unreadable:
        return ""
    if commands and commands[-1].after == "&":
        return (
            "the last command of the line runs in the background, so the container ends without "
            "waiting for it: remove the & or add the command wait"
        )
    words = commands[0].words if commands else []
    parts = words[0].value.split() if len(words) == 1 and words[0].raw[:1] in "'\"" else []
    if len(parts) > 1 and not words[0].expands and _is_command(parts[0]):
        return f"the quotes around {echoed(words[0].value)} make one word of it: remove them"
    return ""


def _lost_words(words: Sequence[str], begin: int) -> str:
    """Return a description of words after a shell's line that the line does not use."""
    line, after = words[begin - 1].strip(), words[begin:]
    alone = re.fullmatch(r"[\w./-]+", line) is not None
    runs = len(after) > 1 and (is_python(after[0]) or is_launcher_word(after[0]))
    runs |= any(word.startswith("-") and word not in ("-", "--") for word in after)
    if begin > len(words) or not after or "$" in line or "`" in line or not (alone or runs):
        return ""
    if after[0] in _OPERATORS | _AMBIGUOUS:
        return ""
    return (
        f"{file_name(words[0])} -c runs one word, {echoed(line)}, and the words after it are not "
        "part of it: write the whole line as one word"
    )


_REMEDY = 'write the line as one word for a shell: ["bash", "-c", "…"]'


def _nothing(words: Sequence[str]) -> str:
    """Return a description of an interpreter without a program to run; empty if it has one."""
    name = file_name(words[0])
    if is_python(name) and python_target(words[1:]) is None:
        given = any(word in ("-", "-V", "-VV", "--version", "-h", "--help") for word in words)
        return "" if given else f"{name} is given no script and no module"
    if is_shell(name):
        call = invocation(words)
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
    known = is_python(word) or is_shell(word) or wrapped_at((word, "x")) is not None
    return known or is_launcher_word(word) or launcher_of_program(word, ("launch",)) is not None
