"""Command `elasticjob convert`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from elasticjob_cli.commands.options import as_yaml
from elasticjob_cli.convert.documents import convert_document
from elasticjob_cli.convert.field_reader import Json, Remark, Unconvertible
from elasticjob_cli.errors import BadInput, CommandError, ExitCode
from elasticjob_cli.manifest_job import script_hint
from elasticjob_cli.output import replace_file, show_text
from elasticjob_operator.model.manifest import (
    STANDARD_INPUT,
    FileProblem,
    InvalidFile,
    YamlDocument,
    documents,
    read_text,
    shown,
)
from elasticjob_operator.model.problems import field_path


@dataclass(slots=True)
class _Found:
    """Result of converting a file."""

    jobs: list[Json] = field(default_factory=list)
    autoscalers: list[Json] = field(default_factory=list)
    remarks: list[FileProblem] = field(default_factory=list)
    problems: list[FileProblem] = field(default_factory=list)


def convert(
    file: Annotated[
        str,
        typer.Argument(
            help="Manifest with PyTorchJobs; - is standard input.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Output file instead of standard output."
        ),
    ] = None,
    autoscaler: Annotated[
        Path | None,
        typer.Option(
            "--autoscaler", metavar="FILE", help="Output file for HorizontalPodAutoscalers."
        ),
    ] = None,
) -> None:
    """Convert kubeflow's PyTorchJobs to ElasticJobs.

    Standard error lists each field that changed or has no counterpart, with its line and the
    remedy. Other objects in the file are left out. If something cannot be converted, the exit code
    is 2 and nothing is written.

    \b
    Examples:
      elasticjob convert pytorchjob.yaml -o elasticjob.yaml
      kubectl get pytorchjob my-job -o yaml | elasticjob convert -
    """
    for path in (output, autoscaler):
        if file == STANDARD_INPUT or path is None:
            continue
        if path.resolve() == Path(file).resolve():
            raise BadInput(f"{path} is the input file: choose another output, to be able to revert")
    if autoscaler is not None and output is not None and _same_file(output, autoscaler):
        raise BadInput(f"-o and --autoscaler must be two files: both are {output}")
    found = _converted(shown(file), _read(file), autoscaler)
    if not found.problems and not found.jobs:
        raise BadInput(f"{shown(file)} contains no PyTorchJob of kubeflow.org/v1")
    for line in found.problems or found.remarks:
        show_text(str(line), err=True)
    if found.problems and (hint := script_hint(file)):
        show_text(hint, err=True)
    if found.problems:
        raise typer.Exit(ExitCode.BAD_INPUT)
    if autoscaler is not None and not found.autoscalers:
        raise BadInput(f"--autoscaler: no job in {shown(file)} is scaled by metrics")
    _write(output, found.jobs)
    if autoscaler is not None:
        _write(autoscaler, found.autoscalers)


def _same_file(one: Path, other: Path) -> bool:
    """Return True if both paths are the same regular file; a pipe or terminal may get both."""
    return one.resolve() == other.resolve() and (one.is_file() or not one.exists())


def _write(path: Path | None, objects: list[Json]) -> None:
    """Write the objects to the file, or to standard output without one."""
    text = "---\n".join(as_yaml(object_) + "\n" for object_ in objects)
    if path is None:
        show_text(text)
        return
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error


def _read(file: str) -> str:
    try:
        return read_text(file)
    except InvalidFile as error:
        raise BadInput(str(error)) from error


def _converted(file: str, text: str, autoscaler: Path | None) -> _Found:
    """Convert all documents of a file; `file` is its name in messages."""
    found = _Found()
    for document in documents(text):
        for fault in document.faults:
            place = fault.place
            path = field_path(fault.location)
            found.problems.append(FileProblem(file, place.line, place.column, path, fault.message))
        if document.value is None:
            continue
        try:
            one = convert_document(document.value, autoscaler=autoscaler)
        except Unconvertible as error:
            found.problems += _placed(file, document, error.problems)
        else:
            found.jobs += one.jobs
            found.autoscalers += one.autoscalers
            found.remarks += _placed(file, document, one.remarks)
    return found


def _placed(file: str, document: YamlDocument, remarks: Iterable[Remark]) -> list[FileProblem]:
    """Return the remarks with line and column, ordered by line."""
    lines = []
    for remark in remarks:
        place = document.place_of(remark.location)
        path = field_path(remark.location)
        lines.append(FileProblem(file, place.line, place.column, path, remark.text))
    return sorted(lines, key=lambda line: (line.line, line.column))
