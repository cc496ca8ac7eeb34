"""persistent_workers: one iterator, one set of workers, for all epochs."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from tests.conformance.comparison import Subject, caught, same_as_torch
from tests.conformance.datasets import (
    Augmented,
    Count,
    EndsOnce,
    Failing,
    Growing,
    NoisyStream,
    Remembering,
    Shares,
    Squares,
    Whereabouts,
    as_list,
    total,
)
from tests.conformance.test_exceptions import story
from tests.conformance.test_orders import draws
from tests.conformance.test_workers import wait_until_gone

pytestmark = pytest.mark.processes("ours")

WORKERS = pytest.mark.parametrize("num_workers", [1, 3])


def persistent(make: Subject, dataset: Any, **options: Any) -> Any:
    return make(dataset, **{"num_workers": 2, "persistent_workers": True, **options})


@WORKERS
@pytest.mark.parametrize(("shuffle", "seeded"), [(False, False), (True, False), (True, True)])
@same_as_torch("streams", async_for=False, defaults=False)
def test_streams_go_on_over_epochs(make: Subject, shuffle: bool, seeded: bool, num_workers: int) -> object:
    """Orders and augmentations of three epochs, bit for bit; the generators after them."""
    generator = torch.Generator().manual_seed(4) if seeded else None
    loader = persistent(make, Augmented(8), batch_size=3, shuffle=shuffle, generator=generator, num_workers=num_workers)
    return [make.batches(loader) for _ in range(3)], torch.get_rng_state(), generator and generator.get_state()


@WORKERS
@same_as_torch("persistent workers")
def test_orders_of_several_epochs(make: Subject, num_workers: int) -> object:
    """The same seeds give the same orders, also with our defaults."""
    loader = persistent(make, Squares(11), batch_size=2, shuffle=True, num_workers=num_workers)
    return [make.batches(loader) for _ in range(3)]


@same_as_torch("persistent workers", async_for=False)
def test_one_iterator_serves_all_epochs(make: Subject) -> object:
    """iter() returns the same object, begun anew, which the loader keeps as `_iterator`."""
    loader = persistent(make, Squares(4))
    first = iter(loader)
    seen = [next(first)]
    second = iter(loader)
    return first is second, loader._iterator is first, seen, list(first), list(second)


@pytest.mark.processes
@same_as_torch("persistent workers", async_for=False)
def test_workers_stay_the_same_processes(make: Subject) -> object:
    """Worker i is one process for all epochs; batch 0 goes to worker 0 in each."""
    loader = persistent(make, Whereabouts(7), batch_size=None, collate_fn=as_list)
    epochs = [list(loader) for _ in range(3)]
    pids = {pid for epoch in epochs for _, _, pid in epoch}
    alive = [psutil.pid_exists(pid) for pid in pids]
    del loader
    return len(pids), alive, [[worker for _, worker, _ in epoch] for epoch in epochs], wait_until_gone(list(pids))


@pytest.mark.processes
@same_as_torch("copies of the dataset")
def test_state_of_the_dataset_lives_on(make: Subject) -> object:
    """A worker's copy keeps its attributes for the next epoch; worker_init_fn has run once."""
    dataset = Remembering(4)
    loader = persistent(make, dataset, batch_size=None, collate_fn=as_list, worker_init_fn=dataset.tell)
    return [make.batches(loader) for _ in range(3)], dataset.fetched


@pytest.mark.processes
@same_as_torch("copies of the dataset")
def test_changes_in_the_main_process_do_not_reach_the_workers(make: Subject) -> object:
    """Their copies were made at the first iter(); the sampler, in the main process, does see the new length."""
    dataset = Growing()
    loader = persistent(make, dataset, batch_size=None)
    first = make.batches(loader)
    dataset.items[0] = 100
    return first, make.batches(loader)


