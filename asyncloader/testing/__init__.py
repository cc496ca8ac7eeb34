"""Helpers that you call in the tests of your own datasets, samplers and loaders.

`assert_resumable`: a run can be resumed from the state after every batch; `assert_resumable_async`: the same with
``async for``. `assert_reproducible`: samples are the same with other workers, batch sizes and threads. `fingerprint`:
16 digits for all batches of a run, to compare runs whose batches nobody keeps.

Containers and dataclasses are compared part by part; tensors, arrays and numbers by dtype, shape, device and values,
without tolerances, a NaN being equal to a NaN; other objects are the same if their class says so (``__eq__``), or if
they would be pickled as the same. The error names the part that differs, or that cannot be compared.
"""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from asyncloader.loader import DataLoader
from asyncloader.log import log
from asyncloader.options import OF_WORKERS, Scheduling, WorkerBackend
from asyncloader.protocols import is_async
from asyncloader.testing.comparison import difference, fingerprint

__all__ = ["assert_reproducible", "assert_resumable", "assert_resumable_async", "fingerprint"]


MakeLoader = Callable[[], Any]


def assert_resumable(
    make_loader: MakeLoader, *, resume_with: MakeLoader | None = None, restore_generators: bool = True
) -> None:
    """Check that a loader goes on from each of its states with exactly the batches that were left.

    Runs through two epochs of one loader and takes its state before the first, after every batch and after the first
    epoch. From each of them another loader goes on: the rest of the epoch and the whole epoch after it must be the same
    batches. States go through JSON, if they can. A loader with ``set_epoch`` is told the epoch.

    Args:
        make_loader: Makes the loader, each time a new one with a new dataset, over a few batches: ours, or any other
            that can be iterated over and has ``state_dict`` and ``load_state_dict``, such as torchdata's.
        resume_with: Makes the loaders that go on, by default `make_loader`: with another number of workers, say.
        restore_generators: Set Python's, numpy's and torch's global generators to what they were when a state was
            taken, as a trainer's checkpoint does. Otherwise they are somewhere else.

    Raises:
        AssertionError: with the state that was gone on from, and the batch that differs or cannot be compared.
    """
    _drive(_check(make_loader, resume_with or make_loader, restore_generators, is_async=False))


async def assert_resumable_async(
    make_loader: MakeLoader, *, resume_with: MakeLoader | None = None, restore_generators: bool = True
) -> None:
    """Check the same as `assert_resumable` with ``async for``."""
    await _check(make_loader, resume_with or make_loader, restore_generators, is_async=True)


def assert_reproducible(
    make_dataset: Callable[[], Any],
    *,
    num_workers: Sequence[int] = (0, 1, 2),
    batch_sizes: Sequence[int] = (1, 4),
    concurrency: Sequence[int | None] = (None,),
    worker_backends: Sequence[WorkerBackend] = ("process",),
    scheduling: Sequence[Scheduling] = ("static", "dynamic"),
    epochs: int = 2,
    seed: int = 0,
    **options: Any,
) -> None:
    """Check that samples do not depend on who makes them, beside which others, and when.

    The first value of each argument makes the samples that are right, the largest number of workers with each of the
    other values those that must be the same, bit for bit; and each number of workers with the first values. They are
    compared as the dataset gives them, before any ``collate_fn``.

    With ``seeding="sample"``, the default here, a sample has draws of its own from the global generators; on threads of
    a worker process only in a :func:`asyncloader.sample_seed` block; not where samples are made at the same time in the
    trainer's process. Draws from :func:`asyncloader.sample_rng` are a sample's own anywhere.

    Args:
        make_dataset: Makes the dataset, a new one for each loader: map-style, with a few samples.
        num_workers: Numbers of workers, each for a loader.
        batch_sizes: Batch sizes, each for a loader. Give one where the dataset makes something of whole batches.
        concurrency: Samples that one worker fetches at once.
        worker_backends: "process", "thread".
        scheduling: Which worker makes which batch.
        epochs: How many of each loader are compared.
        seed: Seeds torch before each loader.
        options: Further arguments of all loaders: ``shuffle=True``, or another ``seeding``. Loaders
            without workers are not given options about workers.

    Raises:
        AssertionError: with the likely cause and what to do, then the loader, the epoch and the place in its order of
            the first sample that differs or cannot be compared.

    Example:
        >>> from asyncloader.testing import assert_reproducible
        >>> assert_reproducible(lambda: range(6), num_workers=[0], shuffle=True)
    """
    varied: dict[str, Sequence[Any]] = {
        "num_workers": num_workers,
        "batch_size": batch_sizes,
        "concurrency": concurrency,
        "worker_backend": worker_backends,
        "scheduling": scheduling,
    }
    fixed = {"seeding": "sample", **options, "collate_fn": list}
    right, others = _varied(varied)
    expected = _samples(make_dataset(), epochs, seed, {**right, **fixed})
    for other in others:
        found = _samples(make_dataset(), epochs, seed, {**other, **fixed})
        told = ", ".join(f"{name}={value!r}" for name, value in other.items())
        try:
            for epoch, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                _compare(f"With {told}, epoch {epoch}", ours, theirs, thing="sample")
        except AssertionError as error:
            if error.__cause__ is not None:  # samples that cannot be compared
                raise
            again = _samples(make_dataset(), epochs, seed, {**right, **fixed})
            cause = _cause(again, expected, make_dataset(), {**other, **fixed})
            raise AssertionError(f"{cause}\n{error}") from None


