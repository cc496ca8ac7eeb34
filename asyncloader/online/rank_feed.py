"""RankFeed: the batches of one rank, of a feed that may be in another process, as a dataset for the rank's loader.

FeedKeys ── begin, ask, step ──> the feed's door        one connection for each iterator: its end is the rank's leave
         <── part of a step ──┘
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from torch.utils.data import Sampler

from asyncloader.online.keys import (
    FeedBatches,
    FeedSamples,
    Place,
    Sample,
    SampleKey,
    check_options,
    feeds,
    other_has_begun,
)
from asyncloader.online.ranks import RankPlace
from asyncloader.protocols import SuppliesKeys

T = TypeVar("T")
_numbers = itertools.count(-1, -1)  # those of feeds ascend


class RankLink(Protocol):
    """A connection to a feed, as the iterator of a rank uses it."""

    def send(self, name: str, arguments: Any) -> Future[Any]:
        """Send a request; return what its answer comes to."""

    def close(self) -> None:
        """End the connection. Also inside the garbage collector."""


class ReachesFeed(Protocol):
    """A handle, as a `RankFeed` uses it."""

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the feed answers."""

    def connect(self) -> RankLink:
        """Return a connection of one's own."""


class RankFeed(SuppliesKeys[T]):
    """The batches of one rank of a feed, for its loader: :meth:`asyncloader.online.FeedHandle.for_rank` returns it.

    All ranks begin to iterate, and take equally many batches. If one leaves, or goes on at another place, the others
    get a `RanksError` behind the last batch that was dealt to all of them. States of the ranks' loaders have the whole
    feed, as of the batches that the loader has given; load one, or those that were taken at the same step, on all
    ranks, of whatever number, before producers begin.

    Args:
        handle: Reaches the feed.
        rank: Its number.
        fn: Makes samples, in a worker of the loader.

    Raises:
        ConfigurationError: if the feed has no such rank.
    """

    def __init__(self, handle: ReachesFeed, rank: int, fn: Callable[[Sample[Any]], T] | None) -> None:
        self.rank, self.fn = rank, fn
        self._handle = handle
        self.batch_size, self._identity = handle.ask("rank", rank)
        self._reader: Callable[[], Any] = lambda: None
        self._readers = 0
        self._given: Callable[[], int] = int
        self._said = -1  # how many batches the reader was given, as the feed knows it
        self._link: RankLink | None = None
        self._begun: Future[int] | None = None  # comes to the number of the run, when all ranks have begun
        self._place: RankPlace = None
        self._step: tuple[int, Future[Any]] | None = None  # that was asked for last
        self._key = next(_numbers)
        feeds[self._key] = self

    def __getitem__(self, key: SampleKey) -> T:
        return FeedSamples(self.fn)[key]

    def __reduce__(self) -> Any:
        return FeedSamples, (self.fn,)

    def make_batch_sampler(self) -> Sampler[list[SampleKey]]:
        """Return the sampler of the rank's batches."""
        return FeedBatches(self)

    def name(self, key: SampleKey) -> tuple[int, int]:
        """Return the number of the unit of a sample, and its place in that."""
        return key[:2]

    def check_options(self, options: Any) -> None:
        """See that a loader gives batches in turn, and whole groups.

        Raises:
            ConfigurationError: if it does not.
        """
        check_options(options, self._identity["group_size"])

    # ------------------------------------------------------------------------------------------------- its iterators

    def begin(self, reader: Any) -> int:
        """Give batches to this reader from now on; return 0, the number of the first one."""
        self._place = self._next_place()
        self._reader, self._readers = weakref.ref(reader), self._readers + 1
        self._given, self._said, self._step = int, -1, None
        self._link = self._begun = None
        return 0

    def _connected(self) -> RankLink:
        """Return the connection of the reader. A loader makes two of them, and reads one: that begins."""
        if self._link is None:
            link = self._link = self._handle.connect()
            weakref.finalize(self._reader(), link.close)
            self._begun = link.send("begin", (self.rank, self._place))
        return self._link

    def _run(self) -> int:
        """Return the number of the run; 0 if it has not begun. Its first step may come before its number."""
        begun = self._begun
        if begun is None or not (begun.done() or self._given()):
            return 0
        return 0 if begun.exception() is not None else begun.result()

    def _next_place(self) -> RankPlace:
        return ("run", run, self._given()) if (run := self._run()) else self._place

    def follow(self, reader: Any, given: Callable[[], int]) -> None:
        """Take what counts how many batches of a reader consumers were given."""
        if self._reader() is reader:
            self._given = given
            self._connected()

    def asked(self, reader: Any) -> None:
        """Note that a consumer asks for its next batch.

        Raises:
            LoaderClosedError: if another reader has begun.
        """
        if self._reader() is not reader:
            raise other_has_begun()
        if (given := self._given()) != self._said:
            self._connected().send("ask", (given,))
            self._said = given

    def arrived(self, reader: Any, tell: Callable[[], object]) -> bool:
        """Return whether a reader gets something without waiting; if not, tell it when it does."""
        if self._reader() is not reader or (future := self._asked_for(reader.number)).done():
            return True
        future.add_done_callback(lambda _: tell())
        return False

    def why_no_keys(self) -> str:
        """Return nothing: the feed is elsewhere, and its ``step_timeout`` speaks for it."""
        return ""

    def next_batch(self, reader: Any) -> list[SampleKey]:
        """Return the next batch of a reader; wait for it.

        Raises:
            StopIteration: at the end.
            RanksError: if ranks do not take the same steps.
            LoaderClosedError: if another reader has begun.
            FeedClosedError: if the feed has ended.
        """
        if self._reader() is not reader:
            raise other_has_begun()
        future = self._asked_for(reader.number)
        try:
            keys: list[SampleKey] | None = future.result()
        except Exception:
            self._step = None  # an error that is kept would keep the frames that it was raised in, and so the iterator
            raise
        finally:
            del future
        if keys is None:
            raise StopIteration
        return keys

    def _asked_for(self, number: int) -> Future[Any]:
        if self._step is None or self._step[0] != number:
            self._step = number, self._connected().send("step", (number,))
        return self._step[1]

    # ------------------------------------------------------------------------------------------------------- states

    def place(self) -> Place:
        """Return, in place of a state, which batch comes next."""
        reader = self._reader()
        return Place(self._key, self._readers, 0 if reader is None else reader.number)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest reader."""
        return self.state_at(self._readers, items)

    def state_at(self, run: int, batch: int) -> dict[str, Any]:
        """Return the state of the feed before a batch of a reader; of one that was left, as it is now."""
        where = self._run(), batch if run == self._readers else self._given()
        if not where[0] and self._place is not None and self._place[0] == "run":  # other ranks have not begun the next
            where = self._place[1:]
        found: dict[str, Any] = self._handle.ask("rank_state", self.rank, *where)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, which all ranks have to do.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        self._handle.ask("rank_load", self.rank, state)
        self._place, self._begun = ("state", state["id"]), None
        self._reader, self._readers = lambda: None, self._readers + 1

    def _state_identity(self) -> dict[str, Any]:
        return dict(self._identity)
