"""Command `elasticjob completion`: the completion script of a shell."""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from typing import Annotated

import typer

from elasticjob_cli.output import show_text


class Shell(StrEnum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.", show_default=False)],
) -> None:
    """Print the completion script of a shell.

    It completes commands, options, and the names of jobs. kubectl completes `kubectl elasticjob`
    by itself if `kubectl_complete-elasticjob` is on PATH.

    \b
    Examples:
      source <(elasticjob completion bash)
      elasticjob completion zsh > "${fpath[1]}/_elasticjob"
      elasticjob completion fish > ~/.config/fish/completions/elasticjob.fish
    """
    name = f"elasticjob.{shell}"
    show_text(resources.files("elasticjob_cli.completion").joinpath(name).read_text())
