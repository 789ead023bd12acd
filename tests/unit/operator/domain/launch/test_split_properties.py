"""Splits of generated shell lines: what runs is the line as written, or nothing runs."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest

from elasticjob_operator.domain.launch.preparation import REPORT
from elasticjob_operator.domain.manifests.torchrun import CannotUnwrap
from elasticjob_operator.domain.manifests.trainer_command import LaunchSpec, trainer_command
from elasticjob_operator.model.types import Launch, LaunchReason

PIECES = (
    *("cd /app", "export A='b c'", "A=1", "pip install x", "source env.sh", "echo 'a; b'", "true"),
    *(
        'echo "$A" | cat',
        "test $? = 0",
        "(cd x)",
        "if true; then a; fi",
        "python train.py",
        "f() {",
    ),
    *("torchrun train.py", "./run.sh", "python train.py > log", "echo # torchrun", "$TOOL x", "}"),
    *("exec python t.py --r $RANK", "trap a EXIT", "sleep 1 &", "eval $A", "python -m pip list"),
    *("cat <<E\nx\nE", "A=b python t.py", "[[ a && b ]]", "'", '"', "`date`", "$(date)", "\\\n"),
)
CONNECTORS = (" && ", "; ", "\n", " || ", " | ", " & ", " ")


def generated(seed: int) -> str:
    chosen = random.Random(seed)
    parts = [chosen.choice(PIECES)]
    for _ in range(chosen.randrange(5)):
        parts += [chosen.choice(CONNECTORS), chosen.choice(PIECES)]
    return "".join(parts)


@pytest.mark.parametrize("first", range(0, 4000, 500))
def test_line_is_never_changed_but_by_one_marked_insertion(first: int) -> None:
    reasons = set()
    for seed in range(first, first + 500):
        line = generated(seed)
        try:
            found = trainer_command(["bash", "-c", line], (), 8, LaunchSpec())
        except CannotUnwrap:
            continue
        reasons.add(found.reason)
        assert found.words[:2] == ("bash", "-c")
        text = found.words[2]
        if found.options[:1] == ("--prepare",):
            assert found.options[1:2] == ("--check",)
            assert found.reason is LaunchReason.PREPARATION_SPLIT
            assert text.count(REPORT) == 1, line
            assert text.replace(f"{REPORT} ", "") == line or "RANK" in line, line
        else:
            assert text == line
            # A line with a preparation never runs as a whole for each of several workers.
            assert found.mode is Launch.PER_NODE or found.reason is LaunchReason.PLAIN_COMMAND, line
            quoting = any(mark in line for mark in ("#", "'", '"', "[["))
            if found.mode is Launch.PER_WORKER and not quoting:
                assert not any(mark in line for mark in ("&&", "||", "|", " & ")), line
    assert LaunchReason.PREPARATION_SPLIT in reasons
    assert LaunchReason.LAUNCHER_FOUND in reasons


@pytest.mark.parametrize("line", ["nice " * 3000 + "t", "exec " * 3000 + "t", "env " * 3000])
def test_line_of_too_many_wrappers_is_not_split(line: str) -> None:
    with pytest.raises(CannotUnwrap, match="more than 50 programs that run each other"):
        trainer_command(["bash", "-c", line], (), 8, LaunchSpec())


@pytest.mark.parametrize(
    "words",
    [
        ["prog", *["su"] * 25],
        ["prog", *["sh"] * 25],
        ["prog", *["a"] * 200_000],
        ["bash", "-c", "ab " * 150_000 + "'"],
    ],
    ids=["su", "sh", "arguments", "text"],
)
def test_time_of_a_decision_is_about_proportional_to_the_length(words: list[str]) -> None:
    """Exponential or quadratic, each of these takes half a minute."""
    began = time.process_time()
    with suppress(CannotUnwrap):
        trainer_command(words, (), 8, LaunchSpec())
    assert time.process_time() - began < 10
