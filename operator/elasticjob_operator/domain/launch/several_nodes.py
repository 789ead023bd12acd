"""Commands that several nodes cannot run together, and the reasons.

The nodes of a job find each other by the job's rendezvous alone, and each of them runs the command.
A command with another rendezvous, or with two launchers, would train alone on each node or stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import line_after
from elasticjob_launcher.command_line.shell_words import Unreadable
from elasticjob_launcher.command_line.wrappers import program_at
from elasticjob_operator.domain.launch.detection import launcher_started
from elasticjob_operator.domain.launch.findings import Finding, FindingKind
from elasticjob_operator.domain.launch.variables import Variables

_LEAVING = frozenset({"exit", "return"})
_ENDING = frozenset({"break", "exit"})
_CONDITIONS = frozenset({"test", "[", "command", "which", "type", "hash", "grep", "diff", "cmp"})
"""Programs whose exit code decides if the commands after them run."""


def several_nodes_refusal(found: Finding | None, words: Sequence[str], is_requested: bool) -> str:
    """Return the reason for which several nodes cannot run a command; empty if they can.

    Args:
        found: finding that decides about the launch.
        is_requested: True if spec.launch sets the launch.
    """
    if found is not None and found.kind is FindingKind.OPTION:
        return _of_option(found)
    if not is_requested and (repeated := repeated_launcher(words)):
        return (
            f"the line starts {repeated} more than once, and several nodes could not agree on "
            "which one they run: make a job of each, or set spec.maxNodes to 1, or set "
            "spec.launch to PerNode if only one of them runs"
        )
    return "" if found is None else _of_rendezvous(found)


def _of_option(found: Finding) -> str:
    """Return the refusal of an option that starts processes or numbers the node."""
    return (
        f"{found.name} makes the program start or number the processes itself, so each "
        "of the nodes would train alone: leave the option out if every process takes its ranks "
        "from the environment, as torchrun's workers do; or set spec.launch to PerNode if the "
        "program starts torchrun, or to PerWorker if it only reads the option; or set "
        "spec.maxNodes to 1"
    )


def _of_rendezvous(found: Finding) -> str:
    """Return the refusal of a launcher with a rendezvous of its own; empty for any other."""
    if found.launcher is None or found.launcher.joins:
        return ""
    name = found.launcher.name
    argument = f", or set spec.launch if {name} is only an argument"
    return (
        f"{name} does not join the job's rendezvous ({found.launcher.own}), so each of the nodes "
        f"would train alone: start the script with torchrun or python3 in place of {name}, or set "
        f"spec.maxNodes to 1{argument if found.guessed else ''}"
    )


def repeated_launcher(words: Sequence[str]) -> str:
    """Return the launcher that a shell line certainly starts more than once, one after the other or
    side by side; empty if there is none."""
    text = line_after(words[program_at(words, strings=False) :])
    try:
        line = shell.read(text or "")
    except Unreadable:
        return ""
    if not line.is_sequence:
        return ""
    ends = any(word.value in _ENDING for one in line.commands for word in one.words)
    known = Variables()
    count, is_conditional = 0, False
    for command in line.commands:
        is_conditional &= command.before in ("&&", "||")
        known.assign(command)
        given = command.values
        launcher = launcher_started(command, known)
        if launcher and not is_conditional and command.before != "||" and not _prints_help(given):
            count += 2 if command.repeated and not ends else 1
            if count > 1:
                return launcher
        name = given[0] if given else ""
        is_conditional |= name in _CONDITIONS
        leaves = name in _LEAVING or (name == "exec" and len(given) > 1)
        if leaves and command.before != "||":
            break
    return ""


def _prints_help(words: Sequence[str]) -> bool:
    """Return True if a launcher only prints its help or version, by an option before its script."""
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    return not {"-h", "--help", "--version"}.isdisjoint(words[:script])
