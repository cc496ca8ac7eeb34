"""Which sample is being fetched, and the random generator that is its own.

Each batch has a `SampleContext`, whose position is set before each sample; where several samples are fetched at once,
each sample has its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncloader.seeding.hashing import mix, mix_on
from asyncloader.seeding.seeder import COLLATE, WHOLE, Seeder

BATCH = -1
"""The position of what belongs to no single sample: ``__getitems__``, ``collate_fn``."""
COLLATION = -2
"""That of ``collate_fn`` where samples are known by their place in the epoch."""

_BEFORE_SAMPLES = 3
_WORD = (1 << 32) - 1


class Placed(NamedTuple):
    """The keys of a batch that knows where in the epoch it is, under ``seeding="sample"``.

    Attributes:
        keys: As the sampler gave them.
        first: The number of its first sample in the order of the epoch, from 0.
    """

    keys: Any
    first: int


class Steps:
    """What is done around the steps of samples that are made at the same time: here nothing. See `switch.py`.

    Attributes:
        is_on: Steps of samples that begin now are to be begun and ended.
        running: The sample whose step it is.
    """

    is_on = False
    running: SampleContext | None = None

    def begin_run(self, seeder: Seeder) -> None:
        """Begin another run."""

    def begin(self, sample: Any) -> None:
        """Begin a step of a sample."""

    def end(self, sample: Any, *, is_last: bool) -> None:
        """End it; the last step of the sample, or of its task."""

    def seeded(self, number: int, part: int) -> AbstractContextManager[None]:
        """Seed for what is done once for a batch."""
        return nullcontext()

    def on_batch(self) -> None:
        """Note that a batch is there."""

    def leave(self) -> Any:
        """Have a `sample_seed` block begin; return whose step it interrupts."""

    def go_on(self, interrupted: Any) -> None:
        """Go on after a block."""


NO_STEPS = Steps()


class SampleContext:
    """Where in the run the running code is.

    Args:
        seeder: The seeder of the worker, for this epoch.
        batch: Number of the batch.

    Attributes:
        first: Number of the batch's first sample in the epoch, where samples are known by that; otherwise None.
        steps: Those of the worker's samples, where samples overlap.
        left: The iterator over the list of keys that samples are asked for by, which tells the position; or None.
        states: Of a coroutine, the generators that earlier steps have moved, with the states that these have left.
    """

    _made_for: int | None = None
    _blocks = BATCH, 0
    _task = 0  # tells the tasks of a sample apart
    _num_tasks = 0
    _begun_by: SampleContext | None = None
    _generator: np.random.Generator
    _samples: dict[int, SampleContext] | None = None
    _seeds_each = False
    _position = BATCH
    first: int | None = None
    steps: Steps = NO_STEPS
    left: Any = None
    states: Sequence[tuple[Any, Any]] = ()

    def __init__(self, seeder: Seeder, batch: int) -> None:
        self.seeder = seeder
        self.batch = batch

    @classmethod
    def of_sample(
        cls, seeder: Seeder, batch: int, position: int = BATCH, first: int | None = None, steps: Steps = NO_STEPS
    ) -> SampleContext:
        """Return the context of a sample at this position, from 0, or of what is done for a batch."""
        sample = cls(seeder, batch)
        sample._position, sample.first, sample.steps = position, first, steps
        return sample

    @property
    def position(self) -> int:
        """In the batch, from 0."""
        if self.left is None:
            return self._position
        # A list's iterator says which key comes next: to set the position for each sample takes longer than to make
        # some. Before the first key, and after the last one, it is the batch that is worked for.
        place = self.left.__reduce__()[2:]
        return place[0] - 1 if place else BATCH

    @position.setter
    def position(self, position: int) -> None:
        self._position, self.left = position, None
        if self._seeds_each:
            self._seed(position)

    def seed_each(self) -> None:
        """Seed the generators for each sample when its position is set, and for what comes before."""
        assert self.first is not None
        self._seeds_each = True
        self.seeder(self.first, WHOLE)

    def _seed(self, position: int) -> None:
        assert self.first is not None
        if position >= 0:
            self.seeder(self.first + position)
        elif position == COLLATION:
            self.seeder(self.first, COLLATE)

    @property
    def number(self) -> int:
        """The number of the sample in the epoch, of the first sample outside of samples. Only where it is known."""
        assert self.first is not None
        return self.first + max(self.position, 0)

    def place(self, part: int = 0) -> tuple[int, int]:
        """Return what to seed a part of this sample with: number and part, for `Seeder`."""
        number = self.batch
        if self.first is not None:
            number = self.number
        else:
            part |= (self.position + _BEFORE_SAMPLES) << 32
        return number, mix_on(self._task, part) if self._task else part

    def of(self, position: int) -> SampleContext:
        """Return the context of a sample, in that of its batch; the same one each time, in each task of the batch."""
        if self._begun_by is not None:
            return self._begun_by.of(position)
        if self._samples is None:
            self._samples = {}
        if position not in self._samples:
            self._samples[position] = self.of_sample(self.seeder, self.batch, position, self.first, self.steps)
        return self._samples[position]

    def of_task(self) -> SampleContext:
        """Return the context of a task that begins in this one: the same sample, with numbers of its own."""
        self._num_tasks += 1
        part = self.of_sample(self.seeder, self.batch, self.position, self.first, self.steps)
        part._task, part._begun_by = mix(self._task, self._num_tasks), self
        return part

    def generator(self) -> np.random.Generator:
        """Return the generator of this sample: the same one as long as the position is the same."""
        if self._made_for != self.position:
            # Philox counts blocks of numbers: a position begins 2^192 of them after the last one, so none ever meet.
            number, part = (self.batch, self.position) if self.first is None else (self.number, min(self.position, 0))
            counter = np.array([0, 0, self._task, part & _WORD], np.uint64)
            key = np.array([mix(*self.seeder.key), mix(number)], np.uint64)
            self._generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            self._made_for = self.position
        return self._generator

    def next_block(self) -> int:
        """Count a block that is seeded by itself; return how many there were for this sample."""
        of, count = self._blocks
        count = count if of == self.position else 0
        self._blocks = (self.position, count + 1)
        return count


current: ContextVar[SampleContext] = ContextVar("asyncloader sample")


def enter(
    seeder: Seeder, batch: int, position: int = BATCH, first: int | None = None, steps: Steps = NO_STEPS
) -> SampleContext:
    """Note that what this context does from now on is done for this sample, or batch."""
    sample = SampleContext.of_sample(seeder, batch, position, first, steps)
    current.set(sample)
    return sample


def tell_tasks_apart(loop: asyncio.AbstractEventLoop) -> None:
    """Have each task that a sample begins on this loop (``asyncio.gather``, a TaskGroup) draw numbers of its own.

    They follow from the order in which the sample begins its tasks. What tasks draw from one generator depends on which
    of them comes first, and so on how long each has waited.
    """
    before = loop.get_task_factory()
    if getattr(before, "func", None) is not begin_task:
        loop.set_task_factory(partial(begin_task, before or _plain_task))


def begin_task(
    make: Callable[..., Any], loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Any = None, **options: Any
) -> Any:
    """Make a task, as the factory of a loop. Whoever gives it a context decides what is in there."""
    sample = current.get(None)
    if context is not None:
        return make(loop, coroutine, context=context, **options)
    if sample is None:
        return make(loop, coroutine, **options)
    # A task takes a copy of the context that it is made in; not every factory of a user's loop lets one give it.
    context = copy_context()
    context.run(current.set, sample.of_task())
    return context.run(make, loop, coroutine, **options)


def _plain_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


def here() -> SampleContext:
    """Return what is being fetched in this context; a new one for a fetcher that was not told."""
    return current.get(None) or SampleContext(Seeder((0, 0, 0)), 0)


def sample_rng() -> np.random.Generator:
    """Return the random generator of the sample that is being fetched.

    Its numbers depend on the base seed of the epoch, the rank of the data (see ``seeding_rank`` of the loader), the
    number of the batch and the position in it, and on nothing else: the same come with any `num_workers`,
    `concurrency` or timing, after a crash and on a retry. (In a stream whose workers have unequal shares, the numbers
    of batches depend on timing once the first of them has come to its end.) With ``seeding="sample"`` it depends on
    the place in the epoch's order in place of batch and position: then the same come with any batch size as well. The
    global generators of random, numpy and torch are shared by all samples that a worker fetches at once; this one is
    not. In `__getitems__` and in `collate_fn` it is the generator of the batch as a whole.

    The generator is made at the first call; further calls for the same sample go on with it. Tasks that a sample begins
    (``asyncio.gather``, a ``TaskGroup``) have generators of their own, by the order in which the sample begins them.
    Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Raises:
        RuntimeError: if no sample is being fetched in this context, as in a thread of the dataset's own that was not
            started with :func:`asyncio.to_thread`.

    Example:
        >>> class Noisy:
        ...     async def __getitem__(self, index):
        ...         image = await self.load(index)
        ...         return image + asyncloader.sample_rng().normal(size=image.shape)
    """
    sample = current.get(None)
    if sample is None:
        raise RuntimeError(
            "sample_rng() was called where no sample is being fetched. It works inside __getitem__, __getitems__, the "
            "iterator of an iterable dataset and collate_fn, called by an asyncloader.DataLoader; in a thread of your "
            "own, call it before and pass the generator on (asyncio.to_thread does so by itself)."
        )
    return sample.generator()
