"""Training configured with hydra and omegaconf, tracked with mlflow in a local database."""

import functools
from pathlib import Path

import corpus_probe
import hydra
import mlflow
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

corpus_probe.imported()

ConfigStore.instance().store(
    name="train",
    node={
        "steps": 4,
        "optimizer": {"lr": 0.01, "weight_decay": "${eval_decay:0.1}"},
        "hydra": {"run": {"dir": "hydra/${oc.env:ELASTICJOB_ROUND}-${oc.env:RANK}"}},
    },
)
OmegaConf.register_new_resolver("eval_decay", lambda text: float(text) / 2)


def track(folder: Path, values: list[float], config: DictConfig) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{folder.absolute()}/mlflow.db")
    mlflow.create_experiment("training", artifact_location=(folder.absolute() / "files").as_uri())
    mlflow.set_experiment("training")
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params(OmegaConf.to_container(config.optimizer, resolve=True))
        for step, value in enumerate(values):
            mlflow.log_metric("loss", value, step=step)
        mlflow.log_dict({"values": len(values)}, "summary.json")


def train(config: DictConfig, folder: Path) -> None:
    torch.manual_seed(3)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **config.optimizer)
    values = []
    for _ in range(config.steps):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    print("losses", values)
    if dist.get_rank() == 0:
        track(folder, values, config)
        torch.save(model.module.state_dict(), folder / "model.pt")
    dist.barrier()
    dist.destroy_process_group()


@hydra.main(version_base=None, config_name="train")
def main(config: DictConfig) -> None:
    again = functools.partial(track, values=[0.0], config=config)
    corpus_probe.run(functools.partial(train, config), again=again, killed=True)


if __name__ == "__main__":
    main()
