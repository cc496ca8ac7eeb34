"""Turns with the global generators, for samples that are made at the same time.

    sample 7:  read ......... [ decode, transform ]
    sample 8:  read .. waits ......................[ decode, transform ]
    sample 9:  read ................................ waits .............[ ...

A sample is alone in its process in a `sample_seed` block, with the three global generators seeded by
its place in the epoch; so what they draw does not depend on what else is in flight.

In the trainer's process the generators are the trainer's between blocks. Between blocks the loader draws from them, and
has samplers draw; it notes their states, and restores them. None of this happens while a block runs in another thread:

    untouched()        generators are noted or restored: at once, or when the block that runs has ended
    exclusive_draws()  others draw, as a sampler does that is read: blocks of other threads wait for its end
    alone()            a batch is made without workers, and seeds the generators for each of its samples: the same
    end()              a run ends: no block of its samples begins any more, and `wait_ended` waits for the one that runs

Only a block holds the lock while the user's code runs. A sampler may wait for what a block is to give, or use blocks
itself: so `exclusive_draws` takes the lock for a moment, which is when no block runs, and tells blocks that come later.
Each wait between a block and something else has an end: after `_PATIENCE_S` the one who waits goes on, and the log says
that what is drawn may differ from run to run. So there is no circle of waits but between blocks. Those hold nothing
that waits, but for a sample that waits for a block of its own, in a thread: that is refused after the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any

from asyncloader.errors import LoaderClosedError
from asyncloader.seeding.generators import GLOBAL, left_alone
from asyncloader.seeding.sample_context import BATCH, EpochKey, SampleContext, current
from asyncloader.seeding.seeder import BLOCK

log = logging.getLogger("asyncloader")

_PATIENCE_S = 10.0
_LOOP_PATIENCE_S = 1.0
"""Where the thread of an event loop drops a run, its other tasks wait no longer than that."""

_ONCE: tuple[tuple[()], ...] = ((),)
"""``for name in starmap(function, _ONCE)`` is ``name = function()``, with no Ctrl-C between call and assignment."""


class _Turn:
    """Whose turn it is in this process.

    Attributes:
        lock: Held by whose turn it is.
        holder: The sample, in the thread that has the lock. A sample of a run that is over may not seed anything.
        num_blocks: How many blocks have begun and ended. What moves generators meanwhile may be them.
        is_trainers: The global generators are those of the trainer, and are given back after each turn.
        drawings: Draws that go on; each thread adds its own with the lock held, never inside a block.
    """

    def __init__(self, *, is_trainers: bool = True) -> None:
        self.lock = threading.RLock()
        self.holder: SampleContext | None = None
        self.is_trainers = is_trainers
        self.num_blocks = 0
        self.drawings: list[weakref.ref[Drawing]] = []  # one that a Ctrl-C keeps from ending is gone by itself

    def going_on(self) -> list[Drawing]:
        """Return the drawings that have begun, and are not over."""
        return [drawing for each in tuple(self.drawings) if (drawing := each()) is not None and drawing.ended.locked()]

    def keeps_out(self, epoch: object) -> bool:
        """Whether somebody draws in another thread, whose end a block of this epoch waits for."""
        return any(drawing.keeps_out(epoch) for drawing in self.going_on())


_turn = _Turn()


def turn() -> _Turn:
    """Return whose turn it is."""
    return _turn


def own_generators() -> None:
    """Say that the global generators of this process are nobody's but those who make samples: it is a worker."""
    global _turn
    _turn = _Turn(is_trainers=False)


def _renew() -> None:
    global _turn  # whoever had its turn in the parent is not here
    _turn = _Turn(is_trainers=_turn.is_trainers)


os.register_at_fork(after_in_child=_renew)


