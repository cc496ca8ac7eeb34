"""The generators of a worker whose samples are coroutines: each sample has its own draws, across everything it awaits.

    sample 7:  [ step ] waits .................... [ step ]            a step: from one await to the next
    sample 8:            [ step ] waits . [ step ]

    seeded    before a step the generators are seeded for its sample, and get the states back that its earlier steps
              have left; after it, the states of those that it has moved are put away
    watched   steps are left alone; when a sample is there, a look says whether a generator has moved meanwhile

Seeding takes 10 us a step, the look 0.1 us a sample. So samples are seeded until the first ones have drawn nothing, and
then watched. Until one has drawn, first steps are not seeded: most samples wait before they draw, and of thousands that
begin at once most are watched when they go on. A sample that draws in its first step is made once more. If a generator
has moved later on, one of the samples in flight has drawn from what was nobody's: those samples are made once more when
they are there, seeded, as all later ones of the run are.

Tasks that a sample begins (``asyncio.gather``, a TaskGroup) have draws of their own, by the order in which the
sample begins them. Steps that are seeded hold the lock of `sample_seed` blocks: blocks of threads wait for their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

from asyncloader.seeding.generators import GLOBAL, restore, states_of
from asyncloader.seeding.hashing import mix
from asyncloader.seeding.positions import positions
from asyncloader.seeding.seeder import Seeder
from asyncloader.seeding.turns import turn

log = logging.getLogger("asyncloader")

_QUIET = 32
"""So many samples that draw nothing end the seeding."""

_NOBODY = -1
"""The part of a seed that no sample draws from."""

_WAY_OUT = (
    "Draw from asyncloader.sample_rng(), which is the sample's own in any thread and task; or have the transforms run "
    "in worker processes, one sample at a time (no concurrency)."
)


class SampleDraws:
    """What a sample draws from, or a task that it has begun.

    Args:
        number: The number that is seeded with, and
        part: the part of it; see `Seeder`.

    Attributes:
        states: The generators that earlier steps have moved, with the states that these have left.
        is_first: No step of the sample has ended. Of a task, whose samples have begun, it is false.
        is_void: It drew before it was seeded: the sample is to be made once more.
        is_over: The last step has ended.
        watch: The rest of the sample was made in one piece, under this `Steps.watch`.
    """

    __slots__ = ("_num_tasks", "is_first", "is_over", "is_task", "is_void", "number", "part", "states", "watch")

    def __init__(self, number: int, part: int, *, is_task: bool = False) -> None:
        self.number = number
        self.part = part
        self.states: list[tuple[Any, Any]] = []
        self.is_over = self.is_void = False
        self.is_task = is_task
        self.is_first = not is_task
        self.watch: _Watch | None = None
        self._num_tasks = 0

    def of_task(self) -> SampleDraws:
        """Return what the next task draws from that is begun in a step of this."""
        self._num_tasks += 1
        return SampleDraws(self.number, mix(self.part, self._num_tasks), is_task=True)


class _Watch:
    """What samples hold that are made in one piece, as nobody looks at their steps."""


class Steps:
    """What the steps of samples are: here nothing.

    Attributes:
        watch: Samples that begin now are made in one piece, and hold this until they are there; None if each of their
            steps is to be begun and ended.
    """

    watch: _Watch | None = _Watch()

    def is_void(self, watch: _Watch) -> bool:
        """Whether a sample that began with this `watch`, and is there, is to be made once more."""
        return False

    def begin(self, draws: SampleDraws) -> None:
        """Begin a step of a sample."""

    def end(self, draws: SampleDraws) -> None:
        """End it."""


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
        self._positions = positions(GLOBAL)
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

    def end(self, draws: SampleDraws) -> None:
        """End it."""
        self.compare(self._before)


class GeneratorSwitch(Steps):
    """Gives the generators to one sample after the other. Belongs to the thread of a worker's loop.

    Args:
        seeder: Of the run.
        warns: Warn of draws that belong to no sample.
    """

    def __init__(self, seeder: Seeder, *, warns: bool = True) -> None:
        self._seeder = seeder
        self._generators = (*GLOBAL, *seeder.own)
        self._positions = positions(self._generators)
        self._mark: Any = None  # where the generators were left
        self._num_blocks = 0
        self._clear()
        self._thread = threading.get_ident()
        self._running: SampleDraws | None = None
        self.watch = None
        self._void: weakref.ref[_Watch] | None = None
        self._last: SampleDraws | None = None  # whom they were seeded for
        self._num_quiet = 0
        self._draws = False
        self._warns = warns

    def begin(self, draws: SampleDraws) -> None:
        """Begin a step of a sample."""
        turn().lock.acquire()
        self._running = draws
        self._look_for_others()
        if draws.is_first and not self._draws:  # most samples wait before they draw: seeding each would take 10 us
            self._last = None
        elif self._last is not draws:
            self._seeder(draws.number, draws.part)
            restore(draws.states)
            self._last = draws
        self._mark = self._positions()

    def end(self, draws: SampleDraws) -> None:
        """End it."""
        self._running = None
        now = self._positions()
        if draws.states or now != self._mark:
            draws.is_void |= draws.is_first and not self._draws
            self.stay_seeded()
            if not draws.is_over:
                draws.states = states_of(self._moved(draws, now))
            self._mark = now
        elif draws.is_over and not self._draws:
            self._num_quiet += 1
            if self._num_quiet == _QUIET:
                self.watch = _Watch()
        draws.is_first = False
        turn().lock.release()

    def _moved(self, draws: SampleDraws, now: Any) -> Iterator[Any]:
        """Yield the generators that it has moved; earlier too, as they may keep a number for the next draw."""
        before = [id(generator) for generator, _ in draws.states]
        for generator, there, here in zip(self._generators, self._mark, now, strict=True):
            if there != here or id(generator) in before:
                yield generator

    def is_void(self, watch: _Watch) -> bool:
        """Look whether a sample has drawn, while none was seeded; return whether this one may be it."""
        if self.watch is not None and (now := self._positions()) != self._mark:
            blocks, before = turn().num_blocks, self._num_blocks
            self._num_blocks, self._mark = blocks, now
            if blocks == before and turn().holder is None:
                self.stay_seeded()
        return watch is not self.watch

    def _look_for_others(self) -> None:
        """Say so, once, if somebody has drawn since the last step: a thread, which nobody can give its own draws."""
        blocks = turn().num_blocks
        if blocks == self._num_blocks and self._mark != self._positions():
            self._last = None
            if self._warns and (self._void is None or self._void() is None):  # those draw as well until they are there
                self._warns = False
                log.warning(
                    "Something draws from the random generators of this worker while no sample runs on its loop: code "
                    "that samples run on a thread (asyncio.to_thread), it seems. What threads draw depends on timing "
                    "and on the number of workers. %s Or draw in a `with asyncloader.sample_seed():` block.",
                    _WAY_OUT,
                )
        self._num_blocks = blocks

    # ------------------------------------------------------------------------------------- blocks, and whole batches

    def leave(self) -> SampleDraws | None:
        """Have a block begin: the step that it is in is interrupted. Returns what is to be gone on with."""
        draws = self._running if threading.get_ident() == self._thread else None
        if draws is not None:
            self.end(draws)
        elif self.watch is not None and threading.get_ident() == self._thread:
            self.is_void(self.watch)
        return draws

    def go_on(self, draws: SampleDraws | None) -> None:
        """Go on after a block."""
        self._last = None
        self._clear()
        if draws is not None:
            self.begin(draws)

    @contextlib.contextmanager
    def seeded(self, number: int, part: int) -> Iterator[None]:
        """Seed for what is done once for a batch, between steps."""
        with turn().lock:
            self._seeder(number, part)
            try:
                yield
            finally:
                self._last = None
                self._clear()

    def _clear(self) -> None:
        """Have no generator keep a number for the next draw, as `random.gauss` does: that draw could not be seen."""
        self._seeder(0, _NOBODY)
        self._num_blocks, self._mark = turn().num_blocks, self._positions()

    def stay_seeded(self) -> None:
        """Seed all steps from now on."""
        if self.watch is not None:
            self._void = weakref.ref(self.watch)
        self.watch, self._draws = None, True

    # -------------------------------------------------------------------------------------------------------- tasks

    def make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task, as the factory of the loop: in a step of a sample, one with draws of its own."""
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
    is_thrown = False
    while True:
        if switch.watch is not None and not is_thrown and not (draws.states or draws.is_task):
            draws.watch = switch.watch
            return (yield from coroutine)
        switch.begin(draws)
        try:
            awaited = step(value)
        except StopIteration as end:
            draws.is_over = True
            return end.value
        except BaseException:
            draws.is_over = True
            raise
        finally:
            value = None  # its traceback refers to this frame
            switch.end(draws)
        try:
            value = yield awaited
            step, is_thrown = coroutine.send, False
        except BaseException as error:  # also that nobody waits any more: the coroutine ends by it
            value, step, is_thrown = error, coroutine.throw, True
