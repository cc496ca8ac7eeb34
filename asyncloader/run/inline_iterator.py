"""num_workers=0: batches are made in the consumer's process. Samples that overlap there have a session, as workers do.

    read the sampler: keys held ──> make: fetch, collate, pin ──> in hand ──> count ──> give

- ``for``: in the caller's thread. No thread, no process, everything can be debugged.
- ``async for``: on a thread of the iterator's own (`MakerThread`), so that the caller's loop stays free. The caller
  still reads the sampler.

Batches are made one at a time, and none before a consumer asks for it: without workers torch prefetches nothing.

A signal's handler may raise after any call. The keys of a batch stay with the plan until it is counted, and the batch
in one attribute, which is why an interrupt loses nothing: the next call goes on with what is there. What was read of a
stream for a batch that was not made is gone, and the iterator says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from asyncloader import threads
from asyncloader.engine import exits
from asyncloader.engine.actions import END, NOTHING, VOID
from asyncloader.engine.error_limit import ErrorLimit
from asyncloader.engine.finisher import pinned
from asyncloader.engine.handoff import Handoff
from asyncloader.engine.progress import Place
from asyncloader.errors import LoaderClosedError
from asyncloader.messages.failure import stand_in
from asyncloader.messages.messages import Kind
from asyncloader.messages.snapshot import Frozen
from asyncloader.options import Options
from asyncloader.protocols import namer
from asyncloader.run.base_iterator import FOR, BaseIterator, iterators_here
from asyncloader.run.maker_thread import MakerThread, Pause
from asyncloader.run.plan import keys_arrive
from asyncloader.run.random_order import DrawDue
from asyncloader.run.run_start import RunStart, reads_again
from asyncloader.run.runs import Runs
from asyncloader.run.state import LoaderState
from asyncloader.seeding.generators import GLOBAL, check_of, left_alone
from asyncloader.worker.batch_maker import BatchMaker, Host

T_co = TypeVar("T_co", covariant=True)

_new = tuple.__new__  # a NamedTuple's own `__new__` is written in Python, and takes three times as long


class InlineHost(Host):
    """The trainer's process, as what makes batches. Nothing here makes it look like a worker."""

    cpu_clock: Callable[[], float] = staticmethod(float)  # always 0.0: stats() has the CPU time of this process

    def ends(self, error: BaseException) -> bool:
        """Whether this is an interruption by a signal's handler, and no failure of a batch.

        No handler raises CancelledError.
        """
        return not isinstance(error, (Exception, asyncio.CancelledError))


