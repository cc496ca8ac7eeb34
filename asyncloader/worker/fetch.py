"""Get the samples of one batch from the dataset, as torch's fetchers do.

Kept apart from collation, which torch's fetchers do in the same call, so that each can be timed and answered for.

With ``on_error="skip"`` or ``"replace"`` a sample that raises does not cost its batch: the fetcher notes its error, and
:class:`~asyncloader.worker.batch_maker.BatchMaker` has the batch mended without it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from asyncloader.messages.failure import EndOfData
from asyncloader.messages.messages import WorkerSpec
from asyncloader.protocols import has_samples
from asyncloader.seeding import sample_context
from asyncloader.seeding.sample_context import SampleContext
from asyncloader.worker.gather import WholeBatches

_NOT_ASYNC = (
    "A sample of {} has to be awaited, and the class does not say so. A dataset is async if its class has an `async "
    "def __getitem__`, or an `__aiter__`: write the method that passes an awaitable on so, and await it there."
)


class MapFetcher:
    """Fetches from a map-style dataset. What costs the batch is raised, by the sample whose position is in the context.

    Attributes:
        errors: The tolerated exceptions of samples, by position. Whoever mends the batch empties it.
    """

    ended = False
    _pause: Callable[[], object] | None = None

    def __init__(self, dataset: Any, spec: WorkerSpec) -> None:
        self._dataset = dataset
        self._auto_collation = spec.auto_collation
        self._tolerates = spec.tolerates
        self._whole = WholeBatches(dataset, spec)
        self._by_batch = not self._whole.by_sample and getattr(dataset, "__getitems__", None) is not None
        is_special = self._by_batch or self._whole.is_in_memory or self._tolerates or spec.knows_places
        self._is_plain = self._may_be_plain = self._auto_collation and not is_special
        self.errors: dict[int, Exception] = {}

    def pause_with(self, pause: Callable[[], object] | None) -> None:
        """Have this called after each sample."""
        self._pause, self._is_plain = pause, self._may_be_plain and pause is None

    def __call__(self, keys: Any, here: SampleContext) -> Any:
        """Return the list of samples, or a `Whole`; without automatic batching a list of the one sample."""
        if not self._is_plain:
            return self._special(keys, here)
        dataset, left = self._dataset, iter(keys)
        here.left = left
        return [dataset[key] for key in left]

    def _special(self, keys: Any, here: SampleContext) -> Any:
        """Return samples that are asked for otherwise than one after the other by a list of keys."""
        if not self._auto_collation:
            return self._each([keys], here)
        if self._whole.is_in_memory and (rows := self._whole.find(keys)) is not None:
            return rows
        if self._by_batch:
            try:
                return self._whole.ready(self._dataset.__getitems__(keys), keys)
            except Exception:  # one by one, to find out which are good
                if not (self._tolerates and has_samples(self._dataset)):
                    raise
        return self._each(keys, here)

    def _each(self, keys: Any, here: SampleContext) -> list[Any]:
        """Return the samples, asked for one by one."""
        samples = [self._one(key, here) for here.position, key in enumerate(keys)]
        if self._auto_collation:
            here.position = sample_context.BATCH
        return samples

    def _one(self, key: Any, here: SampleContext) -> Any:
        try:
            sample = self._dataset[key]
        except Exception as error:
            if not self._tolerates:
                raise
            self.errors[here.position] = error
            return None
        if self._pause is not None:
            self._pause()
        return sample


class IterableFetcher:
    """Fetches from an iterator over an iterable dataset. Raises EndOfData when there is nothing more.

    Where bad samples are tolerated, those that raise are passed over, as long as the iterator goes on after them. A
    generator does not: what it raises is raised, for the epoch would be silently short. A bad sample takes a place in
    its batch, so an iterator that raises for ever still comes back from each call.

    Attributes:
        errors: As those of `MapFetcher`.
        iterator: The iterator.
        ended: The iterator has come to its end, and is not asked again.
        is_unread: No sample was asked for yet.
    """

    _pause: Callable[[], object] | None = None

    def __init__(self, dataset: Any, spec: WorkerSpec, iterator: Any = None) -> None:
        self.iterator: Any = iter(dataset) if iterator is None else iterator
        self.ended: bool = False
        self.is_unread: bool = True
        self.errors: dict[int, Exception] = {}
        self._spec = spec

    def pause_with(self, pause: Callable[[], object] | None) -> None:
        """Have this called after each sample."""
        self._pause = pause

    def __call__(self, keys: Any, here: SampleContext) -> Any:
        """Return as many samples as there are keys, or what is left; without automatic batching the next one."""
        if self.ended:
            raise EndOfData
        self.is_unread = False
        samples, spec = list[Any](), self._spec
        here.left = iter(keys if spec.auto_collation else [None])
        for _ in here.left:
            try:
                samples.append(next(self.iterator))
                if self._pause is not None:
                    self._pause()
            except StopIteration:
                self.ended = True
                break
            except Exception as error:
                if not spec.tolerates or is_over(self.iterator):
                    raise
                self.errors[len(samples)] = error
                samples.append(None)
        here.position = sample_context.BATCH if spec.auto_collation else 0
        if not samples or (spec.auto_collation and spec.drop_last and len(samples) < len(keys)):
            raise EndOfData
        return samples


def is_over(iterator: Any) -> bool:
    """Whether this is a generator that has ended: after an exception it will yield no more."""
    if inspect.isasyncgen(iterator):
        return iterator.ag_frame is None
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


def discard(sample: Any) -> None:
    """Let go of a sample that nobody wants, and may still have to be awaited."""
    if inspect.iscoroutine(sample):
        sample.close()
    elif isinstance(sample, asyncio.Future):
        sample.cancel()


def refuse_awaitables(samples: Any, dataset: Any) -> None:
    """Refuse samples that have to be awaited, of a dataset that nobody could know to be async.

    Futures of dask, and the like, may be awaited as well, and are samples like others: `collate_fn` gets them.

    Raises:
        TypeError: if one is a coroutine, or a future of a loop.
    """
    each = samples if type(samples) is list else [samples]
    if any(issubclass(kind, (Coroutine, asyncio.Future)) for kind in set(map(type, each))):
        for sample in each:
            discard(sample)
        raise TypeError(_NOT_ASYNC.format(type(dataset).__qualname__))


def fetch_and_drop(fetch: MapFetcher | IterableFetcher, keys: Any) -> bool:
    """Fetch a batch for nobody; False if there is none: the stream has come to its end."""
    try:
        fetch(keys, sample_context.here())
    except EndOfData:
        return False
    except Exception:  # it was raised in its time
        pass
    fetch.errors.clear()
    return True
