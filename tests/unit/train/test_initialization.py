"""`elasticjob.train.skip_initialization`: parameters that are restored, and those that are not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticjob import layout, train
from elasticjob.train import initialization


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    initialization._skipped.clear()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.recurrent = nn.LSTM(8, 4)
        self.last = nn.Linear(4, 1)
        nn.init.trunc_normal_(self.last.weight, std=0.1)
        self.register_buffer("noise", torch.randn(8), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words) + self.noise
        found = self.layers(self.attention(found, found, found)[0])
        values: torch.Tensor = self.last(self.recurrent(found)[0])
        return values


def step(network: Network, optimizer: torch.optim.Optimizer, number: int) -> float:
    words = torch.randint(11, (6,), generator=torch.Generator().manual_seed(number))
    loss = network(words).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def adam(network: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(network.parameters(), lr=0.01)


@pytest.mark.parametrize("assigns", [False, True])
def test_training_after_a_restore_without_random_values_is_bitwise_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assigns: bool
) -> None:
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))

    def trained(first: int, end: int) -> list[float]:
        optimizer: torch.optim.Optimizer
        snapshots = train.Snapshots(every_steps=1, optimizers=lambda: optimizer)
        found = snapshots.restore()
        assert (0 if found is None else found.step) == first
        torch.manual_seed(7)  # the buffer that is not in the state
        with train.skip_initialization(found is not None):
            noise = torch.randn(8)
            network = Network()
            network.noise = noise
        if found is not None:
            network.load_state_dict(found.state["model"], assign=assigns)
        optimizer = adam(network)
        if found is not None:
            optimizer.load_state_dict(found.state["optimizer"])
            torch.set_rng_state(found.rank_state)
        losses = []
        for number in range(first, end):
            losses.append(step(network, optimizer, number))
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            snapshots.save(number + 1, state, torch.get_rng_state())
        snapshots.close()
        return losses

    losses = trained(0, 3) + trained(3, 6)
    for each in tmp_path.iterdir():
        each.unlink()
    assert losses == trained(0, 6)


def test_no_random_numbers_are_drawn_and_the_rest_is_as_without() -> None:
    def made(enabled: bool) -> Any:
        torch.manual_seed(5)
        with train.skip_initialization(enabled):
            words = nn.Embedding(5, 4, padding_idx=0)
            return nn.Sequential(words, nn.BatchNorm1d(4), nn.Linear(4, 2))

    torch.manual_seed(5)
    unused = torch.get_rng_state()
    skipped = made(True)
    assert torch.equal(torch.get_rng_state(), unused)
    drawn = made(False)
    assert not torch.equal(torch.get_rng_state(), unused)
    for name, value in skipped[1].state_dict().items():
        assert torch.equal(value, drawn[1].state_dict()[name])
    assert not skipped[0].weight[0].any()  # the padding, filled after the random values
    for unfilled in (skipped[0].weight, skipped[2].weight, skipped[2].bias):
        assert unfilled.flatten()[-1].isnan()
    assert torch.equal(drawn[2].weight, made(False)[2].weight)


def test_tensors_that_are_no_parameters_and_other_threads_draw_random_numbers() -> None:
    layers: list[nn.Linear] = []
    with train.skip_initialization():
        plain = torch.zeros(50).uniform_(1, 2)
        thread = threading.Thread(target=lambda: layers.append(nn.Linear(3, 3)))
        thread.start()
        thread.join()
    assert bool((plain >= 1).all())
    assert not layers[0].weight.isnan().any()


def without_a_layer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of which one layer is not loaded."""
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    with train.skip_initialization():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].load_state_dict(source[0].state_dict())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_parameters_that_are_not_loaded_stop_the_first_step_of_the_optimizer() -> None:
    model, optimizer = without_a_layer()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"2 parameters .* shape \[5, 4\], \[5\]: load all"):
        optimizer.step()


def test_parameters_that_are_not_loaded_stop_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))
    model, _ = without_a_layer()  # a gradient scaler skips the steps with NaN
    snapshots = train.Snapshots(every_steps=1)
    snapshots.restore()
    with pytest.raises(RuntimeError, match="2 parameters"):
        snapshots.save(1, model.state_dict())
    assert train.Snapshots().restore() is None


def test_parameters_loaded_or_filled_later_are_no_error() -> None:
    with train.skip_initialization():
        model = nn.Linear(3, 4)
        other = nn.Linear(2, 2)
    model.load_state_dict(nn.Linear(3, 4).state_dict())
    other.reset_parameters()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    other(model(torch.ones(1, 3))[:, :2]).sum().backward()
    optimizer.step()
    assert not model.weight.isnan().any()
