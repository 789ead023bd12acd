"""Command of the trainer container: the launcher, which runs the user's command for each worker or
once for each pod.

`$(NAME)` is kept in both `command` and `args`: the kubelet expands it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticjob_launcher.launchers import launcher_of_module, launcher_of_program
from elasticjob_operator.domain.launch.detection import (
    Finding,
    FindingKind,
    find,
    is_python,
    program_file,
    repeated_launcher,
)
from elasticjob_operator.domain.launch.misplaced import misplaced, unexpanded
from elasticjob_operator.domain.launch.preparation import Prepared, Whole, split
from elasticjob_operator.domain.manifests.names import LAUNCHER_PATH
from elasticjob_operator.domain.manifests.torchrun import (
    LAUNCH,
    LAUNCHERS,
    TORCHRUN,
    CannotUnwrap,
    Launcher,
    LosesOption,
    Unwrapped,
    unwrap,
)
from elasticjob_operator.model.types import Launch, LaunchReason

DEFAULT_PYTHON = "python3"
SETUP_OPTION = "--setup"
PREPARE_OPTION = "--prepare"
CHECK_OPTION = "--check"
PROGRAM_OPTION = "--program"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_PYTHON_MODULE = re.compile(r"-([^-cmWX][^cmWX]*)?m(.*)")
"""Pattern of `-m`, alone or after other letters, with the module if it is in the same word."""
_PYTHON_CODE = re.compile(r"-|-([^-cmWX][^cmWX]*)?c.*", re.DOTALL)
_PYTHON_VALUED = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_ENV_FLAGS = frozenset({"-", "-i", "--ignore-environment", "--"})
_ENV_VALUED = frozenset({"-u", "--unset", "-C", "--chdir"})
_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z0-9]+)\))")
_HARMLESS = re.compile(r"[\w\s./:@%+,=-]*")
"""Values that do not change the structure of a shell line."""
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
class _ParsedCommand:
    """Parsed command.

    Args:
        before: `env` and its words.
        python: the interpreter and its options, if the program is Python.
        module: the module that `-m` names.
        rest: the script and its arguments, the module's arguments, or the program and its own.
    """

    before: tuple[str, ...]
    python: tuple[str, ...]
    module: str
    rest: tuple[str, ...]


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


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as the kubelet does: unknown names stay, `$$` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return values.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def _decided(
    command: tuple[str, ...],
    args: tuple[str, ...],
    words: tuple[str, ...],
    workers: int | str | None,
    spec: LaunchSpec,
) -> TrainerCommand:
    values = spec.values or {}
    plain = TrainerCommand(_interpreter(_parse((*command, *args))), command, args)
    if spec.launch is Launch.AUTO and (reason := misplaced((*command, *args))):
        raise CannotUnwrap(f"{reason}, {_AS_IT_IS}")
    guesses = spec.launch is Launch.AUTO

    def is_harmless(one: Finding) -> bool:
        return _is_harmless_option(one, workers, spec)

    found = find(words, values, guesses, is_harmless)
    _check_rendezvous(found, spec.max_nodes, words, guesses)
    if spec.launch is Launch.PER_NODE:
        return _per_node(plain, LaunchReason.REQUESTED, "spec.launch is PerNode")
    try:
        removed = _without_launcher((*command, *args), workers, values, guesses)
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
            return _per_node(plain, *_reason(found))
        if found.kind is FindingKind.LAUNCHER:
            raise CannotUnwrap(_nested_text(found))
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


def _check_rendezvous(
    found: Finding | None, max_nodes: int, words: Sequence[str], guesses: bool
) -> None:
    """Refuse a launcher with a rendezvous of its own, or more than one, for several nodes."""
    if found is not None and found.kind is FindingKind.OPTION and max_nodes > 1:
        raise CannotUnwrap(
            f"{found.name} makes the program start or number the processes itself, so each "
            "of the nodes would train alone: leave the option out if every process takes its ranks "
            "from the environment, as torchrun's workers do; or set spec.launch to PerNode if the "
            "program starts torchrun, or to PerWorker if it only reads the option; or set "
            "spec.maxNodes to 1"
        )
    if max_nodes > 1 and guesses and (repeated := repeated_launcher(words)):
        raise CannotUnwrap(
            f"the line starts {repeated} more than once, and several nodes could not agree on "
            "which one they run: make a job of each, or set spec.maxNodes to 1, or set "
            "spec.launch to PerNode if only one of them runs"
        )
    if found is None or found.launcher is None or found.launcher.joins or max_nodes == 1:
        return
    name = found.launcher.name
    argument = f", or set spec.launch if {name} is only an argument"
    raise CannotUnwrap(
        f"{name} does not join the job's rendezvous ({found.launcher.own}), so each of the nodes "
        f"would train alone: start the script with torchrun or python3 in place of {name}, or set "
        f"spec.maxNodes to 1{argument if found.guessed else ''}"
    )


def _without_launcher(
    words: tuple[str, ...], workers: int | str | None, values: Mapping[str, str], guesses: bool
) -> TrainerCommand | None:
    """Return the command without the launcher that it begins with; None if there is none."""
    read = _parse(words)
    launcher, rest = _launcher(read)
    if launcher is None:
        return None
    taken = unwrap(launcher, rest, workers)
    script = expanded(taken.words[0], values)
    if re.match(r"\$\(|-(?!m$)", script):
        raise LosesOption(
            f"{taken.words[0]} may be options of {launcher.name}, which only the container knows"
        )
    python = read.python or (_python_beside(read.rest[0]),)
    started = (*_env_prefix(read, taken.env), *_program(python, taken))
    inner = find(tuple(expanded(word, values) for word in started), values, guesses, _is_option)
    if inner is not None:
        raise LosesOption(
            f"{launcher.name} starts {inner.name}, which may start workers itself: start only one "
            "of them"
        )
    known = TrainerCommand(
        python[0], started, (), launcher=launcher, dropped=taken.dropped,
        reason=LaunchReason.LAUNCHER_REMOVED, workers=taken.workers,
    )  # fmt: skip
    return replace(known, message=known.note)


def _is_option(found: Finding) -> bool:
    return found.kind is FindingKind.OPTION


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
    if isinstance(prepared, Prepared) and (name := _structural(prepared, spec.values or {})):
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
    with one worker may start what it likes, but a shell script may be meant for several."""
    found = _checked(words, spec)
    return found[1:] if spec.has_one_worker(workers) else found


