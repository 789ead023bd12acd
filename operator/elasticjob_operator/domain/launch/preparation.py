"""Split of a shell line into its preparation and the command of the workers.

A line such as `cd /app && pip install x && python train.py` runs once, without its last command.
The launcher gets the words of that command, expanded by the shell, and starts it once for each
worker. The text is changed in one place only, so that the shell, its options and the preparation
stay as written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import (
    FOREIGN_SHELLS,
    SHELLS,
    file_name,
    foreign_line,
    invocation,
    is_python,
    is_shell,
    line_after,
    python_target,
)
from elasticjob_launcher.command_line.shell_words import Unreadable, single_quoted
from elasticjob_launcher.command_line.wrappers import (
    is_transparent,
    line_of,
    program_at,
    split_string,
    wrapped_at,
)
from elasticjob_operator.domain.launch.arguments import MAX_ARGUMENTS
from elasticjob_operator.domain.launch.tools import is_tool
from elasticjob_operator.domain.launch.variables import UNKNOWN

REPORT = '"$ELASTICJOB_PREPARE_PYTHON" -IS -c "$ELASTICJOB_PREPARE_REPORT"'
"""Command that reports its arguments, environment and working directory to the launcher, which
sets both variables."""
_WORKER_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|ELASTICJOB_.*|OMP_NUM_THREADS|ROLE_NAME|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)
"""Variables that the job sets for each worker or round."""
_BUILTINS = frozenset(
    {"cd", "export", "source", ".", "set", "unset", "alias", "echo", "printf", "test", "[", ":"}
    | {
        "true",
        "false",
        "exit",
        "return",
        "trap",
        "wait",
        "ulimit",
        "umask",
        "read",
        "eval",
        "local",
    }
    | {"declare", "typeset", "readonly", "shift", "shopt", "pushd", "popd", "command", "builtin"}
    | {"break", "continue", "let", "getopts", "hash", "type", "jobs", "bg", "fg", "kill", "times"}
)
_UNSPLITTABLE = {
    "trap": "a trap",
    "alias": "an alias",
    "wait": "a background job",
    "return": "return",
    "shift": "positional parameters",
    "getopts": "positional parameters",
    "coproc": "a background job",
    "disown": "a background job",
    "bg": "a background job",
    "renice": "the shell's own priority",
    "chrt": "the shell's own priority",
    "prlimit": "the shell's own limits",
    "taskset": "the shell's own processors",
    "unshare": "namespaces",
}
"""Commands whose effect on the rest of the line is not only its environment."""
_PREPARING_MODULES = frozenset(
    {"pip", "venv", "virtualenv", "ensurepip", "build", "site", "compileall", "nltk.downloader"}
    | {"spacy", "torch.utils.collect_env", "torch.utils.cpp_extension", "pytest", "zipfile"}
    | {"tarfile", "json.tool", "uv", "poetry", "conda", "grpc_tools.protoc"}
)
"""Python modules that train nothing."""
_PREPARING_SCRIPTS = frozenset({"setup.py", "get-pip.py"})
_PRINTING = frozenset({"-h", "--help", "--version"})
"""First arguments with which a program prints something and ends."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Shell command that reports the workers' command instead of running it.

    Args:
        words: the shell's command line.
        last: text of the workers' command.
        positional: positional parameters of the shell, from `$0`.
    """

    words: tuple[str, ...]
    last: str
    positional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """Shell line that cannot be split with certainty.

    Args:
        reason: its part that prevents the split.
    """

    reason: str


def split(words: Sequence[str]) -> Prepared | Whole | None:
    """Return the split of a command that is a shell with a preparation and a last command; None if
    there is nothing to split: no shell line, or a single command."""
    at = program_at(words)
    if not is_shell(words[at]):
        return _nested(words[at:])
    call = invocation(words[at:])
    if call.line_at is None:
        return None
    place = at + call.line_at
    text = words[place]
    try:
        line = shell.read(text)
    except Unreadable as error:
        return Whole(f"text that is not a complete shell line: {error}")
    if not line.commands:
        return Whole(line.compound) if line.compound else None
    if len(line.commands) == 1 and _is_single(line):
        return _nested(line.commands[0].values)
    if nested := _nested(line.commands[-1].values):
        return nested
    if reason := _obstacle(text, line, words[place + 1 :]):
        return Whole(reason)
    wrappers = _opaque_wrapper(words[:at])
    if wrappers:
        return Whole(f"{wrappers} around the shell")
    last = line.commands[-1]
    shell_at = at - 1 if at and file_name(words[at - 1]) == "busybox" else at
    inserted = _inserted(words[shell_at:place], text, last, line.commands[:-1])
    if isinstance(inserted, Whole):
        return inserted
    rest = tuple(words[place + 1 :])
    sets = any(
        command.words[:1] and command.words[0].value == "set" and "--" in command.values
        for command in line.commands
    )
    positional = ("sh", UNKNOWN) if sets else rest
    return Prepared((*words[:place], inserted, *rest), text[last.start : last.end], positional)


_MAX_DEPTH = 50


def _nested(words: Sequence[str], depth: int = 0, searches: bool = True) -> Whole | None:
    """Return the shell line inside of a command if it is more than one plain command; None if
    there is no such line.

    Args:
        searches: True if the arguments of an unknown program are searched for such a line.
    """
    if not words:
        return None
    if depth > _MAX_DEPTH:
        return Whole(f"more than {_MAX_DEPTH} programs that run each other")
    name, inner = file_name(words[0]), words[1:]
    if words[0] == "exec":
        return _nested(inner, depth + 1, searches)
    if expanded := split_string(words):
        return _nested(expanded[1:], depth + 1, searches)
    if name in FOREIGN_SHELLS:
        return Whole(f"the grammar of {name}") if len(words) > 2 else None
    text = line_of(words)
    if text is None:
        text = line_after(words)
    if text is None:
        if is_python(name):
            return None
        if (index := wrapped_at(words)) is not None:
            return _nested(words[index:], depth + 1, searches)
        given = inner[:MAX_ARGUMENTS] if searches else ()
        # Each place is tried here: a search in the arguments of the arguments would repeat it.
        tries = (given[at:] for at in range(len(given)) if _may_run_line(given[at:]))
        return next(
            (found for attempt in tries if (found := _nested(attempt, depth + 1, False))), None
        )
    try:
        line = shell.read(text)
    except Unreadable as error:
        return Whole(f"text that is not a complete shell line: {error}")
    if len(line.commands) == 1 and _is_single(line):
        return _nested(line.commands[0].values, depth + 1, searches)
    return Whole(f"the shell line inside of {name}")


_LINE_PROGRAMS = SHELLS | {"env", "su", "runuser", "script", "flock"}


def _may_run_line(words: Sequence[str]) -> bool:
    """Return True if words among the arguments of a program may be a command with a shell line."""
    name = file_name(words[0])
    return name in _LINE_PROGRAMS or (name in FOREIGN_SHELLS and " " in foreign_line(words))


def _is_single(line: shell.Line) -> bool:
    """Return True if the only command of a line is one that each worker can run as it is."""
    only = line.commands[0]
    ends = ("", "\n", ";")
    plain = only.before in ends and only.after in ends and not line.compound
    return plain and not _files(only)


def _opaque_wrapper(words: Sequence[str]) -> str:
    """Return the first wrapper around a shell that changes more than variables; empty if none."""
    at = 0
    while at < len(words):
        if not is_transparent(words[at:]):
            return file_name(words[at])
        index = wrapped_at((*words[at:], "sh"))
        if index is None:
            return file_name(words[at])
        at += index
    return ""


def _obstacle(text: str, line: shell.Line, positional: Sequence[str]) -> str:
    """Return the first construct that prevents a split; empty if the line can be split."""
    if line.compound:
        return line.compound
    if "$$" in _unquoted(line):
        return "$$"
    for number, command in enumerate(line.commands):
        is_last = number == len(line.commands) - 1
        if command.after in ("|", "|&") or command.before in ("|", "|&"):
            return "a pipeline"
        if command.after == "&" or command.before == "&":
            return "a background job"
        if reason := _command_obstacle(command, is_last):
            return reason
    last = line.commands[-1]
    if last.before == "||":
        return "a command after ||"
    if text[last.end :].strip(" \t\r\n;") and not _is_comment(text[last.end :]):
        return "text after the last command"
    return ""


def _is_comment(rest: str) -> bool:
    lines = [line.strip(" \t;") for line in rest.splitlines()]
    return all(not line or line.startswith("#") for line in lines)


def _unquoted(line: shell.Line) -> str:
    names = [name for command in line.commands for word in command.parts for name in word.names]
    return "$$" if "$" in names else ""


def _command_obstacle(command: shell.Simple, is_last: bool) -> str:
    names = [name for word in command.parts for name in word.names]
    positional = "" if is_last else "0123456789@*#"
    if special := next((name for name in names if name in f"{positional}?!-"), ""):
        return "$?" if special == "?" else f"the parameter ${special}"
    if not command.words:
        if command.redirections:
            return "a redirection without a command"
        worker = next((name for name in names if _WORKER_VARIABLE.fullmatch(name)), "")
        return f"${worker} in the preparation" if worker else ""
    name = command.words[0].value
    if name == "exec" and not is_last:
        return "exec before the last command"
    if reason := _UNSPLITTABLE.get(name, ""):
        return reason
    if name == "exit" and [word.value for word in command.words[1:]] in ([], ["0"]):
        return "exit"
    if is_last:
        return ""
    worker = next((one for one in names if _WORKER_VARIABLE.fullmatch(one)), "")
    if worker:
        return f"${worker} in the preparation"
    return _training(command)


def _training(command: shell.Simple) -> str:
    """Return a description of a Python program that may be a training before the last command."""
    words = command.values
    if command.words[0].expands and not is_python(words[0]):
        return f"{command.words[0].raw} before the last command" if "python" in words[0] else ""
    while (index := wrapped_at(words)) is not None:
        words = words[index:]
    if not is_python(words[0]):
        return ""
    target = python_target(words[1:])
    if target is None:
        return ""
    option, value, arguments = target
    if not _PRINTING.isdisjoint(arguments[:1]):
        return ""
    if option == "-c" or (option == "-m" and value in _PREPARING_MODULES):
        return ""
    if not option and file_name(value) in _PREPARING_SCRIPTS:
        return ""
    return f"a Python program before the last command ({value})"


def _files(command: shell.Simple) -> list[shell.Redirection]:
    """Return the redirections of a command to files, without those to its other streams."""
    return [
        redirection
        for redirection in command.redirections
        if redirection.operator not in (">&", "<&")
    ]


def _inserted(
    call: Sequence[str], text: str, last: shell.Simple, before: Sequence[shell.Simple]
) -> str | Whole:
    """Return the line with the last command reported instead of run."""
    words = list(last.words)
    executed = bool(words) and words[0].value == "exec"
    if executed:
        words = words[1:]
    if not words or words[0].value.startswith("-"):
        return Whole("a last command that is not a program")
    name = words[0].value
    if name in _BUILTINS or is_tool(name):
        return Whole(f"a last command that is not a program ({name})")
    if not (last.words[0].start == last.start or last.assignments):
        return Whole("a redirection before the last command")
    names = [one for word in last.parts for one in word.names]
    own = [one for one in names if _WORKER_VARIABLE.fullmatch(one)]
    if any(
        not any(_WORKER_VARIABLE.fullmatch(one) for one in found.target.names)
        for found in _files(last)
    ):
        return Whole("a redirection of the last command")
    if not own and not last.redirections:
        return f"{text[: words[0].start]}{REPORT} {text[words[0].start :]}"
    if others := _left_in_the_shell(names, before):
        return Whole(f"a last command with {others} beside variables of the worker")
    if special := next((one for one in names if one in "0123456789@*#"), ""):
        return Whole(f"a last command with ${special} beside variables of the worker")
    if any(word.substitutions for word in last.parts):
        return Whole("a last command with a command substitution beside variables of the worker")
    assigned = text[last.start : last.words[0].start].strip()
    run = single_quoted(f"{assigned} exec {text[words[0].start : last.end]}".strip())
    again = " ".join(map(_quoted, call))
    return f"{text[: last.start]}exec {REPORT} {again} {run}{text[last.end :]}"


def _left_in_the_shell(names: Sequence[str], before: Sequence[shell.Simple]) -> str:
    """Return a variable that the workers' own shell may lack: one that is not exported."""
    sourced = any(
        command.words and command.words[0].value in ("source", ".", "read") for command in before
    )
    assigned = {
        word.value.partition("=")[0]
        for command in before
        if not command.words
        for word in command.assignments
    }
    for name in names:
        if not _WORKER_VARIABLE.fullmatch(name) and (sourced or name in assigned):
            return f"${name}"
    return ""


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else single_quoted(word)
