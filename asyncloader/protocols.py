"""Async datasets: protocols for type checkers, and how an async dataset is told from a plain one.

    AsyncDataset            async def __getitem__(key)         one sample
    AsyncBatchDataset       async def __getitems__(keys)       the samples of a batch at once
    TwoFacedDataset         __getitem__(key); async getitem    a sample for everybody, and the same one awaited
    AsyncIterableDataset    def __aiter__()                    also as an async generator
    AsyncResource           async def __aenter__, __aexit__    opened and closed where the dataset runs

A dataset needs none of them as a base class. A dataset is async if it has one of these methods, or if one inside
torch's wrappers (Subset, ConcatDataset, ChainDataset, StackDataset) does.

Workers may be threads in place of processes (`makes_processes`), or be brought by an object (`WorkerProvider`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import repeat
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, Sampler, StackDataset, Subset

T_co = TypeVar("T_co", covariant=True)


class AsyncDataset(Protocol[T_co]):
    """A map-style dataset whose samples are awaited.

    Example:
        >>> class Objects:
        ...     async def __aenter__(self): self.session = aiohttp.ClientSession(); return self
        ...     async def __aexit__(self, *exc_info): await self.session.close()
        ...     def __len__(self): return len(self.urls)
        ...     async def __getitem__(self, index):
        ...         async with self.session.get(self.urls[index]) as answer:
        ...             return await asyncio.to_thread(decode, await answer.read())
    """

    async def __getitem__(self, key: Any, /) -> T_co:
        """Return one sample."""


class AsyncBatchDataset(Protocol[T_co]):
    """A map-style dataset that fetches the samples of a batch together, in one query for example."""

    async def __getitems__(self, keys: list[Any], /) -> Sequence[T_co]:
        """Return the samples of these keys, in this order."""


class TwoFacedDataset(Protocol[T_co]):
    """A map-style dataset like any other, whose samples can be awaited as well.

    ``dataset[key]``, torch's DataLoader and `random_split` use ``__getitem__``. This package awaits ``getitem``
    instead, also inside torch's wrappers, so that many samples are on their way at once; or ``getitems``, an
    ``async def`` that takes the keys of a batch. A dataset that gains nothing by it for the moment, since its files are
    local for example, says so by a false attribute ``is_remote``.

    Example:
        >>> class Objects(torch.utils.data.Dataset):
        ...     def __getitem__(self, index): return decode(get(self.urls[index]))
        ...     async def getitem(self, index): return decode(await get_async(self.urls[index]))
        ...     def __len__(self): return len(self.urls)
    """

    def __getitem__(self, key: Any, /) -> T_co:
        """Return one sample."""

    async def getitem(self, key: Any, /) -> T_co:
        """Return the same sample, without blocking the loop."""


class AsyncIterableDataset(Protocol[T_co]):
    """An iterable dataset read with ``async for``. Samples that are awaitables are awaited, several at once."""

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Begin to read, anew for each run over the data."""


@runtime_checkable
class AsyncResource(Protocol):
    """A dataset that is opened in the place where it runs, on its loop, and closed there at the end.

    The result of ``__aenter__`` is not used: the dataset itself is.
    """

    async def __aenter__(self) -> Any:
        """Open, once for each worker."""

    async def __aexit__(self, *exc_info: object) -> Any:
        """Close, on every orderly end."""


def is_resource(thing: Any) -> bool:
    """Whether it is an `AsyncResource`, by its class: `isinstance` would ask a ``__getattr__`` as well.

    A dataset with two faces of which the asynchronous one is not used needs no opening.
    """
    kind = type(thing)
    return _defines(kind, "__aenter__") and _defines(kind, "__aexit__") and bool(probe(thing, "is_remote", True))


def answers_of(iterator: Iterator[T_co]) -> Iterator[T_co]:
    """Return an iterator that asks another one, and does not iterate over it: ``for`` and `islice` do so each time.

    Some iterators begin anew then: those of samplers that are their own iterators, as lhotse's are. Python's do not.
    """
    return iterator if type(iterator).__module__ == "builtins" else map(next, repeat(iterator))


_OF_NOBODY = "_asyncloader_asks_whether_you_have_every_attribute"