def _checked(words: Sequence[str], spec: LaunchSpec) -> tuple[str, ...]:
    """Return the options by which the launcher checks a program that no rule knows, and the files
    of a Python program; an explicit spec.launch needs no check."""
    if spec.launch is not Launch.AUTO:
        return ()
    program = program_file(words) if words else ""
    return (CHECK_OPTION, *((PROGRAM_OPTION, program) if program else ()))


def _structural(prepared: Prepared, values: Mapping[str, str]) -> str:
    """Return the first variable whose value would change the structure of the shell line."""
    for word in prepared.words:
        for match in _REFERENCE.finditer(word):
            if match[2] and not _HARMLESS.fullmatch(values.get(match[2], "")):
                return match[2]
    return ""


def _per_node(plain: TrainerCommand, reason: LaunchReason, message: str) -> TrainerCommand:
    return replace(plain, mode=Launch.PER_NODE, reason=reason, message=message)


def _reason(found: Finding) -> tuple[LaunchReason, str]:
    """Return the reason for which a command with this finding runs once for each pod."""
    match found.kind:
        case FindingKind.LAUNCHER:
            where = f" inside of {found.inside}" if found.inside else ""
            remedy = "; set spec.launch to PerWorker if it is an argument" if found.guessed else ""
            text = f"{found.name}{where} starts the workers itself{remedy}"
            return LaunchReason.LAUNCHER_FOUND, text
        case FindingKind.OPTION:
            text = f"{found.name} makes the program start the processes of the node itself"
            return (
                LaunchReason.LAUNCHER_FOUND,
                f"{text}; set spec.launch to PerWorker if it only reads the option",
            )
        case FindingKind.SCRIPT:
            return (
                LaunchReason.SCRIPT_FILE,
                f"{found.name} is a script that may start the workers itself; set spec.launch to "
                "PerWorker if it does not",
            )
        case FindingKind.COMPUTED:
            return (
                LaunchReason.COMPUTED_PROGRAM,
                f"the program {found.name} is known only when it runs and may start the workers "
                "itself; set spec.launch to PerWorker if it does not",
            )


