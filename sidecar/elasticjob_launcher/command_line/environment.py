"""Wrappers that keep the variables of the job from the program that they run, such as env -i.

A worker without RANK and WORLD_SIZE, and a torchrun without the variables of the rendezvous, train
alone, and nothing fails. sudo and doas may have a configuration that keeps variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import (
    file_name,
    is_python,
    is_shell,
    line_after,
)
from elasticjob_launcher.command_line.programs import (
    inner_words,
    launcher_of_words,
    program_words,
)
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT, Unreadable
from elasticjob_launcher.command_line.wrappers import (
    is_entrypoint,
    line_of,
    split_string,
    wrapped_at,
)

_OF_WORKERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = ("PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_NNODES")
_PASSED = frozenset({*_OF_WORKERS, *_OF_TORCHRUN})
"""Variables of which one that a command passes on by itself shows that its author knows them."""
_MAX_DEPTH = 64
"""Maximum number of commands inside each other."""
_REMOVE = "remove the option"
_OTHER_USER = "or change the user with `runuser -u USER --` or `setpriv --reuid`, which keep them"


class Clearing(NamedTuple):
    """Part of a command that takes the variables, and the remedy."""

    by: str
    remedy: str

    @property
    def text(self) -> str:
        """Effect and remedy in one sentence."""
        return (
            f"{self.by} keeps the variables of the job from the program that it runs: workers have "
            "no RANK, WORLD_SIZE and MASTER_ADDR, torchrun does not join the other nodes, and each "
            f"of them trains alone; {self.remedy}"
        )


def clearing(argv: Sequence[str]) -> Clearing | None:
    """Return the part of a command that takes the job's variables from its program, or None.

    Nothing is reported if a wrapper within that part passes them on, as in `sudo env RANK=$RANK`.
    """
    found = None
    for words in _inward(tuple(argv)):
        found = None if _passes(words) else found or _of_wrapper(words)
    return found


def deciding_command(text: str) -> tuple[str, ...]:
    """Return the words of the last command of a shell's text that may run the training, since those
    before it may prepare it; without any, those of the last command."""
    try:
        commands = shell.read(text).commands
    except Unreadable:
        return ()
    found = [words for command in commands if (words := tuple(command.values))]
    last = found[-1] if found else ()
    return next((words for words in reversed(found) if may_train(words)), last)


def may_train(words: tuple[str, ...]) -> bool:
    """Return True if a command runs Python, a launcher, a script, or a program that only the
    running shell knows, such as that of `exec "$@"`."""
    found = program_words(_without_exec(words)) or words
    if not found:
        return False
    is_script = is_shell(found[0]) or found[0].endswith((".sh", ".py"))
    return is_script or _is_computed(found[0]) or _is_known(found)


def runs_training(argv: Sequence[str]) -> bool:
    """Return True if a command runs Python or a launcher itself, and not in a script."""
    inward = list(_inward(tuple(argv)))
    prepared = any(is_entrypoint(words[0]) for words in inward)
    return bool(inward) and _is_known(inward[-1]) and not prepared


def _is_known(words: tuple[str, ...]) -> bool:
    return is_python(words[0]) or launcher_of_words(words) is not None


def _inward(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield a command, the command that it runs, and so on, up to a program."""
    for _ in range(_MAX_DEPTH):
        if not words:
            return
        yield words
        line = line_after(words)
        line = line_of(words) if line is None else line
        if line is not None:
            words = deciding_command(line)
        elif words[0] == "exec":
            words = _without_exec(words)
        else:
            words = inner_words(words) or ()


