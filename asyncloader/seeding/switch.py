"""Steps of samples that are coroutines, from one await to the next, and the generators that they draw from.

    sample 7:  [ step ] waits .................... [ step ]
    sample 8:            [ step ] waits . [ step ]

With ``seeding="sample"``, in a worker process, each sample has draws of its own across everything that it awaits
(`GeneratorSwitch`): before a step the generators are seeded for its sample, and get the states back that its earlier
steps have left; after it, the states of those that it has moved are put away. A step takes 25 us for that: 10 for the
seeds, the rest to see what moves. Tasks that a sample begins (``asyncio.gather``, a TaskGroup) have draws of their own,
by the order in which the sample begins them. Steps hold the lock of `sample_seed` blocks: blocks of threads wait for
their end.

Elsewhere samples that are made at the same time share the generators, with each other or with the trainer. The first
draw that is seen is warned of (`DrawWatch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

from asyncloader.log import log
from asyncloader.seeding import turns
from asyncloader.seeding.generators import GLOBAL, restore, states_of
from asyncloader.seeding.positions import positions
from asyncloader.seeding.sample_context import BATCH, SampleContext, Steps, current
from asyncloader.seeding.seeder import WHOLE, Seeder

_WAY_OUT = (
    "Draw from asyncloader.sample_rng(), which is the sample's own in any thread and task; or have the transforms run "
    "in worker processes, one sample at a time (no concurrency)."
)

_ENOUGH_STEPS = 3
"""One of a batch of one sample, and one to the end of it, may be followed by another batch."""


class DrawWatch(Steps):
    """Warns of the first draw of samples that share generators with others, and so cannot be seeded.

    It watches all runs of a worker: threads may still be at samples of the last one.

    Args:
        seeder: Of the first run. It knows the generators of the dataset's own.
        is_alone: Nobody else draws in this process: what has moved when a batch is there, its samples have moved.
            Otherwise each step is looked at, until the first batch is there: most trainers wait for that, and draw
            nothing meanwhile. A single step that has drawn proves nothing, as the base seed of another loader may have
            been drawn; after batches of one sample, the next one is looked at too.

    Attributes:
        has_warned: One of this process has warned, which is enough.
    """

    has_warned: bool = False

    def __init__(self, seeder: Seeder, *, is_alone: bool) -> None:
        self.is_on: bool = not is_alone
        self._is_alone = is_alone
        self._is_suspected = False
        self._num_steps = 0
        self._lock = threading.Lock()
        self.begin_run(seeder)

    def begin_run(self, seeder: Seeder) -> None:
        """Watch another run. The generators of the dataset's own were put back before it."""
        with turns.lock:  # no thread is in a block, which moves them
            self._positions = positions((*GLOBAL, *seeder.own))
            self.begin()

    def begin(self, sample: object = None) -> None:
        """Begin a step."""
        self._mark = self._positions()

    def end(self, sample: object = None, *, is_last: bool = True) -> None:
        """End it: warn if it has drawn."""
        self._num_steps += 1
        with self._lock:  # the steps of two threads that end at the same time are not to count one draw twice
            before, self._mark = self._mark, self._positions()
        if before == self._mark or DrawWatch.has_warned:
            return
        if not (self._is_alone or (self._is_suspected and self.is_on)):  # the trainer may have its batch, and draw
            self._is_suspected = True
            return
        DrawWatch.has_warned = True
        log.warning(
            "Samples that are made at the same time seem to draw from random generators (of random, numpy.random or "
            "torch, or the dataset's own) that they share with each other or with the trainer: what they draw depends "
            "on timing and on the number of workers, and is not the same again after a resume. %s The samples of an "
            'async dataset have draws of their own with seeding="sample", in worker processes.',
            _WAY_OUT,
        )

    def on_batch(self) -> None:
        """Note that a batch is there."""
        self.is_on = self._is_suspected and self._num_steps < _ENOUGH_STEPS
        if self._is_alone and turns.lock.acquire(blocking=False):  # otherwise a thread moves them, in a block
            self.end()
            turns.lock.release()

    def leave(self) -> None:
        """Have a block begin, which seeds the generators."""
        self.end()

    def go_on(self, interrupted: object) -> None:
        """Go on after a block."""
        self.begin()