def _nested_text(found: Finding) -> str:
    where = f" is inside of {found.inside} and" if found.inside else ""
    return (
        f"{found.name}{where} cannot be taken out, and spec.launch PerWorker would start it once "
        f"for each worker: set spec.launch to PerNode or Auto, or write `python3 script.py …` in "
        f"place of {found.name}"
    )


def _interpreter(read: _ParsedCommand) -> str:
    return read.python[0] if read.python else DEFAULT_PYTHON


def _parse(words: Sequence[str]) -> _ParsedCommand:
    before, rest = _without_env(words)
    if not rest or not is_python(rest[0]) or _name(rest[0]).startswith("pypy"):
        return _ParsedCommand(before, (), "", rest)
    python, left = [rest[0]], list(rest[1:])
    while left and left[0].startswith("-") and not _PYTHON_CODE.fullmatch(left[0]):
        word = left.pop(0)
        if named := _PYTHON_MODULE.fullmatch(word):
            python += [f"-{named[1]}"] if named[1] else []
            module = named[2] or (left.pop(0) if left else "")
            return _ParsedCommand(before, tuple(python), module, tuple(left))
        python.append(word)
        if word in _PYTHON_VALUED and left:
            python.append(left.pop(0))
    return _ParsedCommand(before, tuple(python), "", tuple(left))


def _without_env(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `env A=B program …` into two parts; treat an unknown form of `env` as a program."""
    if not words or _name(words[0]) != "env":
        return (), tuple(words)
    at = 1
    while at < len(words):
        if words[at] in _ENV_VALUED:
            at += 2
        elif words[at] in _ENV_FLAGS or _ASSIGNMENT.fullmatch(words[at]):
            at += 1
        else:
            break
    if at >= len(words) or words[at].startswith("-"):
        return (), tuple(words)
    return tuple(words[:at]), tuple(words[at:])


def _launcher(read: _ParsedCommand) -> tuple[Launcher | None, tuple[str, ...]]:
    """Return the launcher that the command begins with and that can be removed, and its arguments;
    None if there is none."""
    if read.module:
        known = launcher_of_module(read.module, read.rest)
        rest = read.rest
    elif read.rest:
        known = launcher_of_program(read.rest[0], read.rest[1:])
        rest = read.rest[1:]
    else:
        return None, ()
    launcher = LAUNCHERS.get(known.name) if known else None
    if launcher is not None and _has_subcommand(read):
        rest = rest[1:]
    return launcher, rest


def _has_subcommand(read: _ParsedCommand) -> bool:
    name = read.module.rpartition(".")[2] or _name(read.rest[0])
    return name in ("accelerate", "accelerate_cli")


def _env_prefix(read: _ParsedCommand, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the `env` prefix, extended by the variables a launcher would have set."""
    added = tuple(f"{name}={value}" for name, value in env.items())
    return (*(read.before or ("env",)), *added) if added else read.before


def _program(python: Sequence[str], taken: Unwrapped) -> tuple[str, ...]:
    if not taken.python:
        return taken.words
    unbuffered = () if "-u" in python else ("-u",)
    return (*python, *unbuffered, *taken.words)


def _python_beside(program: str) -> str:
    """Return the interpreter for a console script: the one in the same folder if that is the
    `bin` of a virtual environment."""
    folder, slash, _ = program.rpartition("/")
    own = slash and folder.endswith("/bin") and not folder.startswith(("/usr/", "/bin"))
    return f"{folder}/python" if own and "/.local/" not in program else DEFAULT_PYTHON


def _name(program: str) -> str:
    return program.rpartition("/")[2]