def _cause(again: list[list[Any]], expected: list[list[Any]], dataset: Any, options: dict[str, Any]) -> str:
    """Say why samples differ, as far as it can be known, and what to do.

    Args:
        again: The samples of a second run of the first loader.
        expected: The samples of its first run.
        dataset: A new one.
        options: The options of the loader that gave other samples.
    """
    if any(difference(one, other) is not None for one, other in zip(again, expected, strict=True)):
        return (
            "The same loader, seeded alike, gives other samples in a second run: something draws from a random "
            "generator that nobody seeds, such as np.random.default_rng() or random.Random() without a seed, or made "
            "in __getitem__, a library's hidden one, or the time. Draw from the global generators of random, numpy and "
            "torch, from asyncloader.sample_rng(), or from generators that the dataset or its transforms have as "
            "attributes since __init__, with a seed."
        )
    overlaps = is_async(dataset) or (options["concurrency"] or 1) > 1 or options["worker_backend"] == "thread"
    if overlaps and options["num_workers"]:
        return (
            "Samples that are made at the same time share random generators: draw from asyncloader.sample_rng(), or, "
            'in worker processes with seeding="sample", in a `with asyncloader.sample_seed():` block.'
        )
    if options["seeding"] != "sample":
        return (
            f"With seeding={options['seeding']!r}, what a sample draws depends on its batch or its worker: "
            'seeding="sample" does without.'
        )
    return (
        "A sample depends on what its worker has made before: the dataset keeps a state of its own. It counts calls, "
        "caches what was random, or draws from a generator that it made after __init__. Make each sample of its index "
        "and of random numbers drawn for it alone."
    )


def _varied(values: dict[str, Sequence[Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first value of each option, and what else they are to be; not all with all."""
    right = {name: each[0] for name, each in values.items()}
    numbers = values["num_workers"]
    others = [{**right, "num_workers": number} for number in numbers]
    many = {**right, "num_workers": max(numbers)}
    others += [{**many, name: value} for name in values if name != "num_workers" for value in values[name][1:]]
    return right, [other for other in others if other != right]


def _samples(dataset: Any, epochs: int, seed: int, options: dict[str, Any]) -> list[list[Any]]:
    if not options["num_workers"]:
        options = {name: value for name, value in options.items() if name not in OF_WORKERS}
    torch.manual_seed(seed)
    loader = DataLoader(dataset, **options)
    try:
        return [[sample for batch in loader for sample in batch] for _ in range(epochs)]
    finally:
        loader.close()


def _drive(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("it waits for something")


async def _check(make: MakeLoader, make_other: MakeLoader, restore: bool, *, is_async: bool) -> None:
    loader = make()
    first: list[Any] = []
    states: list[tuple[str, int, Any, Any]] = []  # when, batches of the first epoch before, state, generators

    def save(when: str) -> None:
        states.append((when, len(first), loader.state_dict(), _generators()))

    save("before the first epoch")
    _set_epoch(loader, 0)
    async for batch in _batches(loader, is_async):
        first.append(batch)
        save(f"after batch {len(first)}")
    save("after the first epoch")
    copies = [repr(state) for _, _, state, _ in states]
    _set_epoch(loader, 1)
    second = [batch async for batch in _batches(loader, is_async)]
    _close(loader)
    assert [repr(state) for _, _, state, _ in states] == copies, "a state has changed after it was taken"

    for number, (when, done, state, generators) in enumerate(states):
        _seed_all(number)
        other = make_other()
        _set_epoch(other, 0)
        other.load_state_dict(_through_json(state))
        if restore:
            _restore(generators)
        is_over = number == len(states) - 1
        _set_epoch(other, int(is_over))
        log.addFilter(_is_news)  # that nothing is left of an epoch is expected here
        rest = [batch async for batch in _batches(other, is_async)]
        log.removeFilter(_is_news)
        _compare(f"The state {when}: the rest of the epoch", rest, second if is_over else first[done:])
        if not is_over:
            _set_epoch(other, 1)
            after = [batch async for batch in _batches(other, is_async)]
            _compare(f"The state {when}: the epoch after", after, second)
        _close(other)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("The loaded state was taken after the last batch")


def _set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)


def _close(loader: Any) -> None:
    if hasattr(loader, "close"):
        loader.close()


async def _batches(loader: Any, is_async: bool) -> AsyncIterator[Any]:
    if is_async:
        async for batch in loader:
            yield batch
    else:
        for batch in loader:
            yield batch


def _through_json(state: Any) -> Any:
    """Return what a state is after JSON, if that can say all of it; else a copy."""
    try:
        read = json.loads(json.dumps(state))
        return read if read == state else copy.deepcopy(state)
    except TypeError:
        return copy.deepcopy(state)


# --------------------------------------------------------------------------------------------------------- generators


def _generators() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(generators: tuple[Any, Any, Any]) -> None:
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --------------------------------------------------------------------------------------------------------- comparison


def _compare(what: str, found: Sequence[Any], expected: Sequence[Any], thing: str = "batch") -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=False), 1):
        try:
            how = difference(one, other)
        except Exception as error:
            raise AssertionError(f"{what}: {thing} {number} cannot be compared: {error}.") from error
        if how is not None:
            raise AssertionError(f"{what}: {thing} {number} is not the same: {how}.")
    many = {"batch": "batches", "sample": "samples"}[thing]
    assert len(found) == len(expected), f"{what} has {len(found)} {many}, and should have {len(expected)}."
