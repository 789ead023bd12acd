"""Jobs without a manifest: the words of the command line, names, commands and manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_cli.commands.script_job import (
    Nodes,
    Target,
    arranged,
    command_of,
    job_document,
    job_name,
    parse_nodes,
    validated,
)
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.differences import check_accelerators, ignored_parts
from elasticjob_operator.domain.launch.variables import expanded
from elasticjob_operator.model.manifest import InvalidFile, load_file
from tests.paths import ROOT

OPTIONS = {"--nodes": True, "-f": True, "--plain": False, "-m": False}


@pytest.mark.parametrize(
    ("words", "wanted", "kind"),
    [
        ("job.yaml --plain", "job.yaml --plain", Target.MANIFEST),
        ("--plain job.yaml", "--plain job.yaml", Target.MANIFEST),
        ("job.yaml --plan", "job.yaml --plan", Target.MANIFEST),
        ("-f job", "-f job", Target.MANIFEST),
        ("-", "-", Target.MANIFEST),
        ("", "", Target.MANIFEST),
        ("t.py", "-- t.py", Target.SCRIPT),
        ("t.py --nodes 2:4 --lr 1", "--nodes 2:4 -- t.py --lr 1", Target.SCRIPT),
        ("t.py --nodes=2 --plain 1", "--nodes=2 --plain -- t.py 1", Target.SCRIPT),
        ("t.py --lr 1 --nodes 2", "-- t.py --lr 1 --nodes 2", Target.SCRIPT),
        ("--plain t.py -- --nodes 2", "--plain -- t.py --nodes 2", Target.SCRIPT),
        ("t.py a -- b", "-- t.py a -- b", Target.SCRIPT),
        ("--nod 2 t.py", "--nod 2 t.py", Target.MANIFEST),  # refused as an unknown option
        ("t.py --nodes", "--nodes -- t.py", Target.SCRIPT),
        ("-m a.b --nodes 2 x", "-m --nodes 2 -- a.b x", Target.MODULE),
        ("--nodes 2 -- t.py -m", "--nodes 2 -- t.py -m", Target.COMMAND),
        ("-- a -- b", "-- a -- b", Target.COMMAND),
        ("--", "--", Target.COMMAND),
    ],
)
def test_words_after_first_unknown_one_belong_to_script(
    words: str, wanted: str, kind: Target
) -> None:
    assert arranged(words.split(), OPTIONS) == (wanted.split(), kind)


def test_folder_with_main_module_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert arranged([str(tmp_path)], OPTIONS) == (["--", str(tmp_path)], Target.SCRIPT)


@pytest.mark.parametrize(
    ("kind", "words", "name"),
    [
        (Target.SCRIPT, "train.py", "train"),
        (Target.SCRIPT, "../My_Script v2.py", "my-script-v2"),
        (Target.SCRIPT, "01.py", "job-01"),
        (Target.SCRIPT, "日本.py", "job"),
        (Target.SCRIPT, "x" * 54 + "-y.py", "x" * 54),
        (Target.MODULE, "a.b.Train", "train"),
        (Target.COMMAND, "/usr/bin/env python3 x/pretrain.py", "pretrain"),
        (Target.COMMAND, "./start.sh now", "start"),
    ],
)
def test_name_is_derived_from_script_module_or_program(kind: Target, words: str, name: str) -> None:
    found = job_name(kind, [words] if kind is Target.SCRIPT else words.split())
    assert found == name
    assert validated(job_document(found, ["true"], Nodes(1, 1), None)).metadata.name == name


@pytest.mark.parametrize("word", ["$(HOME)", "$$", "$", "$HOME", "a$$$(X)$", "$$(X)", "{}", "'"])
def test_command_reaches_container_unchanged(word: str) -> None:
    job = validated(job_document("job", ["true", word], Nodes(1, 1), 1))
    command = job.trainer().command
    assert command is not None
    assert [expanded(one, {"HOME": "/", "X": "1"}) for one in command] == ["true", word]


@pytest.mark.parametrize(("text", "nodes"), [("3", Nodes(3, 3)), ("2:4", Nodes(2, 4))])
def test_nodes_are_a_number_or_a_range(text: str, nodes: Nodes) -> None:
    assert parse_nodes(text) == nodes


def test_reversed_range_of_nodes_is_refused_with_the_right_order() -> None:
    with pytest.raises(ValueError, match="must have the minimum first, such as 2:4, not '4:2'"):
        parse_nodes("4:2")


def test_missing_script_is_named_with_a_similar_one_or_its_missing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(BadInput, match=r"'trian.py' does not exist .*; did you mean 'train.py'"):
        command_of(Target.SCRIPT, ["trian.py"])
    with pytest.raises(BadInput, match="there is no folder 'nowhere'"):
        command_of(Target.SCRIPT, ["nowhere/train.py"])
    with pytest.raises(BadInput, match=r"\)$"):
        command_of(Target.SCRIPT, ["other.py"])


@pytest.mark.parametrize("text", ["", ":", "4:2", "0", "1:2:3", "-1", "1.5", "x", "9" * 30, "٣"])
def test_invalid_nodes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_nodes(text)


def test_ignored_parts_of_a_template_are_named() -> None:
    (job,) = load_file(ROOT / "examples" / "gpu.yaml")
    assert ignored_parts(job) == [
        "init container fetch-data",
        "container metrics",
        "priorityClassName",
        "tolerations",
        "volumes",
        "trainer.volumeMounts",
    ]
    (plain,) = load_file(ROOT / "examples" / "minimal.yaml")
    assert ignored_parts(plain) == []


def test_missing_accelerators_are_refused_unless_workers_are_chosen() -> None:
    (job,) = load_file(ROOT / "examples" / "gpu.yaml")
    nothing = {"NVIDIA_VISIBLE_DEVICES": "none"}
    with pytest.raises(BadInput, match="asks for 8 accelerators for each node") as refused:
        check_accelerators(job, nothing, on_cpus=False)
    assert "Nothing was started" in str(refused.value)
    (remark,) = check_accelerators(job, nothing, on_cpus=True)
    assert remark.endswith("running without them")


def test_empty_words_of_a_shell_are_named() -> None:
    """As from a variable without a value."""
    with pytest.raises(BadInput, match="the name of the module behind -m is empty"):
        command_of(Target.MODULE, [""])
    with pytest.raises(InvalidFile, match=r"^'': must be a readable file: its name is empty"):
        load_file("")
