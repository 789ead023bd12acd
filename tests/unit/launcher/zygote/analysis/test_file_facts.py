"""Facts of a file: names of `os.environ`."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from elasticjob_launcher.zygote.analysis import file_facts
from elasticjob_launcher.zygote.analysis.environment_uses import may_be_environ
from elasticjob_launcher.zygote.analysis.file_facts import EnvironNames, FileFacts

COUNT = 200


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("value", ["{}", "{} or x", "x if y else {}", "(z := {})"])
def test_each_of_many_names_of_the_environment_is_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch, reverse: bool, value: str
) -> None:
    """In a file that binds one name to the next, in either order."""
    lines = [f"a{i + 1} = {value.format(f'a{i}')}" for i in range(COUNT)]
    source = "\n".join(["a0 = os.environ", *(reversed(lines) if reverse else lines)])
    calls = []

    def counted(node: Any, *args: Any) -> bool:
        calls.append(node)
        return may_be_environ(node, *args)

    monkeypatch.setattr(file_facts, "may_be_environ", counted)
    facts = FileFacts(ast.parse(source), EnvironNames())
    assert facts.environs(None)(ast.Name(f"a{COUNT}", ast.Load()))
    assert len(calls) < 10 * COUNT
