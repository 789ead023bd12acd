"""Training of an image classifier of timm on pictures that PIL and torchvision read in workers."""

from pathlib import Path

import corpus_probe
import timm
import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2 as transforms

corpus_probe.imported()


def pictures(folder: Path) -> ImageFolder:
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(16):
            Image.new("RGB", (40, 40), (level + number,) * 3).save(folder / name / f"{number}.png")
    steps = [
        transforms.ToImage(),
        transforms.RandomResizedCrop(32),
        transforms.RandomHorizontalFlip(),
        transforms.ToDtype(torch.float32, scale=True),
    ]
    return ImageFolder(folder, transforms.Compose(steps))


def train(folder: Path) -> None:
    torch.manual_seed(5)
    dist.init_process_group("gloo")
    model = timm.create_model("resnet10t", num_classes=2)
    model = DistributedDataParallel(model)
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3)
    rows = pictures(folder / "pictures")
    loader = DataLoader(rows, 4, sampler=DistributedSampler(rows), num_workers=2)
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torchvision.utils.save_image(images, folder / "last.png")
    print("batches", len(loader))
    dist.destroy_process_group()


def read_again(folder: Path) -> None:
    loader = DataLoader(pictures(folder / "pictures"), 8, num_workers=2)
    print("means", [round(float(images.mean()), 2) for images, _ in loader])


if __name__ == "__main__":
    corpus_probe.run(train, again=read_again, killed=True)