class InlineIterator(BaseIterator[T_co], _SingleProcessDataLoaderIter):
    """Batches made in this process.

    Args:
        loader: For torch's constructor, and nothing else.
        options: The loader's.
        runs: The loader's.
        state: To begin from.
    """

    is_closed: bool
    _timeout = property(lambda self: 0, lambda self, value: None)
    """Of torch's constructor, which refuses one: keys that arrive may be waited for with a limit."""

    def __init__(
        self, loader: DataLoader[T_co], options: Options, runs: Runs, state: LoaderState | None = None
    ) -> None:
        super().__init__(loader, options, runs)
        self._handoff: Handoff[Any] = Handoff()  # nothing is handed over: a task waits for its batch, or for keys
        if options.timeout and not keys_arrive(options.index_sampler):
            raise AssertionError(  # as torch's loader, whose words do not say what to do
                f"timeout={options.timeout:g} is for workers, and with num_workers=0 there are none, so nobody "
                "could stop waiting for what hangs. Use num_workers=1, or timeout=0"
            )
        start = self._begin(partial(self._construct, loader), state)
        plan, made = start.plan, start.checkpointer
        meter = self._runs.make_meter(0, 0, keys_arrive=plan.arrives)
        maker = self._make_maker(start)
        make: Callable[[int, Any], Any] = maker.make
        if options.seeds_each_sample:
            make = partial(_make_alone, (*GLOBAL, *maker.seeder.own), make)
        if options.knows_places:
            make = partial(_make_placed, made.progress.placed, make)
        if self._pinned_for is not None:
            make = partial(_make_pinned, partial(pinned, device=self._pinned_for), make)
        thread = MakerThread(make, self._handoff.wake)
        thread.end_with(self)
        plan.tell(self)
        if plan.arrives:  # whoever brings keys may wait for those who take batches
            exits.note_user()
        self._dataset_fetcher = None  # torch's
        self._names = namer(options.dataset, of_batches=options.auto_collation)
        self._is_torn = self.is_closed = False
        self._plan, self._progress, self._maker, self._make = plan, made.progress, maker, make
        self._limit = ErrorLimit(options, made.progress, meter.faults)
        self._meter, self._thread = meter, thread
        self._counts_simply, self._rest = made.progress.counts_simply(options), made.progress.now[1:]
        self._in_hand: Any = NOTHING
        self._is_made = True
        if plan.has_loaded_sampler:  # before an iterator of another loader has the same sampler load a state
            plan.read()

    def _make_maker(self, start: RunStart) -> BatchMaker:
        """Return what makes batches, its dataset where the run begins. Raises whatever the dataset raises.

        Making batches again from the dataset's state draws what was drawn before the trainer saved the global
        generators. So these are put back afterwards, but for those that the state itself has set. A stream that is read
        again from its beginning has its order drawn again.
        """
        options, checks, kept = self._options, list(map(check_of, GLOBAL)), list(GLOBAL)
        order = start.checkpointer.order if reads_again(self._options, start.starts) else None

        def aside() -> contextlib.AbstractContextManager[None]:
            return order.first() if order is not None and order.is_due else left_alone(kept)

        # torch's own fetcher has begun to iterate, which a dataset may count; but before the dataset was in its state.
        is_begun = options.is_iterable and not (start.starts and start.starts[0].snapshot)
        iterator = self._dataset_fetcher.dataset_iter if is_begun else None
        maker = BatchMaker(0, self._worker_spec(), InlineHost(), aside)

        def open_source(dataset: Any) -> None:
            maker.open_fetcher(dataset, iterator)
            kept[:] = [each for each, before in zip(GLOBAL, checks, strict=True) if check_of(each) == before]

        maker.begin(start.checkpointer.epoch_spec(0, start.starts), open_source)
        if maker.failure is not None:
            raise maker.failure
        return maker

    # -------------------------------------------------------------------------------------------------- for

    def _take(self, asked_at: float) -> Any:
        with self._lock:
            if self._pass is not exits.token:
                self._enter(FOR)
            maker = self._maker
            while self._in_hand is NOTHING:
                if self._plan.arrives:
                    self._wait_for_keys()
                keys, began = self._plan.read(), perf_counter()
                if keys is END or keys is VOID:
                    self._pass_over(keys)
                    continue
                number = self._progress.read - 1
                try:
                    batch = self._make(number, keys)
                    if maker.bad and (error := self._too_many()) is not None:
                        raise error
                except BaseException as raised:
                    if maker.host.ends(raised):
                        self._is_torn, self._pass = self._options.is_iterable, None
                        raise
                    self._give_error(raised)
                    continue
                self._in_hand = batch
                self._meter.add([number, maker.count, began, maker.fetched, asked_at, perf_counter()])
                break
            if self._IterableDataset_len_called is not None:
                self.check_length()
            self._num_yielded += 1
            return self._count()

    def _wait_for_keys(self) -> None:
        """Wait until the next keys are there."""
        self._progress.follower()  # before the batch is read: it may depend on that
        for deadline in self._plan.waits(self._options.timeout):
            self._handoff.wait(self._has_news, deadline)
            self._check_usable()

    # -------------------------------------------------------------------------------------------------- async for

    async def _take_async(self, asked_at: float) -> Any:
        while self._in_hand is NOTHING:
            await self._make_next_aside(asked_at)
        if self._IterableDataset_len_called is not None:
            self.check_length()
        self._num_yielded += 1
        return self._count()

    async def _make_next_aside(self, asked_at: float) -> None:
        """Have the next batch in hand as `_take` does, made by the thread.

        A task that was cancelled while it waited has left its batch to the next one.
        """
        thread = self._thread
        keys = None if thread.is_asked else await self._read_aside()
        began = perf_counter()  # behind the wait for keys, which is none of the work
        if not thread.is_asked:
            if keys is END or keys is VOID:
                self._pass_over(keys)
                return
            number = self._progress.read - 1
            if self._options.seeds_each_sample:  # on a thread, samples would seed what draws in this one
                thread.make_here(number, keys)
            else:
                if not thread.has_begun:
                    self._maker.pause_with(Pause())
                thread.ask(number, keys)
        while (made := thread.made) is None:
            await self._wait()
        self._in_hand, error = made
        thread.is_asked, thread.made = False, None
        try:
            if error is None:
                error = self._too_many()
            if error is not None:
                self._give_error(error)
                return
        finally:
            del made, error  # a traceback that refers to this frame would keep the iterator alive
        maker = self._maker
        self._meter.add([self._progress.read - 1, maker.count, began, maker.fetched, asked_at, perf_counter()])

    async def _read_aside(self) -> Any:
        """Return the next keys, when they are there. The sampler is the user's, and is read in the caller's thread."""
        plan = self._plan
        self._progress.follower()
        for deadline in plan.waits(self._options.timeout):
            await self._wait(deadline)
        plan.draw_apart()
        while True:
            try:
                return plan.read()
            except DrawDue as due:  # what takes long of a shuffle, and draws from a generator that is its own
                draw = due.draw
            except StopAsyncIteration as error:
                raise stand_in(error, in_async_for=True) from error
            await asyncio.to_thread(draw)
            self._check_usable()

    async def _wait(self, deadline: float | None = None) -> None:
        await self._handoff.wait_async(self._has_news, deadline)
        self._last_turn = time.monotonic()
        self._check_usable()

    # -------------------------------------------------------------------------------------------------- both

    def _has_news(self) -> bool:
        """Whether a consumer that waits should look again."""
        is_waiting = self._plan.are_awaited or (self._thread.is_asked and self._thread.made is None)
        return not is_waiting or self.is_closed or exits.is_exiting

    def keys_came(self) -> None:
        """Have the consumer look again: keys have come that were to be read. In the thread that brings them."""
        try:
            self._plan.are_awaited = False
        finally:
            self._handoff.wake()

    def _pass_over(self, keys: Any) -> None:
        """Raise at the end; go on at a batch that was done with before the run."""
        if keys is END:
            self._meter.log_summary()
            self._progress.note_end()
            raise StopIteration if self.face == FOR else StopAsyncIteration
        self._plan.keys = NOTHING

    def _too_many(self) -> BaseException | None:
        """Return what is due if too many samples have raised by now."""
        bad = self._maker.bad
        return self._limit.count(bad, self._progress.now.bad_count) if bad else None

    def _give_error(self, error: BaseException) -> None:
        """Raise what stands in the place of a batch, or the end of a stream; pass over a batch that is left out."""
        maker, faults = self._maker, self._meter.faults
        outcome: Any = None
        raised: BaseException | None = None
        try:
            outcome = maker.failed(maker, error)
            if outcome.kind == Kind.EXHAUSTED:
                if isinstance(outcome.snapshot, Frozen):
                    self._progress.ends = {0: outcome.snapshot}
                self._plan.keys = END
                self._pass_over(END)
            names, raised = self._names(self._plan.keys), self._too_many()
            if raised is None and outcome.kind == Kind.LEFT_OUT:
                faults.left_out.append(names)
                self._count()
                return
            if raised is None:
                raised = outcome.error.rebuild(None if self._options.is_iterable else names)
            raised = stand_in(raised, in_async_for=self.face != FOR)
            faults.errors += 1
            self._count()
            raise raised
        finally:
            del error, raised, outcome  # a traceback refers to this frame

    def _count(self) -> Any:
        """Count the batch in hand, or what stands in its place, which is given; return it."""
        batch = self._in_hand
        place = _new(Place, (self._progress.read, *self._rest)) if self._counts_simply else self._next_place()
        # From here on nothing is called: neither can a signal's handler run, nor another thread.
        self._progress.now = place
        self._plan.keys = self._in_hand = NOTHING
        return batch

    def _next_place(self) -> Place:
        plan, progress, maker = self._plan, self._progress, self._maker
        number, in_stream, keys = progress.read - 1, -1, None
        if not self._options.is_iterable:
            in_stream, keys = number, progress.placed(number, plan.keys)
        return progress.now.after(number, 0, in_stream, maker.snapshot, keys, len(maker.bad))

    # -------------------------------------------------------------------------------------------------- ending

    def _check_usable(self) -> None:
        if self.is_closed and self._plan.keys is not END:
            raise LoaderClosedError("this iterator was closed; call iter(loader) for a new one")
        if self._is_torn:
            raise LoaderClosedError(
                "this iterator was interrupted while it read its dataset, and what it had read of a batch is gone; "
                "to go on, load the loader's state_dict() and call iter(loader)"
            )

    def close(self) -> None:
        """End; a batch in work on the thread is waited for, 3 s at most."""
        if self._is_finalizing() or not self._is_made:
            return
        self.leave()
        self._thread.join(3.0)

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        self.is_closed, self._pass = True, None
        if self._is_made:
            self._plan.leave()
            self._thread.stop()
            self._handoff.wake()


