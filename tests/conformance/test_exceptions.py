"""Errors of datasets, collate_fn and worker_init_fn, and what follows them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.comparison import Subject, caught, same_as_torch, told
from tests.conformance.datasets import (
    ERRORS,
    Failing,
    FailingBatches,
    FailingByKind,
    FailingWithCause,
    Squares,
    Whereabouts,
    as_list,
    fail_to_start,
    failing_collate,
)

pytestmark = pytest.mark.processes("ours")

FEW_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
RAISED = tuple(name for name in ERRORS if name != "StopIteration")
DIFFERENT = ("TwoArguments", "UnicodeDecodeError", "KeepsSocket")  # in test_differences.py


def first_error(loader: Any) -> BaseException:
    """What the first batch raises."""
    error = caught(lambda: next(iter(loader)))
    assert error is not None
    return error


def story(it: Any, limit: int = 50) -> list[Any]:
    """Batches and errors in the order in which they come, until the end."""
    seen: list[Any] = []
    for _ in range(limit):
        error = caught(lambda: seen.append(next(it)))
        if isinstance(error, StopIteration):
            return seen
        if error is not None:
            seen.append(type(error).__name__)
    return [*seen, "no end"]


@same_as_torch("errors without workers")
def test_error_without_workers_is_the_object_itself(make: Subject) -> object:
    """The error is neither wrapped nor changed; ours adds notes with the indices."""
    it = iter(make(FailingByKind(), sampler=RAISED, batch_size=None))
    errors = {kind: caught(lambda: next(it)) for kind in RAISED}
    return {kind: (type(error), repr(error), getattr(error, "__cause__", None)) for kind, error in errors.items()}


@pytest.mark.processes
@same_as_torch("errors in workers")
def test_error_in_a_worker_has_its_type_and_torchs_words(make: Subject) -> object:
    """The same type, the words "Caught X in DataLoader worker process i.", and the worker's traceback."""
    kinds = [kind for kind in RAISED if kind not in DIFFERENT]
    it = iter(make(FailingByKind(), sampler=kinds, batch_size=None, num_workers=1))
    return {kind: shown(caught(lambda: next(it)), str(ERRORS[kind]())) for kind in kinds}


def shown(error: Exception | None, text: str) -> object:
    """What is to be seen of an error from worker 0."""
    assert error is not None
    told_of_it = told(error)
    return (
        type(error),
        f"Caught {type(error).__name__} in DataLoader worker process 0." in told_of_it,
        "Traceback (most recent call last)" in told_of_it,
        "datasets.py" in told_of_it and "__getitem__" in told_of_it,
        text in told_of_it,
    )


@pytest.mark.processes
@same_as_torch("errors in workers")
def test_key_error_is_readable(make: Subject) -> object:
    """The text of a KeyError is not one long repr with escaped line ends."""
    error = first_error(make(Failing(4, "KeyError"), num_workers=1))
    lines = told(error).splitlines()
    return isinstance(error, KeyError), len(lines) > 5, any(line.startswith("KeyError: 'missing") for line in lines)


@pytest.mark.processes
@same_as_torch("errors in workers")
def test_error_names_the_worker_it_came_from(make: Subject) -> object:
    """Batch i fails in worker i % num_workers."""
    it = iter(make(Failing(6, "ValueError"), num_workers=3))
    errors = [caught(lambda: next(it)) for _ in range(6)]
    return [[n for n in range(3) if f"DataLoader worker process {n}." in told(error)] for error in errors if error]


@pytest.mark.processes
@same_as_torch("errors in workers")
def test_cause_of_an_error_is_told(make: Subject) -> object:
    """`raise ... from ...` in a worker is seen in the main process."""
    error = first_error(make(FailingWithCause(3), num_workers=1))
    text = told(error)
    return type(error).__name__, "the disk" in text, "The above exception was the direct cause" in text


@FEW_WORKERS
@pytest.mark.parametrize("batch_size", [1, 3, None])
@same_as_torch("going on after an error")
def test_iteration_goes_on_with_the_next_batch(make: Subject, batch_size: int | None, num_workers: int) -> object:
    """Some samples fail: their batches raise, all others come, in order, until the end."""
    loader = make(
        Failing(17, "ValueError", at=[0, 4, 5, 11, 16]),
        batch_size=batch_size,
        num_workers=num_workers,
    )
    return story(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@same_as_torch("going on after an error")
def test_an_error_in_every_batch_is_counted_as_often_as_there_are_batches(make: Subject, num_workers: int) -> object:
    """As many errors as batches, then the end, and again in the next epoch."""
    loader = make(Failing(11, "RuntimeError"), batch_size=2, num_workers=num_workers)
    first, second = story(iter(loader)), story(iter(loader))
    assert len(first) == len(second) == len(loader)
    return first, second


@FEW_WORKERS
@same_as_torch("going on after an error")
def test_for_loop_ends_at_an_error_and_can_be_taken_up(make: Subject, num_workers: int) -> object:
    """The error leaves the loop; the same iterator gives the rest."""
    it = iter(make(Failing(6, "OSError", at=[2]), num_workers=num_workers))
    seen: list[Any] = []
    error = caught(lambda: seen.extend(batch for batch in it))
    return type(error), seen, list(it)


@same_as_torch("going on after an error", async_for=False)
def test_worker_survives_an_error(make: Subject) -> object:
    """The same process does the next batches."""

    class Sometimes(Whereabouts):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise ValueError
            return super().__getitem__(index)

    loader = make(Sometimes(8), num_workers=2, multiprocessing_context="fork", collate_fn=as_list)
    seen = story(iter(loader))
    places = [place for batch in seen if isinstance(batch, list) for place in batch]
    return [place[:2] for place in places], len({pid for _, _, pid in places}), seen.count("ValueError")


@FEW_WORKERS
@same_as_torch("errors in workers")
def test_error_of_collate_fn(make: Subject, num_workers: int) -> object:
    """Such an error is raised and passed over like an error of the dataset."""
    return story(iter(make(Squares(6), sampler=range(6), collate_fn=failing_collate, num_workers=num_workers)))


@FEW_WORKERS
@same_as_torch("errors in workers")
def test_error_of_getitems(make: Subject, num_workers: int) -> object:
    """The whole batch fails, the others come."""
    return story(iter(make(FailingBatches(7), batch_size=2, num_workers=num_workers)))


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [1, 2])
@same_as_torch("errors of worker_init_fn")
def test_error_of_worker_init_fn_is_the_result_of_the_first_batch(make: Subject, num_workers: int) -> object:
    """Every worker raises the error once, in place of the worker's first batch."""
    it = iter(make(Squares(num_workers * 2), num_workers=num_workers, worker_init_fn=fail_to_start))
    told_by = []
    for worker in range(num_workers):
        error = caught(lambda: next(it))
        words = f"Caught ValueError in DataLoader worker process {worker}."
        told_by.append(
            (type(error), error and (words in told(error), f"worker {worker} does not start" in told(error)))
        )
    return told_by


@pytest.mark.parametrize("num_workers", [1, 2])
@same_as_torch("errors of worker_init_fn")
def test_no_batch_comes_from_workers_that_did_not_start(make: Subject, num_workers: int) -> object:
    """Every batch of the epoch is an error, then the epoch ends."""
    seen = story(iter(make(Squares(7), num_workers=num_workers, worker_init_fn=fail_to_start)))
    assert all(isinstance(error, str) for error in seen)
    return len(seen), seen[:num_workers]