def probe(thing: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default if there is none, or if the object's ``__getattr__`` fails in its own way.

    torch does not ask for most of those that we ask for, so a ``__getattr__`` that raises a KeyError works there, and
    so does one that has an answer for every name: a mock, the stub of a remote object. Of such an object only what its
    class defines, or was set on the object, counts. A wrapper that passes on what it does not have itself has what the
    object inside has.
    """
    try:
        found = getattr(thing, name, default)
        if found is default or not hasattr(thing, _OF_NOBODY):
            return found
        return default if inspect.getattr_static(thing, name, _OF_NOBODY) is _OF_NOBODY else found
    except Exception:
        return default


def _defines(kind: type, name: str) -> bool:
    """Whether a class, or a base of it, has a method. The classes of mocks have what makes up a mock at each access."""
    return callable(inspect.getattr_static(kind, name, None))


def is_stateful(thing: Any) -> bool:
    """Whether it provides its state and takes it back, without arguments.

    A module's state is its weights, which are not a place in the data; that of a `SuppliesKeys` is its sampler's. Some
    datasets' ``state_dict`` takes arguments that only their own loader knows. And a stream that shuffles through a
    buffer may leave that out of its state.
    """
    tell, take = probe(thing, "state_dict"), probe(thing, "load_state_dict")
    if not (callable(tell) and callable(take)) or isinstance(thing, (torch.nn.Module, SuppliesKeys)):
        return False
    if inspect.iscoroutinefunction(tell) or inspect.iscoroutinefunction(take):  # of an actor elsewhere
        return False
    try:
        inspect.signature(tell).bind()
    except TypeError:
        return False
    except ValueError:  # of an extension, whose signature cannot be known
        pass
    return not leaves_out_buffer(thing)


def merges_states(dataset: Any) -> bool:
    """Whether a stream makes one state of those of several workers: it has a method ``merge_state_dicts(states)``."""
    return is_stateful(dataset) and callable(getattr(type(dataset), "merge_state_dicts", None))


def leaves_out_buffer(dataset: Any) -> bool:
    """Whether it is a stream of Hugging Face's `datasets` that shuffles through a buffer.

    Its state leaves out the rows in the buffer: a resumed run lacks these rows (as of 5.2, also in its
    documentation of `state_dict`), one row with a buffer of one. Such a stream begins alike each time, so it can be
    read again.
    """
    rest = [probe(dataset, "__dict__", {}).get("_ex_iterable")]
    while rest:
        if (layer := rest.pop()) is None:
            continue
        if type(layer).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = vars(layer)
        rest += [inner.get("ex_iterable"), *(inner.get("ex_iterables") or ())]
    return False


class _Loaded(dict[str, Any]):
    """A state that `put_back` has loaded."""


def put_back(dataset: Any, state: Any) -> None:
    """Have a dataset begin at a state, or at its beginning if that is None.

    A stream of Hugging Face's `datasets` keeps the state that it has loaded, and begins there each time that it is
    iterated over until its epoch changes (as of 5.2). So this one is taken from it.
    """
    keeps = hasattr(type(dataset), "load_state_dict") and "_starting_state_dict" in probe(dataset, "__dict__", {})
    if state is not None:
        dataset.load_state_dict(_Loaded(state) if keeps else state)
    elif keeps and type(dataset._starting_state_dict) is _Loaded:
        dataset.load_state_dict(None)


def members(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and what is inside torch's wrappers, each once."""
    found: dict[int, Any] = {}
    rest = [dataset]
    while rest:
        member = rest.pop()
        if id(member) in found:
            continue
        found[id(member)] = member
        yield member
        if isinstance(member, Subset):
            rest.append(member.dataset)
        elif isinstance(member, StackDataset):
            inner = member.datasets
            rest += list(inner.values()) if isinstance(inner, dict) else list(inner)
        elif isinstance(member, (ConcatDataset, ChainDataset)) and isinstance(member.datasets, (list, tuple)):
            rest += member.datasets


def _within(dataset: Any, method: str) -> Any:
    """Return the dataset whose method it is: that in torch's Subset, unless a subclass has its own."""
    while isinstance(dataset, Subset) and getattr(type(dataset), method) is getattr(Subset, method):
        dataset = dataset.dataset
    return dataset


def is_collated(dataset: Any) -> bool:
    """Whether ``__getitems__`` of the dataset returns a batch: the dataset says ``collated = True``.

    torch's Subset returns what the dataset in it does.
    """
    dataset = _within(dataset, "__getitems__")
    return probe(dataset, "collated") is True and callable(probe(dataset, "__getitems__"))


def seeds_samples(dataset: Any) -> bool:
    """Whether ``__getitems__`` of the dataset takes care that each sample draws what it would draw alone.

    The dataset says ``seeds_samples = True``: it draws nothing, or in `sample_seed` blocks with the sample's position.
    """
    return probe(_within(dataset, "__getitems__"), "seeds_samples") is True


def has_samples(dataset: Any) -> bool:
    """Whether the dataset gives single samples, and not batches alone; that of a Subset, if it is one."""
    getitem = getattr(type(_within(dataset, "__getitem__")), "__getitem__", None)
    return getitem is not None and getitem is not Dataset.__getitem__


def is_async(dataset: Any) -> bool:
    """Whether the dataset, or one inside torch's wrappers, is async."""
    return any(map(_is_async_itself, members(dataset)))


def is_async_iterable(dataset: Any) -> bool:
    """Whether the dataset can be read with ``async for``, and not by key."""
    kind = type(dataset)
    return _defines(kind, "__aiter__") and not hasattr(kind, "__getitem__")


def reads_async(dataset: Any) -> bool:
    """Whether the dataset is to be read with ``async for``: it can, and gains by it, or has no other way."""
    kind = type(dataset)
    return _defines(kind, "__aiter__") and (bool(probe(dataset, "is_remote", True)) or not _defines(kind, "__iter__"))


def accept_iterable(dataset: Any) -> None:
    """Have torch take an async iterable for what it is.

    torch tells iterable from map-style datasets by `isinstance`, and its IterableDataset cannot be the base of a class
    without ``__iter__``. So the class is registered as a virtual subclass.
    """
    if is_async_iterable(dataset) and not isinstance(dataset, IterableDataset):
        IterableDataset.register(type(dataset))


def has_method(dataset: Any, name: str) -> bool:
    """Whether the class of the dataset has a coroutine function of this name."""
    return inspect.iscoroutinefunction(getattr(type(dataset), name, None))


def has_async_face(dataset: Any) -> bool:
    """Whether the samples of the dataset can be awaited beside `__getitem__`, and gain by it."""
    if not (has_method(dataset, "getitem") or has_method(dataset, "getitems")):
        return False
    return bool(probe(dataset, "is_remote", True))


def stacks_awaited(dataset: Any) -> bool:
    """Whether torch's StackDataset puts samples together, in it, that would have to be awaited before."""
    stacks = [member for member in members(dataset) if isinstance(member, StackDataset)]
    return any(_awaits(part) for stack in stacks for part in members(stack))


def _awaits(dataset: Any) -> bool:
    """Whether samples of the dataset have to be awaited, or are better awaited."""
    return (
        has_async_face(dataset)
        or inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))
        or inspect.iscoroutinefunction(probe(dataset, "__getitems__"))
    )


