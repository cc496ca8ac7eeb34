"""Producers: what they call, of a feed and of its handles in other processes. Leases, and samples without leases.

    with feed.lease() as item:          async with feed.lease() as item:
        item.put(sample)                    await item.put(sample)

Whoever waits is a thread or a task. One that stops waiting, by a time limit for example, withdraws its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from asyncloader.errors import ConfigurationError
from asyncloader.online.errors import FeedClosedError, FeedFullError
from asyncloader.online.keys import FeedDataset, Sample
from asyncloader.online.link import Leased, Link, Request, ask, give_up
from asyncloader.online.runs import Seat
from asyncloader.online.stats import FeedStats

_NOTHING: Any = object()


class Producers:
    """A feed, as producers see it. In any thread, and in tasks of any event loop."""

    identity: dict[str, Any]  # what states of the feed belong to

    def lease(self) -> Lease:
        """Wait for the next item of the source, in ``async with`` or, in a thread, in ``with``.

        If the block ends without samples, the item is leased
        again; if an error or nothing at all ended it, that counts as a failure.

        Raises:
            FeedClosedError: if there will be no more items, on entering the block.
            ConfigurationError: if the feed has no source, on entering the block.
        """
        return Lease(self)

    def leases(self) -> Leases:
        """Iterate over leases, with ``async for`` or, in a thread, with ``for``, until there will be no more items.

        Each lease is for an ``async with`` block, or a ``with`` block, in this task or thread or another one. One that
        is dropped gives its item back. If the feed is closed meanwhile, a put raises FeedClosedError, which ends the
        block and goes no further.

        Raises:
            ConfigurationError: if the feed has no source.
        """
        return Leases(self)

    def put(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> Coroutine[Any, Any, None]:
        """Put a sample, or the list of a group, that was made without a lease; wait until there is room.

        If the task is cancelled meanwhile, by a time limit for example, the sample is not put. If it was put before the
        feed heard of that, this returns, and the task is cancelled at its next ``await``, unless the time limit has
        ended.

        Args:
            samples: One sample; with ``group_size`` a list of so many.
            version: The version of the weights that made them, the oldest of them; by default that of the feed at the
                call, not when there is room.
            cost: The cost of all of them, tokens for example; by default their number.
            priority: Of those that are ready, the ones with more come first.

        Raises:
            FeedClosedError: if the feed is closed.
            ValueError: if the feed cannot take them.
        """
        return self._put((samples, *self._made_with(version), cost, priority))

    def put_many(self, many: Iterable[Any], *, version: int | None = None) -> Coroutine[Any, Any, None]:
        """Put many samples, or groups, one after the other: see `put`. Those before an error are put.

        If the task is cancelled meanwhile, the CancelledError says in its attribute ``num_put`` how many were put; a
        TimeoutError of a time limit has it as its ``__cause__``.
        """
        return self._put_many(many, *self._made_with(version))

    async def _put_many(self, many: Iterable[Any], *made_with: Any) -> None:
        for num_put, samples in enumerate(many):
            try:
                await self._put((samples, *made_with, None, 0.0))
            except asyncio.CancelledError as error:
                error.num_put = num_put  # type: ignore[attr-defined]
                raise

    async def _put(self, unit: tuple[Any, ...]) -> None:
        await self._answer(Request(), "put", [unit])

    def put_nowait(
        self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0
    ) -> None:
        """Put a sample, or a group, without waiting for room: see `put`. In any thread.

        Raises:
            FeedFullError: if there is no room.
        """
        self.put_sync(samples, version=version, cost=cost, priority=priority, timeout=0)

    def put_sync(
        self,
        samples: Any,
        *,
        version: int | None = None,
        cost: float | None = None,
        priority: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        """Put a sample, or a group, from a thread, which waits until there is room: see `put`.

        Args:
            samples: As in `put`.
            version: As in `put`.
            cost: As in `put`.
            priority: As in `put`.
            timeout: How long to wait, in seconds; None for ever.

        Raises:
            FeedFullError: if there was no room in time.
        """
        unit = samples, *self._made_with(version), cost, priority
        if ask(self._link(), "put", [unit], timeout=timeout) is None:
            raise FeedFullError(f"there was no room for another sample within {timeout} s")

    @property
    def version(self) -> int:
        """The version of the weights. Set it when they were updated, before the next batch is asked for.

        A handle knows it as of the last answer of the feed: a lease brings the newest.

        Raises:
            ValueError: for one that is no integer, or goes back.
        """
        return self._link().version

    @version.setter
    def version(self, version: int) -> None:
        ask(self._link(), "update", version)

    async def version_changed(self, version: int) -> int:
        """Wait until the weights have another version than this one; return it.

        Raises:
            FeedClosedError: if the feed is closed meanwhile.
        """
        changed: int = await self._answer(Request(), "version_changed", version)
        return changed

    def for_rank(
        self,
        rank: int,
        num_ranks: int,
        peer: int = 0,
        num_peers: int = 1,
        *,
        fn: Callable[[Sample[Any]], Any] | None = None,
    ) -> FeedDataset[Any]:
        """Return the part of a data-parallel rank, as a dataset for the loader of one process.

        Ranks divide each batch of the feed; the processes of one rank (tensor-, context- and pipeline-parallel ones)
        are given the same part. Each process of the training calls this, with the feed or a handle of it, and trains
        as many steps as the others. A loop begins when all have begun theirs.

        Args:
            rank: The data-parallel rank.
            num_ranks: How many there are. ``batch_size`` of the feed is a multiple of that.
            peer: The number of this process among those of the rank.
            num_peers: How many there are.
            fn: As for `Feed`, whose own is not used.

        Raises:
            ConfigurationError: for numbers that cannot be.
        """
        if not (0 <= rank < num_ranks and 0 <= peer < num_peers):
            raise ConfigurationError(f"there is no rank {rank} of {num_ranks} with a peer {peer} of {num_peers}")
        seat = Seat(rank, num_ranks, peer, num_peers)
        return FeedDataset(self._link, self.identity, fn, seat)

    def pause(self) -> None:
        """Lease nothing until `resume`, while weights are sent to engines for example. What is leased may be put."""
        ask(self._link(), "pause", True)

    def resume(self) -> None:
        """Lease again."""
        ask(self._link(), "pause", False)

    def stats(self) -> FeedStats:
        """Return what became of the samples so far."""
        stats: FeedStats = ask(self._link(), "stats")
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the batches that consumers were given. It is in states of the loader.

        Samples that wait, and items that are not settled, are in it, as they are. If these are numbers, strings,
        tensors and containers of them, and the source's state is, ``torch.load(file, weights_only=True)`` reads it.
        They are copied while the feed goes on: change no sample that was put.
        """
        state: dict[str, Any] = ask(self._link(), "state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, in place of what there is. Leases that were given out before have ended.

        Items whose samples were put after the state are leased again.

        Raises:
            StateMismatchError: if the state is of something else; or if samples wait that were put without leases and
                are not in the state: they would be lost.
        """
        ask(self._link(), "load", state)

    def _link(self) -> Link:
        raise NotImplementedError

    def _made_with(self, version: int | None) -> tuple[int, bool]:
        """Return the version of samples, and whether that is what is known here, not what the caller says."""
        return (self._link().version, True) if version is None else (version, False)

    async def _answer(self, request: Request, name: str, *arguments: Any) -> Any:
        """Return the answer to a call. If the task is cancelled, the call is withdrawn.

        The cancellation of a put comes too late if the feed has taken the samples before it hears of that.
        """
        link = self._link()
        try:
            link.call(request, name, *arguments)
            if not request.is_done:
                try:
                    await _answered(link, request)
                except asyncio.CancelledError:
                    give_up(link, request)
                    await _answered(link, request)
                    if name not in ("put", "settle") or request.outcome[1] is not None or request.outcome[0] is None:
                        give_up(link, request)
                        raise
                    cancel_later()
            return request.result()
        finally:
            del link, request  # an error has the frames that it was raised in, and would be in a circle with this


class Lease:
    """The right to make the samples of an item: what `Producers.lease` and `Producers.leases` give.

    In a thread, ``with lease as item``; in a task, ``async with lease as item``. Methods may be called in any thread.
    What is made at once is `put`; what is made in parts, some of them later than others, is `add`-ed, and `done`.

    Args:
        producers: The feed, or its handle.
        ends_loop: It is one of a loop over leases, which ends when the feed is closed.

    Attributes:
        id: The id of the item; ascending in the order of the source.
        value: The item, as the source gave it.
        version: The version of the weights when the lease was given; of what another producer has begun (`retry`), that
            of its lease.
        tries: How many leases of this item have failed before.
    """

    id: int
    value: Any
    version: int
    tries: int
    _parts: tuple[tuple[Any, int, float], ...] = ()  # with version and cost of each

    def __init__(self, producers: Producers, *, ends_loop: bool = False) -> None:
        self._producers, self._ends_loop = producers, ends_loop
        self._leased: Leased | None = None
        self._is_async = False

    def __repr__(self) -> str:
        return "<Lease>" if self._leased is None else f"<Lease of item {self.id}, version {self.version}>"

    def _take(self, leased: Leased) -> None:
        self._leased, self._link = leased, self._producers._link()
        _, self.id, self.value, self.version, self.tries = leased.item

    def put(self, samples: Any, *, version: int | None = None, cost: float | None = None, priority: float = 0.0) -> Any:
        """Put the sample of this item, or the list of its group, which settles the lease. A task awaits it.

        Args:
            samples: One sample; with ``group_size`` a list of so many.
            version: The version of the weights that made them, the oldest of them; by default that of the lease.
            cost: The cost of all of them, tokens for example; by default their number.
            priority: Of those that are ready, the ones with more come first.

        Raises:
            LeaseLostError: if the lease has ended.
            FeedClosedError: if the feed is closed.
            ValueError: if the feed does not take them. The lease goes on.
        """
        return self._put((samples, self.version if version is None else version, cost, priority, False))

    def add(self, sample: Any, *, version: int | None = None, cost: float = 1.0) -> None:
        """Add a sample to the group of this item. It stays here until `done`: a producer that dies takes it along.

        Args:
            sample: A part of the group.
            version: The version of the weights that made it; by default that of the lease.
            cost: Its cost.
        """
        self._held()
        self._parts += ((sample, self.version if version is None else version, cost),)

    def done(self, *, priority: float = 0.0) -> Any:
        """Put the group of what was added, which settles the lease: see `put`. A task awaits it.

        The group has as many samples as there are; with ``group_size`` it has to have that many. It counts as one
        sample of ``batch_size``, its version is that of its oldest sample, and its cost that of all.

        Raises:
            ValueError: if nothing was added, and as for `put`.
        """
        if not self._parts:
            raise ValueError("nothing was added to this item: drop() settles it without samples")
        samples, versions, costs = zip(*self._parts, strict=True)
        return self._put(([*samples], min(versions), sum(costs), priority, True))

    def renew(self) -> Any:
        """Have the time limit of the lease begin again. A task awaits it.

        Called now and then while a sample is made, it tells early that the work is in vain.

        Raises:
            LeaseLostError: if the lease has ended.
        """
        lease = self._held().item.lease
        if self._is_async:
            return self._producers._answer(Request(), "renew", lease)
        return ask(self._producers._link(), "renew", lease)

    async def lost(self) -> str:
        """Wait until nobody would take what is made of this item, so that it need not be made; return why.

        The lease has ended, by its time limit for example; the sample would be too old, because the version has jumped;
        or the feed is closed. A lease that was settled, or given back, has ended too.
        """
        lease = self._held().item.lease
        try:
            why: str = await self._producers._answer(Request(), "lost", lease)
        except FeedClosedError as error:
            return str(error)
        return why

    def drop(self) -> None:
        """Settle the item without samples. A handle sends that, and does not wait.

        Raises:
            LeaseLostError: if the lease has ended, which a handle is not told.
        """
        leased, request = self._held(), Request()
        self._link.call(request, "settle", leased.item.lease, None)
        if request.is_done:
            request.result()
        leased.end()

    def retry(self, *, value: Any = _NOTHING) -> None:
        """Give the item back: another producer leases it, unless it has failed more than ``max_retries`` times.

        Args:
            value: What is made so far: the other one leases this in place of the item, and that is no failure. It has
                the version of this lease, as all that is made of it has; when that has become too old, the item is
                leased as the source gave it. What was added is in it, or gone.
        """
        leased, made = self._held(), () if value is _NOTHING else (value,)
        self._link.give_back(leased.item.lease, not made, *made)
        leased.end()

    def _put(self, made: Any) -> Any:
        if self._is_async:
            return self._put_async(made)
        leased = self._held()
        ask(self._producers._link(), "settle", leased.item.lease, made)
        leased.end()
        return None

    async def _put_async(self, made: Any) -> None:
        leased = self._held()
        await self._producers._answer(Request(), "settle", leased.item.lease, made)
        leased.end()

    def _held(self) -> Leased:
        if self._leased is None:
            raise RuntimeError("there is no item yet: `with lease as item`, or `async with`, waits for one")
        return self._leased

    def __enter__(self) -> Lease:
        """Wait for the item, if a loop over leases has not done so before."""
        if self._leased is None:
            self._take(ask(self._producers._link(), "lease"))
        return self

    async def __aenter__(self) -> Lease:
        """Wait for the item, if a loop over leases has not done so before."""
        if self._leased is None:
            self._take(await self._producers._answer(Request(), "lease"))
        self._is_async = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Give the item back, unless it was settled.

        A task that was cancelled or interrupted has not failed, nor has one whose feed was closed.
        """
        own_end = error if isinstance(error, FeedClosedError) and error.feed == self._link.address else None
        if (leased := self._held()).is_held:
            failed = error is None or (isinstance(error, Exception) and own_end is None)
            self._link.give_back(leased.item.lease, failed)
            leased.end()
        return self._ends_loop and own_end is not None and not own_end.is_failure

    async def __aexit__(self, *exc_info: Any) -> bool:
        return self.__exit__(*exc_info)


class Leases:
    """What `Feed.leases` returns: iterates over leases, until there will be no more items.

    Args:
        producers: The feed, or its handle.
    """

    def __init__(self, producers: Producers) -> None:
        self._producers = producers

    def __iter__(self) -> Leases:
        return self

    def __next__(self) -> Lease:
        try:
            return Lease(self._producers, ends_loop=True).__enter__()
        except FeedClosedError as error:
            if error.is_failure:
                raise
            raise StopIteration from None

    def __aiter__(self) -> Leases:
        return self

    async def __anext__(self) -> Lease:
        try:
            return await Lease(self._producers, ends_loop=True).__aenter__()
        except FeedClosedError as error:
            if error.is_failure:
                raise
            raise StopAsyncIteration from None


def _answered(link: Link, request: Request) -> asyncio.Future[None]:
    """Return what a task waits for. It is awaited as it is: `asyncio.wait` would make five objects more of each."""
    request.link, request.answered = link, asyncio.get_running_loop().create_future()
    request.when_done(_wake)
    return request.answered


def _wake(request: Request) -> None:
    """Have a task go on. If its loop was closed, an item that it was to be leased is another one's."""
    try:
        request.answered.get_loop().call_soon_threadsafe(_set, request.answered)
    except RuntimeError:
        give_up(request.link, request)


def _set(answered: asyncio.Future[None]) -> None:
    if not answered.done():
        answered.set_result(None)


def cancel_later() -> None:
    """Have this task be cancelled at its next await, because a cancellation came too late for this one.

    A time limit that ends with this await takes the cancellation back, and the task goes on.
    """
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if task.cancelling():
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(cancel)
