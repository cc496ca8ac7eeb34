"""Which sample is being fetched, and the random generator that is its own.

There is one `SampleContext` for each batch, whose position is set before each sample; or one for each sample, where
several are fetched at once.
"""

from __future__ import annotations

from contextvars import ContextVar

import numpy as np

from asyncloader.hashing import mix

BATCH = -1
"""The position of what belongs to no single sample: ``__getitems__``, ``collate_fn``."""


class SampleContext:
    """Where in the run the running code is.

    Args:
        key: Base seed, epoch of the loader, rank.
        seq: Number of the batch.
        position: In the batch, from 0.
    """

    __slots__ = ("_generator", "_made_for", "key", "position", "seq")

    def __init__(self, key: tuple[int, int, int], seq: int, position: int = BATCH) -> None:
        self.key = key
        self.seq = seq
        self.position = position
        self._made_for: int | None = None
        self._generator: np.random.Generator

    def generator(self) -> np.random.Generator:
        """Return the generator of this sample: the same one as long as the position is the same."""
        if self._made_for != self.position:
            # Philox counts blocks of numbers: a position begins 2^192 of them after the last one, so none ever meet.
            counter = np.array([0, 0, 0, self.position & 0xFFFFFFFF], np.uint64)
            key = np.array([mix(*self.key), mix(self.seq)], np.uint64)
            self._generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            self._made_for = self.position
        return self._generator


current: ContextVar[SampleContext] = ContextVar("asyncloader sample")


def enter(key: tuple[int, int, int], seq: int, position: int = BATCH) -> None:
    """Note that what this context does from now on is done for this sample, or batch."""
    current.set(SampleContext(key, seq, position))


def here() -> SampleContext:
    """Return what is being fetched in this context; a new one for a fetcher that was not told."""
    return current.get(None) or SampleContext((0, 0, 0), 0)


def sample_rng() -> np.random.Generator:
    """Return the random generator of the sample that is being fetched.

    It depends on the loader's base seed, the epoch, the rank, the number of the batch and the position in it, and on
    nothing else: the same numbers come with any `num_workers`, `concurrency` or timing, after a crash and on a retry.
    The global generators of random, numpy and torch are shared by all samples that a worker fetches at once; this one
    is not. In `__getitems__` and in `collate_fn` it is the generator of the batch as a whole.

    It is made at the first call and goes on where it was at the next one for the same sample. Source of the generator:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

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
