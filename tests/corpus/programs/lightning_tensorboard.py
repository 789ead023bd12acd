"""Training of a regression with lightning, torchmetrics and a TensorBoard log."""

import os
from pathlib import Path

import corpus_probe
import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

corpus_probe.imported()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch, index):
        inputs, targets = batch
        found = self.layer(inputs)
        self.error(found, targets)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return torch.nn.functional.mse_loss(found, targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(folder: Path) -> None:
    lightning.seed_everything(11)
    inputs = torch.randn(64, 4)
    rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        strategy="ddp",
        max_epochs=2,
        logger=TensorBoardLogger(folder, name="log"),
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True)],
        default_root_dir=folder,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(Regression(), DataLoader(rows, batch_size=4, num_workers=1))
    print("error", float(trainer.callback_metrics["error_epoch"]))
    dist.destroy_process_group()


def log_again(folder: Path) -> None:
    metric = torchmetrics.MeanMetric()
    metric.update(torch.ones(2))
    with SummaryWriter(folder) as writer:
        writer.add_scalar("mean", metric.compute(), 1)


if __name__ == "__main__":
    corpus_probe.run(train, again=log_again, killed=True)
