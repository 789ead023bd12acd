"""Programs that run their remaining arguments as a command, such as timeout or conda run.

The only table of them: operator and CLI find the program of a command by it, the launcher finds the
program to preload or to search for launchers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elasticjob_launcher.command_line.interpreters import file_name, is_shell
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT

PASSING = frozenset({"exec", "command", "builtin"})
"""Builtins of shells that run the command after them."""
_SCRIPT = re.compile(r".*\.(sh|bash|zsh|ksh)")
_ENTRYPOINT = re.compile(r"(.*[-_.])?entry[-_]?point(\.sh)?|cuda-?entry.*")
"""Entry points of images, which run their arguments after a preparation."""

_VALUES = frozenset({"true", "false", "none", "all", "auto", "yes", "no", *map(str, range(1000))})
"""Words that are the value of an unknown option before them rather than a program."""
_ARCHITECTURE = re.compile(r"(x86_64|i\d86|linux\d+|aarch64|arm|ppc|s390|riscv|uname)\w*|.*[$`].*")
"""First argument of setarch, which may be absent."""


_LONG = re.compile(r"-[^-].+")
"""Long option with one dash; letters after a dash are then no options of their own."""


class _Wrapper(NamedTuple):
    """Command line of a wrapper.

    `operands` is the number of its own arguments before the command, `valued` has the options whose
    value is the next word, and `subcommands` the words of which one must come first.
    """

    operands: int = 0
    valued: frozenset[str] = frozenset()
    subcommands: frozenset[str] = frozenset()

    def takes_next(self, option: str) -> bool:
        """Return True if the value of an option is the next word; `-xo` is `-x -o`."""
        if option in self.valued:
            return True
        letters = option[1:]
        if len(letters) < 2 or not letters.isalpha() or any(map(_LONG.fullmatch, self.valued)):
            return False
        *flags, last = (f"-{letter}" in self.valued for letter in letters)
        return last and not any(flags)


def _wrapper(valued: str = "", operands: int = 0, run: str = "") -> _Wrapper:
    return _Wrapper(operands, frozenset(valued.split()), frozenset(run.split()))


_COVERAGE = _wrapper(
    "--rcfile --source --omit --include --data-file --concurrency --context --debug", run="run"
)
_WRAPPERS: Mapping[str, _Wrapper] = {
    # Init processes and end of the process.
    "tini": _wrapper("-p -e"),
    "tini-static": _wrapper("-p -e"),
    "dumb-init": _wrapper("-r --rewrite"),
    "catatonit": _wrapper(),
    "s6-setuidgid": _wrapper(operands=1),
    "nohup": _wrapper(),
    "setsid": _wrapper(),
    "timeout": _wrapper("-k --kill-after -s --signal", operands=1),
    "time": _wrapper("-f --format -o --output"),
    # Users and privileges.
    "gosu": _wrapper(operands=1),
    "su-exec": _wrapper(operands=1),
    "sudo": _wrapper("-u -g -C -p -r -t -h -D --user --group --chdir"),
    "doas": _wrapper("-u -C"),
    "runuser": _wrapper("-u --user -g --group -G"),
    "setpriv": _wrapper(
        "--reuid --regid --groups --inh-caps --ambient-caps --bounding-set --securebits "
        "--selinux-label --apparmor-profile --pdeathsig"
    ),
    "chroot": _wrapper(operands=1),
    "unshare": _wrapper(),
    "prlimit": _wrapper("--pid -p"),
    # Processors, memory and priority.
    "taskset": _wrapper(operands=1),
    "numactl": _wrapper(
        "-i --interleave -N --cpunodebind -C --physcpubind -m --membind -p --preferred "
        "-w --weighted-interleave -P --preferred-many"
    ),
    "nice": _wrapper("-n --adjustment"),
    "ionice": _wrapper("-c --class -n --classdata"),
    "chrt": _wrapper("-T -P -D", operands=1),
    "cpulimit": _wrapper("-l --limit"),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "unbuffer": _wrapper(),
    "setarch": _wrapper(operands=1),
    "catchsegv": _wrapper(),
    "eatmydata": _wrapper(),
    "proxychains": _wrapper("-f"),
    "proxychains4": _wrapper("-f"),
    "xvfb-run": _wrapper("-e -f -n -p -s -w --server-num --server-args"),
    # Environments.
    "conda": _wrapper("-n --name -p --prefix --cwd", run="run"),
    "mamba": _wrapper("-n --name -p --prefix --cwd", run="run"),
    "micromamba": _wrapper("-n --name -p --prefix --cwd -a --attach -e --env", run="run"),
    "poetry": _wrapper("-C --directory -P --project", run="run"),
    "pipenv": _wrapper(run="run"),
    "pdm": _wrapper("-p --project --venv", run="run"),
    "uv": _wrapper(
        "--with --with-editable --with-requirements --extra --group --only-group --no-group "
        "--env-file --project --directory -p --python --package --index --default-index "
        "--index-url --extra-index-url --find-links -f --cache-dir --config-file -w",
        run="run",
    ),
    "uvx": _wrapper("--from --with --with-editable --index --index-url --find-links -p --python"),
    "pipx": _wrapper("--spec --python --index-url --pip-args", run="run"),
    "rye": _wrapper(run="run"),
    "hatch": _wrapper("-e --env", run="run"),
    "pixi": _wrapper("-e --environment --manifest-path", run="run"),
    "pyenv": _wrapper(run="exec"),
    "direnv": _wrapper(operands=1, run="exec"),
    "dotenv": _wrapper("-f --file", run="run"),
    "doppler": _wrapper("-p --project -c --config", run="run"),
    "infisical": _wrapper("--env --path", run="run"),
    "apptainer": _wrapper("-B --bind --env --pwd", operands=1, run="exec"),
    "singularity": _wrapper("-B --bind --env --pwd", operands=1, run="exec"),
    # Observation.
    "ddtrace-run": _wrapper(),
    "opentelemetry-instrument": _wrapper(
        "--traces_exporter --metrics_exporter --logs_exporter --service_name "
        "--exporter_otlp_endpoint"
    ),
    "newrelic-admin": _wrapper(run="run-program run-python"),
    "nsys": _wrapper(
        "-o --output -t --trace -s --sample -w --show-output -c --capture-range -f "
        "--force-overwrite -d --duration -y --delay -x -e --env-var -b --backtrace",
        run="profile launch",
    ),
    "ncu": _wrapper(
        "-o --export -k --kernel-name -s --launch-skip -c --launch-count --set --section "
        "--metrics --target-processes"
    ),
    "nv-nsight-cu-cli": _wrapper("-o -k -s -c --set --section --metrics"),
    "compute-sanitizer": _wrapper("--tool --log-file --target-processes"),
    "cuda-memcheck": _wrapper("--tool --log-file"),
    "nvprof": _wrapper("-o --export-profile --profile-from-start --log-file"),
    "rocprof": _wrapper("-i -o"),
    "rocprofv2": _wrapper("-i -d -o --plugin"),
    "rocprofv3": _wrapper("-i -d -o --output-directory --output-file --output-format -f"),
    "vtune": _wrapper("-collect -result-dir -knob"),
    "py-spy": _wrapper(
        "-o --output -r --rate -d --duration -f --format -p --pid", run="record top dump"
    ),
    "strace": _wrapper("-e -o -s -p -u -E -P -O -S -b -I -a -X"),
    "ltrace": _wrapper("-e -o -s -p -u -l -n -x"),
    "gdb": _wrapper("-ex -x -iex -ix"),
    "valgrind": _wrapper(),
    "perf": _wrapper(
        "-e --event -F --freq -o --output -c --count --call-graph", run="record stat trace"
    ),
    "heaptrack": _wrapper("-o --output"),
    "memray": _wrapper("-o --output", run="run"),
    "scalene": _wrapper("--outfile --profile-interval"),
    "coverage": _COVERAGE,
    "kernprof": _wrapper("-o --outfile -s --setup"),
    "viztracer": _wrapper("-o --output_file --tracer_entries"),
    "neuron_parallel_compile": _wrapper("--command"),
    "xargs": _wrapper("-n -P -I -L -d -a -s -E"),
    "watch": _wrapper("-n --interval"),
    **dict.fromkeys(
        ("wait-for-it", "wait-for-it.sh", "wait-for", "wait-for.sh"),
        _wrapper("-h --host -p --port -t --timeout", operands=1),
    ),
    "flock": _wrapper("-w --wait --timeout -E --conflict-exit-code", operands=1),
    "chronic": _wrapper(),
    "ts": _wrapper(),
}
_PYTHON_MODULES: Mapping[str, _Wrapper] = {
    "cProfile": _wrapper("-o -s"),
    "profile": _wrapper("-o -s"),
    "pdb": _wrapper("-c"),
    "ipdb": _wrapper("-c"),
    "trace": _wrapper("-f --file -C --coverdir"),
    "debugpy": _wrapper("--listen --connect --log-to --configure-subProcess --pid"),
    "coverage": _COVERAGE,
    "memray": _wrapper("-o --output", run="run"),
    "scalene": _wrapper("--outfile --profile-interval"),
    "viztracer": _wrapper("-o --output_file --tracer_entries"),
    "kernprof": _wrapper("-o --outfile -s --setup"),
    "line_profiler": _wrapper("-o --outfile -s --setup"),
    "pyinstrument": _wrapper("-o --outfile -r --renderer -i --interval -p --render-option"),
    "memory_profiler": _wrapper("-o --pdb-mmem --precision --backend"),
    "pudb": _wrapper("--log-errors --pre-run"),
    "torch.utils.bottleneck": _wrapper(),
    "faulthandler": _wrapper(),
    "runpy": _wrapper(),
}
"""Python modules that run a script or `-m` module, as Python itself does."""
_MODULE_OPTIONS = ("-m", "--module")
_ALL: frozenset[str] = frozenset()
_TASK_RUNNERS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("make", "gmake", "just", "task", "go-task", "mage", "ninja", "rake"), _ALL),
    **dict.fromkeys(("invoke", "inv", "nox", "tox", "doit", "poe", "scons", "pants", "fab"), _ALL),
    **dict.fromkeys(("snakemake", "nextflow", "luigi", "guild", "earthly"), _ALL),
    **dict.fromkeys(("supervisord", "circusd", "runsvdir", "s6-svscan"), _ALL),
    **dict.fromkeys(("honcho", "foreman", "overmind"), frozenset({"start", "run"})),
    **dict.fromkeys(("devbox", "mise", "buck2"), frozenset({"run"})),
    **dict.fromkeys(("npm", "yarn", "pnpm"), frozenset({"run", "run-script", "exec", "start"})),
    **dict.fromkeys(("bazel", "bazelisk"), frozenset({"run", "test"})),
    "dvc": frozenset({"repro", "exp"}),
    "mlflow": frozenset({"run"}),
    "wandb": frozenset({"agent", "launch", "launch-agent"}),
    "clearml-agent": frozenset({"execute", "daemon"}),
    "sbatch": _ALL,
    "salloc": _ALL,
}
"""Programs that run commands of a file, with the subcommands that do; none means all of them."""
_TASK_MODULES: Mapping[str, str] = {
    **{name: name for name in ("invoke", "nox", "tox", "doit", "snakemake", "luigi", "guild")},
    **{name: name for name in ("dvc", "mlflow", "wandb")},
    "poethepoet": "poe",
    "fabric": "fab",
}
"""Python modules of these programs; an application may have a package of another's name."""
_TASK_MANAGERS = frozenset({"pixi", "pdm", "hatch", "rye", "pipenv"})
"""Wrappers whose command may be a task of the project's file."""
_PYTHON_RUNNERS = frozenset({"uv", "rye", "pdm", "newrelic-admin"})
"""Wrappers that run a script or `-m` module with Python, and any other command as it is."""
_INITS = frozenset({"tini", "tini-static", "dumb-init", "catatonit"})
"""Wrappers that leave nothing to the command but signals, which the launcher handles itself."""


