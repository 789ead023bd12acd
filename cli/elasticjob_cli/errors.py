"""Errors that commands report to the user, and exit codes."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not for the commands that start no program
    from subprocess import TimeoutExpired


class ExitCode(IntEnum):
    """Exit codes of `elasticjob`."""

    SUCCEEDED = 0
    FAILED = 1
    BAD_INPUT = 2
    WARNINGS = 3
    INTERRUPTED = 130


class CommandError(Exception):
    """Error that ends the command; its message gives the user the problem and the remedy."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(CommandError):
    """Interruption of a run before it had begun."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.INTERRUPTED)


class BadInput(CommandError):
    """Invalid input from the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_INPUT)


def no_answer(error: OSError | TimeoutExpired) -> str:
    """Return the reason for which a program that was called gave no answer."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"no answer within {error.timeout:g} s, which a busy machine can cause: try again"
