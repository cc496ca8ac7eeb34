"""Ranks that have different numbers of batches take equally many steps: they agree ahead, in a group of their own.

    batches of this rank ── pulled ahead ──> held: a chunk, and one more ── steps agreed on ──> consumer
                                               └ how many: one all_gather a chunk, while the one before is used

A chunk is a number of steps, the same on all ranks: 1, 2, 4, then 8. Before its first step each rank has tried to make
all of its batches, and one beyond, so that what the counts of all ranks say is what is: whether all have a batch for
each step ("drop"), or at least one has ("pad"), and whether there is a step after the last one of the chunk.

To the run, a batch that is held is on its way to the consumer: its call ends when the consumer has it. So states are
those of the batches that the consumer has.

All loaders of a process share one group. Whose turn it is in there is the order of their calls, which threads and tasks
may mix up, differently on each rank: so ranks say which loader they speak of, and a mixture is an error.

A signal's handler may raise anywhere, as `asyncloader.engine.progress` says. Whatever a consumer was interrupted in, it
does again: what is due is worked out from the place that it is at, and each place follows from the one before by an
assignment.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from asyncloader.engine.progress import Call, Progress
from asyncloader.engine.taking import Item
from asyncloader.errors import AsyncLoaderError, LoaderClosedError
from asyncloader.messages.failure import another
from asyncloader.messages.messages import Kind
from asyncloader.messages.snapshot import outlasting
from asyncloader.options import EqualSteps
from asyncloader.run.base_iterator import BaseIterator, ClosableIterator
from asyncloader.run.rank_group import Question, own_group
from asyncloader.run.runs import Runs

log = logging.getLogger("asyncloader")

_LONGEST_CHUNK = 8


def in_step(iterator: BaseIterator[Any], mode: EqualSteps, runs: Runs) -> BaseIterator[Any] | EqualStepsIterator:
    """Return an iterator that takes as many steps as those of other ranks; if there are none, the one that is given."""
    is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return iterator if is_alone else EqualStepsIterator(iterator, mode, runs.enrol())


class Agreement:
    """The facts about a chunk that all ranks share.

    Args:
        counts: For each rank how many batches it has from the beginning of the chunk on, counted up to one beyond it.
        size: Steps of the chunk.
        mode: "drop" or "pad".
    """

    def __init__(self, counts: list[int], size: int, mode: EqualSteps) -> None:
        most = min(counts) if mode == "drop" else max(counts)
        self.steps = min(most, size)
        self.is_last = most <= size


class _Held(NamedTuple):
    """A batch that was pulled, or what is raised in its place, and the call that ends when the consumer has it."""

    call: Call
    item: Item

    @property
    def is_batch(self) -> bool:
        return self.item.outcome.kind == Kind.BATCH


class _Place(NamedTuple):
    """How far this rank is. Never changed: with another batch, or step, it is at another place.

    Attributes:
        held: Batches that were pulled, and not handed over.
        ended: Whether the inner iterator is at its end.
        chunk: Number of the chunk at hand.
        agreed: The ranks' agreement on it; None before the very first step.
        step: Steps of it that were taken.
        question: About the next chunk; at the beginning, about the first.
        last: A batch of this rank, kept to be repeated; an error only if no batch was there.
        repeating: The call for the last batch, which goes on while that is repeated: a resumed run repeats it as well.
        is_over: So is the run.
    """

    held: tuple[_Held, ...] = ()
    ended: bool = False
    chunk: int = 0
    agreed: Agreement | None = None
    step: int = 0
    question: Question | None = None
    last: Item | None = None
    repeating: Call | None = None
    is_over: bool = False


class _Step(NamedTuple):
    """A step that was worked out, and leads from one place to another.

    Attributes:
        call: For the batch that is done with then.
        batch: The batch for the consumer.
        error: The error that is raised in its place.
        is_new: Whether the consumer has not had this batch before.
    """

    before: _Place
    after: _Place
    call: Call
    batch: Any
    error: BaseException | None
    is_new: bool


_HELD: Any = object()  # in place of the item of a call: a loader keeps the calls of its last run, but not batches


class EqualStepsIterator(ClosableIterator):
    """Iterates as another iterator does, for as many steps as all ranks agree on. For one consumer at a time.

    Args:
        inner: The iterator over the batches of this rank.
        mode: How uneven ends are made even: "drop" leaves out what not all ranks have; "pad" repeats a rank's last
            batch.
        loader: Its number, the same on all ranks.
    """

    def __init__(self, inner: BaseIterator[Any], mode: EqualSteps, loader: int) -> None:
        self._inner = inner
        self._mode = mode
        self._number = loader
        self._turn = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Begin a run."""
        checkpointer, place = self._inner._checkpointer, _Place()
        self._progress, self._epoch, self._place = checkpointer.progress, checkpointer.epoch, place

    # ----------------------------------------------------------------------------------------------------- iterating

    def __next__(self) -> Any:
        while True:
            with self._turn:
                while (due := self._due()) is not None:
                    if isinstance(due, Question):
                        self._agree(due, due.answers.result())
                    else:
                        self._pull()
                step = self._next_step()
            # From here on nothing is called: neither can a signal's handler run, nor another thread.
            if step is None:
                self._progress.note_end()
                raise StopIteration
            if self._place is step.before:
                self._place, step.call.item = step.after, None
                self._inner._num_yielded += step.is_new
                if step.error is None:
                    return step.batch
                try:
                    raise step.error
                finally:
                    del step  # a traceback that refers to this frame would keep the iterator, and its workers, alive

    async def __anext__(self) -> Any:
        await self._inner.let_the_loop_turn()
        while True:
            while (due := self._due()) is not None:
                if isinstance(due, Question):
                    self._agree(due, await asyncio.wrap_future(due.answers))
                else:
                    await self._pull_async()
            step = self._next_step(in_async_for=True)
            if step is None:
                self._progress.note_end()
                raise StopAsyncIteration
            if self._place is step.before:
                self._place, step.call.item = step.after, None
                self._inner._num_yielded += step.is_new
                if step.error is None:
                    return step.batch
                try:
                    raise step.error
                finally:
                    del step

    def _due(self) -> Question | Literal["batch"] | None:
        """Return what is to be done before the next step: hear the answers to a question, or pull a batch; or nothing.

        Raises:
            LoaderClosedError: if there are no steps any more, for another reason than their end.
        """
        place = self._place
        if place.is_over:
            return None
        if self._progress is not self._inner._checkpointer.progress:
            raise LoaderClosedError(
                "this iterator was closed, or its loader has begun another run; call iter(loader) for a new one"
            )
        agreed, size, following = place.agreed, _size(place.chunk), _size(place.chunk + 1)
        if agreed is None:  # the very first chunk
            needed = size + 1
        elif place.step == agreed.steps:
            return None if agreed.is_last else self._asked(place)
        elif agreed.is_last or place.question is not None:
            return None
        else:
            # By its last step the next chunk is there, and one beyond; until then its share of that.
            needed = size - place.step - (-(following + 1) * (place.step + 1) // size)
        if not place.ended and len(place.held) < needed:
            return "batch"
        if agreed is None:
            return self._asked(place)
        if place.step == size - 1:
            self._asked(place)
        return None

    def _next_step(self, *, in_async_for: bool = False) -> _Step | None:
        """Work the next step out: a batch of this rank, or its last one again; None at the end."""
        place, agreed = self._place, self._place.agreed
        if place.is_over:
            return None
        assert agreed is not None
        if place.step == agreed.steps:
            self._finish(place)
            return None
        ends = agreed.is_last and place.step + 1 == agreed.steps
        after = place._replace(step=place.step + 1)
        if not place.held:  # in "pad" only
            return self._repeated(place, after, ends=ends)
        (call, item), held = place.held[0], place.held[1:]
        batch, error = item.open(in_async_for=in_async_for)
        if error is None and self._inner._IterableDataset_len_called is not None:
            self._inner.check_length()
        after = after._replace(held=held)
        if self._mode == "pad" and not ends and not any(other.is_batch for other in held):
            after = after._replace(last=_kept(place.last, item))
        if place.ended and not held and not ends:  # in "pad" only: others have more
            after, call = after._replace(repeating=call), Call()
        self._inner._meter.held_back = sum(other.is_batch for other in held)
        return _Step(place, after, call, batch, error, is_new=error is None)

    def _repeated(self, place: _Place, after: _Place, *, ends: bool) -> _Step:
        """Work a step out in which this rank repeats its last batch; behind the run's last one nothing is left."""
        assert place.last is not None
        batch, error = _copied(place.last).open()
        call = place.repeating if ends and place.repeating is not None else Call()
        error = None if error is None else another(error)
        return _Step(place, after, call, batch, error, is_new=False)

    def _finish(self, place: _Place) -> None:
        """End the run on this rank, whatever is left of it."""
        if place.held:
            log.info("equal_steps: a rank that has more batches than others leaves them out")
        for call, _ in place.held:  # they are done with, and no consumer was given them
            call.item = None
        progress = self._progress
        # Datasets that were left in the middle of their data.
        for worker, start in (progress.now.workers or {}).items():
            if start.snapshot is not None:
                progress.ends.setdefault(worker, outlasting(start.snapshot, self._inner._dataset))
        self._inner._meter.log_summary(is_over=True)
        if not self._inner._persistent_workers:
            self._inner.close()
        self._change(held=(), is_over=True)

    def _change(self, **changes: Any) -> None:
        """Go over to another place, whoever has gone over to one meanwhile."""
        while True:
            before = self._place
            after = before._replace(**changes)
            if self._place is before:  # see `__next__`
                self._place = after
                return

    # -------------------------------------------------------------------------------------------------- pulling ahead

    def _pull(self) -> None:
        call = Call()
        try:
            self._hold(call, self._inner.next_item(call))
        except StopIteration:
            call.item = None
            self._change(ended=True)
        except BaseException:
            call.is_interrupted = call.item is not _HELD
            raise

    async def _pull_async(self) -> None:
        call = Call()
        try:
            self._hold(call, await self._inner.next_item_async(call))
        except StopAsyncIteration:
            call.item = None
            self._change(ended=True)
        except BaseException:
            call.is_interrupted = call.item is not _HELD
            self._inner._run.handoff.wake()  # another task may take it
            raise

    def _hold(self, call: Call, item: Item) -> None:
        held = _Held(call, item)
        while True:
            before = self._place
            after = before._replace(held=(*before.held, held))
            self._inner._meter.held_back = sum(each.is_batch for each in after.held)
            if self._place is before:  # see `__next__`
                self._place, call.item = after, _HELD
                return

    # ---------------------------------------------------------------------------------------------------- agreeing

    def _asked(self, place: _Place) -> Question:
        """Return the question about the chunk that begins with the next step but those at hand; it is asked by then."""
        if (question := place.question) is None:
            chunk, ahead = place.chunk, len(place.held)
            if place.agreed is not None:
                chunk, ahead = chunk + 1, ahead - (_size(chunk) - place.step)
            question = Question([self._number, self._epoch, chunk, max(0, min(ahead, _size(chunk) + 1))])
            self._change(question=question)
        if not question.is_asked:
            own_group().ask(question)
        return question

    def _agree(self, question: Question, told: list[list[int]]) -> None:
        """Go over to the chunk that all ranks have told of."""
        if self._place.question is not question:  # another task was quicker
            return
        _check_places({rank: tuple(place) for rank, (*place, _) in enumerate(told)})
        chunk, counts = question.said[2], [count for *_, count in told]
        agreed = Agreement(counts, _size(chunk), self._mode)
        empty = [rank for rank, count in enumerate(counts) if not count]
        if self._mode == "pad" and not chunk and empty and agreed.steps:
            raise AsyncLoaderError(
                f'rank {", ".join(map(str, empty))} has no batch at all that it could repeat: equal_steps="pad" needs '
                "one on each rank"
            )
        self._change(chunk=chunk, agreed=agreed, step=0, question=None)

    # ------------------------------------------------------------------------------------------------ the rest of it

    def is_ready(self) -> bool:
        """Whether the next batch is there. Other ranks may have to be asked first, at the same step on each."""
        return False

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, which all ranks have to do."""
        self._inner.load_state_dict(state)
        self._begin()

    def close(self) -> None:
        """End the run and let go of everything."""
        self._let_go()
        self._inner.close()

    def leave(self) -> None:
        """End the run as `close` does, without waiting for it."""
        self._let_go()
        self._inner.leave()

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        self._let_go()
        await self._inner.aclose()

    def _let_go(self) -> None:
        self._progress = Progress()  # of no run
        self._change(held=())


def _size(chunk: int) -> int:
    """Return how many steps a chunk has."""
    return min(1 << chunk, _LONGEST_CHUNK)


def _kept(last: Item | None, item: Item) -> Item:
    """Return what a rank would repeat after this one: a batch that nobody else has, if there was any."""
    return _copied(item) if item.outcome.kind == Kind.BATCH else last or item


def _copied(item: Item) -> Item:
    """Return a batch that nobody else has, or what is raised in its place."""
    return item._replace(outcome=item.outcome._replace(data=copy.deepcopy(item.outcome.data)))


def _check_places(places: dict[int, tuple[int, ...]]) -> None:
    """See that all ranks speak of the same loader, and of the same steps."""
    if len({loader for loader, *_ in places.values()}) > 1:
        raise AsyncLoaderError(
            f"ranks are at different loaders, here as (loader, run, chunk of steps) by rank: {places}; with "
            "equal_steps all ranks make and use the same loaders in the same order, and threads or tasks use one at a "
            "time"
        )
    if len(set(places.values())) > 1:
        raise AsyncLoaderError(
            f"ranks are at different places, here as (loader, run, chunk of steps) by rank: {places}; with equal_steps "
            "all ranks begin, leave and resume a run at the same step"
        )
