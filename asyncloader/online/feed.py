"""Feed: a dataset of samples that producers make while training goes on. The face of a `FeedServer`.

    producers ── lease, put ──> the server ── step ──> FeedKeys ──> a loader: samples travel with their tickets

Nothing of how it works is in here: what may happen next is the ledger's, who waits for it is the server's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from typing import Any, Self, TypeVar, cast

from asyncloader import threads
from asyncloader.checks import at_least, one_of
from asyncloader.errors import ConfigurationError
from asyncloader.online.handle import FeedHandle, connect
from asyncloader.online.keys import FeedDataset, Sample
from asyncloader.online.ledger import OnStale, Rules
from asyncloader.online.link import Link
from asyncloader.online.producers import Producers
from asyncloader.online.runs import Seat
from asyncloader.online.server import FeedServer, servers

T = TypeVar("T")
_BATCHES_WITHOUT_BOUND = 4
_LOOKS, _LOOK_EVERY_S = 3, 0.1  # so often nobody was seen to do anything but wait

_LEAST = {
    "batch_size": 1,
    "group_size": 1,
    "max_staleness": 0,
    "steps_per_version": 1,
    "max_samples": 1,
    "max_retries": 0,
}
"""The numbers among the arguments, and the smallest that each may be."""

_OPTIONAL = ("group_size", "max_staleness", "max_samples")
"""Those that may be None."""


class Feed(Producers, FeedDataset[T]):
    """A dataset of samples that producers make while training goes on.

    Give it to a :class:`~asyncloader.DataLoader` without batch size and sampler: it brings its batches. Producers are
    tasks and threads of this process, and other processes that have a `handle`. They lease items of the ``source`` and
    put samples for them, or put samples of their own. An item that was leased is settled when its samples are put, or
    when it is dropped; otherwise it is leased again. Nothing is lost, and nothing comes twice.

    States of the loader contain that of the feed, as of the batches that the loader has given: samples that wait, items
    that are not settled, and the place in the source. `state_dict` returns it alone.

    A feed is for one loader, in the process that has made it; or for all processes of a training, each of which trains
    on its part (`for_rank`).

    Args:
        source: Items to lease, prompts for example: an iterable, an async one, or a function that returns one. It is
            read ahead in a thread, whose event loop is not the caller's; whoever leases waits until an item has come.
            If the source has `state_dict` and `load_state_dict`, states have its state; otherwise they have the number
            of its items that were leased, which a resumed run leaves out. None: producers put samples without leases.
        batch_size: Samples of a batch. A group that was made in parts (`Lease.add`) counts as one.
        group_size: Samples that are put, and trained, together; they are in one batch, side by side. None: single ones,
            and groups of any size where an item is made in parts.
        max_staleness: How many versions older than the weights a sample may be when its batch is asked for. Producers
            wait while what they would make could become older, and the trainer waits for a slow producer whose sample
            would. None: any.
        steps_per_version: Batches that the weights of one version are trained with, at least.
        max_samples: Samples that there may be at once: leased, waiting, and in batches that are not trained. By default
            as many as ``max_staleness`` allows, or 4 batches without it.
        on_stale: What becomes of samples that are too old all the same, because the version jumped, or they were put
            with an old one: "drop"; "keep" trains them; "recycle" has their items leased again.
        max_cost: The most that a batch costs, in tokens for example: a batch is full with that, or with
            ``batch_size``. None: no bound. Where batches have fewer samples than ``batch_size``, more samples get old.
        max_retries: How often an item is leased again after its producer has failed; then it is dropped.
        lease_timeout: How long a producer may have a lease, in seconds; then the item is leased again. None: for ever.
        fn: Makes of a `Sample` what is collated, in a worker of the loader. By default it is what was put.

    Raises:
        ConfigurationError: for what cannot work.

    Example:
        >>> from asyncloader import DataLoader
        >>> feed = Feed(range(4), batch_size=2, max_staleness=0)
        >>> loader = iter(DataLoader(feed))
        >>> for _ in range(2):
        ...     with feed.lease() as item:
        ...         item.put(item.value ** 2)
        >>> next(loader)
        tensor([0, 1])
    """

    fn: Callable[[Sample[Any]], T] | None

    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any] | Callable[[], Any] | None = None,
        *,
        batch_size: int,
        group_size: int | None = None,
        max_staleness: int | None = None,
        steps_per_version: int = 1,
        max_samples: int | None = None,
        on_stale: OnStale = "drop",
        max_cost: float | None = None,
        max_retries: int = 3,
        lease_timeout: float | None = 1800.0,
        fn: Callable[[Sample[Any]], T] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        rules = _rules(given)
        server = self._server = FeedServer(source, rules, given["group_size"], lease_timeout)
        self.identity: dict[str, Any] = server.identity
        FeedDataset.__init__(self, lambda: server, server.identity, fn, Seat())  # not self, which would be a circle

    def _link(self) -> Link:
        return self._server

    def handle(self) -> FeedHandle:
        """Return what other processes of this machine use in place of the feed. It can be pickled.

        They run as this user, or as root.

        Raises:
            FeedClosedError: if the feed is closed.
        """
        return FeedHandle(partial(connect, self._server.open_door().path, os.geteuid()), self.identity)

    def close(self, reason: str = "it was closed") -> None:
        """Take no more samples, and lease no more items; wake all who wait. What is there still goes to the trainer.

        Items that are leased then are not settled, and in states. In a fork of the process this does nothing.

        Args:
            reason: For the errors of those who come later.
        """
        self._server.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close("it was closed" if kind is None else f"its block was left by {kind.__name__}")


def _rules(given: dict[str, Any]) -> Rules:
    """Check the arguments of a feed, and make their integers Python's own; return its rules.

    Raises:
        ConfigurationError: for what cannot work.
    """
    for name, least in _LEAST.items():
        if given[name] is not None or name not in _OPTIONAL:
            given[name] = at_least(name, given[name], least=least)
    one_of("on_stale", given["on_stale"], OnStale)
    for name in ("max_cost", "lease_timeout"):
        if given[name] is not None and not given[name] > 0:
            raise ConfigurationError(f"{name} should be a number above 0, or None, but is {given[name]!r}")
    group, most, steps = given["group_size"] or 1, given["max_samples"], given["steps_per_version"]
    for name in ("batch_size", "max_samples"):
        if given[name] is not None and given[name] % group:
            raise ConfigurationError(f"{name} should be a multiple of group_size, {group}, but is {given[name]}")
    size, staleness = given["batch_size"] // group, given["max_staleness"]
    limit = (_BATCHES_WITHOUT_BOUND if staleness is None else staleness * steps + 1) * size
    if most is not None:
        limit = most // group if staleness is None else min(limit, most // group)
    if limit < size:
        raise ConfigurationError(
            f"a batch of {given['batch_size']} samples could never be formed: max_samples should be at least batch_size"
        )
    same = ("on_stale", "max_cost", "max_retries")
    return Rules(size, limit, staleness, steps, **{name: given[name] for name in same})


def _end_untrained() -> None:
    """At the end of the main thread: the interpreter waits for other threads, and those may all wait for a trainer."""
    if not all(server.has_begun for server in threads.copied(servers)):
        try:
            threading.Thread(target=_watch_producers, name="asyncloader feeds", daemon=True).start()
        except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread any more, so no trainer can begin
            _watch_producers(_LOOKS)


def _watch_producers(looks: int = 0) -> None:
    """Close the feeds when all threads that the interpreter waits for wait for room in feeds, or for leases."""
    while looks < _LOOKS:
        time.sleep(_LOOK_EVERY_S)
        waiting = {thread for server in threads.copied(servers) for thread in server.waiting_threads()}
        looks = looks + 1 if waiting.issuperset(threads.waited_for()) else 0
    for server in threads.copied(servers):
        if not server.has_begun:
            server.close("the program comes to its end, and has not trained on this feed")


with contextlib.suppress(RuntimeError):  # the main thread has returned before this module was imported
    cast(Any, threading)._register_atexit(_end_untrained)
