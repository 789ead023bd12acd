"""Variables of other operators that a command which runs once for the node expects.

Training operators and batch systems number the nodes by environment variables, and the lines of
their users pass them to torchrun: `torchrun --nnodes=$WORLD_SIZE --node_rank=$RANK
--master_addr=$MASTER_ADDR`. torchrun refuses an empty number before the plug-in, which makes these
options ineffective, can act. A variable is therefore set if the command or a script that it runs
refers to it. It is not set for other commands: a program that finds RANK and WORLD_SIZE would take
itself for a worker.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MAX_FILES = 20
MAX_FILE_BYTES = 256 * 1024
NUMBERS = ("NODE_RANK", "RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "SKYPILOT_NODE_RANK")
"""Variables with the number of the node, of Kubeflow, indexed Jobs, Volcano and SkyPilot."""
COUNTS = ("NNODES", "WORLD_SIZE", "SKYPILOT_NUM_NODES")
MASTER = "localhost"
"""Address that resolves at once; the plug-in replaces it in torchrun's workers."""
PORT = "29500"
_SUFFIXES = (".sh", ".bash", ".zsh", ".ksh", ".env")
_REFERENCE = re.compile(r"\$(?:\{[#!]?)?([A-Z_]+)(?![A-Za-z0-9_])")
_ARITHMETIC = re.compile(r"\(\(([^\n;]*?)\)\)")
_NAME = re.compile(r"\b[A-Z_]+\b")
_PRESENCE = (
    r"-[znv]\s+\"?(\$\{?)?NAME\b",
    r"\$\{NAME:?\+",
    r"\$\{?NAME(:-)?\}?\"?\s*(==?|!=)\s*(\"\"|'')",
)
"""Forms of a test that a variable is set."""
_FILE = re.compile(r"[^\s;&|()<>\"'`$=]+")
_FOLDER = re.compile(r"\b(?:cd|pushd)\s+[\"']?([^\s;&|()<>\"'`$]+)")
_PROGRAM_OF_SCRIPT = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "source", "."})


def node_variables(
    argv: Sequence[str], given: Mapping[str, str], folder: Path | None = None
) -> dict[str, str]:
    """Return the variables that a command refers to and nobody has set.

    Args:
        given: all variables of the command, with PET_NODE_RANK and PET_NNODES.
        folder: working folder; None for this process's own.
    """
    number, nodes = given.get("PET_NODE_RANK"), given.get("PET_NNODES", "1").rpartition(":")[2]
    if number is None:
        return {}
    known = {
        **dict.fromkeys(NUMBERS, number),
        **dict.fromkeys(COUNTS, nodes),
        "MASTER_ADDR": MASTER,
        "MASTER_PORT": PORT,
        "PET_MASTER_ADDR": MASTER,
        "PET_MASTER_PORT": PORT,
    }
    texts = list(_texts(argv, folder or Path.cwd()))
    used = {name for text in texts for name in _REFERENCE.findall(text)}
    for text in texts:
        for arithmetic in _ARITHMETIC.findall(text):
            used.update(_NAME.findall(arithmetic))
    return {
        name: value
        for name, value in known.items()
        if name in used and name not in given and not _tests_presence(name, texts)
    }


def _tests_presence(name: str, texts: Sequence[str]) -> bool:
    """Return True for RANK or WORLD_SIZE if the command tests it: a script that starts torchrun
    only without a rank must not find one."""
    if name not in ("RANK", "WORLD_SIZE"):
        return False
    forms = [re.compile(form.replace("NAME", name)) for form in _PRESENCE]
    return any(form.search(text) for form in forms for text in texts)


def _texts(argv: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield the words of a command, and the text of each shell script that they or it names."""
    yield from argv
    waiting = [_named(" ".join(argv), [folder])]
    read: set[Path] = set()
    while waiting:
        for path in waiting.pop():
            if path in read or len(read) == MAX_FILES:
                continue
            text = _script(path)
            if text:
                read.add(path)
                yield text
                waiting.append(_named(text, [folder, path.parent]))


def _named(text: str, folders: list[Path]) -> list[Path]:
    """Return the paths that a text may mean by its words, in its folders and those it enters."""
    entered = [folder / name for name in _FOLDER.findall(text) for folder in folders]
    found, before = [], ""
    for word in _FILE.findall(text):
        runs = before.rpartition("/")[2] in _PROGRAM_OF_SCRIPT
        if word.endswith(_SUFFIXES) or runs or word.startswith(("./", "/")):
            found += [folder / word for folder in (*folders, *entered)]
        before = word
    return found


def _script(path: Path) -> str:
    """Return the text of a shell script; empty for any other file."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return ""
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if path.name.endswith(_SUFFIXES):
        return text
    first = text.partition("\n")[0]
    try:
        words = shlex.split(first[2:]) if first.startswith("#!") else []
    except ValueError:
        return ""
    return text if any(word.rpartition("/")[2] in _PROGRAM_OF_SCRIPT for word in words) else ""
