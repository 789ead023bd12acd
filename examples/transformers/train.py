"""Elastic training with the Trainer of Hugging Face Transformers: digits as sequences of rows.

The lines marked `elastic` are all that differs from a script for a fixed number of workers.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from elasticjob.train.integrations import TransformersCallback, newest  # elastic


class Digits(torch.utils.data.Dataset[dict[str, Any]]):
    """Each image as 64 tokens, its pixels of 17 shades."""

    def __init__(self, step_seconds: float) -> None:
        self.images, self.labels = load_digits(return_X_y=True)
        self.seconds = step_seconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"input_ids": torch.tensor(self.images[index]).long(), "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", default="checkpoints")
    options = parser.parse_args()

    config = BertConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, num_labels=10,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        save_steps=50,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Digits(options.step_seconds / 4),
        callbacks=[TransformersCallback()],  # elastic
    )
    trainer.train(resume_from_checkpoint=newest(options.folder, "trainer_state.json"))  # elastic
    if trainer.is_world_process_zero():
        print(f"done at step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
