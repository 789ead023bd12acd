"""Variables of other operators that a command which runs once for the node expects.

Training operators and batch systems number the nodes by environment variables, and the lines of
their users pass them to torchrun: `torchrun --nnodes=$WORLD_SIZE --node_rank=$RANK
--master_addr=$MASTER_ADDR`. torchrun refuses an empty number before the plug-in, which makes these
options ineffective, can act. A variable is therefore set if the command or a script that it runs
refers to it. It is not set for other commands: a program that finds RANK and WORLD_SIZE would act
as a worker, and wait for peers at an address that is not theirs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.launchers import names_joining_launcher
from elasticjob_launcher.command_line.shell_words import Unreadable
from elasticjob_launcher.programs.command_texts import command_texts

NUMBERS = ("NODE_RANK", "RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "SKYPILOT_NODE_RANK")
"""Variables with the number of the node, of Kubeflow, indexed Jobs, Volcano and SkyPilot."""
COUNTS = ("NNODES", "WORLD_SIZE", "SKYPILOT_NUM_NODES")
MASTER = "localhost"
"""Address that resolves at once; the plug-in replaces it in torchrun's workers."""
PORT = "29500"
_PAIR = ("RANK", "WORLD_SIZE")
"""Variables with which a program acts as a worker if it has both."""
_GROUP = (*_PAIR, "MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""Variables with which a program without a launcher would create a process group."""
_REFERENCE = re.compile(r"\$(?:\{[#!]?)?([A-Z_]+)(?![A-Za-z0-9_])")
_ARITHMETIC = re.compile(r"\(\(([^\n;]{0,200}?)\)\)")
_NAME = re.compile(r"\b[A-Z_]+\b")
_PRESENCE = (
    r"(?:\[|\btest|&&|\|\||!|\(|\s-[ao])\s*-[znv]\s+\"?(\$\{?)?NAME\b",
    r"\$\{NAME:?\+",
    r"\$\{?NAME(:?-)?\}?\"?\s*(==?|!=)\s*(\"\"|'')",
    r"(\"\"|'')\s*(==?|!=)\s*\"?\$\{?NAME\b",
    r"(\[|\btest|&&|\|\||!)\s+\"?\$\{?NAME(:?-)?\}?\"?\s*(\]|&&|\|\||;|\n|$)",
    r"([A-Za-z_.])\"?\$\{?NAME(:?-)?\}?\"?\s*(==?|!=)\s*[\"']?\1[\"']?(?![\w$])",
    r"\bcase\s+\"?\$\{?NAME\b[^\n]{0,40}\sin\b(?:(?!\besac\b)[\s\S]){0,400}?(''|\"\")\s*[)|]",
    r"\$\{NAME:?-(?!\d+\})([^}\s]{1,40})\}\"?\s*(==?|!=|-eq|-ne)\s*[\"']?\1(?!\w)",
    r"\$\{NAME:?--\d+\}\"?\s*(-[lg][te]|[<>])",
    r"\$\{#NAME\}\"?\s*(-\w\w|[=!<>])",
    r"\bprintenv\s+NAME\b",
)
"""Forms of a test that a variable is set. A numeric default is not such a test: `${RANK:-0} = 0`
selects a node."""
_PROCESSES = re.compile(
    r"(?:^|(?<=\s))--?(?:nproc[\w-]*|num[-_]proc\w*|np|n|ntasks)(?:=|\s+)([^\s;&|)]*)"
)
"""Options whose value is a number of processes."""
_PROCESSES_NAME = re.compile(r"(?i)\w*(nproc|num_?proc|ngpu|n_gpu|num_gpu|gpus?_per_node)\w*")
_VALUE = re.compile(r"(?<![\w$])([A-Za-z_]\w*)=([^\s;&|)]*)")
_ANY_REFERENCE = re.compile(r"\$\{?(\w+)")
_DIVISION = re.compile(
    r"--?(?:nproc[\w-]*|num[-_]proc\w*)[=\s]+\"?\$\(\(\s*\$?\{?WORLD_SIZE\}?\s*/"
)


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
    texts = list(command_texts(argv, given, folder or Path.cwd()))
    omitted = set().union(*(_assigned(text, known) for text in texts))
    if any(name in omitted or _tests_presence(name, texts) for name in _PAIR):
        omitted.update(_PAIR)
    if _counts_processes(texts):
        omitted.add("WORLD_SIZE")
    if nodes != "1" and not any(
        map(names_joining_launcher, [" ".join(texts[: len(argv)]), *texts])
    ):
        omitted.update(_GROUP)
    used = set().union(*map(_references, texts)) - omitted
    return {name: value for name, value in known.items() if name in used and name not in given}


def notice(variables: Mapping[str, str]) -> str:
    """Return the line for the log about variables that were set."""
    text = ", ".join(f"{name}={value}" for name, value in variables.items())
    line = f"the command refers to variables of other operators, which are set: {text}"
    if MASTER in variables.values():
        line += f"; {MASTER} is no other node's address: workers of torchrun get that of the round"
    return line


def _references(text: str) -> dict[str, int]:
    """Return the names that a text refers to, with the place of the first reference."""
    found: dict[str, int] = {}
    for match in _REFERENCE.finditer(text):
        found.setdefault(match[1], match.start())
    for arithmetic in _ARITHMETIC.finditer(text):
        for name in _NAME.findall(arithmetic[1]):
            found[name] = min(arithmetic.start(), found.get(name, arithmetic.start()))
    return found


def _assigned(text: str, names: Collection[str]) -> set[str]:
    """Return those of the names that a text certainly assigns before it refers to them."""
    if not any(name in text for name in names):
        return set()
    try:
        line = shell.read(text)
    except Unreadable:
        return set()
    places = {word.raw: word.start for word in reversed(line.loop_names)}
    for command in line.commands:
        if command.conditional:
            continue
        own = _references(text[command.start : command.end])
        for name, place in _assignments(command):
            if name not in own:
                places.setdefault(name, place)
    references = _references(text)
    return {name for name, place in places.items() if references.get(name, len(text)) > place}


def _assignments(command: shell.Simple) -> Iterator[tuple[str, int]]:
    """Yield the names that a command assigns or reads in its shell, and their places."""
    for word in command.assigned:
        yield word.value.partition("=")[0], word.start
    if command.words and command.words[0].value == "read":
        yield from ((word.raw, word.start) for word in command.words[1:])


def _tests_presence(name: str, texts: Sequence[str]) -> bool:
    """Return True if the command tests that a variable is set: a script that starts torchrun only
    without a rank must not find one."""
    forms = [re.compile(form.replace("NAME", name)) for form in _PRESENCE]
    return any(form.search(text) for form in forms for text in texts)


def _counts_processes(texts: Sequence[str]) -> bool:
    """Return True if WORLD_SIZE is the number of processes in a command, as in
    `--nproc_per_node=$WORLD_SIZE`, also by way of other names."""
    sources: dict[str, set[str]] = {}
    waiting: list[str] = []
    for text in texts:
        if _DIVISION.search(text):
            return True
        for match in _PROCESSES.finditer(text):
            waiting += _plain_references(match[1])
        for match in _VALUE.finditer(text):
            sources.setdefault(match[1], set()).update(_plain_references(match[2]))
    waiting += [name for name in sources if _PROCESSES_NAME.fullmatch(name)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += sources.get(name, ())
    return "WORLD_SIZE" in seen


def _plain_references(value: str) -> list[str]:
    """Return the names whose value may be the result without a change; none for a product."""
    return [] if "((" in value or "*" in value else _ANY_REFERENCE.findall(value)
