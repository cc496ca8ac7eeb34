"""Iterable datasets: replicas, sharding, short batches, ends, lengths."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.conformance.comparison import Subject, caught, same_as_torch, told
from tests.conformance.datasets import (
    Count,
    EndsOnce,
    FailingOnce,
    FailingStream,
    NoisyStream,
    Shares,
    Span,
    Tuned,
    as_list,
    divide_span,
    draw_some,
    fail_to_start,
    remember_globally,
    seed_numpy_alike,
)
from tests.conformance.test_exceptions import story

WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 3])
FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.mark.covering(2)
@WORKERS
@pytest.mark.parametrize(("batch_size", "drop_last"), [(1, False), (3, False), (3, True), (None, False)])
@same_as_torch("iterable", async_for=False)
def test_every_worker_iterates_over_its_own_copy(
    make: Subject, batch_size: int | None, drop_last: bool, num_workers: int
) -> object:
    """Each number as often as there are workers, in torch's order, short batches at the end of each worker's share."""
    loader = make(Count(7), batch_size=batch_size, drop_last=drop_last, num_workers=num_workers)
    return make.batches(loader), make.batches(loader)


@pytest.mark.covering(2)
@WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
@same_as_torch("iterable", defaults=False)
def test_sharding_inside_iter(make: Subject, drop_last: bool, num_workers: int) -> object:
    """__iter__ asks get_worker_info(), as torch's documentation shows."""
    return make.batches(make(Shares(14), batch_size=3, drop_last=drop_last, num_workers=num_workers))


@WORKERS
@same_as_torch("iterable")
def test_sharding_by_worker_init_fn(make: Subject, num_workers: int) -> object:
    """worker_init_fn changes the worker's copy of the dataset, as torch's documentation shows."""
    return make.batches(make(Span(3, 12), batch_size=2, num_workers=num_workers, worker_init_fn=divide_span))


@pytest.mark.covering(2)
@pytest.mark.parametrize("lengths", [(0, 5, 2), (7, 0, 0), (0, 0, 0), (1, 9, 4)])
@pytest.mark.parametrize("batch_size", [1, 2, None])
@same_as_torch("exhausted workers", async_for=False)
def test_workers_that_have_ended_are_passed_over(
    make: Subject, lengths: tuple[int, ...], batch_size: int | None
) -> object:
    """Shares of different lengths, and empty ones; two epochs."""
    loader = make(Shares(0, lengths), batch_size=batch_size, num_workers=3)
    return make.batches(loader), make.batches(loader)


@FEW_WORKERS
@pytest.mark.parametrize("in_order", [True, False])
@same_as_torch("iterable", async_for=False)
def test_all_of_unequal_shares_come_in_any_order(make: Subject, in_order: bool, num_workers: int) -> object:
    """in_order=False loses nothing of an iterable dataset."""
    loader = make(Shares(0, (2, 9, 5)), batch_size=None, num_workers=num_workers and 3, in_order=in_order)
    return sorted(loader)


@FEW_WORKERS
@same_as_torch("iterable")
def test_iterator_is_not_asked_again_after_its_end(make: Subject, num_workers: int) -> object:
    """With batching the end is remembered; each epoch has a new iterator."""
    loader = make(EndsOnce(5), batch_size=2, collate_fn=as_list, num_workers=num_workers)
    return make.batches(loader), make.batches(loader)


@FEW_WORKERS
@same_as_torch("get_worker_info")
def test_workers_know_who_they_are(make: Subject, num_workers: int) -> object:
    """__iter__ sees the worker's id, and the dataset there is the one that is iterated."""
    loader = make(Tuned(3), batch_size=2, collate_fn=as_list, num_workers=num_workers, worker_init_fn=remember_globally)
    return make.batches(loader)


@pytest.mark.processes
@pytest.mark.covering(2)
@WORKERS
@pytest.mark.parametrize("worker_init_fn", [None, seed_numpy_alike, draw_some])
@same_as_torch("streams", async_for=False)
def test_streams_are_bit_identical(make: Subject, worker_init_fn: Any, num_workers: int) -> object:
    """Draws of random, numpy and torch in __iter__, two epochs; always torch's streams, whatever `seeding` says."""
    loader = make(NoisyStream(5), batch_size=2, num_workers=num_workers, worker_init_fn=worker_init_fn)
    return make.batches(loader), make.batches(loader), torch.get_rng_state()


@FEW_WORKERS
@same_as_torch("iterable")
def test_stream_may_have_no_end(make: Subject, num_workers: int) -> object:
    """Taking some batches, twice; workers go."""
    loader = make(Count(10**9), batch_size=4, num_workers=num_workers)
    return [list(itertools.islice(loader, 5)) for _ in range(2)]


