"""Elastic training with Lightning: handwritten digits, on one worker or many.

The lines marked `elastic` are all that differs from a script for a fixed number of workers.
"""

from __future__ import annotations

import argparse
import os
import time

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elasticjob.train.integrations import LightningCallback, newest  # elastic


class Classifier(lightning.LightningModule):
    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.seconds = step_seconds
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        time.sleep(self.seconds)
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--folder", default="checkpoints")
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=local,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // local,  # elastic
        strategy="ddp",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningCallback(options.folder, every=50)],  # elastic
    )
    trainer.fit(
        Classifier(options.step_seconds),
        DataLoader(digits, batch_size=32, shuffle=True),
        ckpt_path=newest(options.folder),  # elastic
    )
    if trainer.is_global_zero:
        print(f"done at step {trainer.global_step}")


if __name__ == "__main__":
    main()
