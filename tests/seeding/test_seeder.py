"""Seeds: torch's own for workers, and ours for batches, which depend on nothing but the numbers that they are made
of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.seeding.hashing import mix
from asyncloader.seeding.seeder import Seeder, seed_worker

_WORD = (1 << 32) - 1


def draw() -> tuple[float, float, float]:
    """Draw from all three global generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Drawing(Dataset[Any]):
    """Samples that are nothing but random numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return (index, *draw())


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    """Give the global generators their states back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def epochs(loader: Any, count: int = 1, seed: int = 3) -> list[Any]:
    """Return the samples of some epochs, in one list each."""
    torch.manual_seed(seed)
    return [
        [[float(part[i]) for part in batch] for batch in loader for i in range(len(batch[0]))] for _ in range(count)
    ]


def test_a_worker_is_seeded_as_torchs() -> None:
    """The same three streams as in torch's worker of that number, for any base seed."""
    for base_seed, worker in [(0, 0), (1234567890123, 3), (2**62, 7)]:
        assert seed_worker(base_seed, worker) == base_seed + worker
        ours = draw()
        random.seed(base_seed + worker)
        torch.manual_seed(base_seed + worker)
        np.random.seed(torch.utils.data._utils.worker._generate_state(base_seed, worker))
        assert ours == draw()


def test_batch_seeds_do_not_depend_on_who_works_when() -> None:
    """Any number of workers, scheduling and timing gives the same samples."""
    others: list[dict[str, Any]] = [{"num_workers": 1}, {"scheduling": "dynamic"}, {"prefetch_factor": 5}]
    first, *found = (
        epochs(DataLoader(Drawing(), **{"batch_size": 4, "shuffle": True, "num_workers": 2, **options}), 2)
        for options in ({}, *others, {"max_buffered_bytes": 0})
    )
    assert found == [first] * 4


def test_each_batch_and_each_epoch_draws_anew() -> None:
    """No two samples of two epochs are alike, though the base seed of the epochs is the same."""
    loader = DataLoader(Drawing(), batch_size=4, num_workers=2, persistent_workers=True)
    samples = [tuple(sample[1:]) for epoch in epochs(loader, 2) for sample in epoch]
    assert len(set(samples)) == 48
    loader.close()


def test_another_seed_of_the_trainer_gives_other_samples() -> None:
    """And the same seed the same ones."""
    loaders = [DataLoader(Drawing(), batch_size=4, num_workers=2) for _ in range(3)]
    first, again, other = (epochs(loader, seed=seed) for loader, seed in zip(loaders, [3, 3, 4], strict=True))
    assert first == again
    assert first != other


def test_no_workers_no_seeds() -> None:
    """As in torch, the trainer's own generators are used, and are where torch's loader would leave them."""
    theirs = epochs(torch.utils.data.DataLoader(Drawing(), batch_size=4)), draw()
    random.seed(0)
    assert epochs(DataLoader(Drawing(), batch_size=4))[0][0][3] == theirs[0][0][0][3]


def test_the_trainers_generators_are_not_touched_by_workers() -> None:
    """Beyond the one number that torch's iterator draws too."""
    for loader_class in (torch.utils.data.DataLoader, DataLoader):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        list(loader_class(Drawing(), batch_size=4, num_workers=1))  # type: ignore[operator]
        after = draw()
        if loader_class is torch.utils.data.DataLoader:
            expected = after
    assert after == expected


