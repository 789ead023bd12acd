"""Launch of commands of training projects, images and manifests, by the documented rules.

A command that begins with `$ ` is a list of words; another one is the line of `bash -c`.
"""

from __future__ import annotations

import shlex

import pytest

from elasticjob_launcher.command_line.programs import launcher_of_words, program_words
from elasticjob_operator.domain.manifests.torchrun import CannotUnwrap
from elasticjob_operator.domain.manifests.trainer_command import (
    LaunchSpec,
    TrainerCommand,
    trainer_command,
)
from elasticjob_operator.model.types import Launch, LaunchReason


def words_of(command: str) -> list[str]:
    if command.startswith("$ "):
        return shlex.split(command.removeprefix("$ "))
    return ["bash", "-c", command]


def decide(command: str, workers: int | None = 8, nodes: int = 1) -> TrainerCommand:
    return trainer_command(words_of(command), (), workers, LaunchSpec(max_nodes=nodes))


PLAIN = [
    "$ python train.py config/train_shakespeare_char.py",
    "$ litgpt finetune_lora checkpoints/pythia-160m --data JSON --data.json_path x --devices 4",
    "llamafactory-cli export examples/merge_lora/llama3_lora_sft.yaml",
    "$ python tools/preprocess_data.py --input x.json --tokenizer-type GPT2BPE --workers 8",
    "$ python examples/nlp/language_modeling/megatron_gpt_pretraining.py trainer.devices=8 "
    "trainer.num_nodes=2",
    "$ ds_report",
    "$ yolo detect train data=coco8.yaml model=yolo11n.pt epochs=100 imgsz=640 device=0,1",
    "$ python train.py --img 640 --epochs 3 --data coco128.yaml --weights yolov5s.pt --device 0",
    "$ python tools/train_net.py --num-gpus 8 --config-file c.yaml SOLVER.BASE_LR 0.0025",
    "$ ./tools/train_net.py --num-gpus 8 --config-file configs/x.yaml --eval-only",
    "$ python tools/plain_train_net.py --num-gpus 8 --num-machines 2 --machine-rank 0 "
    "--dist-url tcp://h:1",
    "$ python tools/lazyconfig_train_net.py --config-file c.py --num-gpus 8",
    "CUDA_VISIBLE_DEVICES=0 fairseq-train data-bin/iwslt14 --arch transformer_iwslt_de_en",
    "$ python -m open_clip_train.main --train-data=x.csv --batch-size=128",
    "$ python main.py fit --config configs/x.yaml --trainer.num_nodes=2 --trainer.strategy=ddp",
    "$ mamba run -n x python -u t.py",
    "$ uv run --no-project --with torch t.py",
    "$ nsys profile -w true -t cuda,nvtx,osrt,cudnn,cublas -s cpu -o nsys.%h "
    "--capture-range=cudaProfilerApi -x true python t.py",
    "$ numactl --interleave=all python t.py",
    "numactl --cpunodebind=$LOCAL_RANK --membind=$LOCAL_RANK python t.py",
    "$ dumb-init --rewrite 15:2 python t.py",
    "$ /usr/bin/env -i HOME=/tmp python t.py",
    "$ xvfb-run -s '-screen 0 1400x900x24' python t.py",
    "$ ncu -o prof --set full -k regex:gemm python t.py",
    "$ python -m torch.utils.bottleneck t.py",
    "$ python -m scalene --outfile x.html t.py",
    "$ kernprof -l -v t.py",
    "$ apptainer exec --nv --bind /data:/data img.sif python t.py",
    "exec python /app/train.py $(EXTRA_ARGS)",
    "$ python -OO t.py",
    "$ python -I -m pkg.train --config c.yaml",
    "$ python -m maxtext.train configs/base.yml run_name=x",
    "$ bash -c 'exec python t.py \"$@\"' -- --lr 1",
    "$ chrt -f 50 python t.py",
    "$ setarch -R python t.py",
    "$ catchsegv python t.py",
    "$ flock /tmp/lock python t.py",
    "$ python train_dreambooth.py --instance_prompt 'a photo of accelerate launch'",
    "$ python examples/unsloth_sft.py --model unsloth/llama-3-8b",
    "$ python scripts/train.py experiment=torchrun +launcher=deepspeed",
    "$ pl_train --launcher slurm",
    "$ python -m pytorch_lightning.cli fit --trainer.accelerator gpu",
    "$ python -m flair.trainers --corpus x",
    "$ speechbrain-train hparams/train.yaml --data_folder=/x",
    "$ python train.py hparams/train.yaml --distributed_launch --distributed_backend=nccl",
    "$ onmt_train -config config.yaml",
    "$ python -m espnet2.bin.asr_train --ngpu 8 --multiprocessing_distributed false",
    "$ mlagents-learn config/ppo.yaml --run-id=x",
    "$ rlgpu-train task=Ant headless=True",
    "$ accelerate estimate-memory bert-base-cased",
    "$ trl env",
    "$ tune validate c.yaml",
    "$ axolotl merge-lora c.yml",
    "$ lightning-cli fit -c c.yaml --trainer.num_nodes 2",
    "python $(which accelerate) env",
    "python $(which train.py) launch accelerate",
    "$ pipenv run python train.py",
    "$ mise exec -- python train.py",
    "$(which python) train.py",
    "`command -v python3` -m pkg.train --lr 1",
    "$ flock /tmp/l -c 'python t.py'",
    "$ doppler run -c dev -- python t.py",
    "$ nsys profile --stats false --sample none python t.py",
    "$ runuser -u me -- python t.py -c c.yaml",
    "$ python -m pyinstrument -o p.html t.py",
]

