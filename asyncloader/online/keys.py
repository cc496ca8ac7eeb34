"""The batches of a feed as keys: its sampler, which the loader reads as far ahead as the bound on staleness allows.

    the loader ── asked, arrived, next ──> FeedKeys ── begin, asked, step ──> the feed's server

The loader tells the iterator how many of its batches consumers were given, when one of them asks for the next: until
then a batch is charged against the bound.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from torch.utils.data import Dataset, Sampler

from asyncloader import identity
from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.online.link import Link, Request, ask
from asyncloader.online.runs import Seat
from asyncloader.online.server import SampleKey
from asyncloader.protocols import SuppliesKeys, probe

T = TypeVar("T")

_numbers = itertools.count()
_samplers: WeakValueDictionary[int, FeedBatches] = WeakValueDictionary()  # of this process


class Sample(NamedTuple, Generic[T]):
    """A sample of a feed, as ``fn`` is given it.

    Attributes:
        value: The sample that was put.
        id: Number of its item, or of its group; samples of one group have the same.
        position: In the group.
        version: The version of the weights that made it.
    """

    value: T
    id: int
    position: int
    version: int


class FeedSamples(Dataset[T]):
    """A feed as a worker has it: it makes samples of their keys.

    Args:
        fn: The feed's.
    """

    def __init__(self, fn: Callable[[Sample[Any]], T] | None) -> None:
        self.fn = fn

    def __getitem__(self, key: SampleKey) -> T:
        number, position, version, value = key
        made: T = value if self.fn is None else self.fn(Sample(value, number, position, version))
        return made

    def __reduce__(self) -> Any:
        return FeedSamples, (self.fn,)


class FeedDataset(FeedSamples[T], SuppliesKeys[T]):
    """The batches of a feed, or one rank's part: :meth:`asyncloader.online.Feed.for_rank` returns it.

    Args:
        reach: Returns how the feed is reached.
        what: What states of the feed belong to.
        fn: Makes samples of what was put.
        seat: For whom it is.
    """

    def __init__(
        self, reach: Callable[[], Link], what: dict[str, Any], fn: Callable[[Sample[Any]], T] | None, seat: Seat
    ) -> None:
        super().__init__(fn)
        self._reach, self._what, self._seat = reach, what, seat

    def make_batch_sampler(self) -> Sampler[list[SampleKey]]:
        """Return the sampler of the feed's batches."""
        return FeedBatches(self._reach, self._what, self._seat)

    def name(self, key: SampleKey) -> tuple[int, int]:
        """Return the number of the unit of a sample, and its place in that."""
        return key[:2]

    def check_options(self, options: Any) -> None:
        """See that a loader follows a feed: batches come in turn, groups are whole.

        Raises:
            ConfigurationError: if it does not.
        """
        sampler = options.index_sampler
        if FeedBatches not in map(type, (sampler, probe(sampler, "batch_sampler"))):
            raise ConfigurationError(
                "a feed brings its batches: leave sampler and batch_sampler out. put(..., priority=...) has a sample "
                "come before others, and feed.for_rank(...) divides batches among ranks"
            )
        if not options.in_order:
            raise ConfigurationError(
                "in_order=False has no place in a feed: which samples are trained is known by how many batches were "
                "given"
            )
        if (size := self._what["group_size"]) is not None and options.on_error != "raise":
            raise ConfigurationError(
                f"on_error={options.on_error!r} would tear a group of {size} samples (group_size) apart: catch the "
                "error in fn"
            )

    def _state_identity(self) -> dict[str, Any]:
        return self._what


class Place(NamedTuple):
    """In place of a state: which batch of a feed comes next. To pickle it takes the same time however much is there.

    The loader pickles a state with every batch that it reads, and unpickles one when it is asked for its own state.
    What is unpickled is the state of the feed then, with all that was put meanwhile.

    Attributes:
        sampler: The number of the sampler.
        reader: The number of the iterator.
        number: The number of the batch among those of the iterator.
    """

    sampler: int
    reader: int = -1
    number: int = 0

    def __reduce__(self) -> Any:
        return _state_at, tuple(self)


def _state_at(sampler: int, reader: int, number: int) -> dict[str, Any]:
    return _samplers[sampler].state(reader, number)


