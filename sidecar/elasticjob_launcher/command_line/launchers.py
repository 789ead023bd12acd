"""Launchers: programs and Python modules that start the workers of a node themselves.

The only list of them: the operator and the CLI decide with it how a command is launched, the
launcher process decides with it that a command cannot be preloaded. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Launcher(NamedTuple):
    """Launcher.

    `joins` is True if the launcher starts its workers through torchrun, which reads the `PET_*`
    variables of the job's rendezvous; otherwise `own` names the rendezvous that it uses instead.
    """

    name: str
    joins: bool
    own: str = ""


class _Command(NamedTuple):
    """Command line of a launcher; without `subcommands` each of the program's commands is one.
    `others` are launchers of other subcommands."""

    launcher: Launcher
    subcommands: frozenset[str] | None = None
    others: Mapping[str, Launcher] = {}


def _joins(name: str) -> Launcher:
    return Launcher(name, True)


TORCHRUN = _joins("torchrun")
TORCH_LAUNCH = _joins("torch.distributed.launch")
ACCELERATE = _joins("accelerate launch")
_ACCELERATE_TEST = _joins("accelerate test")
_TUNE = _joins("tune run")
_AXOLOTL = _joins("axolotl")
_LLAMAFACTORY = _joins("llamafactory-cli")
_SWIFT = _joins("swift")
_TRL = _joins("trl")
_XTUNER = _joins("xtuner train")
_OUMI = _joins("oumi distributed")
_MIM = _joins("mim train")
_HOSTFILE = "it reaches other nodes by ssh, from a host file"
_DEEPSPEED = Launcher("deepspeed", False, _HOSTFILE)
_COLOSSALAI = Launcher("colossalai run", False, _HOSTFILE)
_HOROVOD = Launcher("horovodrun", False, _HOSTFILE)
_MPI = Launcher("mpirun", False, "MPI starts processes on other nodes by ssh or a daemon")
_SRUN = Launcher("srun", False, "Slurm's daemons start the processes of other nodes")
_NUMBERED = "its nodes are numbered and find each other by fixed options"
_COMPOSER = Launcher("composer", False, _NUMBERED)
_FABRIC = Launcher("fabric run", False, _NUMBERED)
_TORCHX = Launcher("torchx run", False, "it submits a job of its own to a scheduler")
_RAY = Launcher("ray", False, "its nodes join a Ray cluster")
_XLA = Launcher("xla_dist", False, "it reaches other nodes by ssh")
_IPEX = Launcher("ipexrun", False, _HOSTFILE)
_BAGUA = _joins("bagua.distributed.run")
_BAGUARUN = Launcher("baguarun", False, "it reaches other nodes by ssh")
_NEMO = _joins("nemo")
_AUTOTRAIN = _joins("autotrain")
_DEEPY = Launcher("deepy.py", False, _HOSTFILE)
_MSRUN = Launcher("msrun", False, _NUMBERED)
_BATCH = Launcher("the batch system's launcher", False, "its daemons start the processes")
_OWN_MASTER = "a master of its own numbers the nodes"
_DLROVER = Launcher("dlrover-run", False, _OWN_MASTER)
_FT_LAUNCHER = Launcher("ft_launcher", False, "it has a rendezvous of its own")
_HYPERPOD = Launcher("hyperpodrun", False, "its agents obey the operator of HyperPod")
_BYTEPS = Launcher("bpslaunch", False, _NUMBERED)
_XEON = Launcher("torch.backends.xeon.run_cpu", False, "it starts the workers of one node only")
_GAUDI = Launcher("gaudi_spawn.py", False, _HOSTFILE)
_XLA_SPAWN = Launcher("xla_spawn.py", False, "it starts the workers of one node only")
_AUTOMODEL = _joins("automodel")
_FASTAI = Launcher("fastai.launch", False, "it starts the workers of one node only")


def _only(launcher: Launcher, *subcommands: str) -> _Command:
    return _Command(launcher, frozenset(subcommands))


_PROGRAMS: Mapping[str, _Command] = {
    "torchrun": _Command(TORCHRUN),
    "accelerate-launch": _Command(ACCELERATE),
    "accelerate": _Command(ACCELERATE, frozenset({"launch"}), {"test": _ACCELERATE_TEST}),
    "tune": _only(_TUNE, "run"),
    "axolotl": _only(
        _AXOLOTL, "train", "evaluate", "inference", "merge-sharded-fsdp-weights", "lm-eval"
    ),
    "llamafactory-cli": _only(_LLAMAFACTORY, "train", "sft", "dpo", "rm"),
    "lmf": _only(_LLAMAFACTORY, "train", "sft", "dpo", "rm"),
    "swift": _only(
        _SWIFT, "pt", "sft", "rlhf", "infer", "eval", "export", "sample", "rollout", "deploy"
    ),
    "megatron": _only(_SWIFT, "pt", "sft", "rlhf", "export"),
    "trl": _only(_TRL, "sft", "dpo", "grpo", "kto", "reward", "rloo"),
    "xtuner": _only(_XTUNER, "train"),
    "oumi": _only(_OUMI, "distributed"),
    "mim": _only(_MIM, "train", "test"),
    "deepspeed": _Command(_DEEPSPEED),
    "deepspeed.pt": _Command(_DEEPSPEED),
    "ds": _Command(_DEEPSPEED),
    "colossalai": _only(_COLOSSALAI, "run"),
    "horovodrun": _Command(_HOROVOD),
    "mpirun": _Command(_MPI),
    "mpirun.real": _Command(_MPI),
    "mpiexec": _Command(_MPI),
    "mpiexec.hydra": _Command(_MPI),
    "orterun": _Command(_MPI),
    "prterun": _Command(_MPI),
    "mpirun_rsh": _Command(_MPI),
    "srun": _Command(_SRUN),
    **dict.fromkeys(("jsrun", "aprun", "ibrun", "brun"), _Command(_BATCH)),
    "deepy.py": _Command(_DEEPY),
    "baguarun": _Command(_BAGUARUN),
    "msrun": _Command(_MSRUN),
    "nemo": _only(_NEMO, "llm", "vlm", "multimodal", "diffusion", "speech", "audio"),
    "nemorun": _only(_NEMO, "llm", "vlm", "multimodal", "diffusion", "speech", "audio"),
    "autotrain": _Command(_AUTOTRAIN),
    "dlrover-run": _Command(_DLROVER),
    "ft_launcher": _Command(_FT_LAUNCHER),
    "hyperpodrun": _Command(_HYPERPOD),
    "bpslaunch": _Command(_BYTEPS),
    "gaudi_spawn.py": _Command(_GAUDI),
    "xla_spawn.py": _Command(_XLA_SPAWN),
    "automodel": _Command(_AUTOMODEL),
    "composer": _Command(_COMPOSER),
    "fabric": _only(_FABRIC, "run"),
    "lightning": _only(_FABRIC, "run"),
    "torchx": _only(_TORCHX, "run"),
    "ray": _only(_RAY, "start", "job", "up", "exec", "submit"),
    "xla_dist": _Command(_XLA),
    "ipexrun": _Command(_IPEX),
}
"""Programs by their file name."""

_MODULES: Mapping[str, _Command] = {
    "torch.distributed.run": _Command(TORCHRUN),
    "torch.distributed.launch": _Command(TORCH_LAUNCH),
    "accelerate.commands.launch": _Command(ACCELERATE),
    "accelerate.commands.accelerate_cli": _PROGRAMS["accelerate"],
    "accelerate": _PROGRAMS["accelerate"],
    "torchtune._cli.tune": _PROGRAMS["tune"],
    "axolotl.cli.main": _PROGRAMS["axolotl"],
    "llamafactory.cli": _PROGRAMS["llamafactory-cli"],
    "swift.cli.main": _PROGRAMS["swift"],
    "trl.cli": _PROGRAMS["trl"],
    "xtuner": _PROGRAMS["xtuner"],
    "deepspeed": _Command(_DEEPSPEED),
    "deepspeed.launcher.runner": _Command(_DEEPSPEED),
    "deepspeed.launcher.launch": _Command(_DEEPSPEED),
    "colossalai.cli": _PROGRAMS["colossalai"],
    "horovod.runner": _Command(_HOROVOD),
    "horovod.runner.launch": _Command(_HOROVOD),
    "composer.cli.launcher": _Command(_COMPOSER),
    "lightning": _PROGRAMS["lightning"],
    "ray.scripts.scripts": _PROGRAMS["ray"],
    "lightning.fabric.cli": _PROGRAMS["fabric"],
    "lightning_fabric.cli": _PROGRAMS["fabric"],
    "torchx.cli.main": _PROGRAMS["torchx"],
    "torch_xla.distributed.xla_dist": _Command(_XLA),
    "fastai.launch": _Command(_FASTAI),
    "torch.backends.xeon.run_cpu": _Command(_XEON),
    "dlrover.trainer.torch.main": _Command(_DLROVER),
    "nvidia_resiliency_ext.fault_tolerance.launcher": _Command(_FT_LAUNCHER),
    "nemo_automodel.cli.app": _Command(_AUTOMODEL),
    "nemo_automodel._cli.app": _Command(_AUTOMODEL),
    "bagua.distributed.run": _Command(_BAGUA),
    "nemo_run": _PROGRAMS["nemo"],
    "autotrain.cli.autotrain": _PROGRAMS["autotrain"],
    "intel_extension_for_pytorch.cpu.launch": _Command(_IPEX),
    "intel_extension_for_pytorch.launcher": _Command(_IPEX),
}
"""Python modules, started by `python -m`."""

_MPI_PROGRAM = re.compile(r"(mpirun|mpiexec)\.\w+")
"""Programs of MPI beside each other, such as mpirun.openmpi."""
_RAY_MODULE = re.compile(
    r"verl\.trainer\.(main_\w+|\w+_ray)|recipe\.\w+\.main_\w+|openrlhf\.cli\.\w+_ray"
)
"""Modules that start or join a Ray cluster, whose workers take all devices."""
_LAUNCH_MODULE = re.compile(r"\w+\.distributed\.launch")
"""Launchers of other frameworks, named after torch's."""