REMOVED = [
    "$ torchrun --nproc_per_node=8 --rdzv_backend c10d --rdzv_endpoint=localhost:0 "
    "--local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --job.config_file c.toml",
    "$ torchrun --standalone --nproc_per_node=8 train.py --compile=False",
    "$ accelerate launch -m axolotl.cli.train examples/x.yml --deepspeed zero1.json",
    "$ torchrun --nproc_per_node=8 swift/cli/sft.py --model x",
    "$ torchrun --nproc-per-node 8 xtuner/v1/train/cli/sft.py --config c.py",
    "$ torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer x=y",
    "$ torchrun --nproc_per_node=8 /opt/NeMo/examples/asr/x.py --config-path=conf",
    "$ torchrun --standalone --nproc_per_node 8 train.py --plugin gemini",
    "$ accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0 "
    "--main_process_ip h --main_process_port 29500 train.py",
    "$ torchrun --nproc_per_node=8 train.py --data-dir /imagenet --model resnet50",
    "$ python -m torch.distributed.run --nproc_per_node 8 train.py --batch 64 --device 0,1",
    "$ torchrun --no_python --nproc_per_node 8 fairseq-train data-bin/x",
    "$ torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr h run_clm.py --do_train",
    "$ python -m torch.distributed.run --nproc-per-node=8 run_glue.py --deepspeed ds.json",
    "$ env LD_PRELOAD=/usr/lib/libjemalloc.so.2 torchrun t.py",
    "$ python3 -m accelerate.commands.launch --num_processes 8 t.py",
    "$ torchrun --nproc_per_node gpu t.py",
    "$ torchrun --nproc-per-node=auto --max-restarts=3 --rdzv-id=x --rdzv-backend=etcd-v2 "
    "--rdzv-endpoint=h:2379 t.py",
    "$ torchrun --nnodes 1:4 --nproc_per_node 8 --monitor-interval 5 --log-dir /logs -r 3 t.py",
    "$ torchrun --module pkg.train --lr 1",
    "$ /opt/conda/envs/x/bin/accelerate launch --mixed_precision bf16 --num_processes 8 t.py",
]

OPTIONS = [
    "$ accelerate launch --config_file configs/fsdp.yaml train.py",
    "$ accelerate launch --config_file=accelerate_configs/deepspeed_zero3.yaml --num_processes 8 "
    "trl/scripts/dpo.py --model x",
    "$ accelerate launch --use_fsdp --fsdp_sharding_strategy 1 train.py",
    "$ python -m torch.distributed.launch --nproc_per_node 8 --master_port 9527 train.py --sync-bn",
    "$ accelerate launch --use_deepspeed --deepspeed_config_file ds.json t.py",
    "$ accelerate launch --use_megatron_lm t.py",
]