class FeedBatches(Sampler[list[SampleKey]]):
    """The batch sampler of a feed. The newest iterator of its seat is given the batches.

    Args:
        reach: Returns how the feed is reached.
        what: What states of the feed belong to.
        seat: For whom it is.

    Attributes:
        rank: That of the data, for seeds.
    """

    keys_arrive = True

    def __init__(self, reach: Callable[[], Link], what: dict[str, Any], seat: Seat) -> None:
        self.rank: int = seat.rank
        self._reach, self._what, self._seat = reach, what, seat
        self._keys: FeedKeys | None = None
        self._preloaded = ""  # the id of a state
        self._number = next(_numbers)
        _samplers[self._number] = self

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Iterate over the batches that follow those that were given to consumers."""
        self._keys = FeedKeys(self._reach, self._seat)
        return self._keys

    def state(self, reader: int, number: int) -> dict[str, Any]:
        """Return the state before a batch of an iterator. That of the first peer of rank 0 has what waits."""
        if not self._seat.is_first:
            return {"version": 1, "id": "", **self._what}
        state: dict[str, Any] = ask(self._reach(), "state", reader, number)
        return state

    def state_dict(self) -> Any:
        """Return where the newest iterator is: the state of the feed, when this is unpickled."""
        keys = self._keys
        return Place(self._number) if keys is None else Place(self._number, keys.reader, keys.number)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest iterator."""
        return self.state(-1 if self._keys is None else self._keys.reader, items)

    def preload(self, state: dict[str, Any]) -> None:
        """Have the feed go on from a state that `load_state_dict` is given later: producers may begin before that.

        The first peer of rank 0 loads it; others wait until that one has begun.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        identity.check(state, self._what)
        if self._seat.is_first:
            if "units" not in state:
                raise StateMismatchError(
                    "the rank of the state", "another one", 0, "rank 0's first peer loads what was saved there"
                )
            ask(self._reach(), "load", state)
        self._preloaded = state["id"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the feed go on from a state.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        if self._preloaded != state["id"]:
            self.preload(state)
        self._preloaded = ""

    def _state_identity(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **self._what}


class Given:
    """How many batches the consumer was given; in another process, how many it had been given when this was sent.

    Args:
        count: Counts them.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def __call__(self) -> int:
        """Count them."""
        return self.count()

    def __reduce__(self) -> Any:
        return partial, (int, self.count())


class FeedKeys:
    """An iterator over the batches of a feed: an `ArrivingKeys` that follows consumers. It begins when it is read.

    A loader makes two of these, and reads one.

    Args:
        reach: Returns how the feed is reached.
        seat: For whom it is.

    Attributes:
        reader: The number of this iterator; -1 before it has begun.
        number: The number of its next batch.
    """

    def __init__(self, reach: Callable[[], Link], seat: Seat) -> None:
        self.reader: int = -1
        self.number: int = 0
        self._reach, self._seat = reach, seat
        self._given = Given(int)
        self._link: Link | None = None  # when it has begun
        self._next: tuple[int, Request] | None = None  # the batch that was asked for last

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self

    def follow(self, given: Callable[[], int]) -> None:
        """Take what counts the batches that consumers were given."""
        self._given = Given(given)

    def asked(self) -> None:
        """A consumer asks for its next batch: those that were given are trained.

        Raises:
            LoaderClosedError: if another iterator has begun. What this one has prefetched is given to that.
        """
        if self._link is not None:
            ask(self._link, "asked", self.reader, self._given)

    def end_with(self, consumer: object) -> None:
        """Have the feed know, when this object is dropped, which batches it was given: another loop has the others."""
        weakref.finalize(consumer, self.leave).atexit = False

    def leave(self) -> None:
        """Say how many batches were given. In any thread, and in the garbage collector."""
        if self._link is not None:
            self._link.dropped(self.reader, self._given)

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Whether the next batch is there, or the end: see :class:`asyncloader.protocols.ArrivingKeys`."""
        if (request := self._asked_for_next()).is_done:
            return True
        request.when_done(lambda _: tell())
        return False

    def why_no_keys(self, *, in_vain: bool) -> str:
        """Return what the next batch waits for; "" if that has to be in vain, and a producer is at work."""
        return str(ask(self._reach(), "why_no_keys", in_vain))

    def _asked_for_next(self) -> Request:
        if self._link is None:
            link = self._reach()
            self.reader = ask(link, "begin", self._seat, self._given)
            self._link = link
        if self._next is None or self._next[0] != self.number:
            request = Request()
            self._link.call(request, "step", self.reader, self.number)
            self._next = self.number, request  # now: an interrupt before this has it asked for again, not waited for
        return self._next[1]

    def __next__(self) -> list[SampleKey]:
        try:
            keys: list[SampleKey] | None = self._asked_for_next().result()
        except Exception:
            self._next = None  # an error that is kept would keep the frames that it was raised in, and so the iterator
            raise
        if keys is None:
            raise StopIteration
        number = self.number + 1
        self.number = number  # behind this there is nothing that the handler of a signal could interrupt
        return keys
