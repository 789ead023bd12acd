"""Command of the trainer container: the launcher, which runs the user's command for each worker or
once for each pod.

`$(NAME)` is kept in both `command` and `args`: the kubelet expands it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticjob_operator.domain.launch.detection import find
from elasticjob_operator.domain.launch.findings import (
    Finding,
    FindingKind,
    per_node_reason,
    per_worker_refusal,
)
from elasticjob_operator.domain.launch.misplaced import misplaced, unexpanded
from elasticjob_operator.domain.launch.preparation import Prepared, Whole, split
from elasticjob_operator.domain.launch.several_nodes import several_nodes_refusal
from elasticjob_operator.domain.launch.tools import program_file
from elasticjob_operator.domain.launch.variables import expanded, structural
from elasticjob_operator.domain.manifests.launcher_removal import interpreter, without_launcher
from elasticjob_operator.domain.manifests.names import LAUNCHER_PATH
from elasticjob_operator.domain.manifests.torchrun import (
    LAUNCH,
    TORCHRUN,
    CannotUnwrap,
    Launcher,
    LosesOption,
)
from elasticjob_operator.model.types import Launch, LaunchReason

SETUP_OPTION = "--setup"
PREPARE_OPTION = "--prepare"
CHECK_OPTION = "--check"
PROGRAM_OPTION = "--program"
_WAYS_OUT = (
    "put the preparation into spec.setup, which runs once for each pod, or set spec.launch to "
    "PerNode if the command starts the workers itself, or to PerWorker if all of it is to run once "
    "for each worker"
)


@dataclass(frozen=True, slots=True)
class TrainerCommand:
    """Command and arguments of the trainer container, and the decision about its launch.

    Args:
        python: interpreter of the launcher.
        options: options of the launcher.
        words, args: the user's command, with or without changes.
        mode: PerWorker or PerNode.
        message: reason in a sentence.
        launcher: removed launcher.
        dropped: its ignored options.
        workers: number of workers per node that its options name, or the only one that is safe; see
            `node_workers`.
    """

    python: str
    words: tuple[str, ...]
    args: tuple[str, ...]
    options: tuple[str, ...] = ()
    mode: Launch = Launch.PER_WORKER
    reason: LaunchReason = LaunchReason.PLAIN_COMMAND
    message: str = "the command is run once for each worker"
    launcher: Launcher | None = None
    dropped: tuple[str, ...] = ()
    workers: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """Command of the container."""
        return (self.python, LAUNCHER_PATH, *self.options, "--", *self.words)

    @property
    def is_checked(self) -> bool:
        """True if the launcher checks the files of the program."""
        return CHECK_OPTION in self.options or PROGRAM_OPTION in self.options

    @property
    def note(self) -> str:
        """Text that names the removed launcher; empty if there was none."""
        return self.note_with("not used")

    def note_with(self, ignored: str) -> str:
        """Return the note with a heading for the ignored options."""
        if self.launcher is None:
            return ""
        note = f"{self.launcher.name} was taken out: the job itself starts the workers"
        if self.dropped:
            note += f"; {ignored}: {', '.join(self.dropped)}"
        return f"{note}; {self.launcher.note}" if self.launcher.note else note


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Fields of the job that affect the launch of its command.

    Args:
        setup: command to run once for each pod.
        max_nodes: maximum number of nodes.
        single: True if a node has one worker, without spec.nprocPerNode.
        values: variables of the container whose values are known.
        nested: place in the program's files that starts a launcher, where they could be read.
    """

    launch: Launch = Launch.AUTO
    setup: tuple[str, ...] = ()
    max_nodes: int = 1
    single: bool = False
    values: Mapping[str, str] | None = None
    nested: str = ""

    def has_one_worker(self, workers: int | str | None) -> bool:
        """Return True if the whole job has one worker at most; `workers` is spec.nprocPerNode."""
        return self.max_nodes == 1 and (workers == 1 or (workers is None and self.single))


