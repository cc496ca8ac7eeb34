"""torch's BatchSampler and RandomSampler, read batch by batch: their order and draws, without a list of the whole.

torch makes a list of its permutation before the first index is there: 40 bytes an index beside the 8 of the tensor. And
its iterator is a generator, which a Ctrl-C that hits inside ends, and with it the epoch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as counter
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from asyncloader.engine.progress import Progress
from asyncloader.protocols import answers_of
from asyncloader.seeding.generators import state_of

_LARGE = 1 << 18
"""To draw a permutation of more takes milliseconds."""
_NO_MORE: Iterator[Any] = iter(())
_torch_iter = RandomSampler.__iter__


def indices(sampler: Any) -> Iterator[Any]:
    """Iterate over a sampler; over torch's RandomSampler, where it draws without replacement, without a list of it."""
    kind = type(sampler)
    if kind is RandomSampler and kind.__iter__ is _torch_iter and not sampler.replacement:
        return RandomOrder(sampler)
    return iter(sampler)


class Batches(Iterator[list[Any]]):
    """Iterates as torch's BatchSampler does. A batch that an interrupt has come into is gone on with.

    Args:
        iterator: Over the sampler within, as `indices` has made it.
        sampler: torch's BatchSampler, whose size may be changed between two batches, unless it drops the last one.
        progress: Is told if it was.

    Attributes:
        size: How many indices the present batch has.
    """

    def __init__(self, iterator: Iterator[Any], sampler: BatchSampler, progress: Progress) -> None:
        self._iterator = answers_of(iterator)
        self._pieces = iterator if type(iterator) is RandomOrder else None
        self._sampler = sampler
        self.size: int = sampler.batch_size
        self._drop_last = sampler.drop_last
        self._progress = progress
        self._begun: list[Any] = []

    def __next__(self) -> list[Any]:
        begun, size = self._begun, self.size
        if self._sampler.batch_size != size and not (begun or self._drop_last):
            self._progress.sizes_differ = True
            size = self.size = self._sampler.batch_size
        if self._pieces is None:
            begun.extend(islice(self._iterator, size - len(begun) if begun else size))  # an interrupt leaves some
        elif not begun:
            begun = self._begun = self._pieces.take(size)
        if len(begun) < (size or 1):
            self._pieces, self._iterator = None, _NO_MORE  # some iterators begin anew if they are asked after the end
            if not begun or self._drop_last:
                raise StopIteration
        self._begun = []  # from here on nothing is called
        return begun

    @property
    def num_missing(self) -> int:
        """How many indices are still to be read for the next batch."""
        is_settled = self._begun or self._drop_last
        return (self.size if is_settled else self._sampler.batch_size) - len(self._begun)


def skip(iterator: Iterator[Any], count: int) -> int:
    """Leave out the next `count` indices, or what is left; return how many."""
    if type(iterator) is RandomOrder:
        return iterator.skip(count)
    drawn = counter()
    deque(zip(islice(answers_of(iterator), count), drawn, strict=False), maxlen=0)
    return next(drawn)


class DrawDue(BaseException):
    """A large permutation is to be drawn apart: by ``draw``, in any thread, and then the order is asked again.

    No `Exception`, which would be the sampler's answer.
    """

    def __init__(self, draw: Callable[[], None]) -> None:
        super().__init__()
        self.draw = draw


class RandomOrder(Iterator[int]):
    """Iterates as torch's RandomSampler does: a permutation is drawn when the first index of it is asked for.

    Attributes:
        draws_apart: Whoever asks has large permutations drawn in another thread, where their generator is nobody
            else's: `DrawDue` is raised for that, when its seed is drawn.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler = sampler
        self.draws_apart = False
        self._drawing = threading.Lock()  # whoever was to draw may be cancelled, and another comes meanwhile
        self._generator: torch.Generator | None = None
        self._length = 0
        self._num_whole = 0  # permutations to be drawn before the last one, of which a part is yielded; then -1
        self._order = np.empty(0, np.int64)
        self._at = 0  # in the order: the next index

    def __next__(self) -> int:
        if index := self.take(1):
            return index[0]
        raise StopIteration

    def take(self, count: int) -> list[int]:
        """Return the next indices; fewer only at the end."""
        while self._at + count > len(self._order) and self._draw_on():
            pass
        taken: list[int] = self._order[self._at : self._at + count].tolist()
        self._at += len(taken)  # last of all: a call that is interrupted has taken nothing
        return taken

    def skip(self, count: int) -> int:
        """Leave out the next indices, without looking at them; return how many there were."""
        left = count
        while left:
            step = min(left, len(self._order) - self._at)
            self._at += step
            left -= step
            if left and not self._draw_on():
                break
        return count - left

    def _draw_on(self) -> bool:
        """Draw the next permutation, if there is one more."""
        if self._generator is None:
            self._begin()
        if self._num_whole < 0:
            return False
        if self.draws_apart and self._length > _LARGE and self._sampler.generator is None:
            raise DrawDue(partial(self._draw_apart, self._num_whole))
        self._draw()
        return True

    def _draw_apart(self, num_whole: int) -> None:
        with self._drawing:
            if self._num_whole == num_whole:
                self._draw()

    def _begin(self) -> None:
        sampler = self._sampler
        self._length = len(sampler.data_source)
        self._num_whole = sampler.num_samples // self._length
        if sampler.generator is not None:
            self._generator = sampler.generator
            return
        before = state_of(torch.default_generator)
        try:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            self._generator = generator
        except BaseException:  # Ctrl-C: the next call draws the same seed
            torch.default_generator.set_state(before)
            raise

    def _draw(self) -> None:
        """Put the next permutation behind what is left. A Ctrl-C in here puts the generator back, to draw it again."""
        assert self._generator is not None
        before = state_of(self._generator)
        try:
            rest = self._length if self._num_whole else self._sampler.num_samples % self._length
            order = self._order[self._at :]
            # torch draws the last one also where nothing of it is yielded, which a generator of the user's shows.
            if rest or self._sampler.generator is not None:
                drawn = torch.randperm(self._length, generator=self._generator)[:rest].numpy()
                order = np.concatenate([order, drawn]) if len(order) else drawn
            self._order, self._at, self._num_whole = order, 0, self._num_whole - 1
        except BaseException:
            self._generator.set_state(before)
            raise
