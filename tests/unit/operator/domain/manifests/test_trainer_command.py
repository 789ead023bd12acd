"""Trainer's command behind the launcher: interpreters, shells, nested launchers."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.manifests.torchrun import CannotUnwrap
from elasticjob_operator.domain.manifests.trainer_command import node_workers, trainer_command

PYZ = "/elasticjob/launcher.pyz"


def run(text: str, workers: int | str | None = None) -> tuple[str, str]:
    """Return the launcher's interpreter and the started command, for a command line."""
    found = trainer_command(text.split(), (), workers)
    begin = 2 + len(found.options)
    assert (found.command[1], found.command[begin]) == (PYZ, "--")
    assert found.args == ()
    return found.command[0], " ".join(found.command[begin + 1 :])


@pytest.mark.parametrize(
    ("command", "interpreter"),
    [
        ("python train.py", "python"),
        ("python3 -u train.py --lr 1", "python3"),
        ("python3.11 train.py", "python3.11"),
        ("/opt/conda/bin/python -m pkg.train", "/opt/conda/bin/python"),
        ("./venv/bin/python3 -m torch.utils.collect_env", "./venv/bin/python3"),
        ("$(VENV)/bin/python train.py", "$(VENV)/bin/python"),
        ("env A=B python train.py", "python"),
        ("/usr/bin/env -u X A=B /opt/bin/python3 train.py", "/opt/bin/python3"),
        ("env -i -C /tmp A=B python3.12 train.py", "python3.12"),
        ("env A=B ./train", "python3"),
        ("env", "python3"),
        ("pypy3 train.py", "python3"),
        ("pythonic train.py", "python3"),
        ("pypy3 train.py --x", "python3"),
        ("/opt/conda/bin/my-trainer --epochs 3", "python3"),
        ("deepspeed train.py", "python3"),
        ("python train.py --launcher torchrun", "python"),
        ("python -c import-torchrun", "python"),
        ("python - torchrun", "python"),
        ("./train torchrun", "python3"),
        ("bash torchrun.sh", "python3"),
        ("accelerate config", "python3"),
    ],
)
def test_plain_command_is_unchanged(command: str, interpreter: str) -> None:
    assert run(command) == (interpreter, command)
    assert trainer_command(command.split(), ()).note == ""


def test_arguments_stay_where_the_kubelet_expands_them() -> None:
    found = trainer_command(["bash", "-c"], ["exec train $(LR) $$HOME"])
    assert found.command == ("python3", PYZ, "--check", "--program", "train", "--", "bash", "-c")
    assert found.args == ("exec train $(LR) $$HOME",)


