"""What the user is told when a command cannot do its work, and the exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What `elasticjob` exits with."""

    SUCCEEDED = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 130


class CommandError(Exception):
    """A message for the user: what was wrong, and what to do; ends the command."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(CommandError):
    """Somebody wanted it ended before it had begun."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.INTERRUPTED)


class BadInput(CommandError):
    """What the user gave cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_INPUT)
