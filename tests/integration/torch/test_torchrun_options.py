"""Options of torchrun that `elasticjob agent` accepts."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from elasticjob_cli.commands.agent import CONTEXT, agent
from elasticjob_cli.main import application
from elasticjob_operator.domain.manifests.torchrun import TORCHRUN, unwrap


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


@pytest.mark.parametrize(
    "line",
    [
        "train.py -- --x --",
        "train.py -- -- --x",
        "train.py --",
        "train.py --x -- y",
        "-- train.py --x",
        "-- train.py -- --x",
        "--nnodes=1 train.py -- --x",
        "--nnodes 1 --no-python train -- --x",
    ],
)
def test_script_has_the_arguments_that_torchrun_gives_it(line: str) -> None:
    words = line.split()
    parsed = get_args_parser().parse_args(words)
    expected = (parsed.training_script, *parsed.training_script_args)
    group: Any = typer.main.get_command(application("agent"))
    context = group.commands["agent"].make_context("agent", list(words))
    assert tuple(context.params["command"]) == expected
    assert unwrap(TORCHRUN, words).words == expected