@pytest.mark.parametrize(
    ("command", "interpreter", "started"),
    [
        ("torchrun train.py", "python3", "python3 -u train.py"),
        (
            "torchrun --nnodes=2 --nproc-per-node 1 train.py --lr 1",
            "python3",
            "python3 -u train.py --lr 1",
        ),
        (
            "torchrun --nnodes 1:4 --rdzv_backend c10d --rdzv-endpoint=$(HOST):29400 "
            "--rdzv_id=$(ID) --rdzv-conf a=b train.py",
            "python3",
            "python3 -u train.py",
        ),
        (
            "torchrun --standalone --max_restarts=3 --nproc_per_node=auto train.py",
            "python3",
            "python3 -u train.py",
        ),
        (
            "torchrun --nn=1:2 --nproc-p=2 --rdzv_e $(HOST):1 --stan --t 3 train.py --nn",
            "python3",
            "python3 -u train.py --nn",
        ),
        ("python -m torch.distributed.launch --use- --role x t.py", "python", "python -u t.py"),
        (
            "torchrun --node-rank=$(RANK) --master-addr x --master_port 1 train.py",
            "python3",
            "python3 -u train.py",
        ),
        (
            "torchrun -r 3 -t3 --log-dir /tmp -m pkg.train --x --standalone",
            "python3",
            "python3 -u -m pkg.train --x --standalone",
        ),
        ("torchrun --module pkg.train", "python3", "python3 -u -m pkg.train"),
        ("torchrun --no-python ./train --x", "python3", "./train --x"),
        ("torchrun --nproc-per-node=$(N) -- train.py", "python3", "python3 -u train.py"),
        ("torchrun train.py -- --x --", "python3", "python3 -u train.py --x --"),
        ("torchrun --nnodes=1 -m pkg.train -- -- x", "python3", "python3 -u -m pkg.train -- x"),
        ("torchrun -- train.py -- --x", "python3", "python3 -u train.py -- --x"),
        ("torchrun train.py --x -- y", "python3", "python3 -u train.py --x -- y"),
        ("torchrun --no-python ./train -- --x", "python3", "./train --x"),
        ("accelerate launch train.py -- --x", "python3", "python3 -u train.py --x"),
        (
            "/opt/conda/bin/torchrun train.py",
            "/opt/conda/bin/python",
            "/opt/conda/bin/python -u train.py",
        ),
        ("/usr/local/bin/torchrun train.py", "python3", "python3 -u train.py"),
        ("/home/me/.local/bin/torchrun train.py", "python3", "python3 -u train.py"),
        ("python -m torch.distributed.run --nnodes=1 train.py", "python", "python -u train.py"),
        ("python3 -um torch.distributed.run train.py", "python3", "python3 -u train.py"),
        (
            "python3 -X dev -W ignore -mtorch.distributed.run train.py",
            "python3",
            "python3 -X dev -W ignore -u train.py",
        ),
        ("python /opt/bin/torchrun --nnodes=1 train.py", "python", "python -u train.py"),
        ("env A=B torchrun train.py", "python3", "env A=B python3 -u train.py"),
        (
            "python -m torch.distributed.launch --use_env --nproc_per_node=1 train.py",
            "python",
            "python -u train.py",
        ),
        ("accelerate launch train.py", "python3", "python3 -u train.py"),
        (
            "accelerate launch --multi_gpu --num_processes=4 --num_machines 2 "
            "--machine_rank $(R) train.py",
            "python3",
            "python3 -u train.py",
        ),
        (
            "accelerate-launch --mixed_precision bf16 --cpu -m pkg.train",
            "python3",
            "env ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_USE_CPU=true python3 -u -m pkg.train",
        ),
        (
            "env A=B python -m accelerate.commands.launch --num_cpu_threads_per_process=2 train.py",
            "python",
            "env A=B OMP_NUM_THREADS=2 python -u train.py",
        ),
    ],
)
def test_nested_launcher_is_removed(command: str, interpreter: str, started: str) -> None:
    assert run(command) == (interpreter, started)


def test_launcher_options_may_stand_in_args() -> None:
    found = trainer_command(["torchrun"], ["--nnodes=2", "train.py", "$(LR)"])
    assert found.command[:4] == ("python3", PYZ, "--check", "--")
    assert found.command[4:] == ("python3", "-u", "train.py", "$(LR)")
    assert found.args == ()


def test_note_names_unused_launcher_options() -> None:
    command = ["torchrun", "--nnodes", "2", "--rdzv_backend=c10d", "-m", "train"]
    found = trainer_command(command, ())
    assert found.note == (
        "torchrun was taken out: the job itself starts the workers; "
        "not used: --nnodes 2, --rdzv_backend=c10d"
    )
    accelerate = trainer_command(["accelerate", "launch", "--cpu", "train.py"], ())
    assert "a default configuration of accelerate in the image is not read" in accelerate.note
    assert "not used" not in accelerate.note