def _is_async_itself(dataset: Any) -> bool:
    return _awaits(dataset) or reads_async(dataset) or is_resource(dataset)


class SuppliesKeys(Dataset[T_co]):
    """A map-style dataset that brings its own sampler, because it alone knows which keys there are, or will be.

    The loader uses that sampler, or batch sampler, where it is given none. If the sampler's class says
    ``keys_arrive = True``, its iterator, an `ArrivingKeys`, is not asked for keys that are not there yet. The sampler
    has the state; none is taken of the dataset.
    """

    def make_sampler(self) -> Sampler[Any]:
        """Return a sampler of its keys, one sample each."""
        raise NotImplementedError

    def make_batch_sampler(self) -> Sampler[list[Any]] | None:
        """Return a sampler of lists of its keys, one batch each; None if the loader is to make batches."""
        return None

    def check_options(self, options: Any) -> None:
        """Raise a ConfigurationError if a loader with these options would make something else of its keys."""

    def name(self, key: Any) -> Any:
        """Return what errors, messages and statistics call the sample of a key: the key, unless it has the sample."""
        return key


def namer(dataset: Any, *, of_batches: bool) -> Callable[[Any], Any]:
    """Return a function of the keys of a batch, or of the key of one sample, that returns what these are called."""
    if not isinstance(dataset, SuppliesKeys):
        return lambda keys: keys
    name = dataset.name
    return (lambda keys: [*map(name, keys)] if isinstance(keys, (list, tuple)) else keys) if of_batches else name


class ArrivingKeys(Protocol):
    """An iterator over keys that become known as time goes by. Its `next` waits for the next key, or for the end.

    It may have more methods, which are called where they are there:

    - ``why_no_keys(in_vain=False)`` tells what keys wait for; with True that, or "" if it may still come.
    - ``end_with(consumer)``, for one that reads ahead, has it read nothing more as soon as this object is dropped, and
      is called before the first key is asked for. ``leave()`` has it read nothing more, and returns; in any thread.
    - ``follow(given)``, for one whose keys depend on how far consumers are, gives it what counts, in any thread, how
      many of its batches consumers were given; it is called before it is read. ``asked()`` tells that a consumer asks
      for its next batch, or asks again; it is called with the lock of the run held.
    """

    def __next__(self) -> Any:
        """Return the next key."""

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Return whether so many keys, or what comes in their place at the end, can be had without waiting.

        If not, ``tell`` is called once, in any thread, as soon as they can.
        """


def makes_processes(context: BaseContext | None) -> bool:
    """Whether what a context calls processes are some: MONAI has one of threads. Their pids are nobody's to signal."""
    kind: Any = getattr(context, "Process", BaseProcess)
    return isinstance(kind, type) and issubclass(kind, BaseProcess)


class WorkerProvider(Protocol):
    """An object that is given as ``worker_backend``: it brings the workers.

    :class:`asyncloader.ray.RayWorkers` is one.
    """

    @property
    def num_workers(self) -> int:
        """How many workers it brings, at the beginning."""

    def make_backend(self, options: Any, spec: Any, loop: Any) -> Any:
        """Make a `Backend`.

        Args:
            options: The options of the loader.
            spec: The dataset, collation and options that the workers use.
            loop: The portal's, guarded.

        Raises:
            Exception: as pickling the dataset raises it, or whatever finds room for workers.
        """