FOUND = [
    # Text and speech models.
    ('PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True" torchrun --nproc_per_node=${NGPU} '
     '-m torchtitan.train --job.config_file ${CONFIG_FILE} $overrides', "torchrun"),
    ("python data/openwebtext/prepare.py && torchrun --standalone --nproc_per_node=8 train.py",
     "torchrun"),
    ("$ fabric run --accelerator=cuda --devices=8 --num-nodes=2 --main-address=h train.py",
     "fabric run"),
    ("$ axolotl train examples/llama-3/fft-8b.yaml --launcher accelerate", "axolotl"),
    ("python -m axolotl.cli.preprocess c.yml && accelerate launch -m axolotl.cli.train c.yml",
     "accelerate launch"),
    ('CUDA_VISIBLE_DEVICES="" axolotl preprocess c.yml; axolotl train c.yml', "axolotl"),
    ("llamafactory-cli train examples/train_lora/qwen3_lora_sft.yaml", "llamafactory-cli"),
    ("$ env DISABLE_VERSION_CHECK=1 FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=1 MASTER_ADDR=h "
     "llamafactory-cli train x.yaml", "llamafactory-cli"),
    ("CUDA_VISIBLE_DEVICES=0,1 swift sft --model Qwen/Qwen2.5-7B --train_type lora", "swift"),
    ("swift rlhf --rlhf_type grpo --model x --deepspeed zero3", "swift"),
    ("pip install ms-swift -U && swift sft --model x", "swift"),
    ("$ megatron pt --mcore_model x", "swift"),
    ("NPROC_PER_NODE=8 NNODES=2 NODE_RANK=$RANK PORT=29600 ADDR=$MASTER_ADDR xtuner train x "
     "--deepspeed deepspeed_zero3", "xtuner train"),
    ('ray job submit --address="http://127.0.0.1:8265" --runtime-env-json=\'{"a": "b"}\' -- '
     "python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1", "ray"),
    ("ray start --head --node-ip-address 0.0.0.0 --num-gpus 8 && python3 -m x", "ray"),
    ("$ ray start --address=h:6379 --block", "ray"),
    ("read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n   --max_len 2048\nEOF\n"
     'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $training_commands\nfi', "deepspeed"),
    ("PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo a=$HOME/x 2>&1 | tee verl.log", "ray"),
    ("set -x\nnproc_per_node=$1\nsave_path=$2\nshift 2\ntorchrun --nproc_per_node=$nproc_per_node "
     "-m verl.trainer.fsdp_sft_trainer $@", "torchrun"),
    ("export CUDA_DEVICE_MAX_CONNECTIONS=1\nGPUS_PER_NODE=8\nDISTRIBUTED_ARGS=(\n"
     "    --nproc_per_node $GPUS_PER_NODE\n    --nnodes $NUM_NODES\n)\n"
     "torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]}", "torchrun"),
    ('DISTRIBUTED_ARGS="--nproc_per_node 8"; python -m torch.distributed.launch '
     "$DISTRIBUTED_ARGS pretrain_bert.py $ARGS", "torch.distributed.launch"),
    ("$ nemo llm pretrain --factory nemotron3_4b --executor local", "nemo"),
    ('srun --container-image=x bash -c "cd /opt/NeMo; torchrun x.py"', "srun"),
    ("$ deepspeed --num_gpus=8 --master_port 29500 train.py --deepspeed ds_config.json",
     "deepspeed"),
    ("$ deepspeed --hostfile=/job/hostfile --no_ssh --node_rank=0 --master_addr=h train.py",
     "deepspeed"),
    ("$ deepspeed --include localhost:0,1 --module pkg.train", "deepspeed"),
    ("ds_report && deepspeed main.py", "deepspeed"),
    ("$ composer --nproc 8 --world_size 16 --node_rank 0 --master_addr h train.py x.yaml",
     "composer"),
    ("python data_prep/convert_dataset_hf.py --dataset c4 && composer train/train.py x.yaml",
     "composer"),
    ("$ colossalai run --nproc_per_node 8 --hostfile hosts.txt train.py", "colossalai run"),
    ("accelerate config default && accelerate launch train.py", "accelerate launch"),
    ('export MODEL_NAME="x/y"\nexport OUTPUT_DIR="out"\n\naccelerate launch '
     '--mixed_precision="fp16" train_text_to_image.py \\\n  --name=$MODEL_NAME \\\n  '
     "--output_dir=${OUTPUT_DIR}", "accelerate launch"),
    ("trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name x --output_dir y", "trl"),
    ("tune download meta-llama/x --output-dir /tmp/x && tune run --nproc_per_node 8 "
     "lora_finetune_distributed --config llama3/8B_lora", "tune run"),
    ("$ tune run lora_finetune_single_device --config x", "tune run"),
    ("run_cmd=\"torchrun --nproc_per_node=8 t.py\"\necho ${run_cmd}\neval ${run_cmd}", "torchrun"),
    ('export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8"\nexport '
     "CMD=\"$(pwd)/pretrain_gpt.py --x\"\nclear; srun --jobid $SLURM_JOBID bash -c '$LAUNCHER "
     "--node_rank $SLURM_PROCID $CMD'", "srun"),
    # Pictures.
    ('PYTHONPATH="$(dirname $0)/..":$PYTHONPATH python -m torch.distributed.launch '
     "--nnodes=$NNODES --node_rank=$NODE_RANK --nproc_per_node=$GPUS $(dirname \"$0\")/train.py "
     "$CONFIG --launcher pytorch ${@:3}", "torch.distributed.launch"),
    ("$ mim train mmdet configs/x.py --gpus 8 --launcher slurm --partition p", "mim train"),
    ("cd open_clip/src && torchrun --nproc_per_node 4 -m open_clip_train.main --train-data "
     "'x-{0000..1000}.tar' --model RN50", "torchrun"),
    ("$ srun --cpu_bind=v --accel-bind=gn python -u src/open_clip_train/main.py", "srun"),
    ('export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
     "srun python train.py", "srun"),
    ("$ mpirun --allow-run-as-root -np 8 -bind-to none -x NCCL_DEBUG=INFO python t.py", "mpirun"),
    ("$ horovodrun -np 8 -H localhost:8 python t.py", "horovodrun"),
    # Wrappers.
    ("$ conda run --no-capture-output -n train torchrun --nproc_per_node=8 t.py", "torchrun"),
    ("$ uv run torchrun --standalone t.py", "torchrun"),
    ("uv sync && uv run accelerate launch t.py", "accelerate launch"),
    ("source .venv/bin/activate && uv pip install -e . && torchrun t.py", "torchrun"),
    ("$ poetry run torchrun t.py", "torchrun"),
    ("$ pixi run -e gpu torchrun t.py", "torchrun"),
    ("$ nsys profile --trace=cuda torchrun --nproc_per_node=8 t.py", "torchrun"),
    ("$ tini -s -- bash -c 'torchrun t.py'", "torchrun"),
    ("$ gosu 1000:1000 accelerate launch t.py", "accelerate launch"),
    ("$ su-exec nobody torchrun t.py", "torchrun"),
    ("$ env -S 'PYTHONUNBUFFERED=1 torchrun --nproc_per_node=8 t.py'", "torchrun"),
    ("$ /usr/bin/time -f %e torchrun t.py", "torchrun"),
    ("$ stdbuf -o0 -e0 accelerate launch t.py", "accelerate launch"),
    ("$ strace -f -e trace=open torchrun t.py", "torchrun"),
    ("$ singularity exec --nv img.sif torchrun t.py", "torchrun"),
    ("$ docker run --gpus all img torchrun t.py", "torchrun"),
    ("$ numactl -C 0-31 -m 0 deepspeed t.py", "deepspeed"),
    ("$ sudo -E env PATH=/opt/bin:/bin torchrun t.py", "torchrun"),
    ("$ prlimit --memlock=-1 torchrun t.py", "torchrun"),
    ("$ unshare -n -- torchrun t.py", "torchrun"),
    ("$ setarch -R torchrun t.py", "torchrun"),
    ("setarch $(uname -m) -R torchrun t.py", "torchrun"),
    ("$ setarch x86_64 --addr-no-randomize accelerate launch t.py", "accelerate launch"),
    # Lines.
    ("cat > train.py <<'EOF'\nimport torch\nEOF\ntorchrun --nproc_per_node=2 train.py", "torchrun"),
    ("echo t.py | xargs torchrun", "torchrun"),
    ("exec torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) t.py", "torchrun"),
    ("source /opt/conda/etc/profile.d/conda.sh && conda activate train && torchrun t.py",
     "torchrun"),
    ("until nc -z $MASTER_ADDR 29500; do sleep 1; done; torchrun t.py", "torchrun"),
    ('trap "kill -TERM $PID" TERM INT; torchrun t.py & PID=$!; wait $PID', "torchrun"),
    ("tensorboard --logdir /logs --bind_all & torchrun t.py", "torchrun"),
    ("nvidia-smi dmon -s u -o T > gpu.log & accelerate launch t.py; kill %1", "accelerate launch"),
    ("(while true; do nvidia-smi; sleep 60; done) & torchrun t.py", "torchrun"),
    ("python -m http.server 8080 & torchrun t.py", "torchrun"),
    ("wandb login $WANDB_API_KEY; torchrun t.py", "torchrun"),
    ("aws s3 sync s3://b/data /data && torchrun t.py && aws s3 sync /out s3://b/out", "torchrun"),
    ('if [ "$RANK" = "0" ]; then python download.py; fi; torchrun t.py', "torchrun"),
    ("NODE_RANK=${HOSTNAME##*-}; torchrun --node_rank=$NODE_RANK --nnodes=4 t.py", "torchrun"),
    ('NUM_GPUS=$(python -c "import torch; print(torch.cuda.device_count())"); torchrun '
     "--nproc_per_node=$NUM_GPUS t.py", "torchrun"),
    ("IFS=',' read -ra A <<< \"$CUDA_VISIBLE_DEVICES\"; torchrun --nproc_per_node=${#A[@]} t.py",
     "torchrun"),
    ("torchrun t.py 2>&1 | tee log; exit ${PIPESTATUS[0]}", "torchrun"),
    ("MODE=${MODE:-train}; case $MODE in train) torchrun t.py;; eval) python e.py;; esac",
     "torchrun"),
    ("[[ $NODE_RANK -eq 0 ]] && ray start --head --block || ray start --address=$A:6379 --block",
     "ray"),
    ("for i in 1 2 3; do torchrun t.py && break || sleep 15; done", "torchrun"),
    ("function train() {\n  torchrun t.py\n}\ntrain", "torchrun"),
    ("set -o pipefail; { time torchrun t.py; } 2>&1 | tee log", "torchrun"),
    ("cd /app; [ -n \"$DEBUG\" ] && L='python -m pdb' || L=torchrun; $L t.py", "torchrun"),
    ("C=torchrun; [ $A ] && C=python; out=$($C t.py); echo $out", "torchrun"),
    ('C=(torchrun); [ $A ] && C=(python); "${C[@]}" t.py', "torchrun"),
    ('C=torchrun; [ $A ] && C=python; B=($C t.py); "${B[@]}"', "torchrun"),
    ("timeout -s KILL 24h bash -c 'while ! torchrun t.py; do sleep 5; done'", "torchrun"),
    ("sleep 5 && exec tini -- torchrun t.py", "torchrun"),
    ("$ nsys profile --stats true torchrun t.py", "torchrun"),
    ("$ nsys profile --gpu-metrics-device all --python-sampling true torchrun t.py", "torchrun"),
    ("cat args | xargs --max-args 1 torchrun", "torchrun"),
    ("$ flock -x -n /tmp/l -c 'torchrun t.py'", "torchrun"),
    ("$ doppler run --command 'torchrun t.py'", "torchrun"),
    ("$ su me --command='cd /app && torchrun t.py'", "torchrun"),
    # Options of the program behind a wrapper, and of the wrapper itself.
    ("$ runuser -u me -- torchrun t.py -c c.yaml", "torchrun"),
    ("$ runuser me -s /bin/bash -c 'cd /app && torchrun t.py'", "torchrun"),
    ("$ flock /tmp/l torchrun t.py -c c.yaml", "torchrun"),
    ("$ flock --wait 5 /tmp/l -c 'torchrun t.py'", "torchrun"),
    ("$ doppler run -- torchrun t.py --command x", "torchrun"),
    ("$ infisical run --projectId x --command 'a && torchrun t.py'", "torchrun"),
    ("$ perf record -F 99 -g torchrun t.py", "torchrun"),
    ("$ perf record --call-graph dwarf torchrun t.py", "torchrun"),
    ("$ pdm run -s torchrun t.py", "torchrun"),
    ("$ ncu -f torchrun t.py", "torchrun"),
    ("$ sudo -D /app torchrun t.py", "torchrun"),
    ("$ memray run -fo x.bin -m torch.distributed.run t.py", "torchrun"),
    ("$ gdb -nx torchrun t.py", "torchrun"),
    ("$ coverage run --concurrency thread -m torch.distributed.run t.py", "torchrun"),
    ("$ python -m pyinstrument -o p.html -m torch.distributed.run t.py", "torchrun"),
    ("$ python -m memory_profiler -o x -m torch.distributed.run t.py", "torchrun"),
    ("$ python -m pudb -m torch.distributed.run t.py", "torchrun"),
    ("$ python -m ray.scripts.scripts start --head", "ray"),
    ("$ env -i torchrun t.py", "torchrun"),
    ("$ env - PATH=/bin accelerate launch t.py", "accelerate launch"),
    ("D=$(which deepspeed); $D --num_gpus 8 t.py", "deepspeed"),
    ('ACC="$(command -v accelerate)" && "$ACC" launch t.py', "accelerate launch"),
    ("TORCHRUN=`type -P torchrun`; exec $TORCHRUN t.py", "torchrun"),
    ("P=$(which python); $P -m torch.distributed.run t.py", "torchrun"),
    ('python3 "$(command -v accelerate)" launch t.py', "accelerate launch"),
    ("$(which accelerate) launch --config_file c.yaml t.py", "accelerate launch"),
    ("python $(which llamafactory-cli) train c.yaml", "llamafactory-cli"),
    ("bash -lc 'module load cuda && torchrun t.py'", "torchrun"),
    ('bash -c "$(cat <<EOF\ntorchrun t.py\nEOF\n)"', "torchrun"),
]  # fmt: skip