class Drawing:
    """A piece of the user's code that draws from generators of the trainer: see `exclusive_draws`.

    Attributes:
        epoch: The epoch of samples that seed the generators inside: their states meanwhile are not the trainer's
            either. None for others.
        overstayed: Blocks have gone on meanwhile: it waits for something, it seems.
        ended: Held until it is over.
    """

    def __init__(self, epoch: EpochKey | None) -> None:
        self.epoch = epoch
        self.overstayed = False
        self.ended = threading.Lock()
        self.ended.acquire()
        self._thread = threading.get_ident()

    def keeps_out(self, epoch: object = None) -> bool:
        """Whether the calling thread has to wait for it, to seed the generators for a sample of this epoch.

        Not for the batch that the sample is in: its thread waits for what its samples do on a loop, or on threads.
        """
        is_its_own = epoch is not None and epoch is self.epoch
        return self._thread != threading.get_ident() and not self.overstayed and not is_its_own

    def wait_ended(self, patience_s: float, epoch: object = None) -> None:
        """Wait until it has ended, if the calling thread has to; see `keeps_out`."""
        if not self.keeps_out(epoch):
            return
        if self.ended.acquire(timeout=patience_s):
            self.ended.release()
        else:
            self.overstayed = patience_s >= _PATIENCE_S
            _warn('A sampler that is read, or a batch that is made under seeding="sample",', patience_s)


# A handler of a signal may raise after any call. What is taken here is given back in a `finally` of a generator, which
# runs also where a handler has raised before its `with` has begun, or as it ended: whoever drops the generator runs it.


@contextlib.contextmanager
def untouched(patience_s: float | None = None) -> Iterator[None]:
    """Look at the generators of the trainer: when no block runs, and no batch that seeds them, in another thread."""
    turn, patience_s = _turn, _PATIENCE_S if patience_s is None else patience_s
    for drawing in turn.going_on():
        if drawing.epoch is not None:
            drawing.wait_ended(patience_s)
    is_between = False
    try:
        for is_between in starmap(turn.lock.acquire, ((True, patience_s),)):
            if not is_between:
                _warn("A sample_seed() block", patience_s)
        yield
    finally:
        if is_between:
            turn.lock.release()


@contextlib.contextmanager
def exclusive_draws(epoch: EpochKey | None = None) -> Iterator[Drawing]:
    """Have blocks of other threads wait while the user's code draws from generators of the trainer inside this."""
    turn, drawing = _turn, Drawing(epoch)
    try:
        with untouched():
            turn.drawings.append(weakref.ref(drawing, turn.drawings.remove))
        yield drawing
    finally:
        drawing.ended.release()


@contextlib.contextmanager
def alone(epoch: EpochKey, own: Iterable[Any] = ()) -> Iterator[None]:
    """Leave the global generators as they are, whatever is drawn from them, or seeded, meanwhile for this epoch.

    Args:
        epoch: The samples' epoch.
        own: Generators of the dataset's own, which is the trainer's here: they are left alone too.

    Raises:
        LoaderClosedError: if its run is over.
    """
    with exclusive_draws(epoch):
        _refuse_if_over(epoch)
        with left_alone((*GLOBAL, *own)):
            yield


def end(epochs: Sequence[EpochKey]) -> bool:
    """Let none of these epochs' samples seed the generators any more; return whether one does at the moment.

    The interleavings with a block, or a batch that is `alone`, in another thread:

      1. The thread says that it begins. 2. The epoch is over. 3. The thread looks, and does not begin; or it had looked
         before: then it is found here.
      1. The epoch is over. 2. The thread says that it begins, looks, and does not begin.

    The states of the generators are noted after that look, by a thread that is found here until it has restored them. A
    thread that noted them first, and then did not begin, restored what a trainer had set meanwhile.
    """
    for epoch in epochs:
        epoch.is_over = True
    turn = _turn
    at_work: list[Any] = [drawing.epoch for drawing in turn.going_on()]
    if (holder := turn.holder) is not None:
        at_work.append(holder.seeder.key)
    return any(each is epoch for each in at_work for epoch in epochs)


def wait_ended() -> None:
    """Wait until no sample seeds the generators; not for long in the thread of an event loop."""
    with untouched(_PATIENCE_S if asyncio._get_running_loop() is None else _LOOP_PATIENCE_S):
        pass


def _refuse_if_over(epoch: object) -> None:
    if isinstance(epoch, EpochKey) and epoch.is_over:
        raise LoaderClosedError("the run that this sample is of has ended: nobody waits for the sample any more")


def _warn(who: str, patience_s: float) -> None:
    log.warning(
        "%s has had the global random generators for %g s, and others go on beside it: what is drawn may differ from "
        "run to run. What waits should not draw from global generators.",
        who,
        patience_s,
    )


