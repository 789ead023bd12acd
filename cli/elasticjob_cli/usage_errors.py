"""Usage errors in this program's own words, instead of those of the library that parses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from elasticjob_cli.main import ONLY_LOCAL, PLACE_OPTIONS
from elasticjob_rendezvous.protocol.text import bounded, echoed, one_line

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Base class of the library's usage errors, which it does not export."""
LIST_JOBS = "`get` lists the jobs."
_BY_NAME = "jobs are selected by name, without a manifest"
_LOG_LINES = "the lines are those of the workers; --pod and --rank select some of them"
HINTS = {
    ("apply", "-k"): "pipe the manifest: `kubectl kustomize FOLDER | elasticjob apply -f -`",
    ("delete", "-f"): _BY_NAME,
    ("describe", "-f"): _BY_NAME,
    ("explain", "-f"): _BY_NAME,
    ("get", "-f"): _BY_NAME,
    ("logs", "--all-containers"): _LOG_LINES,
    ("logs", "--container"): _LOG_LINES,
    ("logs", "-c"): _LOG_LINES,
    ("logs", "--previous"): "--round selects an earlier round",
    ("logs", "-p"): "--round selects an earlier round",
    ("top", "--watch"): "at a terminal it is repeated until Ctrl-C",
    ("top", "-w"): "at a terminal it is repeated until Ctrl-C",
}
"""Remedies for options of other programs, by command and option."""
ON_CLUSTER = {
    "run": "`elasticjob init` writes a manifest for a script, `elasticjob apply` submits it",
    "init": "`elasticjob apply` submits the manifest",
    "fault": "on a cluster delete a pod or drain a node with kubectl",
}
"""Remedies for a place in commands that act on this machine."""

TARGET = "elasticjob_cli.target"
"""Key of the kind of target in the context of a command line."""


class Command(TyperCommand):
    """Command whose usage errors state the expected value and repeat the given one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = tuple(args)
        takes_more, ctx.allow_extra_args = ctx.allow_extra_args, True
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _message(error, given)
            raise
        except _UsageError as error:
            option = getattr(error, "option_name", None)
            if option is not None and (remedy := _remedy(ctx.info_name or "", option)):
                error.message = f"{error.message}; {remedy}"  # type: ignore[attr-defined]
            raise
        if rest and not takes_more:
            ctx.fail(f"{ctx.info_name} takes {_arguments(self.params)}: remove {echoed(rest[0])}")
        return rest


class TargetCommand(Command):
    """Command whose options may follow its script, up to the first word of the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from elasticjob_cli.commands.script_job import arranged  # loads the models

        options = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in options
            for name in (*option.opts, *option.secondary_opts)
        }
        words, kind = arranged(args, {**takes_value, "-h": False, "--help": False})
        ctx.meta[TARGET] = kind
        return super().parse_args(ctx, words)


def _arguments(parameters: Sequence[Any]) -> str:
    """Return the arguments of a command in words."""
    found = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    names = ", ".join(one.metavar or one.name.upper() for one in found)
    return f"one {names}" if len(found) == 1 else names or "no argument"


def _missing(parameter: Any, given: Sequence[str]) -> str:
    """Return the remedy for an argument or a required option that is not among the words given."""
    if getattr(parameter, "metavar", None) == "NAME":
        return LIST_JOBS
    if "-f" in getattr(parameter, "opts", ()):
        manifests = (word for word in given if word.endswith((".yaml", ".yml", ".json")))
        return f"Give the manifest with it: `-f {bounded(one_line(next(manifests, 'FILE')))}`."
    return ""


def _remedy(command: str, option: str) -> str:
    """Return the remedy for an unknown option, empty if there is none."""
    if command in ONLY_LOCAL and option in PLACE_OPTIONS:
        there = ON_CLUSTER.get(command, "")
        return f"{command} acts on this machine" + (f": {there}" if there else "")
    return HINTS.get((command, option), "")


def _message(error: typer.BadParameter, given: Sequence[str]) -> str:
    """Return the message on a value that the library could not convert, or the remedy for one that
    is missing; any other message as it is."""
    if not error.message:  # the library precedes it by the name of the missing argument
        return _missing(error.param, given)
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
    return problems(error.__cause__)[0].message
