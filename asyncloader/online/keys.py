"""The steps of a feed as keys: its sampler, which the loader reads as far ahead as the bound on staleness allows.

    the loader ── asked, arrived, next ──> FeedKeys ── step ──> the feed's server, here or behind a connection

The loader tells the iterator how many of its batches consumers were given, when one of them asks for the next: until
then a batch is charged against the bound.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

from torch.utils.data import Dataset, Sampler

from asyncloader.errors import ConfigurationError, LoaderClosedError
from asyncloader.online.ledger import Unit
from asyncloader.online.link import Link, Request
from asyncloader.online.ranks import RankPlace
from asyncloader.protocols import SuppliesKeys

T = TypeVar("T")
_numbers = itertools.count()

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


class StepsDataset(SuppliesKeys[T]):
    """The batches of one rank of a feed, for its loader.

    Args:
        steps: Those of the rank.
        fn: Makes samples, in a worker of the loader.

    Attributes:
        fn: The same.
        rank: The rank.
        batch_size: Samples of a batch.
    """

    def __init__(self, steps: Steps, fn: Callable[[Sample[Any]], T] | None) -> None:
        self._steps, self.fn = steps, fn
        self.rank, self.batch_size = steps.rank, steps.batch_size

    def __getitem__(self, key: SampleKey) -> T:
        return FeedSamples(self.fn)[key]

    def __reduce__(self) -> Any:
        return FeedSamples, (self.fn,)

    def make_batch_sampler(self) -> Sampler[list[SampleKey]]:
        """Return the sampler of its batches."""
        return FeedBatches(self._steps)

    def _state_identity(self) -> dict[str, Any]:
        return self._steps.identity

    def name(self, key: SampleKey) -> tuple[int, int]:
        """Return the number of the unit of a sample, and its place in that."""
        return key[:2]

    def check_options(self, options: Any) -> None:
        """See that a loader follows a feed: batches come in turn, groups are whole.

        Raises:
            ConfigurationError: if it does not.
        """
        group_size = self._steps.identity["group_size"]
        if not options.in_order:
            raise ConfigurationError(
                "in_order=False has no place in a feed: which samples are trained is known by how many batches were "
                "given"
            )
        if group_size is not None and options.on_error != "raise":
            raise ConfigurationError(
                f"on_error={options.on_error!r} would tear a group of {group_size} samples (group_size) apart: catch "
                "the error in fn"
            )


class RankFeed(StepsDataset[T]):
    """The batches of one rank of a feed, for its loader: :meth:`asyncloader.online.FeedHandle.for_rank` returns it.

    All ranks begin to iterate, and take equally many batches. If one leaves, or goes on at another place, the others
    get a `RanksError` behind the last batch that was dealt to all of them. States of the ranks' loaders have the whole
    feed, as of the batches that the loader has given; load one, or those that were taken at the same step, on all
    ranks, of whatever number, before producers begin.
    """


class Steps:
    """The steps of one rank of a feed: how far its newest reader is, and states.

    Args:
        link: Reaches the feed.
        connect: The same, for a reader alone.
        rank: Its number.
        batch_size: Samples of its batches.
        feed: The identity of the feed, for states.

    Attributes:
        reader: Returns the newest reader; None when it is gone.
        readers: How many there were.
        place: Where the newest began.
        run: The number of the run that it takes part in; 0 before that is known.
        given: Counts its batches that consumers were given.
    """

    def __init__(
        self,
        link: Callable[[], Link],
        connect: Callable[[], Link],
        rank: int,
        batch_size: int,
        feed: dict[str, Any],
    ) -> None:
        self.connect, self.rank, self.batch_size, self.identity = connect, rank, batch_size, feed
        self._link = link
        self.readers = 0
        self.place: RankPlace = None
        self._begin(None)
        self.key = next(_numbers)
        all_steps[self.key] = self

    def _begin(self, reader: FeedKeys | None) -> None:
        self.reader: Callable[[], FeedKeys | None] = _nobody if reader is None else weakref.ref(reader)
        self.run, self.given = 0, cast(Callable[[], int], int)
        self.readers += 1

    def begin(self, reader: FeedKeys) -> None:
        """Give steps to this reader from now on, first those that the last one was not given."""
        self.place = self.where()
        self._begin(reader)

    def where(self) -> RankPlace:
        """Return where the next reader goes on."""
        return ("run", self.run, self.given()) if self.run else self.place

    def state_at(self, readers: int, step: int) -> dict[str, Any]:
        """Return the state of the feed before a step of a reader; of one that was left, as it is now."""
        place = self.where()
        where = (0, 0) if place is None or place[0] != "run" else place[1:]
        if self.run and readers == self.readers:
            where = self.run, step
        found: dict[str, Any] = self.ask("state", *where)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, which all ranks have to do."""
        self.ask("load", self.rank, state)
        self.place = "state", state["id"]
        self._begin(None)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the feed answers; wait for it."""
        request = Request()
        self._link().call(request, name, *arguments)
        try:
            return request.result()
        finally:
            del request  # an error has the frames that it was raised in


all_steps: WeakValueDictionary[int, Steps] = WeakValueDictionary()
"""Those of this process, by their keys."""


class Place(NamedTuple):
    """In place of a state: which batch of a feed comes next. To pickle it takes the same time however much is there.

    The loader pickles a state with every batch that it reads, and unpickles one when it is asked for its own state.
    What is unpickled is the state of the feed then, with all that was put meanwhile.

    Attributes:
        steps: The key of the rank's steps.
        readers: Which of its readers counts.
        step: Number of the step.
    """

    steps: int
    readers: int
    step: int

    def __reduce__(self) -> Any:
        return _state_at, tuple(self)


def _state_at(steps: int, readers: int, step: int) -> dict[str, Any]:
    return all_steps[steps].state_at(readers, step)


class FeedBatches(Sampler[list[SampleKey]]):
    """The batch sampler of a feed. Its newest iterator is given the batches.

    Args:
        steps: Those of the rank.
    """

    keys_arrive = True

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._preloaded = ""  # the id of a state
        self.rank = steps.rank  # of the data, in seeds

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self._steps.batch_size

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Iterate over the batches that follow those that were given to consumers."""
        return FeedKeys(self._steps)

    def state_dict(self) -> Any:
        """Return where the newest iterator is: the state of the feed, when this is unpickled."""
        reader = self._steps.reader()
        return Place(self._steps.key, self._steps.readers, 0 if reader is None else reader.number)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest iterator."""
        return self._steps.state_at(self._steps.readers, items)

    def preload(self, state: dict[str, Any]) -> None:
        """Have the feed go on from a state that `load_state_dict` is given later: producers may begin before that.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        self._steps.load_state_dict(state)
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
        return {"kind": type(self).__name__, **self._steps.identity}