class GeneratorSwitch(Steps):
    """Gives the generators to one sample after the other. Belongs to the thread of a worker's loop, for all its runs.

    Args:
        seeder: Of the first run.
        warns: Warn of draws that belong to no sample.
    """

    is_on = True

    def __init__(self, seeder: Seeder, *, warns: bool = True) -> None:
        self._warns = warns
        self.begin_run(seeder)

    def begin_run(self, seeder: Seeder) -> None:
        """Seed for another run. Samples of the last one that are cancelled may still have steps."""
        self._seeder = seeder
        self._generators = (*GLOBAL, *seeder.own)
        self._positions = positions(self._generators)
        self._last: SampleContext | None = None  # whom they were seeded for
        self._mark = self._positions()  # where the generators were left

    def begin(self, sample: SampleContext) -> None:
        """Begin a step of a sample, or of a task of it."""
        turns.lock.acquire()
        self.running = sample
        self._look_for_others()
        if self._last is not sample:
            self._seeder(*sample.place(WHOLE if sample.position == BATCH else 0))
            restore(sample.states)
            self._last = sample
        self._mark = self._positions()

    def end(self, sample: SampleContext, *, is_last: bool) -> None:
        """End it."""
        self.running = None
        now = self._positions()
        if not is_last and (sample.states or now != self._mark):
            sample.states = states_of(self._moved(sample, now))
        self._mark = now
        turns.lock.release()

    def _moved(self, sample: SampleContext, now: Any) -> Iterator[Any]:
        """Yield the generators that it has moved; earlier too, as they may keep a number for the next draw."""
        before = [id(generator) for generator, _ in sample.states]
        for generator, there, here in zip(self._generators, self._mark, now, strict=True):
            if there != here or id(generator) in before:
                yield generator

    def _look_for_others(self) -> None:
        """Say so, once, if somebody has drawn since the last step: a thread, which nobody can give its own draws."""
        if self._mark == self._positions():
            return
        self._last = None
        if self._warns:
            self._warns = False
            log.warning(
                "Something draws from the random generators of this worker while no sample runs on its loop: code "
                "that samples run on a thread (asyncio.to_thread), it seems. What threads draw depends on timing "
                "and on the number of workers. %s Or draw in a `with asyncloader.sample_seed():` block.",
                _WAY_OUT,
            )

    # ------------------------------------------------------------------------------------- blocks, and whole batches

    def leave(self) -> SampleContext | None:
        """Have a block begin, in any thread that has the lock. Returns whose step it interrupts."""
        sample = self.running
        if sample is not None:
            self.end(sample, is_last=False)
        return sample

    def go_on(self, interrupted: SampleContext | None) -> None:
        """Go on after a block."""
        self._last, self._mark = None, self._positions()
        if interrupted is not None:
            self.begin(interrupted)

    @contextlib.contextmanager
    def seeded(self, number: int, part: int) -> Iterator[None]:
        """Seed for what is done once for a batch, between steps."""
        with turns.lock:
            self._look_for_others()
            self._seeder(number, part)
            try:
                yield
            finally:
                self.go_on(None)

    # -------------------------------------------------------------------------------------------------------- tasks

    def make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task, for the factory of the loop: in a step of a sample, one with draws of its own."""
        if self.running is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        sample = current.get()  # that of the task, unless whoever begins it gives it a context of another kind
        sample = sample.of_task() if sample is self.running else sample
        task = asyncio.Task(_run(self, sample, coroutine), loop=loop, **options)
        task.add_done_callback(partial(_close, coroutine))  # it may have been cancelled before its first step
        return task


async def _run(switch: GeneratorSwitch, sample: SampleContext, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await steps(switch, sample, coroutine)


def _close(coroutine: Any, task: asyncio.Task[Any]) -> None:
    coroutine.close()


@types.coroutine
def steps(switch: Steps, sample: SampleContext, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a coroutine, with each of its steps begun and ended."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    is_last = False
    while True:
        switch.begin(sample)
        try:
            awaited = step(value)
        except StopIteration as end:
            is_last = True
            return end.value
        except BaseException:
            is_last = True
            raise
        finally:
            value = None  # its traceback refers to this frame
            switch.end(sample, is_last=is_last)
        try:
            value = yield awaited
            step = coroutine.send
        except BaseException as error:  # also that nobody waits any more: the coroutine ends by it
            value, step = error, coroutine.throw
