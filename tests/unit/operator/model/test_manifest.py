"""Manifests in files: every problem with its line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_operator.model.manifest import (
    MAX_NODES,
    InvalidFile,
    check_file,
    load_file,
    read_file,
)
from tests.paths import ROOT

GOOD = """\
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata:
  name: good
spec:
  maxNodes: 4
  template:
    spec:
      containers:
        - name: trainer
          command: [python3, train.py]
"""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_loads(path: Path) -> None:
    assert check_file(path) == []
    assert load_file(path)


def problems(tmp_path: Path, text: str) -> list[tuple[int, int, str, str]]:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    found = check_file(file)
    assert {problem.file for problem in found} <= {str(file)}
    return [(one.line, one.column, one.path, one.message) for one in found]


CASES = [
    # line of GOOD, its replacement, position of the problem, part of its message
    ("  maxNodes: 4", "  maxNodes: 0", (6, 13, "spec.maxNodes"), "must be at least 1"),
    ("  maxNodes: 4", "  maxNodes: 4\n  minNodes: 5", (6, 13, "spec.maxNodes"), "minNodes"),
    ("  maxNodes: 4\n", "", (5, 1, "spec.maxNodes"), "must be set"),
    ("  maxNodes: 4", "  maxNodes: 4\n  maxNode: 3", (7, 12, "spec.maxNode"), "did you mean"),
    ("  maxNodes: 4", "  maxNodes: 4\n  maxNodes: 3", (7, 3, "spec.maxNodes"), "given once"),
    ("  maxNodes: 4", "  maxNodes: 4\n  7: 3", (7, 3, "spec"), "strings as keys"),
    ("  maxNodes: 4", "  maxNodes: !!binary aGk=", (6, 13, "spec.maxNodes"), "plain YAML value"),
    ("  maxNodes: 4", "  maxNodes: {a: 1}", (6, 3, "spec.maxNodes"), "must be an integer"),
    (
        "          command: [python3, train.py]",
        "          command:\n            - sleep\n            - 5",
        (13, 15, "spec.template.spec.containers[0].command[1]"),
        "put it in quotes",
    ),
    (
        "          command: [python3, train.py]",
        "          image: x",
        (10, 11, "spec.template.spec.containers[0].command"),
        "command must be set",
    ),
    ("kind: ElasticJob", "kind: Job", (2, 7, "kind"), "must be ElasticJob"),
    ("  name: good", "  name: &a good\n  labels: {x: &b [*b]}", (5, 15, None), "refer to itself"),
    ("  name: good", "  name: [good", (5, 5, ""), "must be YAML"),
    ("  name: good", "  name: good\n\tx: 1", (5, 1, ""), "must be YAML"),
    ("  name: good", "  name: *nowhere", (4, 9, ""), "must be YAML"),
]


@pytest.mark.parametrize(("old", "new", "place", "message"), CASES)
def test_problem_names_its_line(
    tmp_path: Path, old: str, new: str, place: tuple[int, int, str | None], message: str
) -> None:
    assert old in GOOD
    found = problems(tmp_path, GOOD.replace(old, new))
    line, column, path = place
    matching = [one for one in found if one[:2] == (line, column) and message in one[3]]
    assert matching, found
    assert path is None or matching[0][2] == path


def test_each_document_of_a_file_is_validated(tmp_path: Path) -> None:
    foreign = "apiVersion: v1\nkind: ConfigMap\ndata: {spec: 1}\n"
    other = GOOD.replace("good", "other")
    text = "\n".join([GOOD, "---", foreign, "---", "- a list", "---", "---", other])
    lines = [(line, path) for line, _, path, _ in problems(tmp_path, text)]
    assert lines == [(19, "")]
    file = tmp_path / "jobs.yaml"
    file.write_text(text)
    [note] = read_file(file).notes
    assert (note.line, note.path) == (15, "kind")
    assert note.message == "ConfigMap of v1 is not checked: it is not an ElasticJob"


@pytest.mark.parametrize(
    ("other", "message"),
    [("data: {1: a}", "must have strings as keys"), ("data: {a: !vault x}", "plain YAML value")],
)
def test_fault_of_another_object_is_its_only_problem(
    tmp_path: Path, other: str, message: str
) -> None:
    text = f"{GOOD}---\napiVersion: v1\nkind: Secret\n{other}\n"
    [(line, _, _, found)] = problems(tmp_path, text)
    assert line == len(text.splitlines())
    assert message in found


@pytest.mark.parametrize("kind", ["List", "ElasticJobList"])
def test_job_in_a_list_is_refused_beside_a_good_one(tmp_path: Path, kind: str) -> None:
    items = "items:\n- kind: ConfigMap\n- apiVersion: elasticjob.dev/v1alpha1\n  kind: ElasticJob\n"
    text = f"apiVersion: v1\nkind: {kind}\n{items}"
    for before in ("", f"{GOOD}---\n"):
        [(_, _, path, message)] = problems(tmp_path, before + text)
        assert path == "items"
        assert "write it as a document of its own" in message
    harmless = text.replace("kind: ElasticJob", "kind: Secret")
    assert not problems(tmp_path, f"{GOOD}---\n{harmless}")


def test_kind_of_another_object_is_shown_on_one_line(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    long = "x" * 5000
    file.write_text(f'{GOOD}---\napiVersion: v1\nkind: "a\\nb\\e[31m{long}"\n')
    [note] = read_file(file).notes
    assert note.message.startswith("'a\\nb\\x1b[31mxxx")
    assert len(note.message) < 500


def test_file_without_a_job_is_refused(tmp_path: Path) -> None:
    foreign = "apiVersion: v1\nkind: ConfigMap\n"
    found = problems(tmp_path, f"{foreign}---\n{foreign}")
    assert [(line, path) for line, _, path, _ in found] == [(2, "kind"), (5, "kind")]
    [job] = problems(tmp_path, "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n")
    assert job[3].endswith("`elasticjob convert` turns into one")


@pytest.mark.parametrize("version", ["elasticjob.org/v1alpha1", "v1"])
def test_job_of_another_group_is_refused_beside_a_good_one(tmp_path: Path, version: str) -> None:
    odd = GOOD.replace("elasticjob.dev/v1alpha1", version)
    found = problems(tmp_path, f"{GOOD}---\n{odd}")
    assert [path for _, _, path, _ in found] == ["kind"]


def test_name_of_two_jobs_in_a_file_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{GOOD}---\n{GOOD}")
    [warning] = read_file(file).warnings
    assert warning.path == "metadata.name"
    assert warning.line > len(GOOD.splitlines())
    assert "(NameRepeated): a job before is default/good" in warning.message
    empty = GOOD.replace("name: good", "name: good\n  namespace: ''")
    file.write_text(f"{GOOD}---\n{empty}")
    assert len(read_file(file).warnings) == 1
    elsewhere = GOOD.replace("name: good", "name: good\n  namespace: b")
    file.write_text(f"{GOOD}---\n{elsewhere}")
    assert read_file(file).warnings == []


def test_jobs_of_a_file_keep_their_order(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{GOOD}---\n{GOOD.replace('good', 'other')}")
    assert [job.metadata.name for job in load_file(str(file))] == ["good", "other"]


def test_anchors_and_merges_follow_yaml(tmp_path: Path) -> None:
    text = GOOD.replace(
        "  maxNodes: 4",
        "  maxNodes: 4\n  recovery: &r {stopGraceSeconds: 7}\n  elasticity: {settleSeconds: 2}",
    ).replace(
        "        - name: trainer",
        "        - &t\n          name: trainer\n          image: x",
    )
    text += "        - <<: *t\n          name: second\n  trainer: trainer\n"
    file = tmp_path / "job.yaml"
    file.write_text(text)
    [job] = load_file(file)
    second = job.spec.template.spec.containers[1]
    assert (second.name, second.image, second.command) == ("second", "x", ["python3", "train.py"])


def test_dates_stay_strings_as_in_kubectl(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("  name: good", "  name: good\n  labels: {day: 2026-01-31}"))
    [job] = load_file(file)
    assert job.metadata.labels == {"day": "2026-01-31"}


def test_alias_bomb_is_refused_quickly(tmp_path: Path) -> None:
    levels = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    text = GOOD + "\n".join(["x:", "  a0: &a0 [1, 2, 3]", *levels])
    assert any(f"{MAX_NODES:,}" in message for *_, message in problems(tmp_path, text))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    [(_, _, _, message)] = problems(tmp_path, "[" * 5000 + "]" * 5000)
    assert message == "must be YAML: it is nested too deeply"


def test_unreadable_files(tmp_path: Path) -> None:
    missing = check_file(tmp_path / "missing.yaml")
    assert [str(one) for one in missing] == [
        f"{tmp_path}/missing.yaml: must be a readable file: No such file or directory"
    ]
    message = "must be a readable file: it is a folder; name a file in it"
    assert check_file(tmp_path)[0].message == message
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    assert check_file(binary)[0].message == "must be UTF-8 text: byte 3 is not; save it as UTF-8"
    with pytest.raises(InvalidFile, match="must be UTF-8"):
        load_file(binary)


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n"])
def test_empty_file_is_no_job(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text) == [(1, 1, "", "must hold an ElasticJob; it is empty")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\tb: 1\n", "a tab cannot indent a line: use spaces"),
        ('{"a": ', "the file ends inside of a value: a bracket or quote is not closed"),
        ('a: "b', "the file ends inside of a value: a bracket or quote is not closed"),
    ],
)
def test_frequent_errors_of_syntax_are_stated_without_words_of_the_parser(
    tmp_path: Path, text: str, problem: str
) -> None:
    [(*_, message)] = problems(tmp_path, text)
    assert message == f"must be YAML: {problem}"


def test_unprintable_text_is_malformed(tmp_path: Path) -> None:
    [(_, _, _, message)] = problems(tmp_path, "a: \x00")
    assert message.startswith("must be YAML")


def test_problem_is_printed_with_file_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("maxNodes: 4", "maxNodes: x"))
    [found] = check_file(file)
    assert str(found) == f"{file}:6:13: spec.maxNodes: must be an integer; got 'x'"