SCRIPT = [
    'NGPU=8 LOG_RANK=0 CONFIG_FILE="./x.toml" ./run_train.sh --compile.enable',
    "pip install -r requirements.txt && python data/cached_fineweb10B.py 8 && ./run.sh",
    "$ ./distributed_train.sh 4 --data-dir /imagenet --model seresnet34",
    "$ bash distributed_train.sh 8 /imagenet --model x --sched cosine",
    "$ bash ./tools/dist_train.sh configs/x.py 8",
    "CUDA_VISIBLE_DEVICES=0,1,2,3 PORT=29500 ./tools/dist_train.sh configs/x.py 4",
    "NNODES=2 NODE_RANK=0 PORT=29500 MASTER_ADDR=$MASTER_ADDR sh tools/dist_train.sh c.py 8",
    "GPUS=16 ./tools/slurm_train.sh dev mask_r50 configs/x.py /nfs/x",
    "$ pixi run --frozen train",
    "$ /bin/sh /app/start",
    "$ conda run -n x bash scripts/train.sh",
    "cd /workspace/Megatron && CHECKPOINT=/x bash -x examples/pretrain.sh 2>&1 | tee log",
    "$ poetry run bash run.sh",
    "$ make -C /app train GPUS=8",
    "cp /config/run.sh . && chmod +x run.sh && exec ./run.sh",
    "source ./train_env.sh && bash train.sh",
    "$ supervisord -n -c /etc/supervisord.conf",
    "$ honcho start train",
    "$ devbox run train",
    "$ mise run train",
    "$ pipenv run train",
    "$ earthly +train",
]