def _without_exec(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words after the builtin `exec` and its options."""
    if words[:1] != ("exec",):
        return words
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at].endswith("a") else 1
    return words[at:]


def _of_wrapper(words: tuple[str, ...]) -> Clearing | None:
    """Return the first wrapper if it takes the variables."""
    name = file_name(words[0])
    if name == "exec":
        letters = words[1] if len(words) > 2 and re.fullmatch(r"-[acl]+", words[1]) else ""
        return Clearing(f"exec {letters}", _REMOVE) if "c" in letters else None
    end = _end_of_own(words)
    if end is None:
        return None
    own = words[1:end]
    if name in ("su", "runuser"):
        return _of_login(name, own)
    if name == "env":
        return _of_env(own, words[end:])
    if name in ("sudo", "doas"):
        return _of_sudo(name, own)
    option = next((word for word in own if word in _OPTIONS.get(name, ())), "")
    if not option:
        return None
    return Clearing(f"{name} {option}", _REMOVE)


def _end_of_own(words: tuple[str, ...]) -> int | None:
    """Return the index after the words of a wrapper itself; None if it is unknown."""
    end = wrapped_at(words)
    if end is None and file_name(words[0]) in ("su", "runuser"):
        return len(words)
    return _string_at(words) if end is None and split_string(words) else end


def _passes(words: tuple[str, ...]) -> bool:
    """Return True if a wrapper passes variables of the job on, or may do so with words that only
    the running shell knows, such as those of `sudo $OPTIONS python t.py`."""
    name, end = file_name(words[0]), _end_of_own(words)
    if end is None or name in ("exec", "su", "runuser"):
        return False
    if name in _SETTING and any(map(_may_be_options, _candidates(name, words, end))):
        return True
    for before, word in zip(("", *words[1:end]), words[1:end]):
        if before in ("--env", "--env-file") and _is_computed(word):
            return True
        option, _, value = word.partition("=")
        if ASSIGNMENT.fullmatch(word) and option in _PASSED:
            return True
        if option == "--preserve-env" and any(map(_is_computed, value.split(","))):
            return True
        if option == "--env-file" or (option == "--env" and ("RANK" in value or "$" in value)):
            return True
    return False


def _candidates(name: str, words: tuple[str, ...], end: int) -> tuple[str, ...]:
    """Return the words of a wrapper that need be neither its program nor the value of an option."""
    is_program = name not in ("env", *_OF_IMAGES) and not _starts_command(words[end + 1 :])
    if is_program or _is_known(words[end:] or ("",)):
        return ()
    return (*(words[1:end] if name in _OF_IMAGES else ()), *words[end : end + 1])


def _may_be_options(word: str) -> bool:
    """Return True if the shell computes the word and it is not a path."""
    return _is_computed(word) and not re.fullmatch(r".*/[\w.+-]+", word, re.DOTALL)


def _starts_command(words: tuple[str, ...]) -> bool:
    """Return True if the words before these can't be the program: options, or Python, follow."""
    return bool(words) and (words[0].startswith("-") or _is_known(words))


_OF_IMAGES = ("apptainer", "singularity")
"""Wrappers with an image before their program, in whose place a word may be options."""
_SETTING = frozenset({"env", "sudo", "doas", *_OF_IMAGES, "micromamba", "nsys", "strace"})
"""Wrappers whose words can set variables; a computed one of another, as of timeout, can't."""
_CONTAINERS = frozenset({"-e", "--cleanenv", "-C", "--containall"})
_OPTIONS: Mapping[str, frozenset[str]] = {
    "setpriv": frozenset({"--reset-env"}),
    "apptainer": _CONTAINERS,
    "singularity": _CONTAINERS,
    "pixi": frozenset({"--clean-env"}),
}
"""Options with which a wrapper begins an environment of its own."""
_SUDO_VALUED = "CDghprRtTuU"
"""Letters of options of sudo that have a value."""


def _is_computed(word: str) -> bool:
    return word[:1] in ("$", "`")


def _string_at(words: tuple[str, ...]) -> int:
    """Return the index of the word with the option `-S` of env; `-iS` is read, too."""
    return next(
        (at + 1 for at, word in enumerate(words) if re.match(r"-[iv0]*S|--split-string", word)),
        len(words),
    )


def _of_env(own: Sequence[str], program: Sequence[str]) -> Clearing | None:
    removed: list[str] = []
    for before, word in zip(("", *own), own):
        if before in ("-C", "--chdir", "-a", "--argv0"):
            continue
        if before in ("-u", "--unset"):
            removed.append(word)
        elif word == "-" or re.fullmatch(r"-[v0]*i[iv0]*(S.*)?|--i(gnore-environment)?", word):
            return Clearing(f"env {word}", f"{_REMOVE}, or unset single variables with `env -u`")
        elif word.startswith("--unset="):
            removed.append(word.partition("=")[2])
        elif re.match(r"-u.", word):
            removed.append(word[2:])
    is_launcher = launcher_of_words(program_words(program)) is not None
    needed = _OF_TORCHRUN if is_launcher else _OF_WORKERS
    name = next((variable for variable in removed if variable in needed), "")
    return Clearing(f"env -u {name}", f"keep {name}") if name else None


def _of_login(name: str, own: Sequence[str]) -> Clearing | None:
    """Return su or runuser if it starts a login shell."""
    login = ""
    for before, word in zip(("", *own), own):
        if before in ("-c", "--command", "-s", "--shell", "-g", "--group", "-G", "-u", "--user"):
            continue
        if re.fullmatch(r"-w.*|--whitelist-environment.*", word) or word == "--":
            break
        if re.fullmatch(r"-|-[a-z]*l[a-z]*|--login", word):
            login = word
    else:
        return (
            Clearing(f"{name} {login}", f"{_REMOVE}, which starts a login shell") if login else None
        )
    return None


def _of_sudo(name: str, own: Sequence[str]) -> Clearing | None:
    for word in own:
        letters = re.split(f"[{_SUDO_VALUED}]", word[1:])[0] if re.match(r"-\w", word) else ""
        listed = word.partition("=")[2].split(",")
        if "E" in letters or word == "--preserve-env" or not _PASSED.isdisjoint(listed):
            return None
    remedy = "use `sudo -E`" if name == "sudo" else "set keepenv in its configuration"
    return Clearing(name, f"{remedy}, {_OTHER_USER}")
