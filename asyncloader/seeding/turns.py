"""Turns with the global generators, for samples that a worker process makes at the same time.

    sample 7:  read ......... [ decode, transform ]
    sample 8:  read .. waits ......................[ decode, transform ]
    sample 9:  read ................................ waits .............[ ...

A sample is alone in its process in a `sample_seed` block, with the global generators seeded by its place in the epoch;
so what the block draws does not depend on what else is in flight. The steps of coroutines (`switch.py`) take turns with
blocks of threads, by the same lock.

In the trainer's process the generators are the trainer's. A batch that is made there one sample at a time leaves them
as they were. Samples that are made there at the same time cannot have them, and a block refuses to begin.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from asyncloader.log import log
from asyncloader.seeding.sample_context import BATCH, SampleContext, current
from asyncloader.seeding.seeder import BLOCK

lock: threading.RLock = threading.RLock()
"""Held by the block, or the step of a coroutine, that has its turn."""
_holder: SampleContext | None = None  # the sample whose block has its turn

_SHARED = (
    'A sample entered a sample_seed() block under seeding="sample", and other samples are made at the same time in the '
    "trainer's process: on threads, or as coroutines without workers. The global random generators are the trainer's "
    "there, and cannot be seeded for one sample. Draw from asyncloader.sample_rng(), or use worker processes."
)
_PATIENCE_S = 5.0
_BLOCKED = (
    "A sample_seed() block has waited for %g s, on a thread, for the coroutine of its sample to come to an await. Does "
    "that wait for the thread itself (future.result(), thread.join())? Then both wait for ever: await "
    "asyncio.to_thread(...) or asyncio.wrap_future(future) instead."
)


def may_seed() -> bool:
    """Whether a block may begin here."""
    sample = current.get(None)
    return sample is None or sample.first is None or sample.seeder.may_seed


def _renew() -> None:
    """In a forked process: nobody has a turn. A thread of the parent that had one is not here to give it back."""
    global lock, _holder
    lock, _holder = threading.RLock(), None


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def sample_seed(position: int | None = None) -> Iterator[None]:
    """Make what is drawn in a block the sample's own, where samples are fetched at the same time.

    With ``seeding="sample"``, Python's, numpy's and torch's global generators are seeded for the block by the sample's
    place in the epoch's order, and the blocks of all samples of a process take turns: reading overlaps, what is in
    blocks does not. So random transforms give the same with any number of workers, any `concurrency` and any batch
    size.

    Under another ``seeding``, and where nothing is fetched, it changes nothing. A block must hold no ``await``: other
    samples of its loop would run inside it.

    Args:
        position: The position of the sample in the batch, for `__getitems__`, which makes all samples of a batch. In
            the block, :func:`asyncloader.sample_rng` is that sample's own, under any ``seeding``.

    Raises:
        RuntimeError: on entering a block while another sample is in one, in the same thread; and where samples are made
            at the same time in the trainer's process (worker threads; async datasets and `concurrency` without
            workers), whose generators are the trainer's. :func:`asyncloader.sample_rng` works there.

    Example:
        >>> class Photos:
        ...     async def __getitem__(self, index):
        ...         data = await self.read(index)
        ...         with asyncloader.sample_seed():
        ...             return self.augment(decode(data))
    """
    if (sample := current.get(None)) is None:
        yield
        return
    if position is not None and sample.position == BATCH:
        sample = sample.of(position)
    outside = current.set(sample)
    try:
        with contextlib.nullcontext() if sample.first is None else _block(sample):
            yield
    finally:
        current.reset(outside)


@contextlib.contextmanager
def _block(sample: SampleContext) -> Iterator[None]:
    """Seed the generators for a block, when it is its turn."""
    global _holder
    if not sample.seeder.may_seed:
        raise RuntimeError(_SHARED)
    if lock.acquire(timeout=_PATIENCE_S):
        lock.release()
    elif sample.steps.running is sample:
        log.warning(_BLOCKED, _PATIENCE_S)
    with lock:
        if _holder is sample:  # a block inside a block: the outer one goes on
            yield
            return
        if _holder is not None:
            raise RuntimeError(
                "a sample entered a sample_seed() block while another one of the same event loop was in one: there is "
                "an await inside the block. Await before it, or after it."
            )
        interrupted, _holder = sample.steps.leave(), sample
        try:
            sample.seeder(*sample.place(BLOCK + 3 * sample.next_block() - min(sample.position, 0)))
            yield
        finally:
            _holder = None
            sample.steps.go_on(interrupted)