def test_seeds_are_spread() -> None:
    """Neighbouring epochs, ranks and batches have nothing in common."""
    seeds = {
        mix(mix(base, epoch, rank), batch)
        for base in (0, 1)
        for epoch in range(5)
        for rank in range(5)
        for batch in range(200)
    }
    assert len(seeds) == 2 * 5 * 5 * 200
    ones = [sum(seed >> bit & 1 for seed in seeds) / len(seeds) for bit in range(64)]
    assert all(0.47 < share < 0.53 for share in ones)
    assert mix(1, 2) != mix(2, 1)
    assert mix(-1) == mix((1 << 64) - 1)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_a_sample_may_give_its_seed_away(seeding: Any) -> None:
    """`torch.initial_seed()` fits a tensor, whatever the loader's generator drew: 63 bits, as torch's."""

    class Seeds(Dataset[int]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> int:
            return torch.initial_seed()

    generator = torch.Generator().manual_seed(7)
    seeds = torch.cat(list(DataLoader(Seeds(), num_workers=2, seeding=seeding, generator=generator)))
    assert seeds.min() >= 0


def test_no_two_batches_of_an_epoch_have_a_word_in_common() -> None:
    """torch's generator looks at the lower 32 bits of a seed only: among 100,000 random ones a pair would be alike."""
    seeds = np.array([*map(Seeder((12345, 0, 0)), range(100_000))])
    assert len(np.unique(seeds & _WORD)) == len(seeds)
    assert seeds.dtype == np.int64
    assert seeds.min() >= 0
    ones = [(seeds >> bit & 1).mean() for bit in range(32)]
    assert all(0.49 < share < 0.51 for share in ones)


def test_seeds_of_epochs_have_no_more_in_common_than_chance() -> None:
    """Neither whole nor in the word that torch looks at; nor do numbers of which 32 bits are the same."""
    seeds = np.array([[*map(Seeder((12345, epoch, 0)), range(2000))] for epoch in range(60)])
    assert len(np.unique(seeds)) == seeds.size
    assert seeds.size - len(np.unique(seeds & _WORD)) < 10  # of 120,000 random words 1.7 pairs are alike
    beside = np.corrcoef(seeds[:, :-1].ravel() & _WORD, seeds[:, 1:].ravel() & _WORD)[0, 1]
    assert abs(beside) < 5 / seeds.size**0.5
    between = np.corrcoef(seeds & _WORD)[np.triu_indices(len(seeds), 1)]
    assert abs(between).max() < 5 / 2000**0.5
    far = [*map(Seeder((12345, 0, 0)), range(7, 10 << 32, 1 << 32))]
    assert len(set(far)) == len(far)


def test_no_two_batches_of_an_epoch_share_numpys_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200,000 random ones several would be alike; and none is torch's, which is the same generator."""
    words: list[int] = []
    monkeypatch.setattr(np.random, "seed", words.append)
    seeder = Seeder((1, 2, 3))
    seeds = [seeder(batch) & 0xFFFFFFFF for batch in range(50_000)]
    assert len(set(words)) == len(words) == 50_000
    assert not any(word == seed for word, seed in zip(words, seeds, strict=True))
    assert all(0 <= word < 1 << 32 for word in words)


def test_each_generator_draws_numbers_of_its_own() -> None:
    """All three are Mersenne Twisters: from one seed they would draw the same."""
    Seeder((1, 2, 3))(7)
    assert len({round(number, 6) for number in (random.random(), float(np.random.rand()), torch.rand(()).item())}) == 3


def test_a_batch_seed_sets_all_three_generators() -> None:
    """From the same numbers the same draws; another rank, epoch or batch other ones."""
    draws = {}
    for key in [(5, 0, 0), (5, 1, 0), (5, 0, 1), (6, 0, 0)]:
        seeder = Seeder(key)
        for batch in (0, 1):
            seeder(batch)
            draws[key, batch] = draw()
            seeder(batch)
            assert draw() == draws[key, batch]
    for position in range(3):
        assert len({drawn[position] for drawn in draws.values()}) == 8


def test_torchs_and_pythons_own_functions_would_give_the_same_streams() -> None:
    """Seeding the generator directly is the same, only faster."""
    random.gauss(0, 1)  # which makes two numbers, and keeps one
    seed = Seeder((1, 2, 3))(4)
    ours = torch.rand(5), random.gauss(0, 1)
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(5), ours[0])
    assert random.Random(seed).gauss(0, 1) == ours[1]


def test_a_torch_that_raises_where_it_has_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 does; later ones return None. The generators are seeded either way."""

    def raises() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    torch.manual_seed(12)
    expected = torch.rand(())
    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert seed_worker(10, 2) == 12
    assert torch.equal(torch.rand(()), expected)
