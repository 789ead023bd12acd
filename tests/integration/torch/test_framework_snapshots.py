"""Callbacks of docs/no-step-lost.md in Trainer and Lightning: a kill changes no loss."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from bench.frameworks import interpreter
from elasticjob import layout
from tests.documentation import blocks_of
from tests.paths import ROOT

STEPS = 24
EPOCH = 10
COMMON = f"""
import os, sys
os.chdir(os.environ["FOLDER"])
os.environ["{layout.SNAPSHOT_FOLDER}"] = os.environ["FOLDER"]
import torch
from elasticjob import train
from elasticjob.train.data import ElasticLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 83
    def __getitem__(self, index):
        ids = torch.randint(17, (12,), generator=torch.Generator().manual_seed(index))
        return {{"input_ids": ids, "labels": ids.sum() % 4}}

def ended(step, loss):
    print("step", step, loss.item(), flush=True)
    killed(step)

def killed(at):
    if str(at) == os.environ["KILLED_AT"]:
        os.kill(os.getpid(), 9)

torch.set_num_threads(1)
torch.manual_seed(1)
loader = ElasticLoader(Data(), global_batch=8, seed=3)
"""
TRANSFORMERS = """
from transformers import (
    BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments,
)
# block
class Reporting(ElasticTrainer):
    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        ended(self.state.global_step + 1, loss)
        return loss

config = BertConfig(
    vocab_size=17, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=32, num_labels=4,
)
arguments = TrainingArguments(
    output_dir="unused", max_steps=24, save_strategy="no", logging_steps=100, report_to=[],
    use_cpu=True, disable_tqdm=True, learning_rate=2e-3,
)
trainer = Reporting(
    model=BertForSequenceClassification(config), args=arguments, train_dataset=Data(),
    callbacks=[Saving()],
)
trainer.train()
killed(-1)
"""
LIGHTNING = """
import lightning
# block
class Reporting(Saving):
    def on_train_batch_end(self, trainer, module, outputs, *others):
        super().on_train_batch_end(trainer, module, outputs, *others)
        ended(trainer.global_step, outputs["loss"])

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Embedding(17, 20), torch.nn.Dropout(0.1), torch.nn.Flatten(),
            torch.nn.Linear(240, 4),
        )
    def training_step(self, batch, _):
        logits = self.network(batch["input_ids"])
        return torch.nn.functional.cross_entropy(logits, batch["labels"])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_steps=24, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Reporting()],
    reload_dataloaders_every_n_epochs=1, use_distributed_sampler=False,
)
trainer.fit(Module(), loader)
killed(-1)
"""
SCRIPTS = {"transformers": TRANSFORMERS, "lightning": LIGHTNING}
PRELOADED = {
    "transformers": "transformers.trainer,transformers.models.bert.modeling_bert",
    "lightning": "lightning",
}
"""Modules that load all of a framework that its script uses; transformers' own is lazy."""

# The framework is imported once: each run is a fork.
FORKS = """
import importlib, os, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
script = compile(sys.stdin.read(), "train.py", "exec")
for folder, killed_at in zip(sys.argv[2::2], sys.argv[3::2]):
    child = os.fork()
    if not child:
        os.environ.update(KILLED_AT=killed_at, FOLDER=folder)
        exec(script, {"__name__": "__main__"})
        sys.exit()
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def losses(framework: str, runs: list[tuple[Path, int]]) -> list[list[tuple[int, str]]]:
    """Train in each folder to the last step, or to the kill in a step; return the losses."""
    names = {"transformers": "(TrainerCallback)", "lightning": "(lightning.Callback)"}
    blocks = blocks_of(ROOT / "docs" / "no-step-lost.md")
    (block,) = (each.text for each in blocks if names[framework] in each.text)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "sdk"),
        "OMP_NUM_THREADS": "1",
        layout.SNAPSHOTS: '{"everySteps": 1}',
    }
    program = [str(interpreter(framework)), "-W", "ignore", "-c", FORKS, PRELOADED[framework]]
    ran = subprocess.run(
        [*program, *(str(each) for run in runs for each in run)],
        env=env,
        input=COMMON + SCRIPTS[framework].replace("# block", block),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found: list[list[tuple[int, str]]] = []
    codes, steps = [], []
    for line in ran.stdout.splitlines():
        if line.startswith("step "):
            _, step, loss = line.split()
            steps.append((int(step), loss))
        elif line.startswith("ended "):
            codes.append(int(line.split()[1]))
            found, steps = [*found, steps], []
    assert codes == [-signal.SIGKILL if killed_at else 0 for _, killed_at in runs], ran.stderr
    return found


@pytest.mark.parametrize("framework", SCRIPTS)
def test_killed_training_repeats_its_losses(tmp_path: Path, framework: str) -> None:
    """The process is killed within an epoch, in the last step of one, and after the training."""
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    killed_at = (6, EPOCH, -1, 0)
    runs = [(tmp_path / "calm", 0), *((tmp_path / "killed", step) for step in killed_at)]
    calm, *killed = losses(framework, runs)
    assert [step for step, _ in calm] == list(range(1, STEPS + 1))
    told = [line for run in killed for line in run]
    assert {step for step, _ in told} == set(range(1, STEPS + 1))
    assert [line for line in told if line not in calm] == []
    assert len(told) <= STEPS + 2 * 3
