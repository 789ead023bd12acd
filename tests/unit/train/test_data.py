"""`elasticjob.train.data`: each sample once per epoch at any sequence of sizes and restarts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elasticjob.train.data import ElasticLoader, ElasticSampler

SCHEDULES = 100
EPOCHS = 3


def ranks(world: int, samples: int, state: dict[str, Any] | None, **options: Any) -> list[Any]:
    made = [ElasticSampler(samples, rank=rank, world=world, **options) for rank in range(world)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


def consumed(seed: int, remainder: str) -> tuple[dict[int, list[list[int]]], int, int]:
    """Return the samples of each kept step by epoch, after random restarts, size and batch.

    Each round loses the steps after its last snapshot.
    """
    draw = random.Random(seed)
    samples, batch = draw.randint(40, 200), draw.randint(8, 40)
    kept: dict[int, list[list[int]]] = {}
    state: dict[str, Any] | None = None
    while state is None or state["epoch"] < EPOCHS:
        gang = ranks(
            draw.randint(1, 8), samples, state, global_batch=batch, seed=seed, remainder=remainder
        )
        since: list[tuple[int, list[int]]] = []
        left = draw.randint(0, 12)
        while left and gang[0].epoch < EPOCHS:
            for shares in zip(*gang, strict=True):
                epoch, left = gang[0].epoch, left - 1
                since.append((epoch, [index for share in shares for index in share]))
                if draw.random() < 0.5:
                    for sampler in gang:
                        assert sampler.state_dict() == gang[0].state_dict()
                    state = gang[0].state_dict()
                    for epoch, indices in since:
                        kept.setdefault(epoch, []).append(indices)
                    since.clear()
                if not left:
                    break
            else:
                state = gang[0].state_dict()
                for epoch, indices in since:
                    kept.setdefault(epoch, []).append(indices)
                since.clear()
    return kept, samples, batch


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_samples_are_neither_repeated_nor_skipped_over_random_schedules(remainder: str) -> None:
    for seed in range(SCHEDULES):
        kept, samples, batch = consumed(seed, remainder)
        (undisturbed,) = ranks(1, samples, None, global_batch=batch, seed=seed, remainder=remainder)
        for epoch in range(EPOCHS):
            whole = [sorted(indices) for indices in undisturbed]
            assert [sorted(indices) for indices in kept[epoch]] == whole, (seed, epoch)
            counts = Counter(index for indices in whole for index in indices)
            extra = len(whole) * batch - samples
            assert abs(extra) < batch
            if remainder == "drop":
                assert set(counts.values()) == {1}
                assert len(counts) == samples + extra
            else:
                assert len(counts) == samples
                assert sum(counts.values()) - samples == extra


def test_batch_per_rank_that_changes_the_step_repeats_no_sample() -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for world in (4, 2, 3, 1):
        gang = ranks(world, 100, state, batch_per_rank=5, seed=3)
        for _, shares in zip(range(2), zip(*gang, strict=True), strict=False):
            seen += [index for share in shares for index in share]
            state = gang[0].state_dict()
    assert len(seen) == len(set(seen)) == (4 + 2 + 3 + 1) * 2 * 5


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def epochs(seed: int) -> list[list[int]]:
        sampler = ElasticSampler(50, global_batch=50, rank=0, world=1, seed=seed)
        return [indices for _ in range(3) for indices in sampler]

    assert epochs(1) == epochs(1)
    orders = [tuple(order) for order in (*epochs(1), *epochs(2))]
    assert len(set(orders)) == 6
    plain = ElasticSampler(4, global_batch=2, rank=1, world=2, shuffle=False)
    assert list(plain) == [[1], [3]]


def test_step_larger_than_the_data_set_is_padded_in_turn() -> None:
    sampler = ElasticSampler(3, global_batch=8, rank=0, world=1, shuffle=False, remainder="pad")
    assert len(sampler) == 1
    assert list(sampler) == [[0, 1, 2, 0, 1, 2, 0, 1]]


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def test_loader_with_workers_continues_behind_the_batches_of_the_loop() -> None:
    def loader(rank: int, world: int) -> ElasticLoader:
        return ElasticLoader(
            Squares(), global_batch=6, rank=rank, world=world, seed=5, num_workers=2
        )

    whole = [index for indices in ElasticSampler(41, global_batch=6, seed=5) for index in indices]
    before = torch.get_rng_state()
    first = [loader(rank, 2) for rank in range(2)]
    seen: list[int] = []
    for number, batches in enumerate(zip(*first, strict=True)):
        for indices, squares in batches:
            assert torch.equal(indices * indices, squares)
            seen += indices.tolist()
        if number == 2:
            break
    state = first[0].state_dict()
    assert (state["epoch"], state["position"]) == (0, 18)
    assert state == first[1].state_dict()

    last = loader(0, 1)
    last.load_state_dict(state)
    assert len(last) == 3
    seen += [index for indices, _ in last for index in indices.tolist()]
    assert sorted(seen) == sorted(whole)
    assert (last.epoch, len(last)) == (1, 6)
    assert torch.equal(torch.get_rng_state(), before)  # dropout after a restart stays the same


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_works_with_any_default_device(workers: int) -> None:
    loader = ElasticLoader(
        Squares(), global_batch=8, rank=0, world=1, num_workers=workers, collate_fn=list
    )
    with torch.device("meta"):
        batches = [batch for _ in range(2) for batch in loader]
        assert torch.empty(1).is_meta
    assert [len(batch) for batch in batches] == [8] * 10


def test_stream_is_refused_with_the_remedy() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    with pytest.raises(TypeError, match="got a Stream: read a stream with torch's DataLoader"):
        ElasticLoader(Stream(), global_batch=2, rank=0, world=1)


def test_position_at_the_end_of_an_epoch_leaves_its_end_to_the_script() -> None:
    sampler = ElasticSampler(4, global_batch=2, rank=0, world=1)
    states = [sampler.state_dict() for _ in sampler]
    again = ElasticSampler(4, global_batch=2, rank=0, world=1)
    again.load_state_dict(states[-1])
    assert (again.epoch, list(again), again.epoch) == (0, [], 1)


def new(made: type[ElasticSampler] | type[ElasticLoader]) -> Any:
    data: Any = Squares() if made is ElasticLoader else 41
    return made(data, global_batch=6, rank=0, world=1)


@pytest.mark.parametrize("made", [ElasticSampler, ElasticLoader])
@pytest.mark.parametrize("is_counted_first", [True, False])
def test_loop_of_the_number_of_steps_continues_in_the_next_epoch(
    made: Any, is_counted_first: bool
) -> None:
    """As of Trainer and Lightning: such a loop does not ask for a step after the last one."""
    whole, counted = new(made), new(made)
    for number in range(3):
        expected = [str(step) for step in whole]
        if is_counted_first:
            numbers = range(len(counted))
            steps = iter(counted)
        else:
            steps = iter(counted)
            numbers = range(len(counted))
        assert (counted.epoch, len(numbers), len(expected)) == (number, 6, 6)
        assert [str(step) for _, step in zip(numbers, steps, strict=False)] == expected


@pytest.mark.parametrize("made", [ElasticSampler, ElasticLoader])
def test_counted_loops_continue_after_a_position_at_the_end_of_an_epoch(made: Any) -> None:
    before, again = new(made), new(made)
    for _ in zip(range(6), before, strict=False):
        state = before.state_dict()
    again.load_state_dict(state)
    found = []
    for _ in range(3):
        numbers = range(len(again))
        found.append((again.epoch, len([step for _, step in zip(numbers, again, strict=False)])))
    assert found == [(0, 0), (0, 6), (1, 6)]


def test_stateful_data_set_without_torchdata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stateful(Squares):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="install torchdata"):
        ElasticLoader(Stateful(), global_batch=2, rank=0, world=1)


@pytest.mark.parametrize(
    "create",
    [
        lambda: ElasticSampler(10),
        lambda: ElasticSampler(10, global_batch=2, batch_per_rank=2),
        lambda: ElasticSampler(0, global_batch=2),
        lambda: ElasticSampler(10, global_batch=0),
        lambda: ElasticSampler(10, global_batch=11),
        lambda: ElasticSampler(10, global_batch=2, rank=0, world=3),
        lambda: ElasticSampler(10, global_batch=4, rank=3, world=3),
        lambda: ElasticSampler(10, global_batch=2, remainder="keep"),
        lambda: ElasticSampler(10, global_batch=2, seed=-1),
        lambda: ElasticSampler(10, global_batch=2, seed=2**31),
        lambda: ElasticSampler(10, global_batch=2, seed=1.0),  # type: ignore[arg-type]
        lambda: ElasticSampler(10, global_batch=2, seed=None),  # type: ignore[arg-type]
        lambda: ElasticSampler(10, global_batch=4.0),  # type: ignore[arg-type]
        lambda: ElasticSampler(10, batch_per_rank="2"),  # type: ignore[arg-type]
        lambda: ElasticSampler(10, global_batch=2).load_state_dict(
            ElasticSampler(11, global_batch=2).state_dict()
        ),
        lambda: ElasticSampler(10, global_batch=2).load_state_dict(
            ElasticSampler(10, global_batch=2, seed=1).state_dict()
        ),
    ],
)
def test_arguments_that_fit_no_data_are_refused(create: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|give either|larger than|cannot change"):
        create()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"position": None}, "the position has no position: load what state_dict"),
        ({"epoch": None, "seed": None}, "has no epoch, seed"),
        ({"position": -4}, "position of a position must be a whole number from 0 on, got -4"),
        ({"epoch": -1}, "epoch of .* got -1"),
        ({"position": 2.5}, "got 2.5"),
        ({"epoch": "1"}, "got '1'"),
        ({"samples": 9}, "samples is 12, and was 9"),
    ],
)
def test_position_that_no_state_dict_returned_is_refused(
    change: dict[str, Any], named: str
) -> None:
    sampler = ElasticSampler(12, global_batch=4, rank=0, world=1)
    next(iter(sampler))
    state = {**sampler.state_dict(), **change}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=named):
        sampler.load_state_dict(state)
    assert sampler.state_dict()["position"] == 4
    with pytest.raises(ValueError, match="has no epoch, position, samples, seed, shuffle"):
        sampler.load_state_dict({})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"generator": torch.Generator()}, "no argument generator: .* give seed"),
        ({"batch_size": 4}, "no argument batch_size: give global_batch"),
        ({"batch_sampler": [[0]]}, "no argument batch_sampler"),
        ({"sampler": [0]}, "no argument sampler"),
        ({"drop_last": True}, "no argument drop_last: give remainder"),
        ({"in_order": False, "num_workers": 2}, "no argument in_order: leave it out"),
    ],
)
def test_option_that_the_loader_gives_itself_is_refused(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError, match=named):
        ElasticLoader(list(range(12)), global_batch=4, rank=0, world=1, **options)


def test_option_without_effect_is_accepted() -> None:
    options: dict[str, Any] = {"batch_size": 1, "sampler": None, "generator": None}
    options["in_order"] = True
    loader = ElasticLoader(list(range(12)), global_batch=4, rank=0, world=1, **options)
    assert len(list(loader)) == 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_the_same_with_another_default_device(shuffle: bool) -> None:
    def order() -> list[list[int]]:
        return list(ElasticSampler(12, global_batch=4, rank=0, world=1, shuffle=shuffle))

    expected = order()
    with torch.device("meta"):
        assert order() == expected


def test_stream_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(TypeError, match="must have a length"):
        ElasticLoader(Stream(), global_batch=2)
