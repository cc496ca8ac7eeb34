"""Get the samples of one batch from the dataset, as torch's fetchers do.

Kept apart from collation, which torch's fetchers do in the same call, so that each can be timed and answered for.

With ``on_error="skip"`` or ``"replace"`` a sample that raises does not cost its batch: the fetcher catches it, keeps a
note in ``bad``, and has the batch mended without it (`ErrorPolicy`, which overlapping samples are mended by as well).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from asyncloader.messages.failure import BadSample, EndOfData, RemoteError
from asyncloader.messages.indices import listed
from asyncloader.options import OnError
from asyncloader.protocols import has_samples
from asyncloader.seeding import sample_context
from asyncloader.seeding.sample_context import SampleContext
from asyncloader.worker.gather import WholeBatches


class NoGoodSample(Exception):
    """Every sample of a batch raised. ``first`` is what the first one raised, at this position."""

    def __init__(self, first: Exception, position: int) -> None:
        super().__init__("no sample of the batch is good")
        self.first = first
        self.position = position


Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, always on the same loop."""


class ErrorPolicy(NamedTuple):
    """What becomes of samples that raise.

    Attributes:
        on_error: "raise"; "skip" leaves them out; "replace" puts good ones of the same batch in their places.
        where: For the notes: "in DataLoader worker process 3".
    """

    on_error: OnError = "raise"
    where: str = ""

    @property
    def tolerates(self) -> bool:
        """Whether the other samples of a batch are wanted when one has raised."""
        return self.on_error != "raise"

    def note(self, errors: Mapping[int, Exception], keys: Sequence[Any] | None) -> list[BadSample]:
        """Return notes of the samples that raised, by position in the batch; those of a stream have no keys."""
        return [
            BadSample(None if keys is None else keys[position], position, RemoteError.capture(error, self.where))
            for position, error in sorted(errors.items())
        ]

    def mend(self, samples: list[Any], errors: dict[int, Exception]) -> list[Any]:
        """Return the samples in order, without the bad ones or with others in their places.

        Which good sample takes a place depends on the place alone, so that a batch that is made again is the same.

        Args:
            samples: By position; anything where a sample raised.
            errors: What these raised. They are taken out: their tracebacks refer to who has them.

        Raises:
            NoGoodSample: if there is none.
        """
        good = {position: sample for position, sample in enumerate(samples) if position not in errors}
        position, first = min(errors.items(), default=(0, None), key=itemgetter(0))
        errors.clear()
        if first is None:
            return samples
        if not good:
            raise NoGoodSample(first, position)
        found = list(good.values())
        if self.on_error == "skip":
            return found
        return [good.get(i, found[i % len(found)]) for i in range(len(samples))]


_RAISE = ErrorPolicy()


class Fetcher(Protocol):
    """Gets the samples of one batch after the other.

    Samples that turn out to be awaitables, of a dataset that could not be known to be async, are awaited: those of a
    batch together.

    Attributes:
        bad: The samples of the last batch that raised, and were left out or replaced.
    """

    bad: Sequence[BadSample]

    def __call__(self, keys: Any) -> Any:
        """Return the list of samples; without automatic batching the one sample."""


