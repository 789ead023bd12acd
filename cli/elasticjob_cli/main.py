"""`elasticjob`: the commands and what their errors become."""

from __future__ import annotations

import sys

import typer

from elasticjob_cli import agent
from elasticjob_cli.commands import change, get, logs, run, validate
from elasticjob_cli.errors import CommandError, ExitCode

HELP = """Elastic PyTorch jobs on this machine.

`elasticjob run job.yaml` runs the manifest that a cluster runs, with processes as pods; the other
commands look at such jobs and change them, also after their end.
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command(context_settings=agent.CONTEXT)(agent.agent)
app.command()(get.get)
app.command()(get.describe)
app.command()(change.scale)
app.command()(change.delete)
app.command()(logs.logs)
app.command()(validate.validate)
app.command()(change.fault)
app.command()(validate.version)


def main() -> None:
    """The console script: errors become a line on standard error and an exit code."""
    try:
        app(prog_name="elasticjob")
    except CommandError as error:
        print(f"elasticjob: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stderr.close()
        sys.exit(int(ExitCode.FAILED))


if __name__ == "__main__":
    main()
