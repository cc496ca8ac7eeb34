"""ParallelMap: a stream that is read once, and worked on by all workers.

torch gives each worker of an iterable dataset a copy of it, so that all samples come as often as there are workers,
unless the dataset divides itself. Here the trainer's process reads the stream, once, and an item travels with its
ticket to whichever worker is free. To everything else it is a map-style dataset, whose keys are the items.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

from torch.utils.data import Sampler

from asyncloader import identity
from asyncloader.async_face import resolved
from asyncloader.checks import at_least, one_of
from asyncloader.datasets.stream_keys import Items, Place, StreamItem, StreamKeys, gives_once, is_stream
from asyncloader.epochs import hears
from asyncloader.errors import ConfigurationError
from asyncloader.log import log
from asyncloader.protocols import SuppliesKeys
from asyncloader.samplers.ordered import place_in_group

T_co = TypeVar("T_co", covariant=True)
Shard = Literal["rank"]

_MOST_ITEMS = 1024
_MOST_BYTES = 64 << 20


class ParallelMap(SuppliesKeys[T_co]):
    """A map-style dataset of the items of a stream: ``fn(item)`` is a sample, and any worker makes it.

    Give it to a :class:`~asyncloader.DataLoader` without a sampler. The stream is read ahead in the trainer's process,
    on a thread of its own, and never waited for while batches are ready. Any number of workers gives the same batches.
    Whatever holds for map-style datasets does: workers that come, go, die or live on other machines, `on_error`,
    `scheduling`, `seeding`. A state of the loader resumes at any batch, with any number of workers: from the last state
    that the stream has told before, or else by reading it again, which the log says.

    Args:
        stream: An iterable that begins anew each epoch, an async one, or a function that returns one. If it has
            `state_dict` and `load_state_dict`, or its iterator, states of the loader have theirs; if it has
            `set_epoch`, it is told each epoch after the first, and any that `loader.set_epoch` sets. The stream lives
            in the trainer's process: no worker has it, and it need not be pickled. An async stream runs on a loop of
            the thread's own. Each item is an object of its own, as it is read ahead.
        fn: Makes a sample of an item, in a worker. The function and the items are pickled; in a worker that is a thread
            it must not change the item. May be a coroutine function: then `concurrency` samples are awaited at once.
        shard: "rank": each rank reads the whole stream, and takes every n-th item. States are for any number of ranks.
            None: the stream is this rank's own; it divides itself, or all ranks are to have the same.
        num_replicas: Ranks that share the stream; by default those of the process group, or 1 without one.
        rank: Which of them this is; by default that of the process group, or 0.
        max_items: Items that are read ahead at most, and a batch in any case.
        max_bytes: Bytes of theirs, as far as they can be told: those of arrays, tensors, strings and bytes, in
            containers and attributes.

    Raises:
        ConfigurationError: for what cannot work.

    Example:
        >>> from asyncloader import DataLoader
        >>> squares = ParallelMap(range(6), lambda item: item * item, shard="rank", num_replicas=2, rank=1)
        >>> [batch.tolist() for batch in DataLoader(squares, batch_size=2)]
        [[1, 9], [25]]
    """

    def __init__(
        self,
        stream: Iterable[Any] | AsyncIterable[Any] | Callable[[], Any],
        fn: Callable[[Any], T_co],
        *,
        shard: Shard | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        max_items: int = _MOST_ITEMS,
        max_bytes: int = _MOST_BYTES,
    ) -> None:
        if not (is_stream(stream) or callable(stream)):
            raise ConfigurationError(f"stream should be an iterable, or a function that returns one, but is {stream!r}")
        if not callable(fn):
            raise ConfigurationError(f"fn should be a function of an item, but is {fn!r}")
        if shard is not None:
            one_of("shard", shard, Shard)
        elif num_replicas is not None or rank is not None:
            raise ConfigurationError('num_replicas and rank are for shard="rank"')
        self.stream: Any = stream
        self.fn = fn
        self.shard = shard
        self.max_items: int = at_least("max_items", max_items, least=1)
        self.max_bytes: int = at_least("max_bytes", max_bytes, least=1)
        self._readings: list[Items] = []  # of the stream, that may go on
        self._place = (1, 0) if shard is None else place_in_group(num_replicas, rank)

    def __getitem__(self, key: StreamItem) -> T_co:
        if type(key) is not tuple:
            raise TypeError(
                f"the keys of a ParallelMap are the items of its stream, and {key!r} is none: give it to "
                "asyncloader.DataLoader as it is, without a sampler. Subset, random_split, ConcatDataset and torch's "
                "DataLoader ask for samples by number, in any order, which a stream does not have"
            )
        return self.fn(key[1])

    @property
    def is_remote(self) -> bool:
        """Whether `fn` is a coroutine function, whose samples are awaited."""
        return any(map(inspect.iscoroutinefunction, (self.fn, getattr(self.fn, "__call__", None))))  # noqa: B004

    async def getitem(self, key: StreamItem) -> T_co:
        """Return the sample of an item, awaited."""
        return await resolved(self[key])  # type: ignore[no-any-return]

    def __len__(self) -> int:
        """Return how many items the stream has, for all ranks.

        Raises:
            TypeError: if it does not say.
        """
        return len(self.stream)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stream": None, "_readings": None}  # a worker's copy is for making samples

    def name(self, key: StreamItem) -> Any:
        """Return the number of an item in the stream."""
        return key[0] if type(key) is tuple and key else key

    def make_sampler(self) -> StreamSampler:
        """Return the sampler of the items, which reads the stream.

        Raises:
            ConfigurationError: if this is a copy without the stream.
        """
        if self.stream is None:
            raise ConfigurationError("a copy of a ParallelMap that was pickled has no stream: it is for workers")
        return StreamSampler(self)


class StreamSampler(Sampler[StreamItem]):
    """Gives the items of a stream as keys. Its state is the number of the next item, of all ranks together.

    Args:
        dataset: Has the stream.
    """

    keys_arrive = True
    is_epoch_set: bool = False  # by a call of `set_epoch` or `load_state_dict` since our loader has begun an epoch
    num_replicas: int
    rank: int

    def __init__(self, dataset: ParallelMap[Any]) -> None:
        self._dataset = dataset
        self._ranks, self._rank = dataset._place
        if dataset.shard is not None:  # otherwise it is the stream that may be one rank's
            self.num_replicas, self.rank = dataset._place
        self.epoch: int = 0
        self._is_told = False  # of an epoch
        self._was_read = False
        self._next = Place()  # where the next iterator begins
        self._items: Items | None = None  # of the newest iterator

    def __len__(self) -> int:
        """Return how many items this rank is given, if the stream says how many it has."""
        return -(-max(0, len(self._dataset) - self._rank) // self._ranks)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator is of. A state of another epoch is dropped."""
        if epoch != self.epoch:
            self._next, self._items = Place(), None
        self.epoch, self._is_told, self.is_epoch_set = epoch, True, True

    def __iter__(self) -> Iterator[StreamItem]:
        """Iterate: the stream is read from the first `next` on."""
        bounds = {"max_items": self._dataset.max_items, "max_bytes": self._dataset.max_bytes}
        items = Items(self._rank, self._ranks, **bounds)
        return StreamKeys(items, partial(self._begin, items))

    def _begin(self, items: Items) -> None:
        """Start to read for an iterator, which is the newest one; the next one begins at the beginning."""
        dataset, place = self._dataset, self._next
        if items is not self._items:
            if self._was_read and gives_once(dataset.stream):
                raise ConfigurationError(
                    f"the stream is a {type(dataset.stream).__name__}, which gives its items once, and was read: give "
                    "ParallelMap the function that makes it"
                )
            if self._is_told and hears(dataset.stream):
                dataset.stream.set_epoch(self.epoch)
            if place.number > place.given:
                log.info("The stream is read again: %d of its items are left out.", place.number - place.given)
            items.go_to(place)
            self._items, self._next, self._was_read = items, Place(), True
        items.start(dataset.stream, dataset._readings)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the newest iterator was read, which reads ahead of what a loader yields."""
        return self._state(self._next if self._items is None else self._items.place())

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many items of the newest iterator, counted on this rank."""
        return self._state(self._next if self._items is None else self._items.place(items))

    def _state(self, place: Place) -> dict[str, Any]:
        states = pickle.loads(place.states) if place.states else None
        state = {"version": 1, "epoch": self.epoch, "number": place.number, "count": place.given, "stream": states}
        return {**state, **identity.of(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a state, of any rank.

        Raises:
            StateMismatchError: if the state is of another sampler, or of another order.
        """
        identity.check(state, identity.of(self))
        states = b"" if state["stream"] is None else pickle.dumps(state["stream"])
        self.epoch, self.is_epoch_set = state["epoch"], True
        self._is_told = self._is_told or self.epoch != 0  # where no loader tells it
        self._next, self._items = Place(state["number"], state["count"], states), None

    def _state_identity(self) -> dict[str, Any]:
        return {"shard": self._dataset.shard}