@same_as_torch("persistent workers")
def test_changes_to_the_sampler_count_from_the_next_epoch(make: Subject) -> object:
    """The sampler is read anew for each epoch."""
    order = [1, 2, 3]
    loader = persistent(make, Squares(10), sampler=order)
    first = make.batches(loader)
    order[:] = [7, 5]
    return first, make.batches(loader)


@same_as_torch("persistent workers", async_for=False)
def test_settings_of_the_first_epoch_stay(make: Subject) -> object:
    """collate_fn that is set later does not reach workers that run."""
    loader = persistent(make, Squares(6), batch_size=3)
    first = list(loader)
    loader.collate_fn = total
    return first, list(loader)


@same_as_torch("persistent workers")
def test_epoch_after_breaking_off_is_complete(make: Subject) -> object:
    """Batches that were on their way are not seen in the next epoch."""
    loader = persistent(make, Squares(20), batch_size=2)
    for _ in range(3):
        for batch in loader:
            first = batch
            break
    return first, make.batches(loader)


@same_as_torch("persistent workers")
def test_epochs_with_errors(make: Subject) -> object:
    """Errors are raised in each epoch, and the workers live on."""
    loader = persistent(make, Failing(7, "ValueError", at=[1, 6]))
    return [story(iter(loader)) for _ in range(3)]


@pytest.mark.parametrize("way", ["del loader", "_iterator = None", "del _iterator"])
@same_as_torch("persistent workers", async_for=False)
def test_workers_go_with_the_iterator(make: Subject, way: str) -> object:
    """Dropping the loader, or its `_iterator` as Lightning does, ends the workers; the loader can start new ones."""
    loader = persistent(make, Squares(6))
    list(loader)
    workers = [worker.pid for worker in loader._iterator._workers]
    if way == "del loader":
        del loader
        return wait_until_gone(workers)
    if way == "del _iterator":
        del loader._iterator
    loader._iterator = None
    gone = wait_until_gone(workers)
    return gone, list(loader)


@same_as_torch("draws from the global generator", async_for=False)
def test_base_seed_is_drawn_once(make: Subject) -> object:
    """Three draws for two shuffled epochs."""
    loader = persistent(make, Squares(6), shuffle=True)
    count, _ = draws(lambda: [list(loader), list(loader)])
    assert count == 3
    return count


@same_as_torch("persistent workers")
def test_iterator_stays_exhausted_until_iter(make: Subject) -> object:
    """next() after the end raises StopIteration; iter() begins anew."""
    loader = persistent(make, Squares(3))
    it = iter(loader)
    return list(it), [type(caught(lambda: next(it))) for _ in range(2)], list(loader), len(it)


@WORKERS
@same_as_torch("iterable")
def test_iterable_dataset_is_begun_anew_in_each_epoch(make: Subject, num_workers: int) -> object:
    """A new iterator over the dataset that was kept."""
    loader = persistent(make, EndsOnce(5), batch_size=2, collate_fn=as_list, num_workers=num_workers)
    return [make.batches(loader) for _ in range(3)]


@same_as_torch("exhausted workers")
def test_unequal_shares_in_each_epoch(make: Subject) -> object:
    """Workers that had ended in one epoch take part in the next."""
    loader = persistent(make, Shares(0, (1, 6, 3)), batch_size=2, num_workers=3)
    return [make.batches(loader) for _ in range(3)]


@pytest.mark.processes
@same_as_torch("streams")
def test_streams_of_an_iterable_dataset_go_on(make: Subject) -> object:
    """Persistent workers do not seed a stream's generators again in later epochs."""
    loader = persistent(make, NoisyStream(4), batch_size=2)
    return [make.batches(loader) for _ in range(3)]


@same_as_torch("iterable")
def test_breaking_off_an_endless_stream(make: Subject) -> object:
    """Each epoch begins at the beginning."""
    loader = persistent(make, Count(10**9), batch_size=2)
    return [[batch for batch, _ in zip(loader, range(4), strict=False)] for _ in range(3)]
