"""Options of torchrun and accelerate launch, and the command that remains without them.

The job starts one worker for each local rank. A torchrun in the command would start further
workers in each of them, with its own ranks. It is therefore removed, and only the options that
select the program are kept. An option whose effect would be lost is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticjob_launcher.command_line.launchers import unabbreviated
from elasticjob_operator.model.job import MAX_NPROC, NPROC_WORDS


class CannotUnwrap(Exception):
    """Command that cannot be launched as it is. The text names the cause and the alternative."""


class LosesOption(CannotUnwrap):
    """Launcher that cannot be removed without losing an option, but may run once for each pod."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Options of one launcher, spelled with dashes.

    Args:
        valued, flags: known options, with and without a value.
        env: options that an environment variable of the worker replaces. All other options set
            numbers, addresses or logging, which the job sets itself.
        refused: options that change the worker's environment, with the alternative.
        note: further advice to the user.
        abbreviates: True if its parser accepts abbreviations of these options; they are all.
    """

    name: str
    valued: frozenset[str]
    flags: frozenset[str]
    env: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    abbreviates: bool = False

    def full(self, word: str) -> str:
        """Return an option that may be abbreviated with its full name."""
        if not self.abbreviates:
            return word
        names = {"--help", *self.valued, *self.flags, *self.refused}
        return unabbreviated(word, names | {f"--{one[2:].replace('-', '_')}" for one in names})


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """Command that remains without the launcher.

    Args:
        env: variables for the workers.
        python: True if the interpreter runs `words`, False if they are a program.
        dropped: ignored options, as they were written.
        workers: number of workers per node by the launcher's options, or the word by which the
            launcher of the container counts them; empty if no option names it.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    python: bool
    dropped: tuple[str, ...]
    workers: str


_MODULE = ("-m", "--module")
_NO_PYTHON = "--no-python"
_USE_ENV = "--use-env"
_WORKERS = "--nproc-per-node"
_PROCESSES, _MACHINES = "--num-processes", "--num-machines"
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
    abbreviates=True,
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
    """One option. `text` is its original spelling; `value` is "true" for a flag."""

    name: str
    value: str
    text: str


def unwrap(launcher: Launcher, words: Sequence[str], workers: int | str | None = None) -> Unwrapped:
    """Return the command that the launcher would start for each worker.

    Args:
        words: the launcher's options, the script and its arguments.
        workers: spec.nprocPerNode; None if the launcher's options decide.

    Raises:
        LosesOption: an option cannot be dropped without changing the program that runs.
        CannotUnwrap: the command is wrong in itself.
    """
    options, script = _parsed(launcher, words)
    names = {option.name for option in options}
    if not script:
        raise CannotUnwrap(f"{launcher.name} must be given a script to run")
    if launcher is LAUNCH and _USE_ENV not in names:
        raise LosesOption(
            "torch.distributed.launch without --use-env gives the script a --local-rank that the "
            "job does not: read LOCAL_RANK from the environment, and start the script itself"
        )
    for option in options:
        _check(launcher, option)
    asked = _workers(launcher, options)
    if workers is not None and asked is not None:
        _check_agreement(launcher, asked, workers)
    used = (*launcher.env, *_MODULE, _NO_PYTHON)
    if workers is None and asked is not None:
        used += (_WORKERS, _PROCESSES, _MACHINES)
    return Unwrapped(
        words=("-m", *script) if names.intersection(_MODULE) else script,
        env={launcher.env[one.name]: one.value for one in options if one.name in launcher.env},
        python=_NO_PYTHON not in names,
        dropped=tuple(one.text for one in options if one.name not in used),
        workers=asked.value if workers is None and asked is not None else "",
    )


def _parsed(launcher: Launcher, words: Sequence[str]) -> tuple[list[_Option], tuple[str, ...]]:
    """Split words into options and the rest.

    As the launchers' parser, argparse, does, drop the first `--` before or right after the script.
    """
    left = list(words)
    options: list[_Option] = []
    while left and left[0].startswith("-"):
        text = left.pop(0)
        if text == "--":
            return options, tuple(left)
        name, value, attached = _split(launcher.full(text))
        if name in launcher.valued and not attached:
            if not left:
                raise CannotUnwrap(f"{launcher.name} {text} must have a value")
            value = left.pop(0)
            text = f"{text} {value}"
        options.append(_Option(name, value, text))
    if left[1:2] == ["--"]:
        del left[1]
    return options, tuple(left)


