"""Shared command-line arguments and output formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml

from elasticjob_cli.errors import ExitCode
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE
from elasticjob_rendezvous.protocol.text import printable

Name = Annotated[str, typer.Argument(help="Name of the job.", metavar="NAME", show_default=False)]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the job.")]

__all__ = [
    "DEFAULT_NAMESPACE",
    "Name",
    "Namespace",
    "Output",
    "as_json",
    "as_yaml",
    "until_interrupted",
]


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


def as_json(document: dict[str, Any]) -> str:
    # DEL is the only control character that JSON does not escape.
    return json.dumps(document, indent=2).replace("\x7f", "\\u007f")


def as_yaml(document: dict[str, Any]) -> str:
    """Return the document as YAML, in ASCII if it has text that is not printable."""
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if printable(text) != text:
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=False)
    return text.rstrip()
