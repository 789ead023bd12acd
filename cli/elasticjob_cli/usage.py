"""Commands whose usage errors are this program's own text, not that of the library that parses."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

_CHOICES = re.compile(r"is not one of (.*?)\.?", re.DOTALL)


class Command(TyperCommand):
    """Command that states what a value must be, and repeats it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _message(error)
            raise


def _message(error: typer.BadParameter) -> str:
    """Return the message on a value that the library could not convert; any other as it is."""
    from pydantic import ValidationError  # typer has loaded it, the models are only for errors

    if not isinstance(error.__cause__, ValidationError):
        return error.message
    from elasticjob_operator.model.messages import not_one_of
    from elasticjob_operator.model.parse import problems

    first = error.__cause__.errors()[0]
    choices = _CHOICES.search(first["msg"])
    if choices and first["type"] == "value_error":
        words = re.findall(r"'([^']*)'", first["msg"][choices.start() :])
        return not_one_of(words, first["input"])
    return problems(error.__cause__, first["input"])[0].message
