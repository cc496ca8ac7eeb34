"""The generators of a worker whose samples are coroutines: each sample has its own draws, across everything it awaits.

    sample 7:  [ step ] waits .................... [ step ]            a step: from one await to the next
    sample 8:            [ step ] waits . [ step ]

    looked at   after each step a look says whether the sample has moved a generator
    in one piece  a look when a sample is there says whether one of those in flight has
    seeded      before a step the generators are seeded for its sample, and get the states back that its earlier steps
                have left; after it, the states of those that it has moved are put away

Seeding takes 10 us a step, a look at each step 1.5 us a sample, and a look at each sample 0.1 us. So steps are looked
at until the first samples have drawn nothing, and then samples are made in one piece. The first draw that is seen, and
the first `sample_seed` block, begin the seeding, which goes on to the end of the run: samples that may have drawn
before are made once more, seeded. That is one sample where steps are looked at, and those in flight where samples are
made in one piece.

Tasks that a sample begins (``asyncio.gather``, a TaskGroup) have draws of their own, by the order in which the
sample begins them. Steps hold the lock of `sample_seed` blocks: blocks of threads wait for their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

from asyncloader.seeding.generators import GLOBAL, restore, states_of
from asyncloader.seeding.hashing import mix
from asyncloader.seeding.positions import positions
from asyncloader.seeding.sample_context import SampleContext
from asyncloader.seeding.seeder import WHOLE, Seeder
from asyncloader.seeding.turns import turn

log = logging.getLogger("asyncloader")

_QUIET = 8
"""After so many samples that draw nothing, samples are made in one piece."""

_NOBODY = -1
"""The part of a seed that no sample draws from."""

_WAY_OUT = (
    "Draw from asyncloader.sample_rng(), which is the sample's own in any thread and task; or have the transforms run "
    "in worker processes, one sample at a time (no concurrency)."
)


class _Watch:
    """What samples hold that may have drawn from generators that are seeded for none of them."""


_DREW = _Watch()


class SampleDraws:
    """What a sample draws from, or a task that it has begun.

    Args:
        number: The number that is seeded with, and
        part: the part of it; see `Seeder`.
        sample: The draws of the sample that has begun the task.

    Attributes:
        states: The generators that earlier steps have moved, with the states that these have left.
        sample: That of the sample, which is made once more if one of its tasks has drawn before the seeding.
        watch: The `Steps.watch` under which the sample, or a task of it, is made in one piece.
    """

    __slots__ = ("_num_tasks", "number", "part", "sample", "states", "watch")

    def __init__(self, number: int, part: int, sample: SampleDraws | None = None) -> None:
        self.number = number
        self.part = part
        self.sample = sample or self
        self.states: list[tuple[Any, Any]] = []
        self.watch: _Watch | None = None
        self._num_tasks = 0

    def of_task(self) -> SampleDraws:
        """Return what the next task draws from that is begun in a step of this."""
        self._num_tasks += 1
        return SampleDraws(self.number, mix(self.part, self._num_tasks), self.sample)


class Steps:
    """What the steps of samples are: here nothing.

    Attributes:
        watch: Samples that begin now are made in one piece, and hold this until they are there; None if each of their
            steps is to be begun and ended.
    """

    watch: _Watch | None = _Watch()

    def is_void(self, watch: _Watch | None) -> bool:
        """Whether a sample that was made under this `watch`, and is there, is to be made once more."""
        return False

    def begin(self, draws: SampleDraws) -> None:
        """Begin a step of a sample."""

    def end(self, draws: SampleDraws, *, is_last: bool) -> None:
        """End it; the last step of the sample, or of its task."""


class DrawWatch(Steps):
    """Warns of the first draw of samples that share generators with others, and so cannot be seeded.

    Args:
        is_alone: Nobody else draws in this process. Otherwise only the first batch is looked at: most trainers wait
            for it, and draw nothing meanwhile.

    Attributes:
        has_warned: One of this process has warned, which is enough.
    """

    has_warned = False

    def __init__(self, *, is_alone: bool) -> None:
        self.watch = _Watch() if DrawWatch.has_warned else None
        self._is_alone = is_alone
        self._positions = positions()
        self._before: Any = None

    def look(self) -> Any:
        """Return where the generators are."""
        return turn().num_blocks, self._positions()

    def compare(self, before: Any) -> None:
        """Warn if they have moved since, but for blocks, which seed them."""
        if before == (now := self.look()) or self.watch is not None:
            return
        if before[0] == now[0] and turn().holder is None:
            self.watch, DrawWatch.has_warned = _Watch(), True
            log.warning(
                "Samples that are fetched at the same time draw from the global random generators (of random, "
                "numpy.random or torch), which they share with each other or with the trainer: what they draw depends "
                "on timing and on the number of workers, and is not the same again after a resume. %s",
                _WAY_OUT,
            )

    def on_batch(self) -> None:
        """Note that a batch is there."""
        if not self._is_alone:
            self.watch = _Watch()

    def begin(self, draws: SampleDraws) -> None:
        """Begin a step."""
        self._before = self.look()

    def end(self, draws: SampleDraws, *, is_last: bool) -> None:
        """End it."""
        self.compare(self._before)


class GeneratorSwitch(Steps):
    """Gives the generators to one sample after the other. Belongs to the thread of a worker's loop, for all its runs.

    Args:
        seeder: Of the first run.
        warns: Warn of draws that belong to no sample.
    """

    def __init__(self, seeder: Seeder, *, warns: bool = True) -> None:
        self.watch = None
        self._mark: Any = None  # where the generators were left
        self._running: SampleDraws | None = None
        self._void: weakref.ref[_Watch] | None = None
        self._warns = warns
        self.begin_run(seeder)

    def begin_run(self, seeder: Seeder) -> None:
        """Seed for another run. Samples of the last one that are cancelled may still have steps."""
        self._seeder = seeder
        self._generators = (*GLOBAL, *seeder.own)
        self._positions = positions(seeder.own)
        self.stay_seeded()
        self._seeds = False
        self._clear()
        self._last: SampleDraws | None = None  # whom they were seeded for
        self._num_quiet = 0

    def begin(self, draws: SampleDraws) -> None:
        """Begin a step of a sample."""
        turn().lock.acquire()
        self._running = draws
        if self._seeds:
            self._look_for_others()
            if self._last is not draws:
                self._seeder(draws.number, draws.part)
                restore(draws.states)
                self._last = draws
        if self.watch is None:  # otherwise a draw that no step has made is still to be seen
            self._mark = self._positions()

    def end(self, draws: SampleDraws, *, is_last: bool) -> None:
        """End it."""
        self._running = None
        now = self._positions()
        if self._seeds:
            if not is_last and (draws.states or now != self._mark):
                draws.states = states_of(self._moved(draws, now))
            self._mark = now
        elif now != self._mark:
            draws.sample.watch = _DREW
            self.stay_seeded()
        elif is_last and not draws.states:  # those have drawn in the last run
            self._num_quiet += 1
            if self._num_quiet == _QUIET:
                self.watch = _Watch()
        turn().lock.release()

    def _moved(self, draws: SampleDraws, now: Any) -> Iterator[Any]:
        """Yield the generators that it has moved; earlier too, as they may keep a number for the next draw."""
        before = [id(generator) for generator, _ in draws.states]
        for generator, there, here in zip(self._generators, self._mark, now, strict=True):
            if there != here or id(generator) in before:
                yield generator

    def is_void(self, watch: _Watch | None) -> bool:
        """Whether a sample that was made under this `watch`, and is there, is to be made once more."""
        self._look()
        return watch is not None and watch is not self.watch

    def _look(self) -> None:
        """See whether a sample has drawn that is made in one piece."""
        if self.watch is not None and self._positions() != self._mark:
            self.stay_seeded()

    def stay_seeded(self) -> None:
        """Seed all steps from now on."""
        if self.watch is not None:
            self._void = weakref.ref(self.watch)
        self.watch, self._seeds = None, True
        self._mark = self._positions()

    def _look_for_others(self) -> None:
        """Say so, once, if somebody has drawn since the last step: a thread, which nobody can give its own draws."""
        if self._mark == self._positions():
            return
        self._last = None
        if self._warns and (self._void is None or self._void() is None):  # those draw as well until they are there
            self._warns = False
            log.warning(
                "Something draws from the random generators of this worker while no sample runs on its loop: code "
                "that samples run on a thread (asyncio.to_thread), it seems. What threads draw depends on timing "
                "and on the number of workers. %s Or draw in a `with asyncloader.sample_seed():` block.",
                _WAY_OUT,
            )

    # ------------------------------------------------------------------------------------- blocks, and whole batches

    def is_in_step_of(self, sample: SampleContext) -> bool:
        """Whether a step of this sample, or of a task of it, has not come to its end."""
        draws, first = self._running, sample.outermost
        return draws is not None and (draws.number, draws.sample.part) in (first.place(), first.place(WHOLE))

    def leave(self) -> SampleDraws | None:
        """Have a block begin, in any thread that has the lock. Returns whose step it interrupts."""
        draws = self._running
        if draws is not None:
            self.end(draws, is_last=False)
        self.stay_seeded()  # samples in one piece would draw while a thread has a block
        return draws

    def go_on(self, draws: SampleDraws | None) -> None:
        """Go on after a block."""
        self._last, self._mark = None, self._positions()
        if draws is not None:
            self.begin(draws)

    @contextlib.contextmanager
    def seeded(self, number: int, part: int) -> Iterator[None]:
        """Seed for what is done once for a batch, between steps."""
        with turn().lock:
            self._look()  # before the mark is another one
            self._seeder(number, part)
            try:
                yield
            finally:
                self._last = None
                self._clear()

    def _clear(self) -> None:
        """Have no generator keep a number for the next draw, as `random.gauss` does: that draw could not be seen."""
        self._seeder(0, _NOBODY)
        self._mark = self._positions()

    # -------------------------------------------------------------------------------------------------------- tasks

    def make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task, for the factory of the loop: in a step of a sample, one with draws of its own."""
        if (draws := self._running) is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = asyncio.Task(_run(self, draws.of_task(), coroutine), loop=loop, **options)
        task.add_done_callback(partial(_close, coroutine))  # it may have been cancelled before its first step
        return task


async def _run(switch: GeneratorSwitch, draws: SampleDraws, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await steps(switch, draws, coroutine)


def _close(coroutine: Any, task: asyncio.Task[Any]) -> None:
    coroutine.close()


@types.coroutine
def steps(switch: Steps, draws: SampleDraws, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a coroutine, with the generators switched at each of its awaits."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    is_thrown = is_last = False
    while True:
        if switch.watch is not None and not is_thrown:
            draws.sample.watch = switch.watch
            return (yield from coroutine)
        switch.begin(draws)
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
            switch.end(draws, is_last=is_last)
        try:
            value = yield awaited
            step, is_thrown = coroutine.send, False
        except BaseException as error:  # also that nobody waits any more: the coroutine ends by it
            value, step, is_thrown = error, coroutine.throw, True