_LINE_RUNNERS: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(
        ("su", "runuser", "script", "capsh", "flock", "sg"), re.compile(r"--command|-[a-z]*c")
    ),
    **dict.fromkeys(("doppler", "infisical"), re.compile(r"--command")),
}
"""Programs that run the text after an option in a shell, with the option."""
_MAX_WRAPPERS = 50
"""Number of wrappers around each other that are followed."""
_MIXED_OPTIONS = frozenset({"doppler", "infisical"})
"""Those of them whose options may stand anywhere before `--`."""


def line_of(words: Sequence[str]) -> str | None:
    """Return the shell line that a program such as `su -c` runs; None if it runs none."""
    option = _LINE_RUNNERS.get(file_name(words[0]))
    if option is None:
        return None
    for index, word in enumerate(words[1 : _options_end(words)], 1):
        name, equals, text = word.partition("=")
        if option.fullmatch(name):
            return text if equals else "".join(words[index + 1 : index + 2]) or None
    return None


def _options_end(words: Sequence[str]) -> int:
    """Return the index at which the options of a program that runs lines end: those behind the
    command that it runs instead of a line are the command's."""
    if file_name(words[0]) in _MIXED_OPTIONS:
        return words.index("--") if "--" in words else len(words)
    return wrapped_at(words) or len(words)


