"""Commands whose usage errors are this program's own text, not that of the library that parses."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

TARGET = "elasticjob_cli.target"
"""Key of the kind of target in the context of a command line."""


class Command(TyperCommand):
    """Command that states what a value must be, and repeats it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _message(error)
            raise


class TargetCommand(Command):
    """Command whose options may follow its script, up to the first word of the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from elasticjob_cli.commands.script_job import arranged  # loads the models

        options = [one for one in self.params if one.param_type_name == "option"]
        takes_value = {
            name: not getattr(one, "is_flag", False)
            for one in options
            for name in (*one.opts, *one.secondary_opts)
        }
        words, kind = arranged(args, {**takes_value, "-h": False, "--help": False})
        ctx.meta[TARGET] = kind
        return super().parse_args(ctx, words)


def _message(error: typer.BadParameter) -> str:
    """Return the message on a value that the library could not convert; any other as it is."""
    from pydantic import ValidationError  # typer has loaded it, the models are only for errors

    if not isinstance(error.__cause__, ValidationError):
        return error.message
    from elasticjob_operator.model.parse import problems
    from elasticjob_operator.model.problems import not_one_of

    first = error.__cause__.errors()[0]
    kind = getattr(error.param, "type_descriptor", None)
    if kind is not None and kind.choices:
        words = [str(getattr(choice, "value", choice)) for choice in kind.choices]
        return not_one_of(words, first["input"])
    return problems(error.__cause__, first["input"])[0].message