SPLIT = [
    ("litgpt download pythia-14m && ", "litgpt pretrain pythia-14m --config c.yaml"),
    ("fairseq-preprocess --source-lang de --trainpref x && ", "fairseq-train data-bin/x --arch a"),
    ("uv sync --frozen && ", "uv run python t.py"),
    ("poetry install --no-root && ", "poetry run python -m pkg.train"),
    ("cat > train.py <<'EOF'\nimport torch\nprint(1)\nEOF\n", "python train.py"),
    ("set -euo pipefail; exec ", "python -u t.py"),
    ("source activate base && ", "python t.py"),
    (". /opt/conda/etc/profile.d/conda.sh; conda activate x; exec ", "python t.py --lr 1"),
    ("ulimit -l unlimited -n 1048576; ulimit -s unlimited && exec ", "python t.py"),
    ("cd /workspace && ", 'python -m pkg.train "$@"'),
    ("huggingface-cli login --token $T && huggingface-cli download x && ", "python t.py"),
    ("aws s3 cp s3://b/x /data --recursive && ", "python t.py"),
    ("gsutil -m cp -r gs://x . ; ", "python3 t.py"),
    ("git clone https://x/y.git && cd y && git checkout v1 && pip install -e '.[gpu]' && ",
     "python -m y.train"),
    ("[ -d /data/x ] || tar xf x.tar -C /data; ", "python t.py"),
    ('test -f ckpt/last.pt && R="--resume ckpt/last.pt"; ', "python t.py $R"),
    ("export OMP_NUM_THREADS=8 NCCL_DEBUG=INFO; export NCCL_SOCKET_IFNAME=eth0; ", "python t.py"),
    ('python -c "import torch; torch.cuda.init()" && exec ', "python t.py"),
    ("set -a; source .env; set +a; ", "python t.py"),
    ("export $(grep -v '^#' .env | xargs) && ", "python t.py"),
    ('eval "$(micromamba shell hook --shell bash)" && micromamba activate x && ', "python t.py"),
    ("pushd /app > /dev/null; ", "python t.py"),
    ("pip install x;", "python t.py"),
    ("umask 0002 && newgrp 2>/dev/null; ", "python t.py"),
    ("sleep $((RANDOM % 10)); ", "python t.py"),
    ("nvidia-smi -pm 1 || true\nnvidia-smi topo -m\n", "python t.py --data '/x/{0..9}.tar'"),
    ("sudo sysctl -w vm.max_map_count=262144; ", "python t.py"),
    ("ldconfig && python -m pip install --upgrade pip && ", "python t.py"),
    ("export PATH=/opt/bin:$PATH PYTHONPATH=/app:${PYTHONPATH:-}\ncd /app\n",
     "numactl --interleave=all python -m pkg.train"),
    ("python -m torch.distributed.run --help && ", "python t.py"),
    ("python train.py --version; ", "python train.py"),
    ("read -r X < /cfg; ", "python t.py $X"),
    ("cd /app; P=$(which python3); ", "$P -u t.py"),
    ("ln -sfn /data data && ", "yolo train data=x.yaml model=m.pt"),
]  # fmt: skip