ACCELERATORS = "accelerators"
"""Word for one worker for each accelerator, or one worker without any."""
TORCHRUN_VARIABLE = "PET_NPROC_PER_NODE"
"""Variable that torchrun reads in place of its option."""


def node_workers(
    given: int | str | None, command: TrainerCommand, variables: Collection[str] = ()
) -> str:
    """Return the number of workers per node, or the word by which the launcher counts them.

    spec.nprocPerNode (`given`) takes precedence over the options of a removed launcher, and those
    over torchrun's variable, if it is one of the container's `variables`.
    """
    if given is not None or command.workers:
        return str(given or command.workers)
    if command.launcher in (TORCHRUN, LAUNCH) and TORCHRUN_VARIABLE in variables:
        return f"$({TORCHRUN_VARIABLE})"
    return ACCELERATORS


def trainer_command(
    command: Sequence[str],
    args: Sequence[str],
    workers: int | str | None = None,
    spec: LaunchSpec = LaunchSpec(),
) -> TrainerCommand:
    """Return the command behind the launcher, and the decision how it is launched.

    Args:
        workers: spec.nprocPerNode; None if it is absent.

    Raises:
        CannotUnwrap: no way of launching the command is safe.
    """
    words = tuple(expanded(word, spec.values or {}) for word in (*command, *args))
    decided = _decided(tuple(command), tuple(args), words, workers, spec)
    if spec.setup:
        options = (SETUP_OPTION, str(len(spec.setup)), *spec.setup, *decided.options)
        decided = replace(decided, options=options)
    return decided


def _decided(
    command: tuple[str, ...],
    args: tuple[str, ...],
    words: tuple[str, ...],
    workers: int | str | None,
    spec: LaunchSpec,
) -> TrainerCommand:
    values = spec.values or {}
    plain = TrainerCommand(interpreter((*command, *args)), command, args)
    if spec.launch is Launch.AUTO and (reason := misplaced((*command, *args))):
        raise CannotUnwrap(f"{reason}, {_AS_IT_IS}")
    guesses = spec.launch is Launch.AUTO

    def is_harmless(one: Finding) -> bool:
        return _is_harmless_option(one, workers, spec)

    found = find(words, values, guesses, is_harmless)
    if spec.max_nodes > 1 and (reason := several_nodes_refusal(found, words, not guesses)):
        raise CannotUnwrap(reason)
    if spec.launch is Launch.PER_NODE:
        return _per_node(plain, LaunchReason.REQUESTED, "spec.launch is PerNode")
    try:
        removed = _removed((*command, *args), workers, values, guesses)
    except LosesOption as error:
        if spec.launch is Launch.PER_WORKER:
            raise
        _check_expansion((*command, *args), spec)
        return _per_node(plain, LaunchReason.LAUNCHER_OPTIONS, str(error))
    _check_expansion((*command, *args) if removed is None else removed.words, spec)
    if spec.nested and guesses:
        return _per_node(plain, LaunchReason.LAUNCHER_FOUND, spec.nested)
    if removed is not None:
        one = spec.has_one_worker(removed.workers or workers)
        return removed if one else replace(removed, options=_checked((), spec))
    prepared = split((*command, *args))
    if found is not None and not _only_prepares(found, prepared, values, is_harmless):
        if spec.launch is Launch.AUTO:
            return _per_node(plain, *per_node_reason(found))
        if found.kind is FindingKind.LAUNCHER:
            raise CannotUnwrap(per_worker_refusal(found))
    return _per_worker(plain, prepared, workers, spec)


_AS_IT_IS = "or set spec.launch if the command is meant as it is"


def _check_expansion(words: Sequence[str], spec: LaunchSpec) -> None:
    """Refuse a variable that only a shell would replace, unless the launch is requested."""
    if spec.launch is Launch.AUTO and (reason := unexpanded(words)):
        raise CannotUnwrap(f"{reason}, {_AS_IT_IS}")


def _is_harmless_option(found: Finding, workers: int | str | None, spec: LaunchSpec) -> bool:
    """Return True for an option that has no effect on this job: it starts processes where there is
    one worker, or numbers the only node."""
    single = spec.has_one_worker(workers) or (found.numbers and spec.max_nodes == 1)
    return found.kind is FindingKind.OPTION and single