def _split(word: str) -> tuple[str, str, bool]:
    """Split an option into its name, spelled with dashes, its value, and True if the value is in
    the same word."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name.replace("_", "-"), value if equals else "true", bool(equals)
    if len(word) > 2 and word[:2] in _SHORT_VALUED:
        return word[:2], word[2:], True
    return word, "true", False


def _check(launcher: Launcher, option: _Option) -> None:
    name = option.name
    if name in launcher.refused:
        fix = launcher.refused[name]
        raise LosesOption(f"{launcher.name} {option.text} has no meaning here: {fix}")
    if name not in launcher.valued | launcher.flags:
        raise LosesOption(
            f"{launcher.name} {option.text} is not understood, so it cannot be taken out: start "
            "the script itself, and set in it what this option sets"
        )


_NUMBER = re.compile(r"[1-9][0-9]*")
_DEVICE_TYPES = ("xpu", "npu", "mlu", "musa", "hpu", "gcu", "supa", "mtia", "privateuseone")
"""Device types of torch and its plug-ins, which torchrun counts too."""


def _workers(launcher: Launcher, options: Sequence[_Option]) -> _Option | None:
    """Return the option for the number of workers, with their number per node as its value.

    A reference such as `$(NAME)` is kept: the kubelet expands it in the container.
    """
    last = {option.name: option for option in options}
    option = last.get(_PROCESSES if launcher is ACCELERATE else _WORKERS)
    if option is None:
        return None
    if launcher is not ACCELERATE:
        _check_number(launcher, option, (*NPROC_WORDS, *_DEVICE_TYPES))
        return option
    machines = last.get(_MACHINES)
    _check_number(launcher, option, (), most=None)
    if machines is None or machines.value == "1":
        _check_number(launcher, option, ())
        return option
    _check_number(launcher, machines, (), most=None)
    text = f"{option.text} {machines.text}"
    if not (_NUMBER.fullmatch(option.value) and _NUMBER.fullmatch(machines.value)):
        return _Option(option.name, f"{option.value}/{machines.value}", text)
    share, rest = divmod(int(option.value), int(machines.value))
    if rest:
        raise CannotUnwrap(
            f"{launcher.name} {text} gives the machines different numbers of processes: set "
            "spec.nprocPerNode to the number of workers on each node, and leave these options out"
        )
    shared = _Option(option.name, str(share), text)
    _check_number(launcher, shared, ())
    return shared


def _check_number(
    launcher: Launcher, option: _Option, words: Sequence[str], most: int | None = MAX_NPROC
) -> None:
    value = option.value
    if value in words or "$(" in value:
        return
    if _NUMBER.fullmatch(value):
        if most is not None and int(value) > most:
            raise CannotUnwrap(
                f"{launcher.name} {option.text} must be at most {most} workers on each node"
            )
        return
    digits = re.match(r"0*([1-9][0-9]*)(?![0-9.])", value)
    close = [digits[1]] if digits else difflib.get_close_matches(value.lower(), words, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = f"{', '.join(words[: len(NPROC_WORDS)])} or a number" if words else "a number"
    raise CannotUnwrap(f"{launcher.name} {option.text} must be {known} of at least 1{hint}")


def _check_agreement(launcher: Launcher, option: _Option, workers: int | str) -> None:
    """Refuse an option that contradicts spec.nprocPerNode.

    A script written for two workers per node must not silently get one. A number in the field
    overrides a word or a reference of the option, which may mean the same number.
    """
    is_number = _NUMBER.fullmatch(option.value) is not None
    open_ = "$(" in option.value or (isinstance(workers, int) and not is_number)
    if option.value != str(workers) and not open_:
        raise CannotUnwrap(
            f"{launcher.name} {option.text} contradicts the job, which starts {workers} on each "
            f"node: set spec.nprocPerNode to {option.value}, or start the script itself"
        )