WHOLE = [
    ("n=0; until [ $n -ge 5 ]; do python t.py && break; n=$((n+1)); sleep 5; done", "until"),
    ("until pg_isready; do sleep 1; done; python t.py", "until"),
    ("trap cleanup EXIT; python t.py", "a trap"),
    ("nohup tensorboard --logdir /logs > /dev/null 2>&1 &\npython t.py", "a background job"),
    ("aws s3 sync s3://b/x /data && python t.py && aws s3 sync /out s3://b/out",
     "a Python program before the last command (t.py)"),
    ("mkdir -p /logs && python t.py |& tee /logs/x; exit ${PIPESTATUS[0]}", "a pipeline"),
    ("python t.py 2>&1 | tee -a log; test ${PIPESTATUS[0]} -eq 0", "a pipeline"),
    ("python train.py & PID1=$!; python eval.py & wait $PID1", "a background job"),
    ("python t.py || exit 1", "a Python program before the last command (t.py)"),
    ('python -u t.py; echo "exit code $?"', "a Python program before the last command (t.py)"),
    ("xargs -n1 -P4 python convert.py < list.txt", "a redirection of the last command"),
    ("python - --lr 1 <<'EOF'\nimport my_train\nmy_train.main()\nEOF",
     "text after the last command"),
    ("$ flock /tmp/l -c 'cd x && python t.py'", "the shell line inside of flock"),
    ("tmux new -d -s t 'python t.py'; sleep infinity",
     "a last command that is not a program (sleep)"),
    ("pip install x; tail -f /dev/null", "a last command that is not a program (tail)"),
    ("for f in configs/*.yaml; do python t.py -c $f; done", "for"),
    ("if [ -f last.pt ]; then R=--resume; fi; python t.py $R", "if"),
    ("while ! curl -sf http://etcd:2379/health; do sleep 1; done; exec python t.py", "while"),
    ("dockerd & sleep 5; python t.py", "a background job"),
    ("( cd vendor && pip install . ) && python t.py", "a subshell"),
    ("wait_for() { until nc -z $1 $2; do sleep 1; done; }\nwait_for db 5432\npython t.py",
     "a function"),
]  # fmt: skip

