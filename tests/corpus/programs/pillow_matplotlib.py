"""Training of an image classifier on pictures that PIL reads in loader processes, with a plot."""

from pathlib import Path

import corpus_probe
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

corpus_probe.imported()


class Pictures(Dataset):
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.paths = [folder / f"{number % 2}-{number}.png" for number in range(32)]
        for number, path in enumerate(self.paths):
            Image.new("RGB", (40, 40), (number % 2 * 200 + number,) * 3).save(path)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as picture:
            pixels = np.asarray(picture.resize((32, 32)), dtype=np.float32) / 255
        noise = np.random.default_rng(index).normal(0, 0.01, pixels.shape)
        label = int(self.paths[index].name[0])
        return torch.tensor(pixels + noise, dtype=torch.float32).permute(2, 0, 1), label


def classifier() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3600, 2)
    )


def train(folder: Path) -> None:
    torch.manual_seed(5)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = Pictures(folder / "pictures")
    loader = DataLoader(rows, 4, sampler=DistributedSampler(rows), num_workers=2)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plt.plot(losses)
    plt.savefig(folder / "losses.png")
    plt.close()
    print("batches", len(losses))
    dist.destroy_process_group()


def read_again(folder: Path) -> None:
    loader = DataLoader(Pictures(folder / "pictures"), 8, num_workers=2)
    print("means", [round(float(images.mean()), 2) for images, _ in loader])


if __name__ == "__main__":
    corpus_probe.run(train, again=read_again, killed=True)
