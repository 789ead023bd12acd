"""Findings in a command: launchers, and parts of it that may be one or start one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elasticjob_launcher.command_line.launchers import Launcher, numbers_node
from elasticjob_operator.model.types import LaunchReason


class FindingKind(StrEnum):
    """Reason for which a command has or may have a launcher."""

    LAUNCHER = "Launcher"
    OPTION = "Option"
    SCRIPT = "Script"
    COMPUTED = "Computed"


_UNCERTAIN = (FindingKind.SCRIPT, FindingKind.COMPUTED)


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


def deciding(
    found: Sequence[Finding], guesses: bool, is_ignored: Callable[[Finding], bool]
) -> Finding | None:
    """Return the finding that decides about the launch: a launcher before an option that starts
    processes, and those before a part that may start a launcher.

    Args:
        found: findings in the order of the command.
        guesses: False ignores findings in the arguments of unknown programs.
        is_ignored: returns True for a finding that does not count.
    """
    found = [
        finding for finding in found if (guesses or not finding.guessed) and not is_ignored(finding)
    ]
    certain = [finding for finding in found if finding.kind is FindingKind.LAUNCHER]
    options = [
        finding for finding in found if finding.kind is FindingKind.OPTION and not finding.numbers
    ]
    # An option of a helper program does not decide about a script after it.
    last = max((at for at, one in enumerate(found) if one.kind in _UNCERTAIN), default=-1)
    numbering = [finding for finding in found[last + 1 :] if finding.numbers]
    uncertain = [finding for finding in found if finding.kind in _UNCERTAIN]
    return next(iter((*certain, *options, *numbering, *uncertain)), None)


def per_node_reason(found: Finding) -> tuple[LaunchReason, str]:
    """Return the reason for which a command with this finding runs once for each pod."""
    match found.kind:
        case FindingKind.LAUNCHER:
            where = f" inside of {found.inside}" if found.inside else ""
            remedy = "; set spec.launch to PerWorker if it is an argument" if found.guessed else ""
            text = f"{found.name}{where} starts the workers itself{remedy}"
            return LaunchReason.LAUNCHER_FOUND, text
        case FindingKind.OPTION:
            text = f"{found.name} makes the program start the processes of the node itself"
            return (
                LaunchReason.LAUNCHER_FOUND,
                f"{text}; set spec.launch to PerWorker if it only reads the option",
            )
        case FindingKind.SCRIPT:
            return (
                LaunchReason.SCRIPT_FILE,
                f"{found.name} is a script that may start the workers itself; set spec.launch to "
                "PerWorker if it does not",
            )
        case FindingKind.COMPUTED:
            return (
                LaunchReason.COMPUTED_PROGRAM,
                f"the program {found.name} is known only when it runs and may start the workers "
                "itself; set spec.launch to PerWorker if it does not",
            )


def per_worker_refusal(found: Finding) -> str:
    """Return the reason for which a command with this launcher cannot run once for each worker."""
    where = f" is inside of {found.inside} and" if found.inside else ""
    return (
        f"{found.name}{where} cannot be taken out, and spec.launch PerWorker would start it once "
        f"for each worker: set spec.launch to PerNode or Auto, or write `python3 script.py …` in "
        f"place of {found.name}"
    )