@contextlib.contextmanager
def sample_seed(position: int | None = None) -> Iterator[None]:
    """Make what is drawn in a block the sample's own, where samples are fetched at the same time.

    With ``seeding="sample"``, Python's, numpy's and torch's global generators are seeded for the block by the sample's
    place in the epoch's order, and the blocks of all samples of a process take turns: reading overlaps, what is in
    blocks does not. So random transforms give the same with any number of workers, any `concurrency`, number of threads
    and batch size. In the trainer's process the generators are given back to it after each block. The loader draws, and
    reads samplers, between blocks; what the trainer draws itself while a block runs in another thread, it draws from
    the generators of the sample.

    Under another ``seeding``, and where nothing is fetched, it changes nothing. A block must hold no ``await``: other
    samples of its loop would run inside it.

    Args:
        position: The position of the sample in the batch, for `__getitems__`, which makes all samples of a batch. In
            the block, :func:`asyncloader.sample_rng` is that sample's own, under any ``seeding``.

    Raises:
        RuntimeError: on entering a block while another sample is in one, in the same thread.
        LoaderClosedError: on entering one in the trainer's process when the run has ended that the sample was for.

    Example:
        >>> class Photos:
        ...     async def __getitem__(self, index):
        ...         data = await self.read(index)
        ...         with asyncloader.sample_seed():
        ...             return self.augment(decode(data))
    """
    sample, outside = current.get(None), None
    try:
        if sample is not None and position is not None and sample.position == BATCH:
            sample = sample.of(position)
            for outside in starmap(current.set, ((sample,),)):  # noqa: B007 - an assignment, see `_ONCE`
                pass
        if sample is None or (sample.first is None and sample.switch is None):
            yield
        else:
            with _block_turn(sample) as turn, _block(sample, turn):
                yield
    finally:
        if outside is not None:
            try:  # noqa: SIM105
                current.reset(outside)
            except ValueError:  # a block that was dropped, in another context
                pass


@contextlib.contextmanager
def _block_turn(sample: SampleContext) -> Iterator[_Turn]:
    """Wait until it is the sample's turn, and no longer if it would wait for itself."""
    turn, epoch = _turn, sample.seeder.key
    is_held: bool | None = False
    try:
        while not is_held:
            for drawing in turn.going_on():
                drawing.wait_ended(_PATIENCE_S, epoch)
            for is_held in starmap(turn.lock.acquire, ((True, _PATIENCE_S),)):  # noqa: B007
                pass
            if is_held and turn.keeps_out(epoch):
                for is_held in starmap(turn.lock.release, _ONCE):  # noqa: B007
                    pass
            elif not is_held and _waits_for_itself(turn, sample):
                raise RuntimeError(
                    f"a sample has waited for {_PATIENCE_S:g} s to enter a sample_seed() block in a thread, while its "
                    "coroutine, or another block of it, has waited for that thread and held the event loop. Await the "
                    "thread (asyncio.to_thread), outside of blocks."
                )
        yield turn
    finally:
        if is_held:
            try:  # noqa: SIM105 - a call before this one would be a moment for a Ctrl-C
                turn.lock.release()
            except RuntimeError:  # a block that was dropped, in another thread
                pass


def _waits_for_itself(turn: _Turn, sample: SampleContext) -> bool:
    return turn.holder is sample or (sample.switch is not None and sample.switch.is_in_step_of(sample))


@contextlib.contextmanager
def _block(sample: SampleContext, turn: _Turn) -> Iterator[None]:
    """Seed the generators for a block, and give them back to the trainer after it. With the lock of the turn held."""
    if turn.holder is sample:  # a block inside a block: the outer one goes on
        yield
        return
    if turn.holder is not None:
        raise RuntimeError(
            "a sample entered a sample_seed() block while another one of the same event loop was in one: there is an "
            "await inside the block. Await before it, or after it."
        )
    seeder, switch = sample.seeder, sample.switch
    interrupted = None if switch is None else switch.leave()
    turn.holder = sample
    try:
        _refuse_if_over(seeder.key)
        with left_alone((*GLOBAL, *seeder.own)) if turn.is_trainers else contextlib.nullcontext():
            turn.num_blocks += 1
            seeder(*sample.place(BLOCK + 3 * sample.next_block() - min(sample.position, 0)))
            yield
    finally:
        turn.num_blocks += 1
        turn.holder = None
        if switch is not None:
            switch.go_on(interrupted)
