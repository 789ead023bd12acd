"""Shared command-line arguments: a job's name, its place, and output formats."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_cli.kubectl import Kubectl, selects_cluster
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE
from elasticjob_cli.output import show, show_error
from elasticjob_rendezvous.protocol.text import printable

Name = Annotated[str, typer.Argument(help="Name of the job.", metavar="NAME", show_default=False)]
Names = Annotated[
    list[str], typer.Argument(help="Names of the jobs.", metavar="NAME", show_default=False)
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the job.")]


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a verb's jobs: a cluster, or a namespace of this machine."""

    kubectl: Kubectl | None
    """None for this machine."""
    namespace: str = DEFAULT_NAMESPACE
    """Namespace on this machine."""


def _place(
    invocation: typer.Context,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace. Default: default, on a cluster the context's.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        bool | None,
        typer.Option(
            "--cluster/--local",
            help="Place of the job. Default: this machine, unless a context or kubeconfig is "
            "given.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", help="The kubeconfig file.", show_default=False)
    ] = None,
) -> Place:
    """Return the place that the options select; its parameters declare them. Raises `BadInput`."""
    if selects_cluster(bool(invocation.find_root().obj), cluster, context, kubeconfig):
        return Place(Kubectl(namespace, context, kubeconfig))
    return Place(None, namespace or DEFAULT_NAMESPACE)


def placed(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with the options of `_place` in the place of its first parameter, a `Place`."""
    where = inspect.signature(_place, eval_str=True).parameters
    _, *own = inspect.signature(verb, eval_str=True).parameters.values()

    def command(**words: Any) -> None:
        place = _place(**{name: words.pop(name) for name in where})
        verb(place, **words)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in (*own, *where.values())]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def for_each(names: Sequence[str], act: Callable[[str], str]) -> None:
    """Apply a verb to each name and print its results; like kubectl, continue after an error.

    The exit code is that of the first error. The same error twice in a row does not depend on the
    name, and ends the loop.
    """
    errors: list[CommandError] = []
    names = list(dict.fromkeys(names))
    for name in names:
        try:
            show(act(name))
        except CommandError as error:
            if len(names) == 1 or (errors and str(error) == str(errors[-1])):
                raise
            show_error(f"elasticjob: {error}")
            errors.append(error)
    if errors:
        raise typer.Exit(int(errors[0].exit_code))


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Let Ctrl-C end a read-only command without a message."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None


class Output(StrEnum):
    """Output formats of objects."""

    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def as_json(document: object) -> str:
    # DEL is the only control character that JSON does not escape.
    return json.dumps(document, indent=2).replace("\x7f", "\\u007f")


def as_yaml(document: object) -> str:
    """Return the document as YAML, in ASCII if it has text that is not printable."""
    import yaml  # takes longer to load than a listing needs

    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if printable(text) != text:
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=False)
    return text.rstrip()
