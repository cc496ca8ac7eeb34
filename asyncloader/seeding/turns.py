"""Turns with the global generators, for samples that are made at the same time.

    sample 7:  read ......... [ decode, transform ]
    sample 8:  read .. waits ......................[ decode, transform ]
    sample 9:  read ................................ waits .............[ ...

What a sample does in a `sample_seed` block it does alone in its process, with the three global generators seeded by
its place in the epoch; so what they draw does not depend on what else is in flight.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from asyncloader.seeding.sample_context import BATCH, SampleContext, current
from asyncloader.seeding.seeder import BLOCK, Seeder, left_alone


class _Turn:
    """Whose turn it is in this process.

    Attributes:
        lock: Held by whose turn it is.
        holder: The sample, in the thread that has the lock.
        is_trainers: The global generators are those of the trainer, and are given back after each turn.
    """

    def __init__(self, *, is_trainers: bool = True) -> None:
        self.lock = threading.RLock()
        self.holder: SampleContext | None = None
        self.is_trainers = is_trainers
        self.seeder: tuple[tuple[int, int, int], Seeder] | None = None  # of the last epoch

    def seeder_of(self, key: tuple[int, int, int]) -> Seeder:
        """Return what seeds the samples of an epoch. With the lock held."""
        if self.seeder is None or self.seeder[0] != key:
            self.seeder = key, Seeder(key)
        return self.seeder[1]


_turn = _Turn()


def own_generators() -> None:
    """Say that the global generators of this process are nobody's but those who make samples: it is a worker."""
    global _turn
    _turn = _Turn(is_trainers=False)


def _renew() -> None:
    global _turn  # whoever had its turn in the parent is not here
    _turn = _Turn(is_trainers=_turn.is_trainers)


os.register_at_fork(after_in_child=_renew)


class sample_seed:  # read as a function that returns a context manager
    """Make what is drawn in a block the sample's own, where samples are fetched at the same time.

    With ``seeding="sample"``, Python's, numpy's and torch's global generators are seeded for the block by the sample's
    place in the epoch's order, and the blocks of all samples of a process take turns: reading overlaps, what is in
    blocks does not. So random transforms give the same with any number of workers, any `concurrency`, number of threads
    and batch size. In the trainer's process the generators are given back to it after each block; what it draws itself
    while a block runs in another thread, it draws from those of the sample.

    Under another ``seeding``, and where nothing is fetched, it changes nothing. A block must hold no ``await``: other
    samples of its loop would run inside it.

    Args:
        position: Of the sample in the batch, in `__getitems__`, which makes all samples of one. In the block,
            :func:`asyncloader.sample_rng` is that sample's own, under any ``seeding``.

    Raises:
        RuntimeError: on entering a block while another sample is in one, in the same thread.

    Example:
        >>> class Photos:
        ...     async def __getitem__(self, index):
        ...         data = await self.read(index)
        ...         with asyncloader.sample_seed():
        ...             return self.augment(decode(data))
    """

    __slots__ = ("_aside", "_outside", "_position", "_turn")

    def __init__(self, position: int | None = None) -> None:
        self._position = position
        self._outside: Any = None
        self._turn: _Turn | None = None
        self._aside: Any = None

    def __enter__(self) -> None:
        sample = current.get(None)
        if sample is None:
            return
        if self._position is not None and sample.position == BATCH:
            sample = sample.of(self._position)
            self._outside = current.set(sample)
        if sample.first is not None:
            self._begin(sample)

    def _begin(self, sample: SampleContext) -> None:
        turn = _turn
        turn.lock.acquire()
        try:
            if turn.holder is not None:
                if turn.holder is not sample:
                    raise RuntimeError(
                        "a sample entered a sample_seed() block while another one of the same event loop was in one: "
                        "there is an await inside the block. Await before it, or after it."
                    )
                turn.lock.release()  # a block inside a block: the outer one goes on
                return
            aside = left_alone() if turn.is_trainers else contextlib.nullcontext()
            aside.__enter__()
            part = BLOCK + 3 * sample.next_block() - min(sample.position, 0)
            turn.seeder_of(sample.key)(sample.number, part)
            turn.holder, self._turn, self._aside = sample, turn, aside
        except BaseException:
            turn.lock.release()
            if self._outside is not None:
                current.reset(self._outside)
            raise

    def __exit__(self, *exc_info: object) -> None:
        if self._turn is not None:
            turn, self._turn = self._turn, None
            self._aside.__exit__(None, None, None)
            turn.holder = None
            turn.lock.release()
        if self._outside is not None:
            outside, self._outside = self._outside, None
            current.reset(outside)
