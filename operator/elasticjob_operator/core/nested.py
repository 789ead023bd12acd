"""Launchers inside the trainer's command: what they would start, without them.

The job starts the workers itself, once for each local rank. A torchrun in there would start them
anew in each of them, with ranks of its own. So it is taken out; of its options only those that say
what is run are kept. One whose meaning would be lost is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
}
"""Launchers started by `python -m`."""


class Unsafe(Exception):
    """It cannot be taken out; the text says why, and what to write instead."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The options of one launcher, in their spelling with dashes.

    Args:
        valued, flags: what it knows, with and without a value.
        env: of those, the ones that a variable says to the worker as well. The others only say
            how many, where, or how logged: that is the job's.
        refused: those that change what a worker sees, and what to do instead.
        note: what else people should know.
    """

    name: str
    valued: frozenset[str]
    flags: frozenset[str]
    env: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What is left of a launcher's command.

    Args:
        env: variables for the workers.
        python: whether the interpreter runs `words`, or they are a program themselves.
        dropped: the options that count no more, as they were written.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    python: bool
    dropped: tuple[str, ...]


_MODULE = ("-m", "--module")
_NO_PYTHON = "--no-python"
_USE_ENV = "--use-env"
_WORKERS = "--nproc-per-node"
_SHORT_VALUED = ("-r", "-t")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCHRUN = Launcher(
    "torchrun",
    _words(
        "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf "
        "--max-restarts --monitor-interval --start-method --event-log-handler --role --log-dir "
        "--redirects --tee -r -t --local-ranks-filter --duplicate-stdout-filters "
        "--duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr "
        "--logs-specs --numa-binding --signals-to-handle --shutdown-timeout"
    ),
    frozenset({"--standalone", _NO_PYTHON, *_MODULE}),
    refused={
        "--run-path": "give the script as the first argument instead",
        "--virtual-local-rank": "let the script take the device of its LOCAL_RANK",
    },
)
LAUNCH = replace(TORCHRUN, name="torch.distributed.launch", flags=TORCHRUN.flags | {_USE_ENV})
ACCELERATE = Launcher(
    "accelerate launch",
    _words(
        "--num-processes --num-machines --machine-rank --main-process-ip --main-process-port "
        "--rdzv-backend --rdzv-conf --max-restarts --monitor-interval --role --log-dir --tee "
        "--mixed-precision --num-cpu-threads-per-process"
    ),
    _words("--multi-gpu --same-network --quiet -q --cpu --use-cpu") | {_NO_PYTHON, *_MODULE},
    env={
        "--mixed-precision": "ACCELERATE_MIXED_PRECISION",
        "--num-cpu-threads-per-process": "OMP_NUM_THREADS",
        "--cpu": "ACCELERATE_USE_CPU",
        "--use-cpu": "ACCELERATE_USE_CPU",
    },
    refused={"--config-file": "start the script itself, with the file's settings in its code"},
    note="a default configuration of accelerate in the image is not read",
)
LAUNCHERS = {launcher.name: launcher for launcher in (TORCHRUN, LAUNCH, ACCELERATE)}


@dataclass(frozen=True, slots=True)
class _Option:
    """`text` is how it was written; `value` is "true" for a flag."""

    name: str
    value: str
    text: str


def taken_out(launcher: Launcher, words: Sequence[str], workers: int) -> Taken:
    """What the launcher would start for each worker.

    Args:
        words: the launcher's options, the script and its arguments.
        workers: how many the job starts on a node.

    Raises:
        Unsafe: an option would be lost that changes what is run.
    """
    options, script = _parsed(launcher, words)
    names = {option.name for option in options}
    if not script:
        raise Unsafe(f"{launcher.name} must be given a script to run")
    if launcher is LAUNCH and _USE_ENV not in names:
        raise Unsafe(
            "torch.distributed.launch without --use-env gives the script a --local-rank that the "
            "job does not: read LOCAL_RANK from the environment, and start the script itself"
        )
    for option in options:
        _check(launcher, option, workers)
    return Taken(
        words=("-m", *script) if names.intersection(_MODULE) else script,
        env={launcher.env[one.name]: one.value for one in options if one.name in launcher.env},
        python=_NO_PYTHON not in names,
        dropped=tuple(
            one.text for one in options if one.name not in (*launcher.env, *_MODULE, _NO_PYTHON)
        ),
    )


def _parsed(launcher: Launcher, words: Sequence[str]) -> tuple[list[_Option], tuple[str, ...]]:
    """The options, and what follows them."""
    left = list(words)
    options: list[_Option] = []
    while left and left[0].startswith("-"):
        text = left.pop(0)
        if text == "--":
            break
        name, value, attached = _split(text)
        if name in launcher.valued and not attached:
            if not left:
                raise Unsafe(f"{launcher.name} {text} must have a value")
            value = left.pop(0)
            text = f"{text} {value}"
        options.append(_Option(name, value, text))
    return options, tuple(left)


def _split(word: str) -> tuple[str, str, bool]:
    """An option's name, spelled with dashes, its value, and whether it came in the same word."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name.replace("_", "-"), value if equals else "true", bool(equals)
    if len(word) > 2 and word[:2] in _SHORT_VALUED:
        return word[:2], word[2:], True
    return word, "true", False


def _check(launcher: Launcher, option: _Option, workers: int) -> None:
    name, value = option.name, option.value
    if name in launcher.refused:
        fix = launcher.refused[name]
        raise Unsafe(f"{launcher.name} {option.text} has no meaning here: {fix}")
    if name not in launcher.valued | launcher.flags:
        raise Unsafe(
            f"{launcher.name} {option.text} is not understood, so it cannot be taken out: start "
            "the script itself, and set in it what this option sets"
        )
    # A script written for two workers a node must not quietly get one.
    if name == _WORKERS and value.isdigit() and int(value) != workers:
        raise Unsafe(
            f"{launcher.name} {option.text} contradicts the job, which starts {workers} on each "
            f"node: set spec.nprocPerNode to {value}, or start the script itself"
        )