_STARTING_OPTION = re.compile(
    r"--?(n?proc(esses)?[-_]per[-_](node|machine)|multiprocessing[-_]dist\w*|gpu[-_]ranks)"
)
"""Options by which a program starts the processes of a node."""
_NUMBERING_OPTION = re.compile(r"--?(machine|node)[-_]rank")
"""Options that number the node on which a program runs."""

_NOTEBOOK = _joins("notebook_launcher")
_SPAWN = Launcher("torch.multiprocessing.spawn", False, "it numbers the processes of one node")
_DETECTRON = Launcher("detectron2.engine.launch", False, _NUMBERED)
_RAY_TRAIN = Launcher("TorchTrainer of Ray", False, _RAY.own)

_FUNCTIONS: Mapping[str, Launcher] = {
    "torch.distributed.run.main": TORCHRUN,
    "torch.distributed.run.run": TORCHRUN,
    "torch.distributed.launch.main": TORCH_LAUNCH,
    "torch.distributed.launch.launch": TORCH_LAUNCH,
    "torch.distributed.launch.run": TORCH_LAUNCH,
    **{
        f"torch.distributed.{module}.{name}": TORCHRUN
        for module in ("launcher", "launcher.api", "run")
        for name in ("elastic_launch", "launch_agent")
    },
    "accelerate.notebook_launcher": _NOTEBOOK,
    "accelerate.launchers.notebook_launcher": _NOTEBOOK,
    "accelerate.debug_launcher": _NOTEBOOK,
    "accelerate.launchers.debug_launcher": _NOTEBOOK,
    "accelerate.commands.launch.main": ACCELERATE,
    "accelerate.commands.launch.launch_command": ACCELERATE,
    "torch.multiprocessing.spawn": _SPAWN,
    "torch.multiprocessing.start_processes": _SPAWN,
    "torch.multiprocessing.spawn.spawn": _SPAWN,
    "torch.multiprocessing.spawn.start_processes": _SPAWN,
    "detectron2.engine.launch": _DETECTRON,
    "detectron2.engine.launch.launch": _DETECTRON,
    "deepspeed.launcher.runner.main": _DEEPSPEED,
    "horovod.run": _HOROVOD,
    "ray.train.torch.TorchTrainer": _RAY_TRAIN,
}
"""Python functions that start the workers in the process that calls them, or below it."""


