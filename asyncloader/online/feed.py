"""Feed: a dataset of samples that producers make while training goes on. The face of a `Ledger`.

    producers: lease, put ──> Ledger, under one lock ──> FeedKeys ──> a loader: samples travel with their tickets
                  ^ wait for room                            ^ is told when a batch can be formed

The producers' side is in `Intake`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import secrets
import threading
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar, cast

from torch.utils.data import Sampler

from asyncloader import identity, threads
from asyncloader.checks import Least, check_of
from asyncloader.datasets.records import pickled
from asyncloader.errors import ConfigurationError, StateMismatchError
from asyncloader.online.door import Door
from asyncloader.online.forks import generation
from asyncloader.online.handle import FeedHandle
from asyncloader.online.intake import Change
from asyncloader.online.keys import FeedBatches, FeedSamples, Place, Sample, SampleKey, check_options, feeds
from asyncloader.online.ledger import NOTHING, OUTCOMES, FeedOrder, OnStale, Rules
from asyncloader.online.outlet import Outlet, nobody
from asyncloader.online.stats import FeedStats
from asyncloader.online.waiters import ThreadWaiter, first
from asyncloader.plain import unplain
from asyncloader.protocols import SuppliesKeys

T = TypeVar("T")
_numbers = itertools.count()
_BATCHES_WITHOUT_BOUND = 4
_LOOKS, _LOOK_EVERY_S = 3, 0.1  # so often nobody was seen to do anything but wait

_CHECKS = {
    "batch_size": Annotated[int, Least(1)],
    "group_size": Annotated[int | None, Least(1)],
    "max_staleness": Annotated[int | None, Least(0)],
    "steps_per_version": Annotated[int, Least(1)],
    "max_samples": Annotated[int | None, Least(1)],
    "on_stale": OnStale,
    "order": FeedOrder,
    "window": Annotated[int | None, Least(1)],
    "max_uses": Annotated[int, Least(1)],
    "max_retries": Annotated[int, Least(0)],
    "seed": Annotated[int, Least(0)],
    "num_replicas": Annotated[int | None, Least(1)],
}


class Feed(Outlet, SuppliesKeys[T]):
    """A dataset of samples that producers make while training goes on.

    Give it to a :class:`~asyncloader.DataLoader` without batch size and sampler: it brings its batches. Producers are
    tasks and threads of this process, and other processes that have a `handle`. They lease items of the ``source`` and
    put samples for them, or put samples of their own. An item that was leased is settled when its samples are put, or
    when it is dropped; otherwise it is leased again. Nothing is lost, and nothing comes twice.

    States of the loader contain that of the feed, as of the batches that the loader has given: samples that wait, items
    that are not settled, and the place in the source. `state_dict` returns it alone.

    The ranks of a process group share one feed: see ``num_replicas``. A step is a batch for each of them, dealt at once
    from the same samples: as many batches on each rank, of equal cost, and none of them empty.

    Args:
        source: Items to lease, prompts for example. An iterable is read as they are leased, under the feed's lock. An
            async iterable, an `IterableDataset`, or a function that returns a stream, is read ahead in a thread, whose
            event loop is not the caller's; whoever leases waits until an item has come. If the source has `state_dict`
            and `load_state_dict`, states have its state; otherwise they have the number of its items that were leased,
            which a resumed run leaves out. None: producers put samples without leases.
        batch_size: Samples of a batch, on each rank.
        group_size: Samples that are put, and trained, together; they are in one batch, side by side. None: single ones.
        max_staleness: How many versions older than the weights a sample may be when its batch is asked for. Producers
            wait while what they would make could become older, and the trainer waits for a slow producer whose sample
            would. None: any.
        steps_per_version: Batches that the weights of one version are trained with, at least.
        max_samples: Samples that there may be at once: leased, waiting, and in batches that are not trained. By default
            as many as ``max_staleness`` allows, or 4 batches without it.
        on_stale: What becomes of samples that are too old all the same, because the version jumped, or they were put
            with an old one: "drop"; "keep" trains them; "recycle" has their items leased again.
        order: "first_come"; "freshest": the newest version first; "priority": the highest first; "random": drawn anew
            for each batch from what waits, by ``seed``. With ``max_uses``, that is a replay buffer.
        window: A slow sample, or group, is not overtaken by those that were leased so many leases later. None: by any.
        max_uses: How often a sample is trained, as long as it is not too old; it goes to the end after each time.
        max_cost: The most that a batch costs, in tokens for example: a batch is full with that, or with
            ``batch_size``. None: no bound. Where batches have fewer samples than ``batch_size``, more samples get old.
        max_retries: How often an item is leased again after its producer has failed; then it is dropped.
        lease_timeout: How long a producer may have a lease, in seconds; then the item is leased again. None: for ever.
        drop_last: Do not train what fills no batch at the end.
        seed: Seeds a random order.
        num_replicas: How many ranks take their batches from this feed: `FeedHandle.for_rank`. None: one loader, in this
            process, is given the feed itself.
        step_timeout: How long ranks wait for their batches of a step, in seconds; then all of them get a RanksError
            that says for whom they waited. None: for ever.
        spill: Folder, of this run, that what is put is written to before `put` returns. If the process is
            killed, a feed with the same folder has all of it, whichever state it goes on from: what was put after the
            state is not made again. `trim` deletes what a saved state makes superfluous. The files survive the process;
            there is no fsync, so a machine that loses power may lose the last ones. Only read a folder that you trust:
            it has pickles.
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
        order: FeedOrder = "first_come",
        window: int | None = None,
        max_uses: int = 1,
        max_cost: float | None = None,
        max_retries: int = 3,
        lease_timeout: float | None = None,
        drop_last: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        step_timeout: float | None = None,
        spill: str | PathLike[str] | None = None,
        fn: Callable[[Sample[Any]], T] | None = None,
    ) -> None:
        rules = _rules({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        super().__init__(source, rules, group_size, lease_timeout, spill, num_replicas, step_timeout)
        self.fn, self.batch_size = fn, batch_size
        self._life, self._pushed_before = secrets.token_hex(8), self._pushed  # since it was made, or a state was loaded
        self._door: Door | None = None
        # Of steps that not all ranks are behind: how many states each rank has taken there, and these.
        self._rank_states: dict[tuple[str, int], tuple[list[int], list[dict[str, Any]]]] = {}
        self._loaded: tuple[str, set[int]] = ("", set())  # id of a state, and the ranks that have loaded it
        self._key = next(_numbers)
        feeds[self._key] = self
        threads.awaited.add(self)

    # ------------------------------------------------------------------------------------------------------ trainer

    @property
    def version(self) -> int:
        """The version of the weights. Set it when they were updated, before the next batch is asked for.

        Raises:
            ValueError: for one that is no integer, or goes back.
        """
        self.check_process()
        return self._ledger.version

    @version.setter
    def version(self, version: int) -> None:
        with Change(self):
            now = self._ledger.version
            if isinstance(version, bool) or not isinstance(version, int) or version < now:
                raise ValueError(f"version should be an integer that does not go back from {now}, but got {version!r}")
            self._ledger.set_version(version)

    def handle(self) -> FeedHandle:
        """Return what producers in other processes of this machine use in place of the feed. It can be pickled.

        It has the secret of the feed: whoever has it can have this process unpickle anything.

        Raises:
            FeedClosedError: if the feed is closed.
        """
        with Change(self):
            if self._ledger.closed:
                raise self._closed_error()
            if self._door is None:
                self._door = Door(self)
                if self.has_begun:
                    self._door.end_at_exit()
            return FeedHandle(self.address, self._door.secret)

    def close(self, reason: str = "it was closed") -> None:
        """Take no more samples, and lease no more items; wake all who wait. What is there still goes to the trainer.

        Items that are leased then are not settled, and in states. In a fork of the process this does nothing.

        Args:
            reason: For the errors of those who come later.
        """
        if self._process == generation():
            with Change(self):
                self._close(reason)

    def _close(self, reason: str) -> None:
        self._closed_by = self._closed_by or reason
        self._ledger.closed = True
        if self._source is not None:
            self._source.close()
        if self._spill is not None:
            self._spill.close()
        if self._door is not None and self._ranks is None:  # ranks come for what is there
            self._door.close()
        if self._limit is not None:
            self._limit.end()

    def _begin(self, reader: Any, given: Callable[[], int]) -> None:
        super()._begin(reader, given)
        if self._door is not None:  # until now a trainer may come after the end of the main thread
            self._door.end_at_exit()

    def end_with_program(self) -> None:
        """Close the feed if its loader has begun, and has ended with all who train: producers would wait for ever."""
        if self.has_begun and self._ranks is None:
            self._soon(partial(self._close, "the program that trains comes to its end"))

    def end_untrained(self) -> None:
        """Close the feed if its loader has not begun, and nobody is left who could have it begin."""
        if not self.has_begun and self._ranks is None:
            self._soon(partial(self._close, "the program comes to its end, and has not trained on this feed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("it was closed" if kind is None else f"its block was left by {kind.__name__}")

    def stats(self) -> FeedStats:
        """Return what became of the samples so far."""
        with Change(self):
            ledger = self._ledger
            return FeedStats(
                ledger.version,
                ledger.num_running,
                len(ledger.pending),
                ledger.num_ready,
                ledger.num_in_batches,
                {name: ledger.counts[name] for name in OUTCOMES},
                {name: costs.summary() for name, costs in ledger.costs.items() if costs},
                dict(sorted(ledger.ages.items())),
                len(self._leasers) + len(self._putters),
                self._trainer_waits.total_s,
                self._producers_wait.total_s,
            )

    # ------------------------------------------------------------------------------------------------------- loader

    def __getitem__(self, key: SampleKey) -> T:
        return FeedSamples(self.fn)[key]

    def __reduce__(self) -> Any:
        return FeedSamples, (self.fn,)

    def make_batch_sampler(self) -> Sampler[list[SampleKey]]:
        """Return the sampler of the feed's batches.

        Raises:
            ConfigurationError: if they are dealt to ranks.
        """
        if self._ranks is not None:
            raise ConfigurationError(
                "this feed has num_replicas: give the loader of each rank feed.handle().for_rank(rank)"
            )
        return FeedBatches(self)

    def name(self, key: SampleKey) -> tuple[int, int]:
        """Return the number of the unit of a sample, and its place in that."""
        return key[:2]

    def check_options(self, options: Any) -> None:
        """See that a loader gives batches in turn, and whole groups.

        Raises:
            ConfigurationError: if it does not.
        """
        check_options(options, self.group_size)

    # ------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the batches that consumers were given. It is in states of the loader.

        Samples that wait, and items that are not settled, are in it, as they are. If these are numbers, strings,
        tensors and containers of them, and the source's state is, ``torch.load(file, weights_only=True)`` reads it.

        Raises:
            ConfigurationError: if batches are dealt to ranks: the loader of a rank knows what that was given.
        """
        if self._ranks is not None:
            raise ConfigurationError("this feed has num_replicas: take the state of the loader of a rank")
        return self.state_at(self._runs_begun, self._next_given())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, in place of what there is. Leases that were given out before have ended.

        Items whose samples were put after the state are leased again, unless these were spilled.

        Raises:
            StateMismatchError: if the state is of something else; or if samples wait that were put without leases and
                are not in the state: they would be lost, unless they were spilled.
        """
        identity.check(state, identity.of(self))
        units = pickle.loads(pickled(state["units"][0]))  # a copy: the state stays as it is
        with Change(self):
            self._check_keeps_all(state)
            if self._source is not None and state["source"] is not None:
                self._source.load_state_dict(state["source"], self._call_source)
            self._ledger.load(units)
            self._reader, self._runs_begun = nobody, self._runs_begun + 1
            self._woken += (*first(self._readers, len(self._readers)), *self._tells)  # they have no run any more
            self._tells.clear()
            self._first, self._given = self._ledger.formed, int
            self._recover_all(state["pushed"])
            self._life, self._pushed_before = secrets.token_hex(8), self._pushed

    def _check_keeps_all(self, state: dict[str, Any]) -> None:
        is_own = state["life"] == self._life  # then it has what was put before
        first = max(self._pushed_before, state["pushed"] if is_own else 0)
        end = self._pushed if self._spill is None else state["pushed"]  # from there on they are read from the folder
        lost = sum(unit.item is NOTHING and first <= unit.number < end for unit in self._ledger.units.values())
        if lost:
            raise StateMismatchError(
                "the number of samples, or groups, that were put without leases",
                state["pushed"],
                self._pushed,
                f"{lost} that wait are not in the state, and would be lost: load it before anything is put, or have "
                "the feed spill them",
            )

    def rank_state(self, rank: int, run: int, step: int) -> dict[str, Any]:
        """Return the state before a step of a run: the first that each rank takes there is one, and so is the next."""
        self.check_rank(rank)
        assert self._ranks is not None
        is_newest = self._ranks.run is not None and self._ranks.run.number == run
        # The end of a run is where the next one begins: ranks may be in either.
        here = self._life, self._first + step if is_newest else self._next_given()
        life, now = self._life, self._next_given()  # no rank is before that
        self._rank_states = {at: these for at, these in self._rank_states.items() if at[0] == life and at[1] >= now}
        had, states = self._rank_states.setdefault(here, ([0] * self._ranks.count, []))
        if had[rank] == len(states):
            states.append(self.state_at(self._runs_begun, here[1]))
        had[rank] += 1
        if min(had) == len(states):
            del self._rank_states[here]
        return states[had[rank] - 1]

    def rank_load(self, rank: int, state: dict[str, Any]) -> None:
        """Go on from a state that all ranks load: when the first of them does.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        self.check_rank(rank)
        loaded, ranks = self._loaded
        if loaded != state["id"] or rank in ranks:
            self.load_state_dict(state)
            ranks = set()
        self._loaded = state["id"], ranks | {rank}

    def trim(self, state: dict[str, Any]) -> None:
        """Delete what was spilled, and is not needed to go on from a state, or a later one: call it when that is saved.

        After `close` this does nothing: another feed may have the folder.

        Args:
            state: A state of the feed, or of the loader.

        Raises:
            StateMismatchError: if the state is of something else.
        """
        found = unplain(state["samplers"])["sampler"] if "samplers" in state else state
        identity.check(found, identity.of(self))
        with Change(self):
            if self._spill is not None:
                source = found["source"]
                self._spill.trim(found["segment"], 0 if source is None else source["drawn"], self._pushed)

    def place(self) -> Place:
        """Return, in place of a state, which batch comes next."""
        return Place(self._key, self._runs_begun, self._ledger.formed)

    def state_after(self, items: int) -> dict[str, Any]:
        """Return the state after so many batches of the newest reader."""
        return self.state_at(self._runs_begun, self._first + items)

    def state_at(self, run: int, batch: int) -> dict[str, Any]:
        """Return the state before a batch of a reader; of one that was left, as it is now."""
        with Change(self):
            units = self._ledger.state(batch if run == self._runs_begun else self._next_given())
            copy = self._call_out(pickled, units)
            state = {
                "version": 1,
                "id": secrets.token_hex(8),
                **identity.of(self),
                "life": self._life,
                "pushed": self._pushed,
                "segment": 0 if self._spill is None else self._spill.begin_segment(),
                "source": None if self._source is None else self._call_out(self._source.state_dict),
            }
        # As values, and no pickle: whoever trusts a file can tell by torch.load. In a tuple, which
        # torch.distributed.checkpoint does not look into, so the keys of two states are the same.
        return {**state, "units": (pickle.loads(copy),)}

    def _state_identity(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "has_source": self._source is not None}


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(Feed.__init__).parameters.items()}
_OF_LEASES = ("window", "max_retries", "lease_timeout")


def _rules(given: dict[str, Any]) -> Rules:
    """Check the arguments of a feed; return its rules.

    Raises:
        ConfigurationError: for what cannot work.
    """
    for name, kind in _CHECKS.items():
        if (check := check_of(kind)) is not None:
            check(name, given[name])
    fn = given["fn"]
    for name in ("max_cost", "lease_timeout", "step_timeout"):
        if given[name] is not None and not given[name] > 0:
            raise ConfigurationError(f"{name} should be a number above 0, or None, but is {given[name]!r}")
    if fn is not None and not callable(fn):
        raise ConfigurationError(f"fn should be a function of a Sample, but is {fn!r}")
    group, most, steps = given["group_size"] or 1, given["max_samples"], given["steps_per_version"]
    for name in ("batch_size", "max_samples"):
        if given[name] is not None and given[name] % group:
            raise ConfigurationError(f"{name} should be a multiple of group_size, {group}, but is {given[name]}")
    ranks = given["num_replicas"] or 1
    if given["num_replicas"] is None and given["step_timeout"] is not None:
        raise ConfigurationError("step_timeout is for ranks (num_replicas); a loader has its own timeout")
    if given["num_replicas"] is not None and fn is not None:
        raise ConfigurationError("with num_replicas, give fn to for_rank: it runs there")
    size, staleness = given["batch_size"] // group * ranks, given["max_staleness"]
    limit = (_BATCHES_WITHOUT_BOUND if staleness is None else staleness * steps + 1) * size
    if most is not None:
        limit = most // group if staleness is None else min(limit, most // group)
    if limit < size:
        raise ConfigurationError(
            f"a batch of {given['batch_size']} samples could never be formed: max_samples should be at least batch_size"
            + ("" if ranks == 1 else f", for each of {ranks} ranks")
        )
    if given["source"] is None:
        for name in _OF_LEASES:
            if given[name] != _DEFAULTS[name]:
                raise ConfigurationError(f"{name} has no effect without source: there are no items to lease")
        if given["on_stale"] == "recycle":
            raise ConfigurationError('on_stale="recycle" has no effect without source: no items can be leased again')
    same = ("on_stale", "order", "window", "max_uses", "max_cost", "max_retries", "drop_last", "seed")
    return Rules(size, limit, staleness, steps, ranks=ranks, **{name: given[name] for name in same})


def _end_untrained() -> None:
    """At the end of the main thread: the interpreter waits for other threads, and those may all wait for a trainer."""
    if not all(feed.has_begun for feed in _feeds()):
        with contextlib.suppress(RuntimeError):  # Python 3.12.0 and 3.12.1 start no thread any more
            threading.Thread(target=_watch_producers, name="asyncloader feeds", daemon=True).start()


def _watch_producers() -> None:
    looks, pause = 0, threading.Event()
    while looks < _LOOKS:
        pause.wait(_LOOK_EVERY_S)
        looks = looks + 1 if _all_produce() else 0
    for feed in _feeds():
        feed.end_untrained()


def _all_produce() -> bool:
    """Whether all threads that the interpreter waits for wait for room in feeds, or for leases."""
    producers: set[threading.Thread] = set()
    for feed in _feeds():
        waiters = (*threads.copied(feed._leasers), *threads.copied(feed._putters))
        producers.update(waiter.thread for waiter in waiters if isinstance(waiter, ThreadWaiter))
    main = threading.main_thread()
    return all(each.daemon or each is main or each in producers for each in threading.enumerate())


def _feeds() -> list[Feed[Any]]:
    return [feed for feed in threads.copied(feeds.values()) if isinstance(feed, Feed)]


with contextlib.suppress(RuntimeError):  # the main thread has returned before this module was imported
    cast(Any, threading)._register_atexit(_end_untrained)