def _removed(
    words: tuple[str, ...], workers: int | str | None, values: Mapping[str, str], guesses: bool
) -> TrainerCommand | None:
    """Return the command without the launcher that it begins with; None if there is none."""
    started = without_launcher(words, workers, values, guesses)
    if started is None:
        return None
    taken = started.unwrapped
    known = TrainerCommand(
        started.python, started.words, (), launcher=started.launcher, dropped=taken.dropped,
        reason=LaunchReason.LAUNCHER_REMOVED, workers=taken.workers,
    )  # fmt: skip
    return replace(known, message=known.note)


def _only_prepares(
    found: Finding,
    prepared: Prepared | Whole | None,
    values: Mapping[str, str],
    is_harmless: Callable[[Finding], bool],
) -> bool:
    """Return True if the part that may be a launcher stands in the preparation alone, which runs
    once for each pod."""
    if found.kind is FindingKind.LAUNCHER or not isinstance(prepared, Prepared):
        return False
    last = expanded(prepared.last, values)
    line = ("sh", "-c", last, *prepared.positional)
    return find(line, values, is_ignored=is_harmless) is None


def _per_worker(
    plain: TrainerCommand,
    prepared: Prepared | Whole | None,
    workers: int | str | None,
    spec: LaunchSpec,
) -> TrainerCommand:
    if isinstance(prepared, Prepared) and (name := _structural(prepared, spec)):
        prepared = Whole(f"the value of $({name})")
    requested = spec.launch is Launch.PER_WORKER
    if isinstance(prepared, Prepared):
        count = len(plain.words)
        return replace(
            plain,
            words=prepared.words[:count],
            args=prepared.words[count:],
            options=(PREPARE_OPTION, *_options(("sh", "-c", prepared.last), workers, spec)),
            reason=LaunchReason.PREPARATION_SPLIT,
            message="the preparation is run once for each pod, and once for each worker: "
            + prepared.last,
        )
    if requested:
        return replace(plain, reason=LaunchReason.REQUESTED, message="spec.launch is PerWorker")
    if prepared is None:
        return replace(plain, options=_options((*plain.words, *plain.args), workers, spec))
    if workers == 1 or (workers is None and spec.single):
        return replace(
            plain,
            options=() if spec.max_nodes == 1 else _checked((), spec),
            workers="1",
            reason=LaunchReason.SINGLE_WORKER,
            message=f"the shell line cannot be split into a preparation and a command because of "
            f"{prepared.reason}; the node's one worker runs all of it, in every round",
        )
    several = f"{workers} workers" if isinstance(workers, int) else "several workers"
    raise CannotUnwrap(
        f"the shell line cannot be split into a preparation and the command of {several} because "
        f"of {prepared.reason}: {_WAYS_OUT}"
    )


def _options(words: Sequence[str], workers: int | str | None, spec: LaunchSpec) -> tuple[str, ...]:
    """Return the options by which the launcher checks the program's files; the program of a job
    with one worker may start any process, but a shell script may be written for several workers."""
    found = _checked(words, spec)
    return found[1:] if spec.has_one_worker(workers) else found


def _checked(words: Sequence[str], spec: LaunchSpec) -> tuple[str, ...]:
    """Return the options by which the launcher checks a program that no rule knows, and the files
    of a Python program; an explicit spec.launch needs no check."""
    if spec.launch is not Launch.AUTO:
        return ()
    program = program_file(words) if words else ""
    return (CHECK_OPTION, *((PROGRAM_OPTION, program) if program else ()))


def _structural(prepared: Prepared, spec: LaunchSpec) -> str:
    """Return the first variable whose value would change the structure of the shell line."""
    found = (structural(word, spec.values or {}) for word in prepared.words)
    return next(filter(None, found), "")


def _per_node(plain: TrainerCommand, reason: LaunchReason, message: str) -> TrainerCommand:
    return replace(plain, mode=Launch.PER_NODE, reason=reason, message=message)