def starts_processes(option: str) -> bool:
    """Return True if an option makes any program start the processes of its node."""
    return _STARTING_OPTION.fullmatch(option) is not None


def numbers_node(option: str) -> bool:
    """Return True if an option gives any program the number of its node."""
    return _NUMBERING_OPTION.fullmatch(option) is not None


def launcher_of_function(name: str) -> Launcher | None:
    """Return the launcher that a Python function is by its full name, or None."""
    return _FUNCTIONS.get(name)


def is_for_any_program(launcher: Launcher) -> bool:
    """Return True if a launcher's processes may be something else than workers."""
    return launcher is _SPAWN


def trains_by_function(launcher: Launcher) -> bool:
    """Return True if a launcher is a function whose workers run a function of the same program."""
    return launcher in (_SPAWN, _NOTEBOOK, _DETECTRON, _RAY_TRAIN)


def runs_single_itself(launcher: Launcher) -> bool:
    """Return True if a launcher of one worker runs it in the process that calls the function."""
    return launcher is _DETECTRON


def launcher_of_program(program: str, arguments: Sequence[str]) -> Launcher | None:
    """Return the launcher that a program is, or None."""
    name = program.rpartition("/")[2]
    if _MPI_PROGRAM.fullmatch(name):
        return _MPI
    return _launcher(_PROGRAMS.get(name), arguments)


