"""Random numbers in workers: torch's streams, bit for bit, where `seeding="worker"` asks for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.comparison import Subject, same_as_torch
from tests.conformance.datasets import (
    Augmented,
    Echo,
    Informed,
    Squares,
    StartedWith,
    as_list,
    draw_some,
    remember_globally,
    seed_numpy_alike,
    with_noise,
)

pytestmark = pytest.mark.processes

WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def states() -> list[Any]:
    """Where the main process's three generators stand."""
    return [random.random(), float(np.random.rand()), torch.rand(2)]


@pytest.mark.covering(1)
@WORKERS
@pytest.mark.parametrize(("shuffle", "seeded"), [(False, False), (True, False), (True, True)])
@same_as_torch("streams", async_for=False, defaults=False)
def test_augmentations_are_bit_identical(make: Subject, shuffle: bool, seeded: bool, num_workers: int) -> object:
    """Draws of random, numpy and torch in workers, three epochs, and the main process's generators after it."""
    generator = torch.Generator().manual_seed(4) if seeded else None
    loader = make(Augmented(10), batch_size=3, shuffle=shuffle, generator=generator, num_workers=num_workers)
    return [make.batches(loader) for _ in range(3)], states()


@pytest.mark.covering(1)
@FEW_WORKERS
@pytest.mark.parametrize("worker_init_fn", [seed_numpy_alike, draw_some])
@same_as_torch("streams", defaults=False)
def test_worker_init_fn_seeds_and_draws(make: Subject, worker_init_fn: Any, num_workers: int) -> object:
    """The first batch draws from the generators as worker_init_fn has left them."""
    loader = make(Augmented(8), batch_size=2, num_workers=num_workers, worker_init_fn=worker_init_fn)
    return make.batches(loader), make.batches(loader)


@FEW_WORKERS
@pytest.mark.parametrize("batch_size", [1, 4, None])
@same_as_torch("streams", defaults=False)
def test_collate_fn_draws_from_the_same_streams(make: Subject, batch_size: int | None, num_workers: int) -> object:
    """Samples first, then collate_fn."""
    loader = make(Augmented(7), batch_size=batch_size, collate_fn=with_noise, num_workers=num_workers)
    return make.batches(loader)


@same_as_torch("streams", defaults=False)
def test_streams_of_two_iterators_are_their_own(make: Subject) -> object:
    """Two iterators at once have different base seeds, drawn in the order of iter()."""
    loader = make(Augmented(6), num_workers=2)
    return list(zip(loader, loader, strict=True)), states()


@same_as_torch("streams", defaults=False)
def test_streams_do_not_depend_on_breaking_off(make: Subject) -> object:
    """The epoch after one that was left early is the same as in torch."""
    loader = make(Augmented(12), batch_size=2, shuffle=True, num_workers=2)
    for _ in loader:
        break
    return make.batches(loader), states()


@FEW_WORKERS
@same_as_torch("streams", defaults=False)
def test_numbers_drawn_by_the_training_loop(make: Subject, num_workers: int) -> object:
    """Without workers dataset and loop share generators, with workers they do not."""
    return [(batch, states()) for batch in make(Augmented(6), batch_size=2, num_workers=num_workers)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@same_as_torch("get_worker_info", defaults=False)
def test_worker_info_is_torchs(make: Subject, num_workers: int) -> object:
    """A worker has torch's id, number, seed, dataset and other attributes, and one torch thread."""
    return make.batches(make(Informed(4), collate_fn=as_list, num_workers=num_workers))


@same_as_torch("get_worker_info", defaults=False)
def test_worker_seeds_differ_by_one_and_change_with_the_epoch(make: Subject) -> object:
    """Base seed plus worker id."""
    loader = make(Informed(2), batch_size=None, collate_fn=dict, num_workers=2)
    seeds = [[told["seed"] for told in make.batches(loader)] for _ in range(2)]
    assert all(second == first + 1 for first, second in seeds)
    assert seeds[0] != seeds[1]
    return seeds


@same_as_torch("get_worker_info", async_for=False)
def test_main_process_has_no_worker_info(make: Subject) -> object:
    """get_worker_info() is None before, during and after an epoch, with and without workers."""
    seen = []
    for num_workers in (0, 2):
        seen.append(torch.utils.data.get_worker_info())
        for _ in make(Squares(4), num_workers=num_workers):
            seen.append(torch.utils.data.get_worker_info())
        seen.append(torch.utils.data.get_worker_info())
    assert set(seen) == {None}
    return make.batches(make(Informed(2), collate_fn=as_list))


@same_as_torch("worker_init_fn")
def test_worker_init_fn_runs_after_seeding_and_before_fetching(make: Subject) -> object:
    """worker_init_fn gets the worker's id; get_worker_info() and the seed are there already."""
    return make.batches(make(StartedWith(4), collate_fn=as_list, num_workers=2, worker_init_fn=remember_globally))


@same_as_torch("worker_init_fn")
def test_worker_init_fn_is_not_called_without_workers(make: Subject) -> object:
    """num_workers=0 has no worker to start."""
    calls: list[int] = []
    return make.batches(make(Echo(3), worker_init_fn=calls.append)), calls


@same_as_torch("seeds", defaults=False)
def test_same_seed_gives_the_same_epoch_again(make: Subject) -> object:
    """manual_seed before iter() decides everything."""
    loader = make(Augmented(6), batch_size=2, shuffle=True, num_workers=2)
    runs = []
    for _ in range(2):
        torch.manual_seed(99)
        runs.append([[part.tolist() for part in batch] for batch in loader])
    assert runs[0] == runs[1]
    return runs