def _make_alone(generators: Iterable[Any], make: Callable[[int, Any], Any], number: int, keys: Any) -> Any:
    """Make a batch whose samples seed these generators, which stay the trainer's."""
    with left_alone(generators):
        return make(number, keys)


def _make_placed(placed: Callable[[int, Any], Any], make: Callable[[int, Any], Any], number: int, keys: Any) -> Any:
    """Make a batch whose samples know their places in the epoch."""
    return make(number, placed(number, keys))


def _make_pinned(pin: Callable[[Any], Any], make: Callable[[int, Any], Any], number: int, keys: Any) -> Any:
    """Make a batch in page-locked memory."""
    return pin(make(number, keys))


def _stop_at_exit() -> None:
    """Have our threads end, and let daemon threads of the user's finish their batch.

    See :mod:`asyncloader.threads` for what would happen to them in the middle of one.
    """
    iterators = [each for each in threads.copied(iterators_here) if isinstance(each, InlineIterator) and each._is_made]
    for iterator in iterators:
        iterator._thread.stop()
    for iterator in iterators:
        iterator._handoff.wake()
        if iterator._pid == exits.pid and iterator._lock.acquire(timeout=exits.grace_left_s()):
            iterator._lock.release()
        iterator._thread.join(exits.grace_left_s())


exits.at_exit(_stop_at_exit)