class MapFetcher:
    """Fetches from a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate_fn: Any,
        run: Run,
        policy: ErrorPolicy = _RAISE,
        *,
        by_sample: bool = False,
    ) -> None:
        self.bad: Sequence[BadSample] = ()
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._run = run
        self._policy = policy
        self._tolerates = policy.tolerates
        self._whole = WholeBatches(dataset, auto_collation, collate_fn, by_sample)

    def __call__(self, keys: Any) -> Any:
        """Return the list of samples, or a `Whole`; without automatic batching the one sample."""
        self.bad = ()
        here = sample_context.here()
        if not self._auto_collation:
            return self._each([keys], here)[0]
        if self._whole.is_in_memory and (rows := self._whole.find(keys)) is not None:
            return rows
        if type(keys) is not list:
            keys = listed(keys)
        if getattr(self._dataset, "__getitems__", None) and not self._whole.by_sample:
            try:
                return self._whole.ready(_settled(self._dataset.__getitems__(keys), self._run), keys)
            except Exception:  # one by one, to find out which are good
                if not (self._tolerates and has_samples(self._dataset)):
                    raise
        return self._each(keys, here)

    def _each(self, keys: Any, here: SampleContext) -> list[Any]:
        """Return the samples, asked for one by one; without those that raised, or with others, if that is tolerated."""
        dataset, errors = self._dataset, None
        if self._tolerates:
            errors = dict[int, Exception]()
            samples = [self._try(key, errors) for here.position, key in enumerate(keys)]
            self.bad = self._policy.note(errors, keys)
        elif here.first is not None:  # what turns out to be awaitable draws as well, when it is awaited
            samples = [self._one(key) for here.position, key in enumerate(keys)]
        else:
            samples = [dataset[key] for here.position, key in enumerate(keys)]
        if self._auto_collation:
            here.position = sample_context.BATCH
        return _settled(samples, self._run) if errors is None else self._policy.mend(samples, errors)

    def _one(self, key: Any) -> Any:
        sample = self._dataset[key]
        return self._run(settle(sample)) if hasattr(type(sample), "__await__") else sample

    def _try(self, key: Any, errors: dict[int, Exception]) -> Any:
        try:
            return self._one(key)
        except Exception as error:
            errors[sample_context.here().position] = error


class IterableFetcher:
    """Fetches from an iterator over an iterable dataset. Raises EndOfData when there is nothing more.

    Where bad samples are tolerated, those that raise are passed over, as long as the iterator goes on after them. A
    generator does not: what it raises is raised, for the epoch would be silently short. A bad sample takes a place in
    its batch, so an iterator that raises for ever still comes back from each call.

    Attributes:
        iterator: The iterator.
        ended: It has come to its end, and is not asked again.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        drop_last: bool,
        run: Run,
        iterator: Any = None,
        policy: ErrorPolicy = _RAISE,
    ) -> None:
        self.bad: Sequence[BadSample] = ()
        self.iterator = iter(dataset) if iterator is None else iterator
        self.ended = False
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._run = run
        self._policy = policy

    def __call__(self, keys: Any) -> Any:
        """Return as many samples as there are keys, or what is left; without automatic batching the next one."""
        self.bad = ()
        if self.ended:
            raise EndOfData
        here, samples, errors = sample_context.here(), list[Any](), dict[int, Exception]()
        tolerates = self._policy.tolerates
        wanted = keys if self._auto_collation else (None,)
        for here.position, _ in enumerate(wanted):
            try:
                sample = next(self.iterator)
                samples.append(_settled([sample], self._run)[0] if tolerates else sample)
            except StopIteration:
                self.ended = True
                break
            except Exception as error:
                if not tolerates or is_over(self.iterator):
                    raise
                errors[here.position] = error
                samples.append(None)
        if self._auto_collation:
            here.position = sample_context.BATCH
        self.bad = self._policy.note(errors, None)
        if not samples or (self._auto_collation and self._drop_last and len(samples) < len(keys)):
            raise EndOfData
        samples = self._policy.mend(samples, errors) if errors else _settled(samples, self._run)
        return samples if self._auto_collation else samples[0]


def is_over(iterator: Any) -> bool:
    """Whether this is a generator that has ended: after an exception it will yield no more."""
    if inspect.isasyncgen(iterator):
        return iterator.ag_frame is None
    return inspect.isgenerator(iterator) and iterator.gi_frame is None


_NEVER_AWAITED = frozenset({int, float, str, bytes, tuple, list, dict, np.ndarray, torch.Tensor})


def _settled(samples: Any, run: Run) -> Any:
    """Return the samples; those that are still to be awaited, awaited."""
    if type(samples) is not list and hasattr(type(samples), "__await__"):
        samples = run(settle(samples))
    if type(samples) is list:
        # Looked at type by type: most batches have one, and a look at each of a thousand samples would take as long as
        # fetching them.
        for kind in set(map(type, samples)):
            if kind not in _NEVER_AWAITED and hasattr(kind, "__await__"):
                return run(_gather(samples))
    return samples


async def _gather(samples: list[Any]) -> list[Any]:
    return await asyncio.gather(*map(settle, samples))


async def settle(sample: Any) -> Any:
    """Await a sample, or what a StackDataset put together of the samples of several datasets."""
    if hasattr(type(sample), "__await__"):
        return await sample
    if type(sample) is tuple:
        return tuple(await asyncio.gather(*map(settle, sample)))
    if type(sample) is dict:
        return dict(zip(sample, await asyncio.gather(*map(settle, sample.values())), strict=True))
    return sample


def fetch_and_drop(fetch: Callable[[Any], Any] | None, keys: Any) -> bool:
    """Fetch a batch for nobody; False if there is none: the stream has come to its end."""
    assert fetch is not None
    try:
        fetch(keys)
    except EndOfData:
        return False
    except Exception:  # it was raised in its time
        pass
    return True


def make_fetcher(
    dataset: Any,
    *,
    is_iterable: bool,
    auto_collation: bool,
    drop_last: bool,
    collate_fn: Any = None,
    run: Run = asyncio.run,
    on_error: OnError = "raise",
    where: str = "",
    iterator: Any = None,
    by_sample: bool = False,
) -> Fetcher:
    """Return the fetcher for a dataset; for an iterable one with this iterator, if there is one already.

    What it returns is to be collated with ``collate_fn``. With ``by_sample`` samples are asked for one by one where
    what one draws would else depend on the others.
    """
    policy = ErrorPolicy(on_error, where)
    if is_iterable:
        return IterableFetcher(dataset, auto_collation, drop_last, run, iterator, policy)
    return MapFetcher(dataset, auto_collation, collate_fn, run, policy, by_sample=by_sample)
