"""The batches of a feed as keys: its sampler, which the loader reads as far ahead as the bound on staleness allows.

The loader tells the iterator how many of its batches consumers were given, when one of them asks for the next: until
then a batch is charged against the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from torch.utils.data import Dataset, Sampler

from asyncloader import identity
from asyncloader.errors import ConfigurationError, LoaderClosedError
from asyncloader.online.ledger import Unit

T = TypeVar("T")

SampleKey: TypeAlias = tuple[int, int, int, int, Any]
"""A sample as the key of itself: number of its unit, its place in that, its version, how often it was trained, and the
sample. A plain tuple is pickled in a fifth of the time that a class of our own takes."""


class Sample(NamedTuple, Generic[T]):
    """A sample of a feed, as ``fn`` is given it.

    Attributes:
        value: The sample that was put.
        id: Number of its item, or of its group; samples of one group have the same.
        position: In the group.
        version: The version of the weights that made it.
        uses: How often it was trained before.
    """

    value: T
    id: int
    position: int
    version: int
    uses: int


class FeedSamples(Dataset[T]):
    """A feed as a worker has it: it makes samples of their keys.

    Args:
        fn: The feed's.
    """

    def __init__(self, fn: Callable[[Sample[Any]], T] | None) -> None:
        self.fn = fn

    def __getitem__(self, key: SampleKey) -> T:
        number, position, version, uses, value = key
        made: T = value if self.fn is None else self.fn(Sample(value, number, position, version, uses))
        return made


class GivesBatches(Protocol):
    """A feed, as its sampler and their iterators know it."""

    batch_size: int

    def begin(self, reader: Any) -> int:
        """Give batches to this iterator from now on; return the number of the first one."""

    def follow(self, reader: Any, given: Callable[[], int]) -> None:
        """Take what counts how many batches of an iterator consumers were given."""

    def asked(self, reader: Any) -> None:
        """Note that a consumer asks for its next batch."""

    def arrived(self, reader: Any, tell: Callable[[], object]) -> bool:
        """Return whether an iterator gets something without waiting; if not, tell it when it does."""

    def why_no_keys(self) -> str:
        """Return why there may be no further batch; "" while producers are at work."""

    def next_batch(self, reader: Any) -> list[SampleKey]:
        """Return the next batch of an iterator; wait for it."""

    def place(self) -> Any:
        """Return, in place of a state, which batch comes next."""

    def state_at(self, run: int, batch: int) -> dict[str, Any]:
        """Return the state before a batch of an iterator."""

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest iterator."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


feeds: WeakValueDictionary[int, GivesBatches] = WeakValueDictionary()
"""The feeds of this process, by their `_key`."""


class Place(NamedTuple):
    """In place of a state: which batch of a feed comes next. To pickle it takes the same time however much is there.

    The loader pickles a state with every batch that it reads, and unpickles one when it is asked for its own state.
    What is unpickled is the state of the feed then, with all that was put meanwhile.

    Attributes:
        feed: The `_key` of the feed.
        run: Which of its iterators counts.
        batch: Number of the batch.
    """

    feed: int
    run: int
    batch: int

    def __reduce__(self) -> Any:
        return _state_at, tuple(self)


def _state_at(feed: int, run: int, batch: int) -> dict[str, Any]:
    return feeds[feed].state_at(run, batch)


class FeedBatches(Sampler[list[SampleKey]]):
    """The batch sampler of a feed. Its newest iterator is given the batches.

    Args:
        feed: Has the samples.
    """

    keys_arrive = True

    def __init__(self, feed: GivesBatches) -> None:
        self._feed = feed
        self._preloaded = ""  # the id of a state
        self.rank = getattr(feed, "rank", 0)  # of the data, in seeds

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self._feed.batch_size

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Iterate over the batches that follow those that were given to consumers."""
        return FeedKeys(self._feed)

    def state_dict(self) -> Any:
        """Return where the newest iterator is: the state of the feed, when this is unpickled."""
        return self._feed.place()

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest iterator."""
        return self._feed.state_after(items)

    def preload(self, state: dict[str, Any]) -> None:
        """Have the feed go on from a state that `load_state_dict` is given later: producers may begin before that.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        self._feed.load_state_dict(state)
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
        return identity.of(self._feed)


class FeedKeys:
    """An iterator over the batches of a feed: an `ArrivingKeys` that follows consumers.

    Args:
        feed: Has the samples.

    Attributes:
        number: The number of its next batch.
    """

    def __init__(self, feed: GivesBatches) -> None:
        self._feed = feed
        self.number = feed.begin(self)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self

    def follow(self, given: Callable[[], int]) -> None:
        """Take what counts the batches that consumers were given."""
        self._feed.follow(self, given)

    def asked(self) -> None:
        """A consumer asks for its next batch: those that were given are trained."""
        self._feed.asked(self)

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Whether the next batch is there, or the end: see :class:`asyncloader.protocols.ArrivingKeys`."""
        return self._feed.arrived(self, tell)

    def why_no_keys(self) -> str:
        """Return what the next batch waits for, if that may be in vain."""
        return self._feed.why_no_keys()

    def __next__(self) -> list[SampleKey]:
        keys = self._feed.next_batch(self)
        number = self.number + 1
        self.number = number  # behind this there is nothing that the handler of a signal could interrupt
        return keys


def keys_of(units: Iterable[Unit]) -> list[SampleKey]:
    """Return the samples of units as keys."""
    return [
        (unit.id, index, unit.version, unit.uses, sample) for unit in units for index, sample in enumerate(unit.samples)
    ]


def check_options(options: Any, group_size: int | None) -> None:
    """See that a loader follows a feed: batches come in turn, groups are whole.

    Raises:
        ConfigurationError: if not.
    """
    if not options.in_order:
        raise ConfigurationError(
            "in_order=False has no place in a feed: which samples are trained is known by how many batches were given"
        )
    if group_size is not None and options.on_error != "raise":
        raise ConfigurationError(
            f"on_error={options.on_error!r} would tear a group of {group_size} samples (group_size) apart: catch the "
            "error in fn"
        )


def other_has_begun() -> LoaderClosedError:
    """Say why an iterator gives nothing more."""
    return LoaderClosedError("another iterator over this feed has begun, and is given the batches from now on")
