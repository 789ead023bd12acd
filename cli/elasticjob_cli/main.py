"""Command line of `elasticjob`: its commands and the handling of their errors."""

from __future__ import annotations

import difflib
import errno
import importlib
import signal
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elasticjob_cli import entry
from elasticjob_cli.errors import BadInput, CommandError, ExitCode
from elasticjob_cli.output import show_candidates, show_error
from elasticjob_launcher.standard_streams import open_missing
from elasticjob_rendezvous.protocol.text import bounded, echoed

if TYPE_CHECKING:  # imported in `main`, where Ctrl-C no longer shows a traceback
    import typer

HELP = """Elastic PyTorch jobs on this machine or on a cluster.

`elasticjob run train.py` trains on this machine, with processes as pods; `elasticjob run job.yaml`
runs the same manifest as a cluster does. The other commands act on jobs of this machine, also
after their end; with --cluster, --context or --kubeconfig, and as `kubectl elasticjob`, on a
cluster.
"""


COMPLETE = "__complete"
"""Word before the words to complete, in calls of the shells' completion scripts."""
COMMANDS = {
    "run": "run.run",
    "init": "init.init",
    "agent": "agent.agent",
    "apply": "change.apply",
    "get": "get.get",
    "top": "top.top",
    "describe": "describe.describe",
    "explain": "explain.explain",
    "rounds": "get.rounds",
    "timeline": "timeline.timeline",
    "dashboard": "dashboard.dashboard",
    "events": "change.events",
    "logs": "logs.logs",
    "scale": "change.scale",
    "suspend": "change.suspend",
    "resume": "change.resume",
    "delete": "change.delete",
    "validate": "validate.validate",
    "convert": "convert.convert",
    "doctor": "doctor.doctor",
    "completion": "completion.completion",
    "fault": "change.fault",
    "version": "version.version",
}
"""Module and function of each command, in the order of the help."""
PLACE_OPTIONS = ("--cluster", "--local", "--context", "--kubeconfig", "--namespace", "-n")
"""Options of the commands that users of kubectl write before the command."""
HELPS = {
    "run": "Run a script, a command or a manifest's job on this machine.",
    "init": "Write a commented manifest for a script.",
    "agent": "Run this node's workers of an elastic job, as torchrun does.",
    "apply": "Validate a manifest and apply it to a cluster.",
    "get": "List jobs, running or ended.",
    "top": "Show nodes, steps, last recovery and goodput of running jobs.",
    "describe": "Show all details of one job.",
    "explain": "Explain the state of a job, its reasons, and the remedy.",
    "rounds": "List the rounds of a job with their causes and times.",
    "timeline": "Draw the rounds and recoveries of a job as a picture.",
    "dashboard": "Serve a read-only web page of the jobs, for this user.",
    "events": "List the events on a job.",
    "logs": "Print the output of all nodes or of one worker.",
    "scale": "Change the desired number of nodes of a running job.",
    "suspend": "Suspend a job after a checkpoint.",
    "resume": "Resume a suspended job of a cluster.",
    "delete": "Stop jobs if they run, and delete their status and logs.",
    "validate": "Validate manifests; list every error and warning.",
    "convert": "Convert kubeflow's PyTorchJobs to ElasticJobs.",
    "doctor": "Check this machine, or a cluster and its operator.",
    "completion": "Print the completion script of a shell.",
    "fault": "Inject a fault into a local job to test its recovery.",
    "version": "Print the version.",
}
"""Line of each command in the listing, which is shown without loading the commands."""
ONLY_LOCAL = ("run", "init", "agent", "fault", "completion")
CLUSTER_COMMANDS = {name: where for name, where in COMMANDS.items() if name not in ONLY_LOCAL}
"""Those of the kubectl plug-in, which apply to a cluster."""
SYNONYMS = {
    "submit": "apply",
    "create": "apply",
    "start": "run",
    "exec": "run",
    "ls": "get",
    "lst": "get",
    "list": "get",
    "ps": "get",
    "status": "get",
    "show": "describe",
    "why": "explain",
    "history": "rounds",
    "plot": "timeline",
    "ui": "dashboard",
    "web": "dashboard",
    "log": "logs",
    "stop": "suspend",
    "pause": "suspend",
    "continue": "resume",
    "cancel": "delete",
    "kill": "delete",
    "rm": "delete",
    "remove": "delete",
    "check": "validate",
    "lint": "validate",
    "new": "init",
}
"""Verbs of other programs, and the command that does the same."""


def unknown_command(word: str, commands: Mapping[str, str]) -> str:
    """Return the error for a word that is not a command, with the nearest one."""
    if word == "help":
        return "no command 'help'; `-h` shows the help, also behind a command: `run -h`"
    if word in COMMANDS:
        return f"{word} acts on this machine: use `elasticjob {word}`"
    known = [*commands, *(name for name, verb in SYNONYMS.items() if verb in commands)]
    near = next(iter(difflib.get_close_matches(word, known, 1)), "")
    near = SYNONYMS.get(near, near)
    hint = f"did you mean `{near}`?" if near else f"commands: {', '.join(commands)}"
    if word.endswith((".py", ".yaml", ".yml")) and "run" in commands:
        hint = f"did you mean `run {bounded(word)}`?"
    return f"no command {echoed(word)}; {hint}"


