"""Variables of other operators for a command that runs once for the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_launcher.node_variables import node_variables, notice
from elasticjob_launcher.programs.command_texts import MAX_FILE_BYTES, MAX_FILES, MAX_LOOKUPS

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
        ("N=$((WORLD_SIZE * (8 + 1))); echo ${#RANK}; torchrun t.py", {"RANK", "WORLD_SIZE"}),
        ("if ((RANK == 0)); then ls; fi; torchrun t.py", {"RANK"}),
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
        (["bash", "run.sh", "8"], {"run.sh": "echo $NODE_RANK"}),
        (["./run"], {"run": "#!/usr/bin/env bash\necho $NODE_RANK"}),
        (["bash", "run"], {"run": "#!/bin/sh\necho $NODE_RANK"}),
        (["tini", "--", "bash", "scripts/run.sh"], {"scripts/run.sh": "echo ${NODE_RANK}"}),
        (line("cd sub && ./run.sh"), {"sub/run.sh": "echo $NODE_RANK"}),
        (line("source env.sh; torchrun $ARGS t.py"), {"env.sh": "ARGS=--node_rank=$NODE_RANK"}),
        (["bash", "run.sh"], {"run.sh": ". ./args.env", "args.env": "A=$NODE_RANK"}),
        (["bash", "a/run.sh"], {"a/run.sh": "bash inner.sh", "a/inner.sh": "echo $NODE_RANK"}),
        *(
            (["bash", "a/run.sh"], {"a/run.sh": text, "a/inner.sh": "echo $NODE_RANK"})
            for text in (
                "bash $SCRIPT_DIR/inner.sh",
                'D="$(cd "$(dirname "$0")" && pwd)"; source ${D}/inner.sh',
                'bash "$(dirname "$0")"/inner.sh',
                "bash `dirname $0`/inner.sh",
                "bash $PWD/a/inner.sh",
                'cd "$FOLDER" && bash inner.sh',
                "A=a; bash $A/inner.sh",
            )
        ),
        (["bash", "run.sh"], {"run.sh": 'cd "$FOLDER/b" && . x.sh', "a/b/x.sh": "$NODE_RANK"}),
        (["bash", "-x", "run"], {"run": "echo $NODE_RANK"}),
        (["bash", "run"], {"run": "echo $NODE_RANK"}),
        (["bash", "-eo", "pipefail", "--norc", "run"], {"run": "echo $NODE_RANK"}),
    ],
    ids=str,
)
def test_scripts_of_the_command_are_read(
    tmp_path: Path, command: list[str], files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    given = {**GIVEN, "FOLDER": "a"}
    assert node_variables(command, given, tmp_path) == {"NODE_RANK": "3"}


def test_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("#!/usr/bin/python3\n# $NODE_RANK")
    (tmp_path / "big.sh").write_text("echo $NODE_RANK" + " " * MAX_FILE_BYTES)
    (tmp_path / "folder.sh").mkdir()
    (tmp_path / "odd").write_bytes(b"#! 'x\n$NODE_RANK\xff")
    (tmp_path / "program").write_bytes(b"\x7fELF\x00$NODE_RANK")
    command = line("bash program; ./t.py; ./big.sh; ./folder.sh; ./odd; bash missing.sh")
    assert node_variables(command, GIVEN, tmp_path) == {}


def test_scripts_that_run_each_other_are_read_once_and_within_a_bound(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 2):
        (tmp_path / f"{number}.sh").write_text(f"./{number + 1}.sh; ./0.sh; echo $NODE_RANK")
    last = f"{MAX_FILES}.sh"
    (tmp_path / last).write_text("echo $NNODES")
    assert node_variables(["./0.sh"], GIVEN, tmp_path) == {"NODE_RANK": "3"}


def test_files_are_looked_up_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    is_file = Path.is_file

    def counted(path: Path) -> bool:
        looked.append(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", counted)
    (tmp_path / "run.sh").write_text("echo $NODE_RANK")
    many = "".join(f"cd d{number}; ./s{number}; " for number in range(1500))
    found = node_variables(line(f"{many} bash run.sh"), GIVEN, tmp_path)
    assert found == {"NODE_RANK": "3"}
    assert 0 < len(looked) <= MAX_LOOKUPS


@pytest.mark.parametrize(
    ("program", "is_set"),
    [
        ("python t.py", False),
        ("mpirun -np 8 python t.py", False),
        ("echo x # torchrun\npython t.py", False),
        ("python my-torchrun-like.py", False),
        ("accelerate config", False),
        ("torchrun t.py", True),
        ("/opt/bin/torchrun t.py", True),
        ("python -m torch.distributed.run t.py", True),
        ("python -m torch.distributed.launch t.py", True),
        ("python /x/torch/distributed/run.py t.py", True),
        ("accelerate launch t.py", True),
        ("llamafactory-cli train x.yaml", True),
    ],
)
def test_variables_of_a_group_need_a_launcher_that_joins_on_several_nodes(
    tmp_path: Path, program: str, is_set: bool
) -> None:
    options = "--rank $RANK --world-size $WORLD_SIZE --dist-url tcp://$MASTER_ADDR:$MASTER_PORT"
    (tmp_path / "run.sh").write_text(f"{program} {options} $NODE_RANK $NNODES")
    found = set(node_variables(["bash", "run.sh"], GIVEN, tmp_path))
    group = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert found == {"NODE_RANK", "NNODES"} | (group if is_set else set())
    assert ("RANK" in node_variables(line(f"{program} $RANK"), GIVEN)) is is_set
    alone = {**GIVEN, "PET_NNODES": "1"}
    assert set(node_variables(["bash", "run.sh"], alone, tmp_path)) == group | {
        "NODE_RANK",
        "NNODES",
    }


def test_notice_names_the_variables_and_warns_of_the_address() -> None:
    assert "RANK=3" in notice({"RANK": "3"})
    assert "no other node" not in notice({"RANK": "3"})
    assert "localhost is no other node's address" in notice({"MASTER_ADDR": "localhost"})


@pytest.mark.parametrize(
    ("text", "is_set"),
    [
        ("torchrun --nproc_per_node=${WORLD_SIZE:-8} t.py", False),
        ("torchrun --nproc-per-node $WORLD_SIZE t.py", False),
        ('torchrun --nproc_per_node "${WORLD_SIZE}" t.py', False),
        ("N=${WORLD_SIZE:-$(nvidia-smi -L|wc -l)}; torchrun --nproc_per_node $N", False),
        ("A=$WORLD_SIZE; N=${A}; torchrun --nproc_per_node=${N:-1} t.py", False),
        ("NPROC_PER_NODE=$WORLD_SIZE accelerate launch t.py", False),
        ("mpirun -np $WORLD_SIZE torchrun t.py", False),
        ("accelerate launch --num_processes $WORLD_SIZE t.py", False),
        ("torchrun --nproc_per_node=$((WORLD_SIZE / NNODES)) t.py", False),
        ("accelerate launch --num_processes $((WORLD_SIZE * 8)) t.py", True),
        ("N=$(($WORLD_SIZE * 8)); accelerate launch --num_processes $N t.py", True),
        ("torchrun --nproc_per_node=8 --nnodes=$WORLD_SIZE t.py", True),
    ],
)
def test_number_of_processes_is_not_the_number_of_nodes(text: str, is_set: bool) -> None:
    assert ("WORLD_SIZE" in node_variables(line(text), GIVEN)) is is_set


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("RANK=0; torchrun --node_rank $RANK", set()),
        ("export RANK=0 X=1\ntorchrun --node_rank $RANK --nnodes $WORLD_SIZE", set()),
        ("read -r RANK < f; torchrun --node_rank $RANK", set()),
        ("for RANK in 0 1; do torchrun --node_rank $RANK; done", set()),
        ("MASTER_ADDR=$(hostname); torchrun --master_addr $MASTER_ADDR", set()),
        ("torchrun t.py # --node_rank $RANK", set()),
        ("torchrun t.py '$RANK' \\$RANK \"\\$RANK\"", set()),
        ("cat <<'EOF'\n$RANK\nEOF\ntorchrun t.py", set()),
        ("RANK=${RANK:-0}; torchrun --node_rank $RANK", {"RANK"}),
        ("X=1 RANK=$(echo $RANK); torchrun --node_rank $RANK", {"RANK"}),
        ("torchrun --node_rank $RANK; RANK=0", {"RANK"}),
        ("if true; then RANK=0; fi; torchrun --node_rank $RANK", {"RANK"}),
        ("true && RANK=0; torchrun --node_rank $RANK", {"RANK"}),
        ("docker -e RANK=0; torchrun --node_rank $RANK", {"RANK"}),
        ("bash -c 'torchrun --node_rank $RANK'", {"RANK"}),
        ('bash -c "torchrun --node_rank \\$RANK"', {"RANK"}),
        ("cat <<EOF\nit's\nEOF\ntorchrun --node_rank $RANK", {"RANK"}),
        ('echo "it\'s # 1" $#; torchrun --node_rank $RANK', {"RANK"}),
        ("bash <<'EOF'\ntorchrun --node_rank $RANK\nEOF", {"RANK"}),
        ("declare -x RANK=0; torchrun --node_rank $RANK", set()),
        ("RANK=0; RANK=1; torchrun --node_rank $RANK", set()),
        ("cd /x; read -ra A; RANK=${A[0]}\ntorchrun --node_rank $RANK", set()),
        ("cat <<EOF > x\nRANK=0\nEOF\ntorchrun --node_rank $RANK", {"RANK"}),
        ("RANK=0 ./prepare; torchrun --node_rank $RANK", {"RANK"}),
        ("(RANK=0; ./prepare); torchrun --node_rank $RANK", {"RANK"}),
        ("f() { RANK=0; }; torchrun --node_rank $RANK", {"RANK"}),
        ("RANK=0; torchrun --node_rank $RANK '", {"RANK"}),
    ],
)
def test_what_the_line_assigns_or_the_shell_keeps_is_no_reference(
    text: str, names: set[str]
) -> None:
    assert set(node_variables(line(text), GIVEN)) == names


@pytest.mark.parametrize(
    ("test", "names"),
    [
        *(
            (test, set())
            for test in (
                "[[ $RANK ]]",
                '[ "$RANK" ]',
                '[ ! "${RANK:-}" ]',
                'test "$RANK"',
                "[[ -f x && $RANK ]]",
                "[ x$RANK = x ]",
                '[ "x$RANK" != "x" ]',
                "case \"$RANK\" in '') false;; esac",
                'case "$RANK" in 0|1) true;; "") false;; esac',
                '[ "${RANK:-none}" = none ]',
                "[[ ${RANK:-unset} != 'unset' ]]",
                "[ ${RANK:--1} -ge 0 ]",
                "[ ${#RANK} -eq 0 ]",
                "(( ${#RANK} == 0 ))",
                '[ -z "$RANK" ]',
                "[ -n $RANK ]",
                "[[ -v RANK ]]",
                "[ -f x -a ! -z $RANK ]",
                "[[ -f x && -n $RANK ]]",
                '[ "" = "$RANK" ]',
                "printenv RANK",
                "[ $WORLD_SIZE ]",
            )
        ),
        ("[ $RANK = 0 ]", {"RANK", "WORLD_SIZE"}),
        ("echo -n $RANK", {"RANK", "WORLD_SIZE"}),
        ('[ "${RANK:-0}" = 0 ]', {"RANK", "WORLD_SIZE"}),
        ('case "$RANK" in 0) true;; esac', {"RANK", "WORLD_SIZE"}),
        ("[ $WORLD_SIZE -gt 1 ]", {"RANK", "WORLD_SIZE"}),
    ],
)
def test_rank_and_size_are_not_set_where_one_is_tested_for_presence(
    test: str, names: set[str]
) -> None:
    text = f"{test} || torchrun --node_rank $RANK --nnodes $WORLD_SIZE t.py"
    assert set(node_variables(line(text), GIVEN)) == names