REFUSED = [
    ("$ LD_PRELOAD=/x.so python t.py", "is an assignment, which only a shell understands"),
    ("$ cd /workspace && torchrun t.py", "cd is a command of a shell"),
    ("$ source activate x && python t.py", "source is a command of a shell"),
    ("$ ulimit -n 65536", "ulimit is a command of a shell"),
    ("$ python t.py | tee log", "is an argument here"),
    ("$ torchrun t.py > log", "is an argument here"),
    ("$ nohup python t.py &", "is an argument here"),
    ("$ 'source activate x && python t.py'", "contains spaces"),
    ("$ srun --jobid $SLURM_JOBID python t.py", "write $(SLURM_JOBID)"),
    ("$ bash -c 'torchrun' --nproc_per_node=8 t.py", "bash -c runs one word, 'torchrun'"),
    ("tensorboard --logdir x & torchrun t.py &", "runs in the background"),
    ("# python t.py", "has no command"),
    ("$ bash run.sh && python t.py", "'&&' is an argument here"),
    ("$ bash -x run.sh > log", "'>' is an argument here"),
    ("$ sh -x < run.sh", "'<' is an argument here"),
    ("$ torchrun --nproc_per_node=4 t.py", "set spec.nprocPerNode to 4"),
]
"""Commands that need a shell, or contradict the job."""