def application(first: str) -> typer.Typer:
    """Return the command line of `elasticjob`; see `_application`."""
    return _application(HELP, COMMANDS, first, is_plugin=False)


def plugin(first: str) -> typer.Typer:
    """Return the command line of the kubectl plug-in; see `_application`."""
    text = "Elastic PyTorch jobs on a cluster."
    return _application(text, CLUSTER_COMMANDS, first, is_plugin=True)


def _application(
    text: str, commands: Mapping[str, str], first: str, is_plugin: bool
) -> typer.Typer:
    """Return a command line, with the command `first` alone if it has one of that name.

    The object of its context is True for the plug-in.

    Importing the other commands takes up to a second, and the agent starts on every node while the
    others wait for it.
    """
    if first and not first.startswith("-") and first not in commands:
        raise BadInput(unknown_command(first, commands))
    if (option := first.partition("=")[0]) in PLACE_OPTIONS:
        raise BadInput(f"{option} must stand behind the command: `get {option} …`")
    import typer

    app = typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "obj": is_plugin},
    )
    app.callback()(_group)
    if first not in commands:  # the listing, for which no command is loaded
        for name in commands:
            app.command(name, help=HELPS[name])(_group)
        return app
    from elasticjob_cli.usage_errors import Command

    module_name, _, function = commands[first].partition(".")
    module = importlib.import_module(f"elasticjob_cli.commands.{module_name}")
    settings = getattr(module, "CONTEXT", None)
    kind = getattr(module, "COMMAND_CLASS", Command)
    app.command(first, cls=kind, context_settings=settings)(getattr(module, function))
    return app


def _group() -> None:
    """Define the options of all commands; with a callback a single command keeps its name."""


def main() -> None:
    """Run the console script `elasticjob`."""
    _run(application, "elasticjob")


def kubectl() -> None:
    """Run the console script `kubectl-elasticjob`, the kubectl plug-in."""
    _run(plugin, "kubectl elasticjob")


def kubectl_complete() -> None:
    """Run the console script `kubectl_complete-elasticjob`, which kubectl calls to complete."""
    sys.argv.insert(1, COMPLETE)
    kubectl()


def _run(app: Callable[[str], typer.Typer], name: str) -> None:
    """Run a command line; turn errors into a line on standard error and an exit code."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # unencodable characters must not end a command
            stream.reconfigure(errors="backslashreplace")
    try:
        _load(app)(prog_name=name)
    except CommandError as error:
        show_error(f"{name}: {error}")
        sys.exit(int(error.exit_code))
    except ModuleNotFoundError as error:
        if (error.name or "elasticjob").startswith("elasticjob"):
            raise
        show_error(
            f"{name}: the package of the module {error.name!r} is missing: the installation left "
            "out dependencies (`--no-deps`); pip install elasticjob"
        )
        sys.exit(int(ExitCode.FAILED))
    except KeyboardInterrupt:  # while the command was being loaded
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:  # the reader closed our output
        sys.stderr.close()
        sys.exit(int(ExitCode.FAILED))
    except OSError as error:
        show_error(f"{name}: {_os_error_text(error)}")
        if error.filename is None:
            sys.stderr.close()  # else buffered output would be flushed again at exit
        sys.exit(int(ExitCode.FAILED))
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C at exit


def _load(app: Callable[[str], typer.Typer]) -> typer.Typer:
    """Return the command line; from here on the command itself handles Ctrl-C."""
    entry.exit_at_ctrl_c()
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first == COMPLETE:
        _complete(sys.argv[2:], is_plugin=app is plugin)
    command = app("version" if first == "--version" else first)
    if first == "--version":
        sys.argv[1] = "version"
    if signal.getsignal(signal.SIGINT) is entry.interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


def _complete(words: list[str], is_plugin: bool) -> NoReturn:
    """Print the candidates for the last word and exit, without loading a command."""
    from elasticjob_cli.completion.names import answer

    commands = CLUSTER_COMMANDS if is_plugin else COMMANDS
    helps = {name: text for name, text in HELPS.items() if name in commands}
    show_candidates(answer(words, helps, is_plugin))
    sys.exit(int(ExitCode.SUCCEEDED))


def _folder_exists() -> bool:
    """Return True if the current folder exists."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _os_error_text(error: OSError) -> str:
    """Return the message for an operating system error."""
    fault = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {fault}"
    match error.errno:
        case errno.ENOENT if not _folder_exists():
            return "the current folder was removed: change to another one"
        case errno.ENOSPC:
            return f"the output cannot be written: {fault}"
    return fault


if __name__ == "__main__":
    main()
