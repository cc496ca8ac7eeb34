"""Leases: a producer's right to make the samples of one item. A block that is left without samples gives it back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

from asyncloader.online.errors import FeedClosedError
from asyncloader.online.forks import generation


class Leased(NamedTuple):
    """What is leased, as it was when the lease was given.

    Attributes:
        id: The id of the item.
        item: As the source gave it.
        version: The version of the weights.
        tries: How many leases of this item have failed before.
        lease: Number of the lease.
    """

    id: int
    item: Any
    version: int
    tries: int
    lease: int


class GivesLeases(Protocol):
    """A feed, as leases know it.

    Attributes:
        address: Tells it from other feeds.
    """

    address: str

    def wait_lease(self, take: Callable[[Leased], object]) -> None:
        """Wait for a lease, in a thread, and have it taken. If this raises, it may have been taken all the same."""

    async def await_lease(self, take: Callable[[Leased], object]) -> None:
        """Wait for a lease, and have it taken. If this raises, it may have been taken all the same."""

    def put_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease."""

    async def aput_leased(self, lease: int, samples: Any, version: int, cost: float | None, priority: float) -> None:
        """Put what was made under a lease, without blocking the loop."""

    def drop_leased(self, lease: int, cost: float | None) -> None:
        """Settle what is leased without samples."""

    def give_back(self, lease: int, *, failed: bool) -> None:
        """Have what is leased be leased again."""


class _Held:
    """The base of both kinds of leases.

    Args:
        feed: The feed that has given it.
        leased: The item and its lease, as they were given.

    Attributes:
        id: The id of the item; ascending in the order of the source.
        value: The item, as the source gave it.
        version: The version of the weights when the lease was given.
        tries: How many leases of this item have failed before.
    """

    def __init__(self, feed: GivesLeases, leased: Leased) -> None:
        self.id, self.value, self.version, self.tries, self._lease = leased
        self._feed, self._process = feed, generation()
        self._is_settled = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of item {self.id}, version {self.version}>"

    def drop(self, cost: float | None = None) -> None:
        """Settle the item without samples.

        Args:
            cost: The cost of the work so far, for the statistics. None: unknown.

        Raises:
            LeaseLostError: if the lease has ended.
        """
        self._feed.drop_leased(self._lease, cost)
        self._is_settled = True

    def retry(self) -> None:
        """Give the item back: another producer leases it, unless it has failed more than ``max_retries`` times."""
        self._feed.give_back(self._lease, failed=True)

    def leave(self, error: BaseException | None) -> bool:
        """Give the item back, unless it was settled.

        A task that was cancelled or interrupted has not failed, nor has one whose feed was closed. A fork of the
        process that leaves the block, to end, leaves the lease to its parent.

        Returns:
            Whether this feed was closed meanwhile, and nothing else is wrong: then the loop over leases ends.
        """
        was_closed = isinstance(error, FeedClosedError) and error.feed == self._feed.address
        if not self._is_settled and self._process == generation():
            failed = error is None or (isinstance(error, Exception) and not was_closed)
            self._feed.give_back(self._lease, failed=failed)
        return was_closed and not cast(FeedClosedError, error).is_failure


class Lease(_Held):
    """A lease of a thread: ``with feed.lease() as item``. Its methods do not wait, and may be called in any thread."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.leave(error)

    def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put the sample of this item, or the list of its group, which settles the lease.

        Args:
            samples: One sample; with ``group_size`` a list of so many.
            version: The version of the weights that made them, the oldest of them; by default that of the lease.
            cost: The cost of all of them, tokens for example; by default their number.
            priority: With ``order="priority"``: those with more come first.

        Raises:
            LeaseLostError: if the lease has ended.
            FeedClosedError: if the feed is closed.
            ValueError: if the feed does not take them. The lease goes on.
        """
        version = self.version if version is None else version
        self._feed.put_leased(self._lease, samples, version, cost, priority)
        self._is_settled = True


class AsyncLease(_Held):
    """A lease of a task: ``async with feed.lease() as item``."""

    async def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put the sample of this item, or the list of its group: see :meth:`Lease.put`."""
        version = self.version if version is None else version
        await self._feed.aput_leased(self._lease, samples, version, cost, priority)
        self._is_settled = True

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.leave(error)


class LeaseRequest:
    """What `Feed.lease` returns: a context manager of both kinds, which waits for a lease.

    Args:
        feed: Is asked for one.
    """

    def __init__(self, feed: GivesLeases) -> None:
        self._feed = feed
        self._held: Any = None

    def _take(self, kind: type[_Held], leased: Leased) -> None:
        self._held = kind(self._feed, leased)

    def __enter__(self) -> Lease:
        try:
            self._feed.wait_lease(partial(self._take, Lease))
            return cast(Lease, self._held)
        except BaseException as error:
            self._leave(error)
            raise

    async def __aenter__(self) -> AsyncLease:
        try:
            await self._feed.await_lease(partial(self._take, AsyncLease))
            return cast(AsyncLease, self._held)
        except BaseException as error:
            self._leave(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._held is not None:
            self._held.leave(error)


class Leases:
    """What `Feed.leases` returns: iterates over leases, until there will be no more items.

    Args:
        feed: Is asked for them.
    """

    def __init__(self, feed: GivesLeases) -> None:
        self._feed = feed

    def __iter__(self) -> Leases:
        return self

    def __next__(self) -> Lease:
        try:
            return LeaseRequest(self._feed).__enter__()
        except FeedClosedError as error:
            if error.is_failure:
                raise
            raise StopIteration from None

    def __aiter__(self) -> Leases:
        return self

    async def __anext__(self) -> AsyncLease:
        try:
            return await LeaseRequest(self._feed).__aenter__()
        except FeedClosedError as error:
            if error.is_failure:
                raise
            raise StopAsyncIteration from None