def test_table_is_large_and_names_each_command_once() -> None:
    tables = (FOUND, SPLIT, WHOLE, REFUSED)
    commands = [*PLAIN, *REMOVED, *OPTIONS, *SCRIPT, *(one[0] for table in tables for one in table)]
    assert len(commands) == len(set(commands)) > 200


@pytest.mark.parametrize("command", PLAIN)
def test_program_runs_for_each_worker(command: str) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.PLAIN_COMMAND)
    assert found.words == tuple(words_of(command))


@pytest.mark.parametrize("command", REMOVED)
def test_torchrun_and_accelerate_with_replaced_options_are_removed(command: str) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.LAUNCHER_REMOVED)
    assert not {"torchrun", "launch", "accelerate"}.intersection(found.words)


@pytest.mark.parametrize("command", OPTIONS)
def test_launcher_with_configuration_stays(command: str) -> None:
    found = decide(command)
    assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_OPTIONS)
    assert found.words == tuple(words_of(command))


@pytest.mark.parametrize(("command", "name"), FOUND, ids=[name for _, name in FOUND])
def test_launcher_in_a_command_runs_once_for_each_pod(command: str, name: str) -> None:
    for workers in (8, 1, None):
        found = decide(command, workers)
        assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.LAUNCHER_FOUND)
        assert found.message.startswith(name)
        assert (found.words, found.options) == (tuple(words_of(command)), ())
    try:
        assert decide(command, nodes=2).mode is Launch.PER_NODE
    except CannotUnwrap as error:
        assert f"{name} does not join" in str(error)  # noqa: PT017


@pytest.mark.parametrize("command", PLAIN)
def test_pod_finds_no_launcher_where_the_operator_finds_none(command: str) -> None:
    assert launcher_of_words(program_words(words_of(command))) is None


@pytest.mark.parametrize(("command", "name"), FOUND, ids=[name for _, name in FOUND])
def test_launcher_that_the_pod_finds_is_that_of_the_operator(command: str, name: str) -> None:
    launcher = launcher_of_words(program_words(words_of(command)))
    assert launcher is None or launcher.name == name


@pytest.mark.parametrize("command", SCRIPT)
def test_script_of_a_project_runs_once_for_each_pod(command: str) -> None:
    for nodes in (1, 2):
        found = decide(command, nodes=nodes)
        assert (found.mode, found.reason) == (Launch.PER_NODE, LaunchReason.SCRIPT_FILE)
        assert found.words == tuple(words_of(command))


@pytest.mark.parametrize(("before", "last"), SPLIT, ids=[last[:20] for _, last in SPLIT])
def test_preparation_of_a_project_is_split(before: str, last: str) -> None:
    for workers in (8, 1, None):
        found = decide(before + last, workers)
        assert (found.mode, found.reason) == (Launch.PER_WORKER, LaunchReason.PREPARATION_SPLIT)
        assert found.message.endswith(last)


@pytest.mark.parametrize(("command", "reason"), WHOLE, ids=[line[:30] for line, _ in WHOLE])
def test_line_that_cannot_be_split_needs_one_worker(command: str, reason: str) -> None:
    with pytest.raises(CannotUnwrap) as refused:
        decide(command)
    assert f"because of {reason}" in str(refused.value)
    assert decide(command, 1).reason is LaunchReason.SINGLE_WORKER


@pytest.mark.parametrize(("command", "reason"), REFUSED, ids=[one[:30] for one, _ in REFUSED])
def test_command_without_its_shell_or_against_the_job_is_refused(command: str, reason: str) -> None:
    with pytest.raises(CannotUnwrap) as refused:
        decide(command)
    assert reason in str(refused.value)