def program_at(words: Sequence[str], strings: bool = True) -> int:
    """Return the index of the program behind wrappers, or of a shell.

    With `strings` a wrapper whose string has the words, as of `env -S` and `su -c`, counts as the
    program.
    """
    at = 0
    for _ in range(_MAX_WRAPPERS):
        left = words[at:]
        if not left:
            break
        is_string = strings and (split_string(left) or line_of(left) is not None)
        is_program = is_shell(left[0]) or is_string
        index = None if is_program else wrapped_at(left)
        if index is None:
            break
        at += index
    return at


def wrapped_at(words: Sequence[str]) -> int | None:
    """Return the index of the command that a wrapper runs; None if the words are not a wrapper, or
    the wrapper runs none."""
    name = file_name(words[0])
    if name == "env":
        return _env(words)
    if name == "busybox":
        return _checked(words, 1)
    if is_entrypoint(words[0]):
        return _checked(words, 1)
    wrapper = _WRAPPERS.get(name)
    if wrapper is None or (name == "runuser" and not _names_user(words)):
        return None
    keep = _MODULE_OPTIONS if name in _PYTHON_RUNNERS else ()
    return _command_at(wrapper, words, name, keep)


def _names_user(words: Sequence[str]) -> bool:
    """Return True if an option of runuser names the user; without it, runuser starts a shell."""
    return any(re.fullmatch(r"-u.*|--user(=.*)?", word) for word in words[1:])


