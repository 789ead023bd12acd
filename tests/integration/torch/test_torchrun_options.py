"""Options of torchrun that `elasticjob agent` accepts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NoReturn

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


def result(words: list[str]) -> object:
    """Return the options that torchrun reads, or its error."""
    parser = get_args_parser()
    said: list[str] = []

    def error(message: str) -> NoReturn:
        said.append(message)
        raise SystemExit

    parser.error = error
    try:
        return vars(parser.parse_args(words))
    except SystemExit:
        return "".join(said)


def test_each_beginning_of_an_option_is_read_as_torchrun_reads_it() -> None:
    options = {name for one in options_of_torchrun() for name in one.option_strings}
    long = sorted(name for name in options if name.startswith("--"))
    accepted = 0
    for word in {name[:length] for name in long for length in range(3, len(name) + 1)}:
        full, read = TORCHRUN.full(word), result([word, "7", "train.py"])
        if "ambiguous" in str(read):
            assert full == word, read
            assert word not in options
        else:
            assert full in options, f"torchrun accepts {word}"
            assert result([full, "7", "train.py"]) == read
            accepted += full != word
    assert accepted > 100


USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def params(line: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(application("agent"))
    found: dict[str, Any] = group.commands["agent"].make_context("agent", line.split()).params
    return found


def test_abbreviated_options_have_their_meaning() -> None:
    short = "--nn 1:2 --nproc-p=2 --rdzv_e h:1 --name --stan --max-rest 7 --mod --t 3 train --nn 3"
    full = (
        "--nnodes 1:2 --nproc-per-node=2 --rdzv_endpoint h:1 --name --stan --max-restarts 7 "
        "--module --tee 3 train --nn 3"
    )
    assert params(short) == params(full)
    assert params(short)["name"] == "--stan", "a value stays as it is"
    own = " --name --stan"
    read, meant = (unwrap(TORCHRUN, line.replace(own, "").split()) for line in (short, full))
    assert replace(read, dropped=()) == replace(meant, dropped=())
    assert (read.workers, read.words) == ("2", ("-m", "train", "--nn", "3"))
    for word in ("--nproc", "--warm-s", "--nam"):
        with pytest.raises(USAGE_ERROR, match=f"No such option: {word}"):
            params(f"{word} 2 train.py")
