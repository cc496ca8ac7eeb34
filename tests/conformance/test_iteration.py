"""Iterators: protocol, prefetching, several at once, order of delivery."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.conformance.comparison import Subject, caught, same_as_torch
from tests.conformance.datasets import (
    Counted,
    Failing,
    Gate,
    Mailbox,
    Squares,
    Watched,
    Whereabouts,
    as_list,
)

FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@FEW_WORKERS
@same_as_torch("iterator")
def test_iterator_is_its_own_iterator(make: Subject, num_workers: int) -> object:
    """iter(iterator) is the iterator; a second loop goes on where the first one stopped."""
    it = iter(make(Squares(6), num_workers=num_workers))
    first = next(it)
    return iter(it) is it, first, [batch for _, batch in zip(range(2), it, strict=False)], list(it)


@FEW_WORKERS
@same_as_torch("iterator")
def test_iterator_stays_exhausted(make: Subject, num_workers: int) -> object:
    """After its end, an iterator raises StopIteration at each call."""
    it = iter(make(Squares(3), num_workers=num_workers))
    seen = list(it)
    return seen, [type(caught(lambda: next(it))) for _ in range(3)], list(it), len(it)


@FEW_WORKERS
@same_as_torch("iterator")
def test_each_iter_is_a_fresh_iterator(make: Subject, num_workers: int) -> object:
    """Each iterator begins at the beginning; `_iterator` stays None."""
    loader = make(Squares(4), num_workers=num_workers)
    a, b = iter(loader), iter(loader)
    return a is not b, [next(a), next(a), next(b)], loader._iterator


@pytest.mark.processes("ours")
@FEW_WORKERS
@same_as_torch("several iterators")
def test_two_iterators_take_turns(make: Subject, num_workers: int) -> object:
    """Two over one loader at the same time do not disturb each other."""
    loader = make(Squares(7), batch_size=2, shuffle=True, num_workers=num_workers)
    return list(zip(loader, loader, strict=True))


@FEW_WORKERS
@same_as_torch("several iterators")
def test_nested_loops_over_one_loader(make: Subject, num_workers: int) -> object:
    """A loop within a loop."""
    loader = make(Squares(3), num_workers=num_workers)
    return [(int(a), int(b)) for a in loader for b in loader]


@same_as_torch("several iterators")
def test_loops_over_different_loaders(make: Subject) -> object:
    """Training and validation, interleaved."""
    train, validate = make(Squares(6), batch_size=2, num_workers=2), make(Squares(3), num_workers=1)
    return [(batch, make.batches(validate) if i % 2 else None) for i, batch in enumerate(train)]


@FEW_WORKERS
@same_as_torch("iterator")
def test_iterator_outlives_the_loader(make: Subject, num_workers: int) -> object:
    """`iter(DataLoader(...))` without a name for the loader."""
    return list(iter(make(Squares(5), batch_size=2, num_workers=num_workers)))


@FEW_WORKERS
@same_as_torch("iterator")
def test_first_batch_by_next_and_iter(make: Subject, num_workers: int) -> object:
    """The usual line to look at one batch, several times."""
    loader = make(Squares(5), batch_size=2, num_workers=num_workers)
    return [next(iter(loader)) for _ in range(3)]


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(1, 1), (1, 3), (2, 2), (3, 1)])
@same_as_torch("eager prefetching", async_for=False, defaults=False)
def test_batches_are_made_from_iter_on(make: Subject, num_workers: int, prefetch_factor: int) -> object:
    """iter() alone, without a next(), has prefetch_factor * num_workers batches made, and no more."""
    with Mailbox() as mailbox:
        it = iter(make(Watched(40, mailbox), num_workers=num_workers, prefetch_factor=prefetch_factor))
        window = sorted(mailbox.letter() for _ in range(num_workers * prefetch_factor))
        begun_before_next = mailbox.empty()
        next(it)
        after = mailbox.letter()
    return window, begun_before_next, after


@same_as_torch("eager prefetching", async_for=False)
def test_without_workers_nothing_is_done_before_next(make: Subject) -> object:
    """iter() starts the sampler and reads nothing."""
    with Mailbox() as mailbox:
        sampler = Counted(5)
        it = iter(make(Watched(5, mailbox), sampler=sampler))
        before = sampler.started, sampler.read, mailbox.empty()
        next(it)
        return before, sampler.read, mailbox.letter(), mailbox.empty()


@same_as_torch("order of delivery", async_for=False)
def test_in_order_waits_for_a_slow_batch(make: Subject) -> object:
    """Batch 1 is ready while batch 0 is not; batch 0 is given first."""
    with Mailbox() as mailbox, Gate() as gate:
        it = iter(make(Watched(6, mailbox, gate, at=[0]), num_workers=2))
        begun = {mailbox.letter(), mailbox.letter(), mailbox.letter()}
        opener = threading.Timer(0.05, gate.open)  # not before the loop waits; the order does not depend on it
        opener.start()
        seen = list(it)
        opener.join()
    assert begun == {0, 1, 3}
    return seen


@same_as_torch("order of delivery", async_for=False, defaults=False, since=(2, 13))
def test_out_of_order_gives_what_is_ready(make: Subject) -> object:
    """in_order=False: batches that are ready are given while one is not."""
    with Gate() as gate:
        it = iter(make(Watched(12, gate=gate, at=[0]), batch_size=None, num_workers=2, in_order=False))
        early = [next(it) for _ in range(5)]
        gate.open()
        late = list(it)
    assert 0 not in early
    return sorted(early + late)


@same_as_torch("order of delivery", async_for=False, defaults=False, since=(2, 13))
def test_out_of_order_holds_little_behind_a_slow_batch(make: Subject) -> object:
    """A worker that is stuck has at most prefetch_factor * num_workers // active workers batches."""
    with Gate() as gate:
        dataset = _StuckAndPlaced(30, gate=gate, at=[0])
        it = iter(make(dataset, batch_size=None, collate_fn=as_list, num_workers=2, in_order=False))
        early = [next(it) for _ in range(28)]
        gate.open()
        late = list(it)
    assert {worker for _, worker in early} == {1}
    assert len([index for index, worker in late if worker == 0]) <= 2
    return sorted(index for index, _ in early + late)