class FeedKeys:
    """An iterator over the batches of a rank: an `ArrivingKeys` that follows consumers.

    Args:
        steps: Those of the rank.

    Attributes:
        number: The number of its next batch.
    """

    def __init__(self, steps: Steps) -> None:
        self.number = 0
        self._steps = steps
        self._said = -1  # how many batches were given, as the feed knows it
        self._next: tuple[int, Request] | None = None  # the step that was asked for last
        self._key = secrets.token_hex(8)
        self._link: Link | None = None  # a loader makes two of these, and reads one: that begins
        steps.begin(self)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self

    def _send(self, request: Request, number: int | None) -> None:
        steps = self._steps
        if self._link is None:
            self._link = steps.connect()
            weakref.finalize(self, self._link.leave, self._key).atexit = False
        self._link.call(request, "step", self._key, steps.rank, steps.place, self._said, number)

    def follow(self, given: Callable[[], int]) -> None:
        """Take what counts the batches that consumers were given."""
        if self._steps.reader() is self:
            self._steps.given = given
            self._send(Request(), None)

    def asked(self) -> None:
        """A consumer asks for its next batch: those that were given are trained.

        Raises:
            LoaderClosedError: if another iterator has begun. What this one has prefetched is given to that.
        """
        self._check_newest()
        if (given := self._steps.given()) != self._said:
            self._said = given
            self._send(Request(), None)

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Whether the next batch is there, or the end: see :class:`asyncloader.protocols.ArrivingKeys`."""
        if self._steps.reader() is not self or (request := self._asked_for_next()).done():
            return True
        request.add_done_callback(lambda _: tell())
        return False

    def why_no_keys(self) -> str:
        """Return what the next batch waits for, if that may be in vain; of a feed that is elsewhere, nothing."""
        return str(getattr(self._link, "why_no_keys", str)())

    def _asked_for_next(self) -> Request:
        if self._next is None or self._next[0] != self.number:
            request = Request()
            self._next = self.number, request
            self._send(request, self.number)
        return self._next[1]

    def _check_newest(self) -> None:
        if self._steps.reader() is not self:
            raise other_has_begun()

    def __next__(self) -> list[SampleKey]:
        self._check_newest()
        try:
            self._steps.run, keys = self._asked_for_next().result()
        except Exception:
            self._next = None  # an error that is kept would keep the frames that it was raised in, and so the iterator
            self._check_newest()
            raise
        if keys is None:
            raise StopIteration
        number = self.number + 1
        self.number = number  # behind this there is nothing that the handler of a signal could interrupt
        found: list[SampleKey] = keys
        return found


def keys_of(units: Iterable[Unit]) -> list[SampleKey]:
    """Return the samples of units as keys."""
    return [
        (unit.id, index, unit.version, unit.uses, sample) for unit in units for index, sample in enumerate(unit.samples)
    ]


def other_has_begun() -> LoaderClosedError:
    """Say why an iterator gives nothing more."""
    return LoaderClosedError("another iterator over this feed has begun, and is given the batches from now on")


def _nobody() -> None:
    """Stand for a reader that is gone."""
