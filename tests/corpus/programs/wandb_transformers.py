"""Training of a language model: Trainer of transformers, rows of datasets, log of wandb."""

import os
from pathlib import Path

os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import corpus_probe
import datasets
import numpy as np
import torch.distributed as dist
import wandb
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

corpus_probe.imported()

TEXTS = [f"the {noun} {verb}" for noun in ("cat", "dog", "bird") for verb in ("sleeps", "eats")] * 8


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]"]
    trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    words.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")


def train(folder: Path) -> None:
    set_seed(7)
    os.environ["WANDB_DIR"] = str(folder)
    words = tokenizer()
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows = rows.map(lambda row: words(row["text"]), remove_columns=["text"], num_proc=2)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=len(words), n_positions=16)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_steps=2,
        dataloader_num_workers=1,
        report_to="wandb",
        run_name=folder.name,
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    trainer.train()
    print("trained", trainer.state.global_step, "steps")
    wandb.finish()
    dist.destroy_process_group()


def log_picture(folder: Path) -> None:
    with wandb.init(dir=folder, name=folder.name) as run:
        run.log({"sample": wandb.Image(np.zeros((4, 4, 3), "uint8"))})


if __name__ == "__main__":
    corpus_probe.run(train, again=log_picture, killed=True)
