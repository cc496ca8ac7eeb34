"""The batches of a feed as keys: its sampler, which the loader reads as far ahead as the bound on staleness allows.

    the loader ── asked, arrived, next ──> FeedKeys ── step ──> the feed's server

The loader tells the iterator how many of its batches consumers were given, when one of them asks for the next: until
then a batch is charged against the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import Dataset, Sampler

from asyncloader.online.link import Request
from asyncloader.online.server import FeedServer, SampleKey, other_has_begun, servers

T = TypeVar("T")


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


class Place(NamedTuple):
    """In place of a state: which batch of a feed comes next. To pickle it takes the same time however much is there.

    The loader pickles a state with every batch that it reads, and unpickles one when it is asked for its own state.
    What is unpickled is the state of the feed then, with all that was put meanwhile.

    Attributes:
        server: The key of the feed's server.
        reader: The number of the iterator.
        number: The number of the batch among those of the iterator.
    """

    server: int
    reader: int = -1
    number: int = 0

    def __reduce__(self) -> Any:
        return _state_at, tuple(self)


def _state_at(server: int, reader: int, number: int) -> dict[str, Any]:
    return servers[server].state(reader, number)


class FeedBatches(Sampler[list[SampleKey]]):
    """The batch sampler of a feed. Its newest iterator is given the batches.

    Args:
        server: The feed's.
        batch_size: Samples of a batch.
    """

    keys_arrive = True
    batch_size: int

    def __init__(self, server: FeedServer, batch_size: int) -> None:
        self._server, self.batch_size = server, batch_size
        self._keys: FeedKeys | None = None
        self._preloaded = ""  # the id of a state

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Iterate over the batches that follow those that were given to consumers."""
        self._keys = FeedKeys(self._server)
        return self._keys

    def state_dict(self) -> Any:
        """Return where the newest iterator is: the state of the feed, when this is unpickled."""
        keys = self._keys
        return Place(self._server.key) if keys is None else Place(self._server.key, keys.reader, keys.number)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest iterator."""
        return self._server.state(-1 if self._keys is None else self._keys.reader, items)

    def preload(self, state: dict[str, Any]) -> None:
        """Have the feed go on from a state that `load_state_dict` is given later: producers may begin before that.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        self._server.load(state)
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
        return {"kind": type(self).__name__, **self._server.identity}


class FeedKeys:
    """An iterator over the batches of a feed: an `ArrivingKeys` that follows consumers.

    A loader makes two of these, and reads one, which begins then.

    Args:
        server: The feed's.

    Attributes:
        reader: The number of this iterator.
        number: The number of its next batch.
    """

    def __init__(self, server: FeedServer) -> None:
        self.number: int = 0
        self.reader: int = server.new_reader()
        self._server = server
        self._given: Callable[[], int] | None = None
        self._said = 0  # how many batches were given, as the server knows it
        self._next: tuple[int, Request] | None = None  # the batch that was asked for last

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self

    def follow(self, given: Callable[[], int]) -> None:
        """Take what counts the batches that consumers were given."""
        self._server.follow(self.reader, given)
        self._given = given

    def asked(self) -> None:
        """A consumer asks for its next batch: those that were given are trained.

        Raises:
            LoaderClosedError: if another iterator has begun. What this one has prefetched is given to that.
        """
        self._check_newest()
        if self._given is not None and (given := self._given()) != self._said:
            self._said = given
            self._server.asked(self.reader)

    def arrived(self, count: int, tell: Callable[[], object]) -> bool:
        """Whether the next batch is there, or the end: see :class:`asyncloader.protocols.ArrivingKeys`."""
        if not self._is_newest or (request := self._asked_for_next()).done():
            return True
        request.add_done_callback(lambda _: tell())
        return False

    def why_no_keys(self, *, in_vain: bool) -> str:
        """Return what the next batch waits for; "" if that has to be in vain, and a producer is at work."""
        return self._server.why_no_keys(in_vain=in_vain)

    def _asked_for_next(self) -> Request:
        if self._next is None or self._next[0] != self.number:
            if self._given is None:
                self.follow(int)
            request = Request()
            self._server.call(request, "step", self.reader, self.number)
            self._next = self.number, request  # now: an interrupt before this has it asked for again, not waited for
        return self._next[1]

    @property
    def _is_newest(self) -> bool:
        return self.reader == self._server.newest

    def _check_newest(self) -> None:
        if not self._is_newest:
            raise other_has_begun()

    def __next__(self) -> list[SampleKey]:
        self._check_newest()
        try:
            keys: list[SampleKey] | None = self._asked_for_next().result()
        except Exception:
            self._next = None  # an error that is kept would keep the frames that it was raised in, and so the iterator
            self._check_newest()
            raise
        if keys is None:
            raise StopIteration
        number = self.number + 1
        self.number = number  # behind this there is nothing that the handler of a signal could interrupt
        return keys