class _StuckAndPlaced(Watched):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), Whereabouts(0)[index][1]


@FEW_WORKERS
@same_as_torch("order of delivery", async_for=False)
def test_out_of_order_gives_all_batches(make: Subject, num_workers: int) -> object:
    """Each batch comes exactly once, errors included."""
    it = iter(make(Failing(25, "ValueError", at=[3, 9]), batch_size=None, num_workers=num_workers, in_order=False))
    seen, errors = [], 0
    for _ in range(25):
        error = caught(lambda: seen.append(next(it)))
        errors += isinstance(error, ValueError)
    return sorted(seen), errors, list(it)


@FEW_WORKERS
@same_as_torch("profiler", async_for=False)
def test_profiler_shows_a_range_for_each_step(make: Subject, num_workers: int) -> object:
    """Each call of next() has a range "enumerate(DataLoader)#<class>.__next__"."""
    loader = make(Squares(6), batch_size=2, num_workers=num_workers)
    with torch.autograd.profiler.profile() as profile:
        list(loader)
    names = [event.name for event in profile.function_events or [] if "DataLoader" in event.name]
    assert all(name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__") for name in names)
    return len(names)


@FEW_WORKERS
@same_as_torch("large samplers", async_for=False)
def test_sampler_of_ten_million_does_not_delay_the_end(make: Subject, num_workers: int) -> object:
    """An error at the first batch ends a loop over ten million indices at once."""
    loader = make(Failing(10**7, "ValueError"), batch_size=1000, num_workers=num_workers)
    error = caught(lambda: list(loader))
    return type(error), len(loader)


@FEW_WORKERS
@same_as_torch("iterator")
def test_enumerate_and_zip(make: Subject, num_workers: int) -> object:
    """enumerate() and zip() over a loader."""
    loader = make(Squares(6), batch_size=2, num_workers=num_workers)
    pairs = list(zip(loader, range(10), strict=False))
    return [(step, batch) for step, batch in enumerate(loader, start=1)], pairs, [b.sum() for b in map(abs, loader)]