def is_entrypoint(program: str) -> bool:
    """Return True if a program is an image's entry point by its name."""
    return _ENTRYPOINT.fullmatch(file_name(program)) is not None


def is_script(program: str) -> bool:
    """Return True if a program is a shell script by its name."""
    return _SCRIPT.fullmatch(program) is not None


def runs_task(program: str, arguments: Sequence[str]) -> bool:
    """Return True if a program runs commands that a file defines."""
    subcommands = _TASK_RUNNERS.get(file_name(program))
    if subcommands is None:
        return False
    first = next((word for word in arguments if not word.startswith("-")), "")
    return not subcommands or first in subcommands


def module_runs_task(module: str, arguments: Sequence[str]) -> bool:
    """Return True if a Python module runs commands that a file defines."""
    return module in _TASK_MODULES and runs_task(_TASK_MODULES[module], arguments)


def may_be_task(words: Sequence[str], at: int) -> bool:
    """Return True if the command at `at`, which a wrapper runs, may be a task of a project's
    file."""
    manages = file_name(words[0]) in _TASK_MANAGERS
    return manages and re.fullmatch(r"[\w.:-]+", words[at]) is not None


def is_transparent(words: Sequence[str]) -> bool:
    """Return True if a wrapper changes nothing of its process but variables."""
    name = file_name(words[0])
    return name in (*_INITS, "busybox") or (name == "env" and not _has_env_options(words))


