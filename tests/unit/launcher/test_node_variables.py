"""Variables of other operators for a command that runs once for the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_launcher.node_variables import MAX_FILE_BYTES, MAX_FILES, node_variables

GIVEN = {"PET_NODE_RANK": "3", "PET_NNODES": "2:4"}
KUBEFLOW = (
    "torchrun --nnodes=$WORLD_SIZE --node_rank=$RANK --master_addr=$MASTER_ADDR "
    "--master_port=$MASTER_PORT t.py"
)


def line(text: str) -> list[str]:
    return ["bash", "-c", text]


def test_line_of_another_operator_gets_its_variables() -> None:
    assert node_variables(line(KUBEFLOW), GIVEN) == {
        "WORLD_SIZE": "4",
        "RANK": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("torchrun --nnodes $NNODES --node_rank ${NODE_RANK} t.py", {"NNODES", "NODE_RANK"}),
        ("torchrun --nnodes ${NNODES:-1} --node_rank ${NODE_RANK:=0}", {"NNODES", "NODE_RANK"}),
        (
            "torchrun --nnodes $SKYPILOT_NUM_NODES --node_rank $SKYPILOT_NODE_RANK t.py",
            {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"},
        ),
        ("torchrun --node_rank $VC_TASK_INDEX t.py", {"VC_TASK_INDEX"}),
        ("torchrun --node_rank ${JOB_COMPLETION_INDEX} t.py", {"JOB_COMPLETION_INDEX"}),
        ("torchrun --master_addr ${PET_MASTER_ADDR} t.py", {"PET_MASTER_ADDR"}),
        ("[ $RANK -eq 0 ] && tensorboard & torchrun t.py", {"RANK"}),
        ("N=$((WORLD_SIZE * (8 + 1))); echo ${#RANK}", {"RANK", "WORLD_SIZE"}),
        ("if ((RANK == 0)); then ls; fi", {"RANK"}),
        ("echo $LOCAL_RANK $RANK_FILE $MY_WORLD_SIZE", set()),
        ("echo RANK WORLD_SIZE; torchrun t.py", set()),
        ('if [ -z "$RANK" ]; then torchrun t.py; else python t.py; fi', set()),
        ("[[ -n ${RANK:-} ]] || torchrun t.py --r $RANK", set()),
        ('[ "$RANK" = "" ] && torchrun t.py', set()),
        ("[ ${WORLD_SIZE+x} ] || torchrun t.py", set()),
        ('[ -z "$MASTER_ADDR" ] || torchrun --master_addr $MASTER_ADDR', {"MASTER_ADDR"}),
    ],
)
def test_only_variables_that_the_command_refers_to_are_set(text: str, names: set[str]) -> None:
    assert set(node_variables(line(text), GIVEN)) == names


def test_values_of_the_container_are_kept() -> None:
    assert set(node_variables(line(KUBEFLOW), {**GIVEN, "RANK": "1", "MASTER_ADDR": "x"})) == {
        "WORLD_SIZE",
        "MASTER_PORT",
    }


def test_node_without_a_number_gets_none() -> None:
    assert node_variables(line(KUBEFLOW), {"PET_NNODES": "4"}) == {}


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (["bash", "run.sh", "8"], {"run.sh": "echo $RANK"}),
        (["./run"], {"run": "#!/usr/bin/env bash\necho $RANK"}),
        (["bash", "run"], {"run": "#!/bin/sh\necho $RANK"}),
        (["tini", "--", "bash", "scripts/run.sh"], {"scripts/run.sh": "echo ${RANK}"}),
        (line("cd sub && ./run.sh"), {"sub/run.sh": "echo $RANK"}),
        (line("source env.sh; torchrun $ARGS t.py"), {"env.sh": "ARGS=--node_rank=$RANK"}),
        (["bash", "run.sh"], {"run.sh": ". ./args.env", "args.env": "A=$RANK"}),
        (["bash", "a/run.sh"], {"a/run.sh": "bash inner.sh", "a/inner.sh": "echo $RANK"}),
    ],
    ids=str,
)
def test_scripts_of_the_command_are_read(
    tmp_path: Path, command: list[str], files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert node_variables(command, GIVEN, tmp_path) == {"RANK": "3"}


def test_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("#!/usr/bin/python3\n# $RANK")
    (tmp_path / "big.sh").write_text("echo $RANK" + " " * MAX_FILE_BYTES)
    (tmp_path / "folder.sh").mkdir()
    (tmp_path / "odd").write_bytes(b"#! 'x\n$RANK\xff")
    command = line("./t.py; ./big.sh; ./folder.sh; ./odd; bash missing.sh")
    assert node_variables(command, GIVEN, tmp_path) == {}


def test_scripts_that_run_each_other_are_read_once_and_within_a_bound(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 2):
        (tmp_path / f"{number}.sh").write_text(f"./{number + 1}.sh; ./0.sh; echo $NODE_RANK")
    last = f"{MAX_FILES}.sh"
    (tmp_path / last).write_text("echo $RANK")
    assert node_variables(["./0.sh"], GIVEN, tmp_path) == {"NODE_RANK": "3"}