def test_equal_number_of_workers_is_no_conflict() -> None:
    assert run("torchrun --nproc-per-node=8 train.py", workers=8)[1] == "python3 -u train.py"


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ("torchrun", ""),
        ("torchrun --nproc-per-node=4", "4"),
        ("torchrun --nproc_per_node 4 --nproc_per_node 2", "2"),
        ("torchrun --nproc-per-node=auto", "auto"),
        ("torchrun --nproc-per-node=gpu", "gpu"),
        ("torchrun --nproc-per-node=cpu", "cpu"),
        ("torchrun --nproc-per-node=xpu", "xpu"),
        ("torchrun --nproc-per-node=$(N)", "$(N)"),
        ("python -m torch.distributed.launch --use-env --nproc_per_node=3", "3"),
        ("accelerate launch", ""),
        ("accelerate launch --num_machines 2", ""),
        ("accelerate launch --num_processes 4", "4"),
        ("accelerate launch --num_processes=8 --num_machines 2", "4"),
        ("accelerate launch --num_processes=4096 --num_machines 512", "8"),
        ("accelerate launch --num_processes=$(P)", "$(P)"),
        ("accelerate launch --num_processes=$(P) --num_machines 2", "$(P)/2"),
        ("accelerate launch --num_processes=8 --num_machines $(M)", "8/$(M)"),
    ],
)
def test_number_of_workers_of_a_removed_launcher_is_kept(options: str, workers: str) -> None:
    found = trainer_command([*options.split(), "train.py"], ())
    assert found.workers == workers
    assert not workers or not any("proc" in option for option in found.dropped)
    assert node_workers(None, found) == (workers or "accelerators")
    assert node_workers(7, found) == "7"


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        ("torchrun --nproc-per-node=8 train.py", 8),
        ("torchrun --nproc-per-node=$(N) train.py", 8),
        ("torchrun --nproc-per-node=$(N) train.py", "cpu"),
        ("torchrun --nproc-per-node=auto train.py", 8),
        ("torchrun --nproc-per-node=gpu train.py", "gpu"),
        ("torchrun train.py", "gpu"),
        ("accelerate launch --num_processes 16 --num_machines 2 train.py", 8),
    ],
)
def test_number_of_the_job_takes_precedence_without_a_contradiction(
    command: str, workers: int | str
) -> None:
    found = trainer_command(command.split(), (), workers)
    assert (found.words, found.workers) == (("python3", "-u", "train.py"), "")


@pytest.mark.parametrize(
    ("command", "workers", "reason"),
    [
        ("torchrun --nproc-per-node=2 train.py", 1, "starts 1 on each node: set"),
        ("torchrun --nproc-per-node=2 train.py", "auto", "set spec.nprocPerNode to 2"),
        ("torchrun --nproc-per-node=cpu train.py", "gpu", "set spec.nprocPerNode to cpu"),
        ("accelerate launch --num_processes 4 train.py", 2, "set spec.nprocPerNode to 4"),
        (
            "accelerate launch --num_processes 4 --num_machines 2 train.py", 4,
            "--num_processes 4 --num_machines 2 contradicts the job",
        ),
    ],
)  # fmt: skip
def test_contradicting_numbers_of_workers_are_refused(
    command: str, workers: int | str, reason: str
) -> None:
    with pytest.raises(CannotUnwrap) as refused:
        run(command, workers)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            "torchrun --nproc-per-node=0 train.py",
            "--nproc-per-node=0 must be auto, gpu, cpu or a number",
        ),
        ("torchrun --nproc-per-node=1025 train.py", "must be at most 1024 workers on each node"),
        (
            "accelerate launch --num_processes 4096 --num_machines 2 train.py",
            "--num_processes 4096 --num_machines 2 must be at most 1024 workers",
        ),
        ("torchrun --nproc-per-node=-1 train.py", "or a number of at least 1"),
        ("torchrun --nproc-per-node=8x train.py", "did you mean 8?"),
        ("torchrun --nproc-per-node GPU train.py", "did you mean gpu?"),
        ("torchrun --nproc-per-node= train.py", "--nproc-per-node= must be auto"),
        ("accelerate launch --num_processes auto train.py", "auto must be a number of at least 1"),
        ("accelerate launch --num_processes 4 --num_machines 0 train.py", "--num_machines 0 must"),
        (
            "accelerate launch --num_processes 5 --num_machines 2 train.py",
            "gives the machines different numbers of processes",
        ),
        ("torchrun --nnodes", "--nnodes must have a value"),
        ("torchrun --nnodes=1", "must be given a script"),
        ("torchrun", "must be given a script"),
    ],
)
def test_command_that_cannot_be_unwrapped_is_refused_with_the_remedy(
    command: str, reason: str
) -> None:
    with pytest.raises(CannotUnwrap) as refused:
        run(command)
    assert reason in str(refused.value)