def module_wrapped(module: str, arguments: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words after Python that a Python module runs, such as `-m pkg` or a script; None
    if it runs none."""
    wrapper = _PYTHON_MODULES.get(module)
    if wrapper is None:
        return None
    words = (module, *arguments)
    at = _command_at(wrapper, words, module, _MODULE_OPTIONS)
    return None if at is None else words[at:]


def runs_python(words: Sequence[str], at: int) -> bool:
    """Return True if a wrapper runs its command at `at` with Python, as `uv run train.py` does."""
    of_python = words[at].endswith(".py") or words[at] in _MODULE_OPTIONS
    return file_name(words[0]) in _PYTHON_RUNNERS and of_python


_ENV_VALUED = frozenset({"-u", "--unset", "-C", "--chdir", "-a", "--argv0"})


def split_string(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words that `env -S` makes of its string and the rest; None if there is none."""
    if file_name(words[0]) != "env":
        return None
    for index, word in enumerate(words[1:], 1):
        text = ""
        if words[index - 1] in _ENV_VALUED:
            continue
        if word in ("-S", "--split-string") and index + 1 < len(words):
            text, rest = words[index + 1], words[index + 2 :]
        elif word.startswith("--split-string="):
            text, rest = word.partition("=")[2], words[index + 1 :]
        elif re.fullmatch(r"-[iv0]*S.+", word):
            text, rest = word.partition("S")[2], words[index + 1 :]
        elif re.fullmatch(r"-[iv0]+S", word) and index + 1 < len(words):
            text, rest = words[index + 1], words[index + 2 :]
        if text:
            try:
                return ("env", *shlex.split(text), *rest)
            except ValueError:
                return ("env", *text.split(), *rest)
        if not word.startswith("-") and not ASSIGNMENT.fullmatch(word):
            return None
    return None


def _env(words: Sequence[str]) -> int | None:
    at = 1
    while at < len(words):
        word = words[at]
        if word in _ENV_VALUED:
            at += 2
        elif word.startswith("-") or ASSIGNMENT.fullmatch(word):
            at += 1
        else:
            return at
    return None


def _has_env_options(words: Sequence[str]) -> bool:
    at = _env(words)
    return any(word.startswith("-") for word in words[1:at])


def _command_at(
    wrapper: _Wrapper, words: Sequence[str], name: str, keep: tuple[str, ...] = ()
) -> int | None:
    at = 1
    if wrapper.subcommands:
        while at < len(words) and words[at].startswith("-"):
            at += 2 if wrapper.takes_next(words[at]) else 1
        if at >= len(words) or words[at] not in wrapper.subcommands:
            return None
        at += 1
    operands = wrapper.operands
    while at < len(words):
        word = words[at]
        if word in keep:
            break
        if word == "--":
            at += 1
            break
        if word.startswith("-") and len(word) > 1:
            is_valued = wrapper.takes_next(word) or (
                not wrapper.operands and "".join(words[at + 1 : at + 2]) in _VALUES
            )
            at += 2 if is_valued else 1
        elif ASSIGNMENT.fullmatch(word) and name in ("sudo", "doas"):
            at += 1
        elif operands and (name != "setarch" or _ARCHITECTURE.fullmatch(word)):
            operands -= 1
            at += 1
        else:
            break
    return _checked(words, at)


def _checked(words: Sequence[str], at: int) -> int | None:
    return at if at < len(words) else None