@FEW_WORKERS
@same_as_torch("iterable")
def test_chain_of_datasets(make: Subject, num_workers: int) -> object:
    """ChainDataset, and `+` between iterable datasets."""
    chained = ChainDataset([Count(3), Count(2)])
    return make.batches(make(chained, 2, num_workers=num_workers)), make.batches(make(Count(2) + Count(3)))


@FEW_WORKERS
@pytest.mark.parametrize("batch_size", [2, None])
@same_as_torch("errors of iterable datasets")
def test_error_of_a_generator_ends_it(make: Subject, batch_size: int | None, num_workers: int) -> object:
    """The error is raised, then the share of that worker is over."""
    return story(iter(make(FailingStream(9, at=3), batch_size=batch_size, num_workers=num_workers)))


@FEW_WORKERS
@pytest.mark.parametrize("batch_size", [2, None])
@same_as_torch("errors of iterable datasets")
def test_error_of_an_iterator_that_goes_on(make: Subject, batch_size: int | None, num_workers: int) -> object:
    """An iterator that can go on after an error goes on."""
    return story(iter(make(FailingOnce(9, at=3), batch_size=batch_size, num_workers=num_workers)))


@pytest.mark.processes
@same_as_torch("errors of iterable datasets")
def test_error_of_a_stream_has_torchs_words(make: Subject) -> object:
    """As for map-style datasets."""
    it = iter(make(FailingStream(2, at=0), num_workers=1))
    error = caught(lambda: next(it))
    return type(error), "Caught ValueError in DataLoader worker process 0." in told(error or ValueError()), story(it)


@same_as_torch("errors of worker_init_fn")
def test_error_of_worker_init_fn_with_a_stream(make: Subject) -> object:
    """The error is the first result of each worker."""
    it = iter(make(Count(3), num_workers=2, worker_init_fn=fail_to_start))
    return [type(caught(lambda: next(it))) for _ in range(2)]


@FEW_WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
@same_as_torch("len")
def test_length_is_taken_from_the_dataset(make: Subject, drop_last: bool, num_workers: int) -> object:
    """The length is rounded; a dataset without one gives TypeError, and so does the iterator."""
    sized = make(Count(7, says=7), batch_size=2, drop_last=drop_last, num_workers=num_workers)
    unsized = make(Count(7), batch_size=2, num_workers=num_workers)
    return len(sized), type(caught(lambda: len(unsized))), type(caught(lambda: len(iter(sized))))


@pytest.mark.covering(2)
@FEW_WORKERS
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, None])
@same_as_torch("warnings", async_for=False)
def test_more_than_the_length_warns(make: Subject, batch_size: int | None, asked: bool, num_workers: int) -> object:
    """Once for each batch beyond len(dataset), if len(loader) was called before iter()."""
    loader = make(Count(6, says=2), batch_size=batch_size, num_workers=num_workers)
    if asked:
        len(loader)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches = list(loader)
    texts = [str(w.message).replace(repr(loader.dataset), "<dataset>") for w in seen if "Length of" in str(w.message)]
    return len(batches), texts


@FEW_WORKERS
@same_as_torch("attributes")
def test_shuffle_false_is_accepted(make: Subject, num_workers: int) -> object:
    """An iterable dataset takes `shuffle=False`, which was once the default."""
    loader = make(Count(3), shuffle=False, num_workers=num_workers)
    return make.batches(loader), type(loader.sampler).__name__, type(loader.batch_sampler).__name__


@FEW_WORKERS
@same_as_torch("draws from the global generator", defaults=False)
def test_draws_for_a_stream(make: Subject, num_workers: int) -> object:
    """One base seed for each epoch."""
    loader = make(Count(3), num_workers=num_workers)
    return make.batches(loader), torch.get_rng_state(), make.batches(loader), torch.get_rng_state()


@pytest.mark.processes
@FEW_WORKERS
@same_as_torch("IterDataPipe")
def test_iter_data_pipe_is_sharded_and_shuffled(make: Subject, num_workers: int) -> object:
    """The shuffle argument, the shared seed and the sharding of torch's data pipes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = IterableWrapper(range(12)).shuffle().sharding_filter()
        shuffled = make(pipe, batch_size=2, shuffle=True, num_workers=num_workers)
        epochs = make.batches(shuffled), make.batches(shuffled), torch.get_rng_state()
        return epochs, make.batches(make(pipe, batch_size=2, shuffle=False, num_workers=num_workers))
