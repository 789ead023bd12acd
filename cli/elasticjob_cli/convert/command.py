"""The trainer's command: torchrun is taken out as the operator does, and its numbers are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticjob_operator.core.command import wrapped

_KEPT = {"--nproc-per-node": "nprocPerNode", "--max-restarts": "maxRestarts"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command without its launcher.

    Args:
        launched: a launcher such as torchrun was taken out.
        note: what was taken out, for people.
    """

    command: tuple[str, ...]
    args: tuple[str, ...]
    launched: bool
    note: str


def option(words: Sequence[str], name: str) -> str | None:
    """The value of a launcher's option, however it is spelled; None where it is not given."""
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def without_launcher(command: Sequence[str], args: Sequence[str]) -> Command:
    """The command as each worker runs it.

    Raises:
        Unsafe: there is a launcher that cannot be taken out.
    """
    words = (*command, *args)
    asked = option(words, "--nproc-per-node") or ""
    found = wrapped(command, args, int(asked) if asked.isdigit() else 1)
    if not found.note:
        return Command(tuple(command), tuple(args), False, "")
    # Here, other than in a pod, some of the options go on counting: as fields of the job.
    note = found.note.replace("; not used: ", "; its options left out: ")
    kept = [f"{name} became {field}" for name, field in _KEPT.items() if option(words, name)]
    return Command(found.unwrapped, found.args, True, "; ".join([note, *kept]))
