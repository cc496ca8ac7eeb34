"""Ranks that have different numbers of batches take equally many steps: they agree ahead, in a group of their own.

    batches of this rank ── pulled ahead ──> held: a chunk, and one more ── steps agreed on ──> consumer
                                               └ how many: one all_gather a chunk, while the one before is used

A chunk is a number of steps, the same on all ranks: 1, 2, 4, then 8. Before its first step each rank has tried to have
all of its batches, and one beyond. So what the counts of all ranks say is what is: whether all have a batch for each
step ("drop"), or at least one has ("pad"), and whether there is a step after the last one of the chunk.

A rank that repeats its last batch gives copies of it, and holds the batch itself until the last step: so a resumed run
repeats it as well.

All loaders of a process share one group. Whose turn it is in there is the order of their calls, which threads and tasks
may mix up, differently on each rank: so ranks say which loader they speak of, and a mixture is an error.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset

from asyncloader.checks import one_of
from asyncloader.errors import AsyncLoaderError, ConfigurationError
from asyncloader.log import log
from asyncloader.wrap.rank_group import Answers, own_group
from asyncloader.wrap.wrapper import IteratorWrapper, LoaderWrapper

T_co = TypeVar("T_co", covariant=True)
Mode = Literal["drop", "pad"]

_LONGEST_CHUNK = 8

_numbers = count()
"""Of the loaders of this process that take equal steps."""


def steps_of(counts: list[int], size: int, mode: Mode) -> tuple[int, bool]:
    """Return how many steps of a chunk all ranks take, and whether it is the last chunk.

    Args:
        counts: For each rank how many batches it has from the beginning of the chunk on, counted up to one beyond it.
        size: Steps of the chunk, if it is not the last one.
        mode: "drop" or "pad".
    """
    most = min(counts) if mode == "drop" else max(counts)
    return min(most, size), most <= size


class EqualStepsIterator(IteratorWrapper):
    """Iterates as another iterator does, for as many steps as all ranks agree on.

    Args:
        inner: The iterator over the batches of this rank.
        mode: "drop" leaves out what not all ranks have; "pad" repeats a rank's last batch.
        loader: Its number, the same on all ranks.
        runs: Numbers of its runs, the same on all ranks.
    """

    def __init__(self, inner: Any, mode: Mode, loader: int, runs: Iterator[int]) -> None:
        self._mode, self._loader, self._runs = mode, loader, runs
        super().__init__(inner)

    def begin(self) -> None:
        """Begin a run: before its first chunk, as if at the end of an empty one."""
        super().begin()
        self._place = [self._loader, next(self._runs), 0]  # the same on all ranks; with the number of the next chunk
        self._size = self._steps = self._given = 0  # of the chunk at hand: as long as it is; agreed on; taken so far
        self._is_last = False  # the chunk at hand is
        self._answers: Answers | None = None  # about the next chunk

    async def prepare(self) -> None:
        """See that a batch is held for a step that all ranks take, and this step's share of the next chunk."""
        if self._given == self._steps and not self._is_last:
            answers = await self._ask_ahead()
            assert answers is not None
            self._agree(await asyncio.wrap_future(answers) if self._in_async_for else answers.result())
        if not self._is_last:
            await self._ask_ahead()
        elif self._given == self._steps:
            self._finish()

    async def _ask_ahead(self) -> Answers | None:
        """Pull this step's share of the next chunk, and one beyond; with the last step, ask all ranks about it."""
        left, following = self._size - self._given, self._following
        share = -(-(following + 1) * (self._given + 1) // self._size) if left else following + 1
        while self._answers is None and not self._has_ended and len(self.held) < left + share:
            await self.pull()
        if self._answers is None and left <= 1:
            ahead = max(0, min(self._num_batches - left, following + 1))
            self._answers = own_group().ask([*self._place, ahead])
        return self._answers

    @property
    def _following(self) -> int:
        return min(2 * self._size or 1, _LONGEST_CHUNK)

    def _agree(self, told: list[list[int]]) -> None:
        """Go over to the chunk that all ranks have told of."""
        places, counts = [tuple(place) for *place, _ in told], [each[-1] for each in told]
        if len(set(places)) > 1:
            loaders = {loader for loader, *_ in places}
            raise AsyncLoaderError(
                f"ranks are at different {'loaders' if len(loaders) > 1 else 'places'}, here as (loader, run, chunk of "
                f"steps) by rank: {dict(enumerate(places))}; with equal_steps all ranks make and use the same loaders "
                "in the same order, threads or tasks use one at a time, and all ranks begin, leave and resume a run at "
                "the same step"
            )
        steps, is_last = steps_of(counts, self._following, self._mode)
        empty = [rank for rank, count in enumerate(counts) if not count]
        if self._mode == "pad" and not self._size and empty and steps:
            raise AsyncLoaderError(
                f'rank {", ".join(map(str, empty))} has no batch at all that it could repeat: equal_steps with "pad" '
                "needs one on each rank"
            )
        self._size, self._steps, self._is_last, self._given, self._answers = self._following, steps, is_last, 0, None
        self._place[-1] += 1

    @property
    def _has_ended(self) -> bool:
        """Whether the iterator within has: its end is held behind its last batch."""
        return bool(self.held) and isinstance(self.held[-1][1], StopAsyncIteration)

    @property
    def _num_batches(self) -> int:
        return len(self.held) - self._has_ended

    @property
    def _repeats(self) -> bool:
        """Whether the batch of this step is this rank's last one, and will be given in the next step too."""
        is_end = self._is_last and self._given + 1 == self._steps
        return self._mode == "pad" and self._has_ended and self._num_batches == 1 and not is_end

    def give(self, received: Any) -> Any:
        """Return a batch that nobody else has."""
        return copy.deepcopy(received) if self._repeats else received

    def advance(self) -> None:
        """Note that a step is taken."""
        if not self._repeats:
            super().advance()
        self._given += 1

    def _finish(self) -> None:
        """End the run on this rank, whatever is left of it."""
        if self._num_batches:
            log.info("equal_steps: a rank that has more batches than others leaves them out")
        if not self._has_ended and hasattr(self._inner, "finish"):
            self._inner.finish()
        self.states.clear()
        self.end(StopAsyncIteration)

    def is_ready(self) -> bool:
        """Whether the next batch is there: all ranks are asked in the same steps, and not whenever one is ahead."""
        return False


def equal_steps(loader: Iterable[T_co] | AsyncIterable[T_co], mode: Mode = "drop") -> LoaderWrapper[T_co]:
    """Return a loader that takes as many steps as those of all other ranks, whose streams have other lengths.

    For iterable datasets under DDP and the like, where a rank that has no more batches leaves the others waiting for
    ever. Ranks agree some steps ahead and hold up to 17 batches for it. All have to make and use such loaders in the
    same order, threads or tasks one at a time, and to begin, leave and resume a run at the same step. Without a process
    group, or alone in it, nothing changes.

    The loader that is returned has all that ``loader`` has: methods and attributes. Its states are those of the batches
    that it has given.

    Args:
        loader: Any loader or iterable, asynchronous ones too.
        mode: "drop" leaves out what not all ranks have; "pad" has a rank repeat its last batch until all are at their
            end.

    Raises:
        ConfigurationError: for a map-style dataset, of which samplers give all ranks equally many samples; or another
            word.
        AsyncLoaderError: while iterating, if ranks are at different loaders or places; or, with "pad", if one has no
            batch at all.

    Example:
        >>> for batch in equal_steps(loader):
        ...     step(batch)
    """
    one_of("mode", mode, Mode)
    if not isinstance(getattr(loader, "dataset", None), (IterableDataset, type(None))):
        raise ConfigurationError(
            "equal_steps is for iterable datasets; of a map-style one a sampler gives all ranks equally many samples: "
            "torch's DistributedSampler, or ElasticSampler"
        )
    return LoaderWrapper(loader, partial(_in_step, mode, next(_numbers), count()))


def _in_step(mode: Mode, loader: int, runs: Iterator[int], iterator: Any) -> Any:
    """Return an iterator that takes as many steps as those of other ranks; if there are none, the one that is given."""
    is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return iterator if is_alone else EqualStepsIterator(iterator, mode, loader, runs)
