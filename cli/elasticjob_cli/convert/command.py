"""Conversion of the trainer's command: removes torchrun as the operator does, keeps its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticjob_operator.core.command import wrapped

_KEPT = {"--nproc-per-node": "nprocPerNode", "--max-restarts": "maxRestarts"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command without its launcher.

    Args:
        launched: set if a launcher such as torchrun was removed.
        note: description of the removed parts.
    """

    command: tuple[str, ...]
    args: tuple[str, ...]
    launched: bool
    note: str


def option(words: Sequence[str], name: str) -> str | None:
    """Return the value of a launcher's option in any spelling; None if it is not given."""
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def without_launcher(command: Sequence[str], args: Sequence[str]) -> Command:
    """Return the command that each worker runs.

    Raises:
        Unsafe: the command has a launcher that cannot be removed.
    """
    words = (*command, *args)
    asked = option(words, "--nproc-per-node") or ""
    found = wrapped(command, args, int(asked) if asked.isdigit() else 1)
    if found.launcher is None:
        return Command(tuple(command), tuple(args), False, "")
    # Unlike in a pod, some options keep their effect here: they become fields of the job.
    note = found.note_with("its options left out")
    kept = [f"{name} became {field}" for name, field in _KEPT.items() if option(words, name)]
    return Command(found.unwrapped, found.args, True, "; ".join([note, *kept]))
