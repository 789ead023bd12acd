"""Launch of commands as users write them: mode, reason, split and refusal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from elasticjob_operator.domain.launch.preparation import REPORT
from elasticjob_operator.domain.manifests.torchrun import CannotUnwrap
from elasticjob_operator.domain.manifests.trainer_command import (
    LaunchSpec,
    TrainerCommand,
    trainer_command,
)
from elasticjob_operator.model.types import Launch, LaunchReason


def decide(
    command: str | Sequence[str],
    workers: int | None = 8,
    launch: Launch = Launch.AUTO,
    nodes: int = 1,
    **values: str,
) -> TrainerCommand:
    words = shlex.split(command) if isinstance(command, str) else list(command)
    return trainer_command(words, (), workers, LaunchSpec(launch, (), nodes, values=values))


def bash(line: str, *options: str) -> list[str]:
    return ["bash", *(options or ("-c",)), line]


PLAIN = [
    "python train.py",
    "python3 -u -m pkg.train --launcher torchrun",
    "python train.py torchrun --nnodes 8",
    "python train.py --cmd 'torchrun train.py'",
    "python train.py --backend deepspeed --deepspeed ds.json",
    "python -m pkg.torchrun",
    "python -c 'import train; train.main()'",
    "python - torchrun",
    "/opt/my-trainer --epochs 3",
    "./train --launcher torchrun train.yaml",
    "./train torchrun",
    "echo torchrun train.py",
    "grep torchrun run.txt",
    "which torchrun train.py",
    "pip install deepspeed accelerate",
    "accelerate config default",
    "accelerate env",
    "tune download model",
    "axolotl preprocess c.yml",
    "llamafactory-cli version",
    "ray --version",
    "gosu trainer python train.py",
    "su-exec 1000:1000 python train.py",
    "setpriv --reuid 1000 --clear-groups python train.py",
    "taskset -c 0-7 python train.py",
    "numactl -N 0 -m 0 python train.py",
    "nice -n 5 python train.py",
    "timeout -k 5 3600 python train.py",
    "timeout 10 grep torchrun f",
    "ddtrace-run python train.py",
    "opentelemetry-instrument --traces_exporter console python train.py",
    "micromamba run -n env python train.py",
    "conda run --no-capture-output -n torchrun python train.py",
    "poetry run python train.py",
    "uv run train.py --launcher torchrun",
    "uv run --with torchrun python train.py",
    "nsys profile -o torchrun python train.py",
    "py-spy record -o out.svg -- python train.py",
    "tini -- python train.py",
    "dumb-init python train.py",
    "/opt/nvidia/nvidia_entrypoint.sh python train.py",
    "/docker-entrypoint.sh python train.py",
    "env A=torchrun python train.py",
    "env -S 'python train.py'",
    "python -m cProfile -o torchrun train.py",
    "python -m debugpy --listen 5678 -m pkg.train",
    "coverage run train.py",
    "bash -c 'python train.py'",
    "bash -c 'exec python train.py --lr 1'",
    "bash -lc 'A=b exec python train.py'",
    "bash -c 'python train.py # not torchrun'",
    "bash -euo pipefail -c '# torchrun x\npython train.py'",
    "bash -c 'python train.py --launcher torchrun'",
    "bash -c 'python train.py \"; torchrun x\"'",
    "bash -c '${PYTHON:-python3} train.py'",
    "bash -c '$VENV/bin/python train.py'",
    "busybox sh -c 'python train.py'",
    "$(VENV)/bin/python train.py",
    # Arguments of programs, options, and other uses of a launcher's name.
    "./train --launcher torchrun --nnodes 8",
    "./train --backend=torchrun train.py",
    "lightning-cli fit --trainer.strategy deepspeed --config c.yaml",
    "lightning-cli fit --trainer.strategy deepspeed train.py",
    "my-train --accelerator deepspeed --num_nodes 2",
    "my-train --accelerator deepspeed --standalone",
    "my-train --dataset ds --num-workers 3",
    "my-train --dataset ds --config c.yaml",
    "my-train --dataset ds --use-amp",
    "my-train --dataset ds --multi-gpu",
    "my-train --dataset ds -m resnet",
    'yolo train --name "composer run"',
    "yolo train --name 'torchrun train.py'",
    '/app/train --notes "accelerate launch with bf16"',
    "/app/train --run.description 'torchrun t.py'",
    "/app/train --notes 'python -m torch.distributed.run t.py'",
    "/app/train --remark 'accelerate launch with bf16'",
    "/app/train --remark 'deepspeed run of train.py'",
    "python train.py bash -c 'pip install x && torchrun t.py'",
    "python train.py run.sh",
    "python -m pytest torchrun",
    "sudo -Eu user python train.py",
    "env -vS 'A=b python train.py'",
    "env -C /app -S 'python train.py'",
    "poetry run train",
    "pixi run python train.py",
    "pdm run ./train.py --lr 1",
    "dvc pull torchrun",
    "wandb login torchrun",
    "python -m axolotl.cli.train c.yml",
    "python -m task.train",
    "python -m mage.main_pretrain",
    "python -m just.train",
    "python -m task train",
    "python -m wandb.train agent",
    "python -m wandb login",
    "gnn-train --task node --dataset x",
    "gnn-train --task node -c config.yaml",
    "my-train --lang perl --epochs 3",
    "my-train fish and chips",
    "my-train node -c x",
    "python src/llamafactory/launcher.py c.yaml",
    "python -m llamafactory.launcher c.yaml",
    "python -m torch.utils.collect_env",
    "python /app/torch/run.py --x",
    "python /app/my/distributed/run.py torchrun",
    "'/my dir/bin/python' 'my train.py'",
    "find . -name torchrun -newer x",
    "bash -c -- 'python train.py'",
    "bash --norc --noprofile -c 'python train.py'",
    "bash -c '  python train.py\n\n'",
    "bash -c 'python train.py $(which torchrun)'",
    "bash -c 'exec \"$@\"' _ python train.py",
    'bash -c \'exec "$0" "$@"\' python train.py',
    "bash -c 'gosu me bash -c \"python train.py\"'",
    "bash -c 'python train.py --cmd \"$(cat cmd)\"'",
    # Commands of the frameworks' documentation.
    "llamafactory-cli webui",
    "llamafactory-cli chat x.yaml",
    "python src/train.py examples/train_lora/llama3_lora_sft.yaml",
    "python -m llamafactory.launcher train.yaml",
    "python -m swift.cli.sft --model x",
    "swift web-ui",
    "swift merge-lora --ckpt_dir x",
    "xtuner chat x",
    "xtuner convert pth_to_hf a b c",
    "axolotl fetch examples",
    "tune ls",
    "tune cp a b",
    "python -m openrlhf.cli.train_sft --max_len 2048",
    "python tools/train.py configs/x.py --launcher pytorch",
    "mim run mmdet train x.py",
    "mim install mmdet",
    "colossalai check -i",
    "fairseq-train data-bin/wmt --arch transformer",
    "fairseq-hydra-train task.data=x --config-dir c --config-name n",
    "python -m fairseq_cli.train data",
    "yolo train data=coco.yaml model=yolov8n.pt device=0,1",
    "python main.py fit --config x.yaml --trainer.devices 8",
    "litgpt pretrain pythia-14m --devices 4",
    "env KERAS_BACKEND=torch python train.py",
    "python -m mpi4py train.py",
    "python -m my.launch train.py",
    "python -m my.distributed.launcher",
    "python src/distributed/launch.py",
    "nemo --help",
    "uv run --script t.py",
    "poetry run my-train",
    "pixi run -e cuda python t.py",
    "conda run --live-stream -n env python t.py",
    "micromamba run -p /env python t.py",
    "xvfb-run -a -s '-screen 0 1x1x24' python t.py",
    "nsys profile -t cuda -o x -- python t.py",
    "nsys launch python t.py",
    "ncu --target-processes all python t.py",
    "py-spy record -s -f speedscope -o p -- python t.py",
    "gdb -batch -ex run -ex bt --args python t.py",
    "/usr/bin/tini -g -- python t.py",
    "dumb-init --single-child python t.py",
    "timeout 1h python t.py",
    "stdbuf -oL python t.py",
    "proxychains python t.py",
    "omnitrace-run -- python t.py",
    "tau_exec python t.py",
    "dlprof --mode=pytorch python t.py",
    "austin -o x python t.py",
    "memray run t.py",
    "python -m pyinstrument t.py",
    "ipython -- t.py",
    "papermill in.ipynb out.ipynb",
    "bash -c 'python $SCRIPT'",
    # Commands of run scripts, Dockerfiles and manifests.
    "python3.11 -X faulthandler -u train.py",
    "python -u -W ignore train.py",
    "sudo -E -H python t.py",
    "su -s /bin/bash me -c 'python t.py'",
    "prlimit --memlock=unlimited:unlimited --nofile=65536 python t.py",
    "ssh-agent bash -c 'python t.py'",
    "/usr/bin/time -v python t.py",
    "python -m kernprof -l t.py",
    "jupyter execute t.ipynb",
    "wait-for-it.sh etcd:2379 -- python t.py",
    "yolo task=detect mode=train model=yolov8n.pt data=coco.yaml",
    "python -m xtuner.v1.train.cli.sft --config x.py",
    "python -m trl.scripts.sft --x",
    "oumi train -c x.yaml",
    "ludwig train --config c.yaml --backend horovod",
    "python tools/train_net.py --num-gpus 8 --config-file c.yaml",
    "python train.py A=b hydra.run.dir=${now:%Y} lr=${lr} path=${oc.env:HOME}/x",
    "python train.py --prompt '$5 for ${you}' --pattern '*.txt' --tail ''",
    "python -c 'print(\"$HOME\")' x",
    "bash -c 'python train.py $OUT ~/x' name",
    "bash -c 'exec \"$@\"' _ python train.py --lr 1",
]


@pytest.mark.parametrize("command", PLAIN)
def test_plain_command_runs_unchanged_for_each_worker(command: str) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.PLAIN_COMMAND)
    assert found.words == tuple(shlex.split(command))
    assert found.options[:2] in (("--check",), ("--check", "--program"))
    requested = decide(command, launch=Launch.PER_WORKER)
    assert (requested.words, requested.options) == (found.words, ())


LAUNCHERS = [
    ("pyinstrument -m torch.distributed.run t.py", "torchrun"),
    ("sudo -iu user bash -c 'torchrun t.py'", "torchrun"),
    (bash("torchrun train.py", "-euo", "pipefail", "-c"), "torchrun"),
    (bash("torchrun train.py", "-o", "pipefail", "-c"), "torchrun"),
    (bash("torchrun train.py", "-O", "extglob", "-c"), "torchrun"),
    (bash("torchrun train.py", "+x", "-c"), "torchrun"),
    (bash("torchrun train.py", "-lc"), "torchrun"),
    (bash("torchrun train.py", "-x", "--norc", "-e", "-c"), "torchrun"),
    (bash("torchrun train.py", "--rcfile", "x", "-c"), "torchrun"),
    (bash("set -x; cd /app && exec torchrun train.py"), "torchrun"),
    (bash("cd /app\nexport A=b\ntorchrun \\\n  --nproc_per_node 8 \\\n  train.py"), "torchrun"),
    (bash("A=b C=d torchrun train.py"), "torchrun"),
    (bash("if true; then torchrun a.py; else python b.py; fi"), "torchrun"),
    (bash("for i in 1 2; do accelerate launch t.py --seed $i; done"), "accelerate launch"),
    (bash("while ! torchrun train.py; do sleep 1; done"), "torchrun"),
    (bash("(cd x; torchrun train.py)"), "torchrun"),
    (bash("{ torchrun train.py; }"), "torchrun"),
    (bash("f() { torchrun train.py; }; f"), "torchrun"),
    (bash("case $A in x) torchrun train.py;; esac"), "torchrun"),
    (bash("[[ -f x ]] && torchrun train.py"), "torchrun"),
    (bash("time torchrun train.py"), "torchrun"),
    (bash("torchrun train.py 2>&1 | tee log"), "torchrun"),
    (bash("torchrun train.py > log &\nwait"), "torchrun"),
    (bash("eval 'torchrun train.py'"), "torchrun"),
    (bash("eval torchrun train.py"), "torchrun"),
    (bash("CMD='torchrun train.py'; $CMD"), "torchrun"),
    (bash('L=torchrun; "$L" train.py'), "torchrun"),
    (bash("export L=torchrun; $L train.py"), "torchrun"),
    (bash("${LAUNCHER:-torchrun} train.py"), "torchrun"),
    (bash("$(which torchrun) train.py"), "torchrun"),
    (bash("python $(which torchrun) train.py"), "torchrun"),
    (bash("/opt/conda/bin/torchrun train.py"), "torchrun"),
    (bash("python -m torch.distributed.run train.py"), "torchrun"),
    (bash("bash -c 'sh -ec \"torchrun train.py\"'"), "torchrun"),
    (bash("cat <<EOF > c.yaml\na: b\nEOF\ntorchrun train.py"), "torchrun"),
    (bash("echo 'it is # fine'; torchrun train.py"), "torchrun"),
    (bash("cd /x; command torchrun train.py"), "torchrun"),
    (bash("exec -a name torchrun train.py"), "torchrun"),
    (["bash", "-c", 'exec "$@"', "--", "torchrun", "train.py"], "torchrun"),
    ("gosu user torchrun train.py", "torchrun"),
    ("su-exec user:group torchrun train.py", "torchrun"),
    ("su user -c 'cd /x && torchrun train.py'", "torchrun"),
    ("sudo -E -u user A=b torchrun train.py", "torchrun"),
    ("setpriv --reuid=1000 --init-groups torchrun train.py", "torchrun"),
    ("taskset -c 0-7 torchrun train.py", "torchrun"),
    ("taskset 0xff torchrun train.py", "torchrun"),
    ("numactl --cpunodebind=0 --membind 0 torchrun train.py", "torchrun"),
    ("nice -n 10 ionice -c 3 torchrun train.py", "torchrun"),
    ("timeout --signal INT 1h torchrun train.py", "torchrun"),
    ("stdbuf -oL torchrun train.py", "torchrun"),
    ("nohup torchrun train.py", "torchrun"),
    ("ddtrace-run torchrun train.py", "torchrun"),
    ("opentelemetry-instrument torchrun train.py", "torchrun"),
    ("micromamba run -n e torchrun train.py", "torchrun"),
    ("mamba run -p /e torchrun train.py", "torchrun"),
    ("conda run --live-stream -n e bash -c 'torchrun train.py'", "torchrun"),
    ("poetry run accelerate launch t.py --x", "accelerate launch"),
    ("pipenv run torchrun train.py", "torchrun"),
    ("pdm run torchrun train.py", "torchrun"),
    ("uv run --extra gpu -- torchrun train.py", "torchrun"),
    ("uv run -m torch.distributed.run train.py", "torchrun"),
    ("uv run --frozen --module accelerate.commands.launch t.py", "accelerate launch"),
    ("python -m lightning run model t.py", "fabric run"),
    (bash("shopt -s expand_aliases; alias t=torchrun\nt train.py"), "torchrun"),
    ("uv run python -m torch.distributed.run train.py", "torchrun"),
    ("rye run torchrun train.py", "torchrun"),
    ("hatch -e prod run torchrun train.py", "torchrun"),
    ("catchsegv torchrun train.py", "torchrun"),
    ("nsys profile -t cuda,nvtx -o out torchrun train.py", "torchrun"),
    ("ncu --set full torchrun train.py", "torchrun"),
    ("py-spy record -o o.svg -- torchrun train.py", "torchrun"),
    ("strace -f -o log torchrun train.py", "torchrun"),
    ("/opt/nvidia/nvidia_entrypoint.sh torchrun train.py", "torchrun"),
    ("docker-entrypoint.sh torchrun train.py", "torchrun"),
    ("/usr/local/bin/entrypoint.sh bash -c 'torchrun train.py'", "torchrun"),
    ("tini -g -- torchrun train.py", "torchrun"),
    ("dumb-init -- bash -c 'torchrun train.py'", "torchrun"),
    ("env -S 'A=b torchrun train.py'", "torchrun"),
    ("env -iS 'torchrun train.py'", "torchrun"),
    ("env -i PATH=/bin gosu user torchrun train.py", "torchrun"),
    ("busybox sh -c 'torchrun train.py'", "torchrun"),
    ("python -m cProfile -m torch.distributed.run train.py", "torchrun"),
    ("python -m debugpy --listen 5678 -m torch.distributed.run train.py", "torchrun"),
    ("coverage run -m accelerate.commands.launch t.py", "accelerate launch"),
    ("coverage run /opt/bin/torchrun train.py", "torchrun"),
    ("python -c 'from torch.distributed.run import main; main()'", "torch.distributed.run"),
    ("axolotl train c.yml", "axolotl"),
    ("tune run --nproc_per_node 2 lora --config c", "tune run"),
    ("llamafactory-cli train c.yaml", "llamafactory-cli"),
    ("swift sft --model x", "swift"),
    ("trl sft --config c", "trl"),
    ("deepspeed train.py --deepspeed ds.json", "deepspeed"),
    ("python -m deepspeed.launcher.runner train.py", "deepspeed"),
    ("mpirun -np 8 python train.py", "mpirun"),
    ("/usr/bin/mpiexec -n 2 python train.py", "mpirun"),
    ("horovodrun -np 2 python train.py", "horovodrun"),
    ("composer -n 8 train.py", "composer"),
    ("colossalai run --nproc_per_node 8 train.py", "colossalai run"),
    ("fabric run --devices 2 train.py", "fabric run"),
    ("torchx run dist.ddp --script t.py", "torchx run"),
    ("ray job submit -- python t.py", "ray"),
    # Other options of env -S.
    ("env -u A -S 'torchrun t.py'", "torchrun"),
    ("env -C /app -S 'torchrun t.py'", "torchrun"),
    ("env -uA -vS 'B=c torchrun t.py'", "torchrun"),
    (["env", "-S", "bash -euo pipefail -c", "torchrun t.py"], "torchrun"),
    ("/usr/bin/env -S torchrun t.py", "torchrun"),
    # Positions in a line.
    (bash("2>/dev/null torchrun t.py"), "torchrun"),
    (bash("A=$(x y) B='c d' torchrun t.py"), "torchrun"),
    (bash("true&&torchrun t.py"), "torchrun"),
    (bash("if ! torchrun t.py;then exit 1;fi"), "torchrun"),
    (bash("case $A in (a) torchrun t.py;; esac"), "torchrun"),
    (bash("for ((i=0;i<3;i++)); do torchrun t.py; done"), "torchrun"),
    (bash("(( i = 1 << 2 )); torchrun t.py"), "torchrun"),
    (bash("time -p torchrun t.py"), "torchrun"),
    (bash("coproc torchrun t.py"), "torchrun"),
    (bash("coproc T { torchrun t.py; }; wait"), "torchrun"),
    (bash("tor'chrun' t.py"), "torchrun"),
    (bash("\\torchrun t.py"), "torchrun"),
    (bash("~/venv/bin/torchrun t.py"), "torchrun"),
    (bash("builtin exec torchrun t.py"), "torchrun"),
    (bash("cd x\r\ntorchrun t.py\r\n"), "torchrun"),
    (bash("torchrun t.py > >(tee log) 2>&1"), "torchrun"),
    (bash("tune run --nproc_per_node 2 lora > >(tee log)"), "tune run"),
    (bash("llamafactory-cli train c.yaml 2> >(tee err >&2)"), "llamafactory-cli"),
    (bash("nohup torchrun t.py > log 2>&1 &\nwait $!"), "torchrun"),
    (bash("out=$(torchrun t.py); echo $out"), "torchrun"),
    (bash("ls *.py | xargs torchrun"), "torchrun"),
    (bash('A=(--standalone); torchrun "${A[@]}" t.py'), "torchrun"),
    (bash("OPT='--nproc 8'; CMD=\"torchrun\"; eval $CMD $OPT t.py"), "torchrun"),
    (bash("C='torchrun t.py'; bash -c \"$C\""), "torchrun"),
    (bash('set -- torchrun t.py; exec "$@"'), "torchrun"),
    (["bash", "-c", 'cd x && exec "$@"', "_", "torchrun", "t.py"], "torchrun"),
    (["bash", "-c", "$0 $@", "torchrun", "t.py"], "torchrun"),
    (["bash", "-c", "--", "torchrun t.py"], "torchrun"),
    # Files of a launcher.
    ("python /x/site-packages/torch/distributed/run.py t.py", "torchrun"),
    ("python3 /x/torch/distributed/launch.py t.py", "torch.distributed.launch"),
    (
        "python3 /usr/lib/python3/dist-packages/paddle/distributed/launch.py t.py",
        "paddle.distributed.launch",
    ),
    ("python -u /x/accelerate/commands/launch.py t.py", "accelerate launch"),
    ("python -m fastai.launch t.py", "fastai.launch"),
    (bash("cd x && python /x/deepspeed/launcher/runner.py t.py"), "deepspeed"),
    # Other shells and interpreters.
    ("fish -c 'torchrun t.py'", "torchrun"),
    ("perl -e 'exec \"torchrun t.py\"'", "torchrun"),
    (bash("python - <<'E'\nimport os\nos.system('torchrun t.py')\nE"), "torchrun"),
    (
        bash("cd x\npython3 <<E\nfrom torch.distributed.run import main\nmain()\nE"),
        "torch.distributed.run",
    ),
    ("tcsh -c 'cd x; accelerate launch t.py'", "accelerate launch"),
    ("script -qefc 'torchrun t.py' /dev/null", "torchrun"),
    ("busybox ash -c 'torchrun t.py'", "torchrun"),
    # Commands of the frameworks' documentation.
    ("env FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", "llamafactory-cli"),
    (
        bash("FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 llamafactory-cli train x.yaml"),
        "llamafactory-cli",
    ),
    ("python -m llamafactory.cli train x.yaml", "llamafactory-cli"),
    (bash("NPROC_PER_NODE=8 swift sft --model x"), "swift"),
    ("megatron sft --load x", "swift"),
    (bash("NPROC_PER_NODE=8 xtuner train x --deepspeed deepspeed_zero2"), "xtuner train"),
    ("axolotl train x.yml --launcher torchrun -- --nproc_per_node=2", "axolotl"),
    ("tune run --nproc_per_node 4 full_finetune_distributed --config x", "tune run"),
    ("nemo llm pretrain --factory llama3_8b", "nemo"),
    ("nemorun llm finetune --factory x -y", "nemo"),
    ("autotrain --config x.yml", "autotrain"),
    ("autotrain llm --train --model x", "autotrain"),
    ("python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8", "ray"),
    ("python -m verl.trainer.sft_trainer_ray x=y", "ray"),
    ("python3 -m recipe.dapo.main_dapo x=y", "ray"),
    ("python3 -m openrlhf.cli.train_ppo_ray --x", "ray"),
    ("deepspeed --module openrlhf.cli.train_sft --max_len 2048", "deepspeed"),
    ("python ./deepy.py train.py -d configs 125M.yml local_setup.yml", "deepy.py"),
    ("./deepy.py train.py x.yml", "deepy.py"),
    ("mim train mmdet x.py --gpus 8 --launcher pytorch", "mim train"),
    (
        bash("python -m torch.distributed.launch --nproc_per_node=8 $(which fairseq-train) data"),
        "torch.distributed.launch",
    ),
    ("composer train/train.py x.yaml", "composer"),
    ("fabric run model --devices=2 train.py", "fabric run"),
    ("mpirun.openmpi -n 4 python t.py", "mpirun"),
    ("mpiexec.mpich -n 4 python t.py", "mpirun"),
    ("mpirun_rsh -np 4 python t.py", "mpirun"),
    ("jsrun -n 2 python t.py", "the batch system"),
    ("ibrun python t.py", "the batch system"),
    ("msrun --worker_num=8 net.py", "msrun"),
    ("python -m bagua.distributed.launch --nproc_per_node=8 t.py", "bagua.distributed.launch"),
    ("python3 -m bagua.distributed.run --nproc_per_node=8 t.py", "bagua.distributed.run"),
    ("baguarun --nproc_per_node=1 --host_list=h t.py", "baguarun"),
    ("python -m paddle.distributed.launch t.py", "paddle.distributed.launch"),
    ("python -m oneflow.distributed.launch --nproc_per_node 2 t.py", "oneflow.distributed.launch"),
    ("uvx torchrun t.py", "torchrun"),
    ("uv run --no-sync --frozen torchrun t.py", "torchrun"),
    ("pipx run torchrun t.py", "torchrun"),
    ("conda run --no-capture-output -p /opt/env accelerate launch t.py", "accelerate launch"),
    ("xvfb-run -a torchrun t.py", "torchrun"),
    ("numactl --cpunodebind=0 --membind=0 torchrun t.py", "torchrun"),
    ("ncu --set full -o x torchrun t.py", "torchrun"),
    ("gdb --args torchrun t.py", "torchrun"),
    ("valgrind --tool=memcheck torchrun t.py", "torchrun"),
    ("nice -10 torchrun t.py", "torchrun"),
    ("taskset 0xff torchrun t.py", "torchrun"),
    ("timeout --signal=INT 3600 torchrun t.py", "torchrun"),
    ("eatmydata torchrun t.py", "torchrun"),
    ("rocprofv3 --hip-trace -- torchrun t.py", "torchrun"),
    ("coverage run -m torch.distributed.run t.py", "torchrun"),
    (bash("for i in 1 2; do torchrun t.py --seed $i; done"), "torchrun"),
    (bash("while ! torchrun t.py; do sleep 5; done"), "torchrun"),
    (bash("torchrun t.py & PID=$!; wait $PID"), "torchrun"),
    # Commands that are put together in variables and arrays.
    (bash('C="torchrun"; C+=" --nproc_per_node 8 t.py"; $C'), "torchrun"),
    (bash('C="torchrun"; C="$C --nproc_per_node $N t.py"; echo $C; eval $C'), "torchrun"),
    (bash('C=(torchrun --nproc_per_node 8)\nC+=(t.py)\n"${C[@]}" --lr 1'), "torchrun"),
    (bash('declare -a C=(torchrun t.py); "${C[@]}"'), "torchrun"),
    (bash("C=(torchrun t.py); $C --lr 1"), "torchrun"),
    (bash('L=\'python -m torch.distributed.run\'; C="$L t.py"; bash -c "$C"'), "torchrun"),
    (bash('L="accelerate launch --num_processes $N"; bash -c "$L $C"'), "accelerate launch"),
    (bash('C="deepspeed --num_gpus 8 $ARGS t.py"; echo $C; eval $C'), "deepspeed"),
    (bash('C=(mpirun -np 8); C+=(python t.py); "${C[@]}"'), "mpirun"),
    (bash('cmd="srun -l torchrun $@"\necho $cmd\n$cmd'), "srun"),
    (bash("L=${L:-torchrun}; $L t.py"), "torchrun"),
    # Launchers with options of torchrun.
    ("dlrover-run --network-check --nnodes=2 --nproc_per_node=8 t.py", "dlrover-run"),
    ("ft_launcher --nnodes=2 --nproc-per-node=8 t.py", "ft_launcher"),
    ("hyperpodrun --nnodes=2 --nproc_per_node=8 t.py", "hyperpodrun"),
    ("bpslaunch python t.py", "bpslaunch"),
    ("python xla_spawn.py --num_cores 8 t.py", "xla_spawn.py"),
    ("python examples/gaudi_spawn.py --world_size 8 --use_mpi t.py", "gaudi_spawn.py"),
    ("python -m torch.backends.xeon.run_cpu --ninstances 4 t.py", "torch.backends.xeon.run_cpu"),
    ("automodel finetune llm -c x.yaml", "automodel"),
    ("accelerate test --config_file c.yaml", "accelerate test"),
    ("wait-for-it.sh -t 30 etcd:2379 -- torchrun t.py", "torchrun"),
    (bash("torchrun t.py 2>&1 | tee log.txt"), "torchrun"),
    (bash("git clone x y && cd y && pip install -e . && torchrun t.py"), "torchrun"),
    (bash("trap 'kill 0' EXIT; torchrun t.py"), "torchrun"),
    (bash("( cd x; torchrun t.py )"), "torchrun"),
]


@pytest.mark.parametrize(("command", "name"), LAUNCHERS, ids=str)
def test_command_with_launcher_runs_unchanged_once_for_each_pod(
    command: str | list[str], name: str
) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_FOUND)
    assert found.message.startswith(name)
    words = shlex.split(command) if isinstance(command, str) else command
    assert (found.words, found.options) == (tuple(words), ())
    with pytest.raises(CannotUnwrap, match=r"set spec\.launch to PerNode or Auto"):
        decide(command, launch=Launch.PER_WORKER)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun a.py && torchrun b.py",
        "torchrun a.py\naccelerate launch b.py",
        "torchrun a.py & torchrun b.py & wait",
        "for lr in 1 2; do torchrun t.py --lr $lr; done",
        "A=(1 2); torchrun a.py; torchrun b.py",
        "for i in 1 2; do for j in 1 2; do echo; done; torchrun t.py; done",
        "cd a && torchrun a.py; cd b && torchrun b.py",
        "cd a || exit 1; torchrun a.py; torchrun b.py",
        "exec > log; torchrun a.py; torchrun b.py",
        "torchrun a.py --help; torchrun b.py",
        "for s in {1..3}; do torchrun t.py --seed $s; done",
        "for s in $SEEDS; do torchrun t.py --seed $s; done",
    ],
)
def test_several_launchers_in_one_line_are_refused_for_several_nodes(line: str) -> None:
    with pytest.raises(CannotUnwrap, match=r"starts (torchrun|accelerate launch) more than once"):
        decide(bash(line), nodes=2)
    assert decide(bash(line)).reason is LaunchReason.LAUNCHER_FOUND
    assert decide(bash(line), nodes=2, launch=Launch.PER_NODE).mode is Launch.PER_NODE


@pytest.mark.parametrize(
    "line",
    [
        "torchrun a.py || torchrun b.py",
        "if [ $A ]; then torchrun a.py; else torchrun b.py; fi",
        "for i in 1 2 3; do torchrun t.py && break; done",
        "until torchrun t.py; do sleep 1; done",
        "torchrun a.py; echo torchrun b.py",
        "for f in *.sh; do echo $f; done; torchrun t.py",
        "for i in 1 2; do nc -z x 1; done\ntorchrun t.py",
        "[ $NODE_RANK = 0 ] && torchrun a.py\n[ $NODE_RANK = 1 ] && cd x && torchrun b.py",
        "while read l; do echo $l; done < x; torchrun a.py",
        "torchrun --version; torchrun t.py",
        "accelerate launch --help; python -m torch.distributed.run -h; accelerate launch t.py",
        "deepspeed --version; mpirun -V; torchrun t.py",
        "torchrun a.py && exit 0; torchrun a.py --resume",
        "exec torchrun a.py; torchrun b.py",
        "torchrun a.py; exit $?; torchrun b.py",
        "torchrun --nproc_per_node 8 --help; torchrun a.py",
        "for s in 1; do torchrun t.py --seed $s; done",
    ],
)
def test_launchers_of_which_one_runs_are_kept(line: str) -> None:
    assert decide(bash(line), nodes=2).reason is LaunchReason.LAUNCHER_FOUND


OPTIONS = [
    ("python launch.py --nproc_per_node=2 main.py --distributed", "launch.py --nproc_per_node"),
    ("python -m my.launch --nproc-per-node 8 t.py", "my.launch --nproc-per-node"),
    ("python main.py -a resnet50 --multiprocessing-distributed --world-size 1 --rank 0 /d",
     "main.py --multiprocessing-distributed"),
    ("python main.py --multiprocessing-distributed", "main.py --multiprocessing-distributed"),
    ("python main.py --multiprocessing_distributed true", "main.py --multiprocessing_distributed"),
    ("my-train --nproc_per_node 8", "my-train --nproc_per_node"),
    ("./train --launcher torchrun --nproc-per-node 8", "./train --nproc-per-node"),
    ("onmt_train -config c.yaml -world_size 2 -gpu_ranks 0 1", "onmt_train -gpu_ranks"),
    ("numactl -N 0 python launch.py --nproc_per_node 2 t.py", "launch.py --nproc_per_node"),
    (bash("cd x && python launch.py --nproc_per_node $N t.py"), "launch.py --nproc_per_node"),
    (bash("bash prepare.sh; python launch.py --nproc_per_node 2 t.py"),
     "launch.py --nproc_per_node"),
    ("python launch.py --nnodes=1 --node_rank=0 --nproc_per_node=8 t.py",
     "launch.py --nproc_per_node"),
    ("python main.py --node-rank 0 --multiprocessing-distributed",
     "main.py --multiprocessing-distributed"),
]  # fmt: skip
"""Options that tell a program to start processes."""


@pytest.mark.parametrize(("command", "name"), OPTIONS, ids=str)
def test_program_that_an_option_makes_start_processes_is_not_run_once_for_each_worker(
    command: str | list[str], name: str
) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_FOUND)
    assert found.message.startswith(f"{name} makes the program start the processes")
    with pytest.raises(CannotUnwrap, match="each of the nodes would train alone") as refused:
        decide(command, 1, nodes=2)
    assert "spec.launch to PerNode if the program starts torchrun" in str(refused.value)
    for launch in (Launch.PER_WORKER, Launch.PER_NODE):
        requested = decide(command, launch=launch, nodes=2)
        assert requested.mode is launch
    assert decide(command, 1).reason is not LaunchReason.LAUNCHER_FOUND


@pytest.mark.parametrize(
    "command", ["python train_net.py --num-gpus 8 --machine-rank 0", "python t.py --node_rank=1"]
)
def test_program_with_an_option_for_the_number_of_its_node_is_refused_for_several_nodes(
    command: str,
) -> None:
    assert decide(command).reason is LaunchReason.PLAIN_COMMAND
    with pytest.raises(CannotUnwrap, match=r"-?rank makes the program start or number"):
        decide(command, nodes=2)


@pytest.mark.parametrize("line", ["./prep --node_rank 0; bash run.sh", "./a --node_rank 0; ./r.sh"])
def test_number_of_the_node_of_a_helper_does_not_hide_the_script_after_it(line: str) -> None:
    for nodes in (1, 2):
        assert decide(bash(line), nodes=nodes).reason is LaunchReason.SCRIPT_FILE
    reversed_line = "; ".join(reversed(line.split("; ")))
    with pytest.raises(CannotUnwrap, match="--node_rank makes the program start or number"):
        decide(bash(reversed_line), nodes=2)


def test_option_without_effect_leaves_the_preparation_to_be_split() -> None:
    found = decide(bash("bash prepare.sh; python t.py --node_rank 0"))
    assert found.reason is LaunchReason.PREPARATION_SPLIT


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('CMD="torchrun t.py"; numactl -N 0 $CMD', "torchrun"),
        ('CMD="torchrun t.py"; timeout 5 $CMD', "torchrun"),
        ('CMD="torchrun t.py"; env A=1 $CMD', "torchrun"),
        ('CMD="torchrun t.py"; P="numactl -N 0"; $P $CMD', "torchrun"),
        ("CMD=(torchrun t.py); exec nice timeout 5 ${CMD[@]}", "torchrun"),
        ('CMD="deepspeed --num_gpus 8 t.py"; nice $CMD', "deepspeed"),
        ('C=torchrun; [ "$DEBUG" ] && C=python; $C --nproc_per_node=8 t.py', "torchrun"),
        ('C=python; [ "$DEBUG" ] || C=torchrun; D="$C t.py"; nice $D', "torchrun"),
        ("C=torchrun; if [ $A ]; then C=python; fi; $C t.py", "torchrun"),
        ("C=torchrun; [ $A ] && { C=python; }; $C t.py", "torchrun"),
        ("C=torchrun; case $A in x) C=python;; esac; D=1; $C t.py", "torchrun"),
        ("[ $A ] && C=python; ${C:-torchrun} t.py", "torchrun"),
    ],
)
def test_launcher_in_a_variable_runs_once_for_each_pod(line: str, name: str) -> None:
    found = decide(bash(line))
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_FOUND)
    assert found.message.startswith(name)
    if name == "deepspeed":
        with pytest.raises(CannotUnwrap, match="deepspeed does not join"):
            decide(bash(line), nodes=2)


@pytest.mark.parametrize(
    "line",
    [
        "C=torchrun; C=python; $C t.py",
        "C=torchrun; [ $A ] && C=python; C=python; $C t.py",
        "if [ $A ]; then C=python3; else C=python; fi; $C t.py",
        "P=nice; C=python; $P -n 5 $C t.py",
    ],
)
def test_program_in_a_variable_that_is_no_launcher_runs_for_each_worker(line: str) -> None:
    assert decide(bash(line), 1).mode is Launch.PER_WORKER


@pytest.mark.parametrize("line", ["timeout 5 $CMD", "env A=1 $CMD t.py", "P=nice; $P $CMD"])
def test_program_of_an_unknown_variable_behind_a_wrapper_runs_once_for_each_pod(line: str) -> None:
    assert decide(bash(line)).reason is LaunchReason.COMPUTED_PROGRAM


@pytest.mark.parametrize(
    "command",
    [
        "python main.py --multiprocessing-distributed false",
        "torchrun --nproc_per_node=8 t.py --nproc_per_node 8 --node_rank 0",
        "accelerate launch --num_processes 8 t.py --nproc_per_node 3",
        "echo --nproc_per_node 8",
        "python train.py --distributed-world-size 16 --num_nodes 2 --world-size 2",
    ],
)
def test_option_that_starts_nothing_does_not_count(command: str) -> None:
    for nodes in (1, 2):
        assert decide(command, nodes=nodes).mode is Launch.PER_WORKER


GUESSED = [
    ("uv tool run torchrun t.py", "torchrun"),
    ("aws-vault exec prod -- torchrun t.py", "torchrun"),
    ("sops exec-env s.yaml 'torchrun t.py'", "torchrun"),
    ("bwrap --ro-bind / / torchrun t.py", "torchrun"),
    ("systemd-run --scope torchrun t.py", "torchrun"),
    ("/init torchrun t.py", "torchrun"),
    ("dockerize -wait tcp://x torchrun t.py", "torchrun"),
    ("my-wrapper torchrun train.py", "torchrun"),
    ("my-wrapper --flag -- bash -c 'torchrun train.py'", "torchrun"),
    (bash("find . -name t.py -exec torchrun {} \\;"), "torchrun"),
    ("my-wrapper bash -c 'torchrun t.py'", "torchrun"),
    ("my-wrapper --verbose torchrun t.py", "torchrun"),
    ("my-wrapper --quiet torchrun --nproc_per_node 8 t.py", "torchrun"),
    ("retry 3 'torchrun t.py'", "torchrun"),
    ("parallel 'torchrun {}' ::: a.py b.py", "torchrun"),
    ("tmux new-session -d 'cd x; torchrun t.py'", "torchrun"),
    ("sops exec-env secrets.yaml 'torchrun t.py'", "torchrun"),
    ("ssh worker-1 torchrun t.py", "torchrun"),
    ("tmux new-session -d 'mpirun -np 8 python t.py'", "mpirun"),
    ("tmux new-session -d 'torchrun -m pkg.train'", "torchrun"),
    ("tmux new-session -d 'llamafactory-cli train c.yaml'", "llamafactory-cli"),
    ("tmux new-session -d 'accelerate launch --config_file c.yaml t.py'", "accelerate launch"),
    ("tmux new-session -d 'python -m torch.distributed.run t.py'", "torchrun"),
    ("my-wrapper --verbose torchrun -m pkg.train", "torchrun"),
    ("my-wrapper --verbose accelerate launch t.py", "accelerate launch"),
    ("my-wrapper --verbose torchrun --standalone t", "torchrun"),
    ("my-train deepspeed --num-workers 3", "deepspeed"),
]
"""Launchers in the arguments of programs that no rule knows."""


@pytest.mark.parametrize(("command", "name"), GUESSED, ids=str)
def test_launcher_in_arguments_of_an_unknown_program_counts_unless_the_launch_is_requested(
    command: str | list[str], name: str
) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_FOUND)
    assert found.message.startswith(f"{name} inside of ")
    assert "set spec.launch to PerWorker if it is an argument" in found.message
    for launch in (Launch.PER_WORKER, Launch.PER_NODE):
        requested = decide(command, launch=launch, nodes=2)
        assert (requested.mode, requested.reason) == (launch, LaunchReason.REQUESTED)


def test_launcher_with_its_own_rendezvous_in_arguments_is_refused_with_a_way_out() -> None:
    command = "my-train deepspeed --num_nodes 2"
    with pytest.raises(CannotUnwrap, match=r"or set spec\.launch if deepspeed is only an argument"):
        decide(command, nodes=2)
    inside = f"torchrun --no-python {command}"
    assert decide(inside).reason is LaunchReason.LAUNCHER_OPTIONS
    assert decide(inside, launch=Launch.PER_WORKER).reason is LaunchReason.LAUNCHER_REMOVED


@pytest.mark.parametrize(
    "command",
    [
        "bash run.sh",
        "sh -ex ./scripts/train.sh --lr 1",
        "bash -euo pipefail run_train",
        "./run.sh",
        "make train",
        "/app/launch.bash",
        "/app/entrypoint.sh",
        "gosu user ./run.sh",
        bash("cd /app && ./run.sh"),
        bash("cd /app && bash run.sh 8"),
        bash("cd /app; . ./env.sh; exec /app/run.sh"),
        bash("source run.sh"),
        bash("cd /app && . ./train.sh && echo done"),
        bash("bash <<EOF\ntorchrun t.py\nEOF"),
        bash("bash -s <<'EOF'\ntorchrun t.py\nEOF"),
        bash("sh <<< 'torchrun t.py'"),
        bash("echo torchrun t.py | bash"),
        bash("curl -s http://x/run | bash -s -- 8"),
        bash("bash < run"),
        bash("curl -s http://x/run | bash -s -- 8 2>&1 | tee log; sleep 9"),
        bash("bash <(curl -s http://x/run)"),
        bash("cat > run <<'EOF'\ntorchrun t.py\nEOF\nbash run"),
        "my-wrapper ./run.sh",
        "my-wrapper -- bash run",
        "fish run.fish",
        "node launch.js",
        bash("NGPU=8 CONFIG_FILE=./llama3_8b.toml ./run_train.sh"),
        bash("cd /Megatron-LM && bash examples/gpt3/train_gpt3_175b_distributed.sh $CKPT"),
        "pixi run train",
        "pdm run train",
        "hatch run gpu:train",
        "npm run train",
        "task train",
        "python -m invoke train",
        "python -m nox -s train",
        "python -m poethepoet train",
        "python -m fabric train",
        "python -m dvc repro",
        "python -m luigi --module x Train",
        "nox -s train",
        "dvc repro",
        "wandb agent a/b/c",
        "mlflow run .",
    ],
    ids=str,
)
def test_script_file_runs_once_for_each_pod_unless_requested(command: str | list[str]) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.SCRIPT_FILE)
    assert found.options == ()
    assert decide(command, launch=Launch.PER_WORKER).mode is Launch.PER_WORKER


@pytest.mark.parametrize(
    "command",
    [
        "$(TOOL) train.py",
        bash("$TOOL train.py"),
        bash("$(cat tool) train.py"),
        bash("$(CMD)"),
        bash('C=($(cat cmd)); "${C[@]}"'),
        bash('read -ra C < cmd; "${C[@]}"'),
        bash('C="$(cat cmd) t.py"; bash -c "$C"'),
        bash('set -- $(cat cmd); exec "$@"'),
        ["bash", "-c", 'exec "${@:1}"', "_", "torchrun", "t.py"],
    ],
    ids=str,
)
def test_computed_program_runs_once_for_each_pod(command: str | list[str]) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.COMPUTED_PROGRAM)


@pytest.mark.parametrize("command", ["$(TOOL) train.py", bash("$(TOOL) train.py"), bash("$TOOL x")])
@pytest.mark.parametrize(
    ("value", "mode"),
    [("torchrun", Launch.PER_NODE), ("python", Launch.PER_WORKER), ("./t", Launch.PER_WORKER)],
)
def test_known_value_of_a_variable_decides(
    command: str | list[str], value: str, mode: Launch
) -> None:
    assert decide(command, TOOL=value).mode is mode


@pytest.mark.parametrize(
    ("value", "mode"),
    [("--standalone", Launch.PER_NODE), ("train.py", Launch.PER_WORKER)],
)
def test_value_of_a_reference_after_torchrun_decides(value: str, mode: Launch) -> None:
    assert decide("torchrun $(FIRST) --lr 1", FIRST=value).mode is mode


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("torchrun --nproc_per_node=8 t.py", "python3 -u t.py"),
        ("python -m accelerate.commands.accelerate_cli launch t.py", "python -u t.py"),
        ("accelerate launch --mixed_precision no t.py --launcher torchrun",
         "env ACCELERATE_MIXED_PRECISION=no python3 -u t.py --launcher torchrun"),
        ("env A=b python /opt/bin/torchrun -m pkg.train", "env A=b python -u -m pkg.train"),
        ("python -X dev -mtorch.distributed.run t.py", "python -X dev -u t.py"),
        ("accelerate launch -m axolotl.cli.train c.yml", "python3 -u -m axolotl.cli.train c.yml"),
        ("torchrun --nproc_per_node 8 /app/src/llamafactory/launcher.py c.yaml",
         "python3 -u /app/src/llamafactory/launcher.py c.yaml"),
    ],
)  # fmt: skip
def test_launcher_that_can_be_removed_is_removed(command: str, started: str) -> None:
    for launch in (Launch.AUTO, Launch.PER_WORKER):
        found = decide(command, launch=launch)
        assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.LAUNCHER_REMOVED)
        assert found.words == tuple(started.split())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("torchrun --future-option=1 t.py", "--future-option=1 is not understood"),
        ("torchrun --run-path t.py", "give the script as the first argument"),
        ("torchrun $(ARGS) t.py", "$(ARGS) may be options of torchrun"),
        ("accelerate launch $(ARGS) t.py", "$(ARGS) may be options of accelerate launch"),
        ("torchrun --virtual-local-rank t.py", "take the device of its LOCAL_RANK"),
        ("python -m torch.distributed.launch t.py", "read LOCAL_RANK from the environment"),
        ("accelerate launch --config_file c.yaml t.py", "start the script itself"),
        ("accelerate launch --use_fsdp --fsdp_offload_params false t.py", "--use_fsdp"),
        ("accelerate launch --use_deepspeed --zero_stage 2 t.py", "--use_deepspeed"),
        ("accelerate launch --dynamo_backend inductor t.py", "--dynamo_backend"),
        ("torchrun --no-python torchrun t.py", "torchrun starts torchrun"),
        ("torchrun --no-python bash run.sh", "torchrun starts run.sh"),
        ("torchrun --no-python bash -c 'accelerate launch t.py'", "starts accelerate launch"),
        ("accelerate launch -m llamafactory.cli train c.yml", "starts llamafactory-cli"),
    ],
)
def test_launcher_with_options_that_would_be_lost_runs_once_for_each_pod(
    command: str, why: str
) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_OPTIONS)
    assert why in found.message
    assert found.words == tuple(shlex.split(command))
    with pytest.raises(CannotUnwrap):
        decide(command, launch=Launch.PER_WORKER)


@pytest.mark.parametrize(
    "command",
    [
        "deepspeed t.py", "mpirun -np 2 python t.py", "horovodrun -np 2 python t.py",
        "ray start --head", "composer t.py", "colossalai run t.py", "fabric run t.py",
        "torchx run dist.ddp", "bash -c 'cd x; mpiexec python t.py'", "srun python t.py",
        "python -m deepspeed.launcher.launch t.py", "python deepy.py train.py c.yml",
        "python -m verl.trainer.main_ppo", "python -m paddle.distributed.launch t.py",
        "mpirun.openmpi -n 2 python t.py", "baguarun t.py", "msrun t.py", "jsrun python t.py",
    ],
)  # fmt: skip
@pytest.mark.parametrize("launch", list(Launch))
def test_launcher_with_its_own_rendezvous_is_refused_for_several_nodes(
    command: str, launch: Launch
) -> None:
    with pytest.raises(CannotUnwrap, match=r"would train alone: .*or set spec\.maxNodes to 1"):
        decide(command, launch=launch, nodes=2)


@pytest.mark.parametrize("command", ["torchrun t.py", "python t.py", "bash -c 'a | b'"])
def test_requested_per_node_keeps_the_command(command: str) -> None:
    found = decide(command, launch=Launch.PER_NODE)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.REQUESTED)
    assert found.words == tuple(shlex.split(command))


# -- preparations

SPLIT = [
    # line, part before the last command, last command
    ("cd /app && ", "python train.py"),
    ("cd x && source venv/bin/activate && pip install y && exec ", "python train.py"),
    ("set -e; export A=b C='d e'\n. env.sh\n", 'python train.py --lr "$LR"'),
    ("pip install -q -r r.txt > /dev/null 2>&1; ", "python -m pkg.train"),
    ("apt-get update && apt-get install -y git; git clone x; cd x; VAR=1 ", "python train.py"),
    ("pip install x || true; ", "python3 train.py"),
    ("cd a || exit 1; ", "python train.py"),
    ("python -m pip install -e . && ", "python train.py"),
    ("python setup.py develop; ", "python train.py"),
    ("python -c 'import torch; print(torch.__version__)'; ", "./train --x"),
    ("echo starting torchrun; ", "python train.py"),
    ("# torchrun is not used\ncd /app\n# really\n", "python train.py"),
    ("cat > c.yaml <<EOF\ntorchrun: |\n  x && y\nEOF\n", "python train.py -c c.yaml"),
    ("cat <<'E' > a\n$X `torchrun`\nE\n", "python train.py"),
    ("ulimit -n 65536 && umask 002; ", "python train.py"),
    ('mkdir -p "$OUT"/logs; N=$(nproc); export N; ', "python train.py --n $N"),
    ('cd "$(mktemp -d)" && ', "python /app/train.py"),
    ("test -d data || ./download; ", "python train.py"),
    ("bash setup.sh && ", "python train.py"),
    ("./install.sh; ", "python train.py"),
    ("make build && ", "python train.py"),
    ("export PY=python3.11; cd x; ", "$PY train.py"),
    ('eval "$(conda shell.bash hook)" && conda activate e && ', "python train.py"),
    ("module load cuda; conda activate env; ", "python train.py"),
    ("cd /app && exec ", "gosu me python train.py"),
    ("cd /app && \\\n  ", "python \\\n  train.py \\\n  --lr 1"),
    ("export A=1;;".replace(";;", ";"), "  python train.py"),
    ("cd x; nvidia-smi; ", "python train.py --launcher torchrun"),
    ("cd $(DIR) && ", "python train.py --lr $(LR)"),
    ("cd x && exec ", '"$@"'),
    ("bash setup.sh; ", "python train.py $1"),
    ("cd x && set -- --lr 1; ", 'python train.py "$@" $1 $#'),
    ("test -x /usr/bin/torchrun && cd x; ", "python train.py"),
    ("pkill torchrun || true; hash torchrun; ", "python train.py"),
    ("pip show deepspeed; ", "python train.py --launcher $TORCHRUN"),
    ("cd /app && ", "gnn-train --task node --dataset x"),
    ('C="python t.py --lr $LR"; echo $C; ', "$C"),
    ("PY=${PY:-python}; ", "$PY t.py"),
    ("nvidia-smi; python -V; ", "python train.py"),
    ("mpirun --version && torchrun --help; ", "python train.py"),
    ("wandb login $KEY && hf download gpt2; ", "python train.py"),
    ("read -r -d '' S << EOM\nimport torch\nEOM\nprintf '%s' \"$S\" > s.py; ", "python -u s.py"),
    ("bash <<E\npip install x\nE\n", "python train.py"),
    ("bash -c 'curl x | sh'; ", "python train.py"),
]


@pytest.mark.parametrize(
    "shell",
    [
        "bash -c",
        "sh -ec",
        "/bin/bash -euo pipefail -c",
        "env A=b bash -c",
        "tini -- bash -c",
        "busybox sh -c",
    ],
)
@pytest.mark.parametrize(("before", "last"), SPLIT, ids=[last[:20] for _, last in SPLIT])
def test_preparation_runs_once_for_each_pod(shell: str, before: str, last: str) -> None:
    found = decide([*shell.split(), before + last])
    assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.PREPARATION_SPLIT)
    program = last.split()[0]
    checked = ("--program", program) if program in ("./train", "gnn-train") else ()
    assert found.options == ("--prepare", "--check", *checked)
    command = last.lstrip()
    assert found.words == (*shell.split(), f"{before}{last[: -len(command)]}{REPORT} {command}")


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("cd x && python t.py --rank $LOCAL_RANK", "python t.py --rank $LOCAL_RANK"),
        ("cd x && exec python t.py > log.${RANK}", "python t.py > log.${RANK}"),
        ("cd x; CUDA_VISIBLE_DEVICES=$LOCAL_RANK python t.py 2>&1",
         "CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec python t.py 2>&1"),
        ("cd x; python t.py 2>&1", "python t.py 2>&1"),
        ("cd x; export A=1; python t.py '$RANK' $A \"$RANK\"", "python t.py '$RANK' $A \"$RANK\""),
    ],
)  # fmt: skip
def test_last_command_with_variables_of_a_worker_runs_in_a_shell_for_each_worker(
    line: str, last: str
) -> None:
    found = decide(["bash", "-e", "-c", line])
    assert found.reason is LaunchReason.PREPARATION_SPLIT
    inner = shlex.split(found.words[3][found.words[3].index(REPORT) + len(REPORT) :])
    assert inner[:3] == ["bash", "-e", "-c"]
    assert inner[3].removeprefix("exec ") == last.removeprefix("exec ")


WHOLE = [
    ('C="python t.py --lr $LR"; echo $C; eval $C', "a last command that is not a program (eval)"),
    ('C=(python t.py --lr "$LR"); "${C[@]}"', "an array"),
    ('run() { echo "$*"; "$@"; }\nrun python t.py', "a function"),
    ("pip install x; python t.py | tee log", "a pipeline"),
    ("python t.py 2>&1 | tee log", "a pipeline"),
    ("python t.py |& tee log", "a pipeline"),
    ("for i in 1 2; do python t.py; done", "for"),
    ("while true; do python t.py; done", "while"),
    ("until python t.py; do sleep 1; done", "until"),
    ("if [ -f x ]; then cd x; fi; python t.py", "if"),
    ("[[ -f x ]] && cd x; python t.py", "[["),
    ("case $A in a) cd a;; esac; python t.py", "case"),
    ("f() { cd x; }; f; python t.py", "a function"),
    ("(cd x; python t.py)", "a subshell"),
    ("{ cd x; python t.py; }", "{"),
    ("A=(1 2); python t.py", "an array"),
    ("trap 'rm x' EXIT; python t.py", "a trap"),
    ("alias python=python3; python t.py", "an alias"),
    ("redis-server & python t.py", "a background job"),
    ("python t.py &\nwait", "a background job"),
    ("cd x; test $? = 0; python t.py", "$?"),
    ("cd x; python t.py $1 --rank $RANK", "a last command with $1 beside variables of the worker"),
    ("cd $1; python t.py", "the parameter $1"),
    ("echo $$ > pid; python t.py", "$$"),
    ("exec > log; python t.py", "exec before the last command"),
    ("cd x; python t.py > log", "a redirection of the last command"),
    ("python t.py > log 2>&1", "a redirection of the last command"),
    ("cd x; python - <<EOF\nprint()\nEOF", "text after the last command"),
    ("python download.py && python t.py", "a Python program before the last command (download"),
    ("for i in 1 2; do pip install x && break; done; python t.py", "for"),
    ("ls; env | sort; exec python t.py", "a pipeline"),
    ("date && python t.py && date", "a Python program before the last command (t.py)"),
    ("python t.py 2>&1 | while read l; do echo $l; done", "while"),
    ("(pip install x); python t.py", "a subshell"),
    ("tensorboard --logdir x & python t.py", "a background job"),
    ("python t.py </dev/null", "a redirection of the last command"),
    ("cd x && exec -a trainer python t.py", "a last command that is not a program"),
    ("cd x; python t.py; echo done", "a Python program before the last command (t.py)"),
    ("cd x && python t.py && python eval.py", "a Python program before the last command (t.py)"),
    ("python t.py; rm -r x", "a Python program before the last command (t.py)"),
    ("cd x; echo done", "a last command that is not a program (echo)"),
    ("cd x; python t.py || python u.py", "a Python program before the last command (t.py)"),
    ("test -f x || ./t", "a command after ||"),
    ("export CUDA_VISIBLE_DEVICES=$LOCAL_RANK; python t.py", "$LOCAL_RANK in the preparation"),
    ("[ $RANK = 0 ] && ./get; python t.py", "$RANK in the preparation"),
    ("LR=1; python t.py --lr $LR --rank $RANK", "$LR beside variables of the worker"),
    ("exit 0; python t.py", "exit"),
    ("! true; python t.py", "!"),
    ("python t.py > >(tee log)", "a process substitution"),
    ("su user -c 'cd x && python t.py'", "the shell line inside of su"),
    ("bash -c 'pip install y && python t.py'", "the shell line inside of bash"),
    ("cd x && sh -c 'pip install y && python t.py'", "the shell line inside of sh"),
    ("sudo -u me bash -c 'cd x; python t.py'", "the shell line inside of bash"),
    ("my-wrapper -- bash -c 'cd x; python t.py'", "the shell line inside of bash"),
    ("env -S 'bash -c \"cd x && python t.py\"'", "the shell line inside of bash"),
    ("exec fish -c 'cd x; python t.py'", "the grammar of fish"),
    ("curl -LsSf https://example/install.sh | sh && uv run train.py", "a pipeline"),
    ("curl -LsSf https://example/install.sh | sudo bash && python t.py", "a pipeline"),
    ("echo 'pip install x' | bash; python train.py", "a pipeline"),
    ("bash <(curl -s http://x/install) && python t.py", "a process substitution"),
    ("cd x; time python t.py", "time"),
    ("cd x; 'python t.py", "not a complete shell line"),
]


@pytest.mark.parametrize(("line", "reason"), WHOLE, ids=[line for line, _ in WHOLE])
def test_line_that_cannot_be_split_runs_whole_only_with_one_worker(line: str, reason: str) -> None:
    for several in (2, 8, None):
        with pytest.raises(CannotUnwrap) as refused:
            decide(bash(line), several)
        assert f"because of {reason}" in str(refused.value) or reason in str(refused.value)
        assert "spec.setup" in str(refused.value)
        assert "spec.launch to PerNode" in str(refused.value)
    found = decide(bash(line), 1)
    assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.SINGLE_WORKER)
    assert (found.words, found.options) == (("bash", "-c", line), ())
    requested = decide(bash(line), 8, Launch.PER_WORKER)
    assert (requested.words, requested.reason) == (("bash", "-c", line), LaunchReason.REQUESTED)


@pytest.mark.parametrize("wrapper", ["gosu me", "numactl -N 0", "timeout 9", "nice", "conda run"])
def test_preparation_below_a_wrapper_is_not_split(wrapper: str) -> None:
    command = [*wrapper.split(), "bash", "-c", "cd x; python t.py"]
    with pytest.raises(CannotUnwrap, match="around the shell"):
        decide(command)


def test_value_that_changes_the_structure_of_the_line_prevents_the_split() -> None:
    line = bash("cd /app && python train.py $(ARGS)")
    assert decide(line, ARGS="--lr 0.1 --name a/b").reason is LaunchReason.PREPARATION_SPLIT
    with pytest.raises(CannotUnwrap, match=r"the value of \$\(ARGS\)"):
        decide(line, ARGS="; rm -r x")


def test_setup_stands_before_the_other_options() -> None:
    spec = LaunchSpec(setup=("pip", "install", "$(X)"))
    found = trainer_command(["bash", "-c"], ["cd x; python t.py"], 8, spec)
    assert found.options == ("--setup", "3", "pip", "install", "$(X)", "--prepare", "--check")
    assert found.command[:3] == ("python3", "/elasticjob/launcher.pyz", "--setup")
    assert (found.words, found.args) == (("bash", "-c"), (f"cd x; {REPORT} python t.py",))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("su user -c 'cd x && python t.py'", "the shell line inside of su"),
        ("my-wrapper bash -c 'pip install y; python t.py'", "the shell line inside of bash"),
        ("env -S 'bash -c \"cd x && python t.py\"'", "the shell line inside of bash"),
        ("csh -c 'cd x && python t.py'", "the grammar of csh"),
        ("my-wrapper fish -c 'cd x; python t.py'", "the grammar of fish"),
        ("my-wrapper --verbose fish -c 'cd x; python t.py'", "the grammar of fish"),
        ("my-wrapper --quiet pwsh -NoLogo -Command 'cd x; python t.py'", "the grammar of pwsh"),
        ("my-wrapper -- perl -we 'system(\"python t.py\")'", "the grammar of perl"),
        ("conda run -n e script -qc 'cd x; python t.py'", "the shell line inside of script"),
    ],
)
def test_shell_line_inside_of_a_command_is_not_run_once_for_each_worker(
    command: str, reason: str
) -> None:
    with pytest.raises(CannotUnwrap, match=f"because of {reason}"):
        decide(command)
    assert decide(command, 1).reason is LaunchReason.SINGLE_WORKER


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["bash", "-c", "cd x", "&&", "python", "t.py"], "bash -c runs one word, and '&&' stands"),
        (["python", "t.py", "&&", "echo", "x"], "'&&' is an argument here"),
        (["gosu", "me", "python", "t.py", ">", "log"], "'>' is an argument here"),
        (["python", "t.py", "2>&1"], "'2>&1' is an argument here"),
        (["find", ".", "-name", "x", ";", "./train"], "';' is an argument here"),
        (["find", ".", "-exec", "rm", "{}", ";", ";", "./train"], "';' is an argument here"),
        (["find", ".", "-exec", "rm", "{}", "&&", "./train"], "'&&' is an argument here"),
        (["cd", "x", "&&", "python", "t.py"], "cd is a command of a shell"),
        (["tini", "--", "source", "x"], "source is a command of a shell"),
        (["python t.py --lr 1"], "the program 'python t.py --lr 1' contains spaces"),
        (["torchrun t.py"], "contains spaces: write each word as an item of its own"),
        (["/bin/bash -c 'cd x'"], "contains spaces"),
        (["./train --lr 1"], "contains spaces"),
        (["my-train config.yaml"], "contains spaces"),
        (["/usr/bin/env torchrun t.py"], "contains spaces"),
        (["bash"], "bash is given no script and no line after -c: name what it is to run"),
        (["bash", "-c"], "bash is given no script"),
        (["sh", "-ec", "# only this\n"], "the line of sh -c has no command"),
        (["tini", "--", "python", "-u"], "python is given no script and no module"),
        (["NCCL_DEBUG=INFO", "torchrun", "t.py"], "is an assignment, which only a shell"),
        (["python", "t.py", "--out", "$OUT_DIR/x"], "'$OUT_DIR/x' is passed on as it is written"),
        (["python", "t.py", "--out=${OUT_DIR}"], "write $(OUT_DIR), which is replaced by"),
        (["$HOME/bin/python", "t.py"], "write $(HOME)"),
        (["gosu", "me", "python", "$SCRIPT"], "write $(SCRIPT)"),
        (["torchrun", "t.py", "--out", "$OUT"], "write $(OUT)"),
        (["torchrun", "--new-option", "$RANK", "t.py"], "write $(RANK)"),
        (["python", "~/train.py"], "~ in ~/train.py is a part of the name"),
        (["python", "train.py --lr 1"], "'train.py --lr 1' is one word"),
        (["python", "-m", "pkg.train --lr 1"], "'pkg.train --lr 1' is one word"),
        (["python", "train.py", "--lr 1"], "'--lr 1' is one word"),
        (["bash", "run.sh --lr 1"], "'run.sh --lr 1' is one word"),
        (["torchrun", "--nproc_per_node 8", "t.py"], "'--nproc_per_node 8' is one word"),
        (["sh", "-c", "python", "train.py"], "sh -c runs one word, 'python'"),
        (["bash", "-c", "torchrun", "--nproc=8", "t.py"], "bash -c runs one word, 'torchrun'"),
        (["bash", "-c", "cd /app;", "python", "t.py"], "bash -c runs one word, 'cd /app;'"),
        (["bash", "-c", "python t.py", "--lr", "1"], "bash -c runs one word, 'python t.py'"),
        (["env", "OUT=$OUT", "python", "t.py"], "write $(OUT)"),
        (["bash", "-c", "'torchrun t.py'"], "the quotes around 'torchrun t.py' make one word"),
        (["bash", "-c", '"cd /x && python t.py"'], "the quotes around 'cd /x && python t.py'"),
        (bash("nohup torchrun t.py > log 2>&1 &"), "the last command of the line runs in the back"),
        (bash("cd x; python t.py &\n"), "the last command of the line runs in the background"),
        (['"python"', "t.py"], 'the quotes in "python" are part of the word'),
        (["python", "'t.py'"], "the quotes in 't.py' are part of the word"),
        (["torchrun", "\\", "--nproc_per_node=8", "t.py"], "'\\' is an argument here"),
        (["torchrun", "--standalone", "--nnodes 1", "t.py"], "'--nnodes 1' is one word"),
        (["torchrun", "t.py", "--a=1", "--lr 1"], "'--lr 1' is one word"),
        (["“python”", "t.py"], "has a quote or a dash of typography"),
        (["python", "-u", "“t.py”"], "has a quote or a dash of typography"),
        (["torchrun", "—nnodes=1", "t.py"], "has a quote or a dash of typography"),
        (["python", "t.py", "\u2013\u2013lr", "1"], "has a quote or a dash of typography"),
        (["python", "t.py", "\\", "--lr"], "'\\' is an argument here"),
        (["python", "t.py", "out=$OUT"], "write $(OUT), which is"),
        (["python", "t.py", "--out", "$OUT"], "or $$OUT if the program is to read it as it is"),
        (["python", "t.py", "--out=${OUT}"], "or $${OUT} if the program"),
        (["", "python", "t.py"], "the program is an empty word"),
        (["python ", "t.py"], "the program 'python ' begins or ends with a space"),
        (["python", "t.py\n"], "'t.py\\n' begins or ends with a space"),
    ],
    ids=str,
)
def test_word_that_needs_a_shell_is_refused_unless_the_launch_is_requested(
    command: list[str], reason: str
) -> None:
    with pytest.raises(CannotUnwrap) as refused:
        decide(command)
    assert reason in str(refused.value)
    assert "or set spec.launch if the command is meant as it is" in str(refused.value)
    assert decide(command, launch=Launch.PER_NODE).reason is LaunchReason.REQUESTED
    if not any("torchrun" in word for word in command):  # which PerWorker refuses
        requested = decide(command, launch=Launch.PER_WORKER)
        assert (requested.mode, requested.reason) == (Launch.PER_WORKER, LaunchReason.REQUESTED)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "t.py", "--separator", "|"],
        ["python", "t.py", "--join", ";"],
        ["/my dir/bin/python", "t.py"],
        ["./my program", "t.py"],
        ["python", "--version"],
        ["bash", "-c", "python t.py", "name", "x"],
        ["python", "t.py", "a && b"],
        ["find", "/cache", "-name", "*.lock", "-exec", "rm", "{}", ";"],
        ["find", ".", "-execdir", "rm", "{}", ";", "-o", "-ok", "ls", ";", "-okdir", "ls", ";"],
        ["nice", "find", ".", "-exec", "./train", "{}", ";"],
        ["python", "t.py", "--extra-args", "--lr 1"],
        ["python", "t.py", "--prompt", "- one word"],
        ["awk", "$NF"],
        ["torchrun", "--node_rank=$RANK", "t.py"],
        ["torchrun", "t.py", "--extra-args", "--lr 1"],
        ["torchrun", "t.py", "--opts", "a", "--lr 1"],
        ["python", "t.py", "--opts", "a", "--lr 1"],
        ["python", "t.py", "--text", "“你好”"],
        ["python", "t.py", "“你好”"],
        ["python", "t.py", "--stop", "\u2019s"],
        ["python", "t.py", "--text", "—"],
        ["python", "t.py", "--text", "—no"],
        ["python", "t.py", "--sep", "\\"],
        ["python", "t.py", "key=${NAME}", "model.name=${MODEL}", "out=${OUT_DIR}/x"],
        ["python", "t.py", "--out", "$$OUT", "--in=$${IN}"],
    ],
    ids=str,
)
def test_word_that_may_be_an_argument_is_kept(command: list[str]) -> None:
    script = command.index("t.py") if command[0] == "torchrun" else 0
    started = ["python3", "-u", *command[script:]] if script else command
    assert decide(command).words == tuple(started)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("/app/train --lr 1", "/app/train"),
        ("gosu me nice -n 5 ./train", "./train"),
        ("bash -ec 'exec ./train --x'", "./train"),
        ("tini -- bash -c 'A=b my-train'", "my-train"),
        (bash("cd x; numactl -N 0 ./train"), "./train"),
        ("$(ROOT)/train", ""),
        ("python train.py", ""),
        ("coverage run train.py", ""),
        (bash("python train.py | tee log"), ""),
        (bash('cd x && exec "$@"'), ""),
    ],
    ids=str,
)
def test_launcher_checks_the_file_of_an_unknown_program(
    command: str | list[str], program: str
) -> None:
    options = decide(command, 1).options
    assert options[-2:] == (("--program", program) if program else options[-2:])
    assert ("--program" in options) == bool(program)
    assert "--program" not in decide(command, 1, Launch.PER_WORKER).options


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("torchrun --nproc-per-node=2 train.py", "set spec.nprocPerNode to 2"),
        ("torchrun --nnodes", "--nnodes must have a value"),
        ("torchrun --nnodes=1", "must be given a script"),
        ("torchrun", "must be given a script"),
    ],
)
def test_wrong_command_is_refused(command: str, reason: str) -> None:
    with pytest.raises(CannotUnwrap, match=reason):
        decide(command)


@pytest.mark.parametrize(
    "command",
    ["python train.py", "torchrun train.py", bash("cd x; python t.py"), bash("exec python t.py")],
    ids=str,
)
def test_launcher_checks_python_files_unless_the_launch_is_requested(
    command: str | list[str],
) -> None:
    for workers, nodes in ((8, 1), (1, 2), (None, 1)):
        assert "--check" in decide(command, workers, nodes=nodes).options
    assert "--check" not in decide(command, 1, nodes=1).options
    one = LaunchSpec(single=True)
    words = shlex.split(command) if isinstance(command, str) else command
    assert "--check" not in trainer_command(words, (), None, one).options
    for launch in (Launch.PER_NODE, Launch.PER_WORKER):
        if "torchrun" not in command or launch is Launch.PER_NODE:
            assert "--check" not in decide(command, 8, launch).options


def test_line_of_one_worker_on_several_nodes_is_checked() -> None:
    found = decide(bash("python train.py | tee log"), 1, nodes=2)
    assert found.reason is LaunchReason.SINGLE_WORKER
    assert found.options == ("--check",)


@pytest.mark.parametrize("command", ["python run_all.py", "torchrun run_all.py"])
def test_program_that_is_known_to_start_a_launcher_runs_once_for_each_pod(command: str) -> None:
    text = "run_all.py, line 2 starts torchrun"
    found = trainer_command(command.split(), (), 8, LaunchSpec(nested=text))
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_FOUND)
    assert (found.message, found.words, found.options) == (text, tuple(command.split()), ())
    requested = LaunchSpec(Launch.PER_WORKER, nested=text)
    assert trainer_command(command.split(), (), 8, requested).mode is Launch.PER_WORKER
