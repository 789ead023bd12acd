"""Options of torchrun that `elasticjob agent` accepts."""

from __future__ import annotations

import argparse

import pytest
import typer
from torch.distributed.run import get_args_parser

from elasticjob_cli.commands.agent import CONTEXT, agent


def options_of_torchrun() -> list[argparse.Action]:
    return [
        action
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ]


@pytest.mark.parametrize("action", options_of_torchrun(), ids=lambda action: action.dest)
def test_agent_accepts_each_option_of_torchrun_and_its_variable(action: argparse.Action) -> None:
    app = typer.Typer()
    app.command(context_settings=CONTEXT)(agent)
    found = [one for one in typer.main.get_command(app).params if one.name == action.dest]
    assert found, f"no option {action.option_strings}"
    assert set(action.option_strings) <= set(found[0].opts)
    assert f"PET_{action.dest.upper()}" in str(found[0].envvar)
    assert bool(getattr(found[0], "is_flag", False)) == (action.nargs == 0)