def launcher_of_module(module: str, arguments: Sequence[str]) -> Launcher | None:
    """Return the launcher that a Python module is, or None."""
    name = module[: -len(".__main__")] if module.endswith(".__main__") else module
    if name not in _MODULES:
        if _RAY_MODULE.fullmatch(name):
            return _RAY
        if _LAUNCH_MODULE.fullmatch(name):
            return Launcher(name, False, _NUMBERED)
    return _launcher(_MODULES.get(name), arguments)


def launcher_of_script(path: str, arguments: Sequence[str]) -> Launcher | None:
    """Return the launcher that a Python file is by its path, such as `…/torch/distributed/run.py`,
    or that a console script is by its name; None otherwise."""
    if not path.endswith(".py") or path.rpartition("/")[2] in _PROGRAMS:
        return launcher_of_program(path, arguments)
    parts = path[: -len(".py")].split("/")
    if parts[-1] == "__main__":
        parts.pop()
    for start in range(len(parts) - 1):
        module = ".".join(parts[start:])
        is_installed = any(part.endswith("-packages") for part in parts[:start])
        if not is_installed and module not in _MODULES and _LAUNCH_MODULE.fullmatch(module):
            continue  # a file of the user's own, such as src/distributed/launch.py
        launcher = launcher_of_module(module, arguments)
        if launcher is not None:
            return launcher
    return None


_ASKS_FOR_NO_WORKERS = (_LLAMAFACTORY,)
"""Launchers that ask torchrun for 0 workers on a machine without accelerators."""
_THEIR_NAMES = re.compile(
    "|".join(
        rf"\b{re.escape(name)}\b"
        for table in (_PROGRAMS, _MODULES)
        for name, command in table.items()
        if command.launcher in _ASKS_FOR_NO_WORKERS
    )
)


def may_ask_for_no_workers(command: Sequence[str]) -> bool:
    """Return True if a command may start a launcher that asks torchrun for 0 workers on a machine
    without accelerators."""
    return _THEIR_NAMES.search(" ".join(command)) is not None


def _pattern(name: str, command: _Command) -> str:
    """Return the pattern of a launcher's program or module, or of a file of that module."""
    words = re.escape(name).replace(r"\.", "[./]")
    if command.subcommands is not None:
        words += rf"\s+(?:{'|'.join(map(re.escape, sorted(command.subcommands)))})"
    return words


_JOINING = re.compile(
    r"(?<![\w.-])(?:"
    + "|".join(
        _pattern(name, command)
        for table in (_PROGRAMS, _MODULES)
        for name, command in table.items()
        if command.launcher.joins
    )
    + r")(?:\.py)?(?![\w-])"
)


def names_joining_launcher(text: str) -> bool:
    """Return True if a text names a launcher that joins the job's rendezvous."""
    return _JOINING.search(text) is not None


def is_launcher_word(word: str) -> bool:
    """Return True if the word names a launcher that needs no subcommand."""
    command = _PROGRAMS.get(word.rpartition("/")[2])
    return word in _MODULES or (command is not None and command.subcommands is None)


_TOLD = frozenset({"--version", "-V", "--help", "-h"})
"""Options with which a launcher prints something and starts nothing."""


def _launcher(command: _Command | None, arguments: Sequence[str]) -> Launcher | None:
    at = 0 if command is None or command.subcommands is None else 1
    if command is None or _TOLD.intersection(arguments[: at + 1]):
        return None
    if command.subcommands is None:
        return command.launcher
    given = next((word for word in arguments if not word.startswith("-")), "")
    return command.launcher if given in command.subcommands else command.others.get(given)


def unabbreviated(word: str, options: Collection[str]) -> str:
    """Return a long option of torchrun with its full name, as argparse reads it.

    The beginning of one of the options stands for it, unless another one has the same. Spellings
    count as different options: `--nproc-p` and `--nproc_p` are abbreviations, `--nproc` is not.
    """
    name, equals, value = word.partition("=")
    if name == "--" or not name.startswith("--") or name in options:
        return word
    found = [option for option in options if option.startswith(name)]
    return f"{found[0]}{equals}{value}" if len(found) == 1 else word
