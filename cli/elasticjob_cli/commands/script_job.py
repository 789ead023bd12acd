"""Job of a script or a command without a manifest: its words on the command line, and its object.

`run` starts such a job and `init` writes it as a manifest. The words after the first word that
`run` does not know belong to the script, so that a script's options need no quoting.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import BadInput
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.job import API_VERSION, KIND, MAX_NAME
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_rendezvous.protocol.text import echoed

NAME_OF_ANY = "job"
"""Name of a job whose command has no word to derive one from."""
_MODULE_OPTIONS = ("-m", "--module")
_EXPANDED = re.compile(r"\$(?=[$(])")
"""Dollar sign that a kubelet would expand."""
_NOT_IN_NAME = re.compile(r"[^a-z0-9]+")


class Target(StrEnum):
    """Kinds of targets of `elasticjob run`."""

    MANIFEST = "manifest"
    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Nodes:
    """Minimum and maximum number of nodes; equal for a fixed number."""

    least: int
    most: int


def parse_nodes(text: str, least_of_all: int = 1) -> Nodes:
    """Parse N or MIN:MAX. Raises ValueError with a message for the user."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"must be a number or MIN:MAX, such as 2:4, not {echoed(text)}")
    if any(len(part) > 9 for part in parts) or int(parts[-1]) > MAX_NODES:
        raise ValueError(f"must be at most {MAX_NODES}, not {echoed(text)}")
    least, most = int(parts[0]), int(parts[-1])
    if least < least_of_all:
        raise ValueError(f"must be at least {least_of_all}, not {echoed(text)}")
    if least > most:
        raise ValueError(f"must have the minimum first, such as {most}:{least}, not {echoed(text)}")
    return Nodes(least, most)


def is_script(word: str) -> bool:
    """Return True if a word names a Python script or a folder with a __main__.py."""
    return word.endswith(".py") or (Path(word) / "__main__.py").is_file()


def arranged(words: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], Target]:
    """Return the words in an order for the option parser, and the kind of target.

    `run train.py --nodes 2 --lr 1` has the options of `run` first, then `--`, then the script's
    words. `takes_value` has the options of `run`, True if one has a value.
    """
    at, own = _options(words, 0, takes_value)
    if at == len(words):
        return list(words), Target.MANIFEST
    if words[at] == "--":
        return [*own, *words[at:]], Target.COMMAND
    is_module = any(word in _MODULE_OPTIONS for word in own)
    if not is_module and not is_script(words[at]):
        return list(words), Target.MANIFEST
    rest, more = _options(words, at + 1, takes_value)
    if rest < len(words) and words[rest] == "--":
        rest += 1
    kind = Target.MODULE if is_module else Target.SCRIPT
    return [*own, *more, "--", words[at], *words[rest:]], kind


def _options(
    words: Sequence[str], start: int, takes_value: Mapping[str, bool]
) -> tuple[int, list[str]]:
    """Return the index of the first word that is not one of our options, and the options before it.

    Before the target every option counts as ours, so that a misspelt one is refused.
    """
    at = start
    found: list[str] = []
    while at < len(words):
        word = words[at]
        name, has_value, _ = word.partition("=")
        if word in ("-", "--") or not word.startswith("-") or (start and name not in takes_value):
            break
        length = 2 if takes_value.get(name) and not has_value else 1
        found += words[at : at + length]
        at += length
    return min(at, len(words)), found


def job_name(kind: Target, words: Sequence[str]) -> str:
    """Return a job's name, derived from its script, module or program."""
    stem = words[0].rpartition(".")[2] if kind is Target.MODULE else _stem(words[0])
    if kind is Target.COMMAND:
        stem = next((_stem(word) for word in words if word.endswith(".py")), stem)
    name = _NOT_IN_NAME.sub("-", stem.lower()).strip("-")[:MAX_NAME].strip("-")
    if not name:
        return NAME_OF_ANY
    return name if name[0].isalpha() else f"{NAME_OF_ANY}-{name}"[:MAX_NAME].strip("-")


def _stem(word: str) -> str:
    path = Path(word)
    return path.resolve().name if path.name in ("", "..") else path.stem


def command_of(kind: Target, words: Sequence[str]) -> list[str]:
    """Return the command of a trainer container. Raises `BadInput` if its script is missing."""
    if kind is Target.SCRIPT:
        script = Path(words[0])
        if not script.exists():
            raise BadInput(
                f"the script {echoed(words[0])} does not exist (looked in {Path.cwd()})"
                f"{_nearest(script)}"
            )
        return ["python3", *words]
    if kind is Target.MODULE and not words[0]:
        raise BadInput("the name of the module behind -m is empty")
    return ["python3", "-m", *words] if kind is Target.MODULE else list(words)


def _nearest(script: Path) -> str:
    """Return a question for the script of a similar name in the same folder; empty without one."""
    try:
        found = {path.stem: path for path in script.parent.iterdir() if path.suffix == ".py"}
    except OSError:
        return f": there is no folder {echoed(str(script.parent))}"
    near = difflib.get_close_matches(script.stem, found, 1)
    return f"; did you mean {echoed(str(found[near[0]]))}?" if near else ""


def job_document(
    name: str, command: Sequence[str], nodes: Nodes, workers: int | str | None
) -> dict[str, Any]:
    """Return the manifest of a job that runs a command. `$` in it stays `$` in a container."""
    spec: dict[str, Any] = {"minNodes": nodes.least, "maxNodes": nodes.most}
    spec |= {} if workers is None else {"nprocPerNode": workers}
    container = {"name": "trainer", "command": command_words(command)}
    spec["template"] = {"spec": {"containers": [container]}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": spec,
    }


def command_words(command: Sequence[str]) -> list[str]:
    """Return the words of a container's command; `$` in them stays `$`."""
    return [_EXPANDED.sub("$$", word) for word in command]


def validated(document: Mapping[str, Any]) -> ElasticJob:
    """Return the job of a document made here. Raises `BadInput` for values of the user's."""
    from elasticjob_operator.model.parse import parse_strictly
    from elasticjob_operator.model.problems import InvalidManifest

    try:
        return parse_strictly(document)
    except InvalidManifest as error:
        raise BadInput(f"the job is not valid: {error}") from error
