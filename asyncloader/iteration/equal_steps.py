"""Ranks that have different numbers of batches take equally many steps: they agree ahead, in a group of their own.

    batches of this rank ── pulled ahead ──> held: a chunk, and one more ── steps agreed on ──> consumer
                                               └ how many: one all_gather a chunk, while the one before is used

A chunk is a number of steps, the same on all ranks: 1, 2, 4, then 8. Before its first step each rank has tried to make
all of its batches, and one beyond, so that what the counts of all ranks say is what is: whether all have a batch for
each step ("drop"), or at least one has ("pad"), and whether there is a step after the last one of the chunk.

States are those of the batches that the consumer has: the one after each is taken when it is pulled, and held with it.

All loaders of a process share one group. Whose turn it is in there is the order of their calls, which threads and tasks
may mix up, differently on each rank: so ranks say which loader they speak of, and a mixture is an error.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import deque
from concurrent.futures import Future
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asyncloader.errors import AsyncLoaderError, BatchTimeoutError, LoaderClosedError
from asyncloader.iteration.base_iterator import BaseIterator, ClosableIterator
from asyncloader.iteration.checkpoint import Checkpointer
from asyncloader.iteration.runs import Runs
from asyncloader.settings import EqualSteps

log = logging.getLogger("asyncloader")

_LONGEST_CHUNK = 8
_groups: dict[int, tuple[Any, Future[Any]]] = {}  # by the id of the process group: that group, and ours
_making = threading.Lock()  # held to look at them


class _Held(NamedTuple):
    """A batch, or what was raised in its place, and the state after it."""

    batch: Any
    error: Exception | None
    state: dict[str, Any]


class Yielded:
    """The state as of what the consumer has: kept by the loader when the iterator is gone.

    Attributes:
        state: After the last batch that was handed over.
        over: The run has come to its end.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.state = checkpointer.state_dict()
        self.over = False

    @property
    def done(self) -> int:
        """How many batches were handed over in this run; none of the next one."""
        return 0 if self.over else int(self.state["position"]) + len(self.state["ahead"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state; what the trainer has drawn since the batch was made is no reason to draw anew."""
        if self.over:
            return self._checkpointer.state_dict()
        return {**copy.deepcopy(self.state), **self._checkpointer.generators_now()}


class Agreement:
    """What all ranks know of a chunk.

    Args:
        counts: For each rank how many batches it has from the beginning of the chunk on, counted up to one beyond it.
        size: Steps of the chunk.
        mode: "drop" or "pad".
    """

    def __init__(self, counts: list[int], size: int, mode: EqualSteps) -> None:
        most = min(counts) if mode == "drop" else max(counts)
        self.steps = min(most, size)
        self.is_last = most <= size


class EqualStepsIterator(ClosableIterator):
    """Iterates as another iterator does, for as many steps as all ranks agree on. For one consumer at a time.

    Args:
        inner: The iterator over the batches of this rank.
        mode: What becomes of uneven ends: "drop" leaves out what not all ranks have; "pad" repeats a rank's last batch.
        runs: Of the loader, which is told of states.
        loader: Its number, the same on all ranks.
    """

    def __init__(self, inner: BaseIterator[Any], mode: EqualSteps, runs: Runs, loader: int) -> None:
        self._inner = inner
        self._mode = mode
        self._number = loader
        self._runs = runs
        self._yielded = runs.yielded = Yielded(inner._checkpointer)
        self._persistent = inner._persistent_workers
        self._begin(inner._checkpointer.epoch)

    def _begin(self, epoch: int) -> None:
        """Begin a run; `epoch` is how many there were before."""
        self._held: deque[_Held] = deque()  # pulled, and not handed over
        self._last: _Held | None = None  # of this rank, kept to be repeated: an error only if no batch was there
        self._before_last = self._after_last = self._yielded.state
        self._ended = False  # the inner iterator
        self._size, self._step = 1, 0
        self._agreed: Agreement | None = None  # on the chunk at hand
        self._since = 0.0  # when it was last seen what is due
        self._asked: tuple[Any, list[torch.Tensor]] | None = None  # about the next one
        self._epoch, self._chunk = epoch, 0
        self._turn = threading.Lock()
        self._async_turn = asyncio.Lock()

    # ----------------------------------------------------------------------------------------------------- iterating

    def __next__(self) -> Any:
        with self._turn:
            while not self._yielded.over and (due := self._due()) is not None:
                if isinstance(due, int):
                    self._pull(due)
                else:
                    due[0].wait()
                    self._agree()
            return self._take()

    async def __anext__(self) -> Any:
        async with self._async_turn:
            if self._agreed is None:
                await asyncio.wrap_future(_own_group())  # whose making goes on if this is cancelled
            while not self._yielded.over and (due := self._due()) is not None:
                if isinstance(due, int):
                    await self._pull_async(due)
                else:
                    await asyncio.to_thread(due[0].wait)
                    self._agree()
            try:
                return self._take()
            except StopIteration:
                raise StopAsyncIteration from None

    def _due(self) -> int | tuple[Any, list[torch.Tensor]] | None:
        """Return what is to be done before the next step: have so many batches, or wait for an answer; or nothing."""
        agreed, self._since = self._agreed, perf_counter()
        if agreed is None:  # the very first chunk
            if not self._has(self._size + 1):
                return self._size + 1
            self._asked = self._asked or self._ask(self._size)
            return self._asked
        if self._step == agreed.steps:
            if agreed.is_last:
                self._finish()
                return None
            if self._asked is None:
                raise LoaderClosedError("ranks did not agree on this run; call iter(loader) for a new one")
            return self._asked
        if not agreed.is_last and self._asked is None:
            # By its last step the next chunk is there, and one beyond; until then its share of that.
            left, following = self._size - self._step, self._next_size()
            share = -(-(following + 1) * (self._step + 1) // self._size)
            if not self._has(left + share):
                return left + share
            if left == 1:
                self._asked = self._ask(following)
        return None

    def _has(self, count: int) -> bool:
        return self._ended or len(self._held) >= count

    def _next_size(self) -> int:
        return min(2 * self._size, _LONGEST_CHUNK)

    def _take(self) -> Any:
        """Hand over a batch of this rank, or its last one again."""
        if self._yielded.over:
            raise StopIteration
        assert self._agreed is not None
        self._step += 1
        ends = self._agreed.is_last and self._step == self._agreed.steps
        if not self._held:  # in "pad" only
            return self._repeat(ends=ends)
        held = self._held.popleft()
        self._yielded.state = self._after_last = held.state
        if self._ended and not self._held and not ends:  # in "pad" only: others have more
            # A state in the time of repeating is one before the last batch: what is resumed repeats that, and goes on.
            self._yielded.state = self._before_last
        self._before_last = held.state
        if self._mode == "pad" and not ends and all(other.error is not None for other in self._held):
            self._keep(held)
        if held.error is not None:
            raise held.error
        self._inner._meter.held_back -= 1
        return held.batch

    def _keep(self, held: _Held) -> None:
        """Keep what may turn out to be the last batch of this rank, to be repeated; no error, if there is a batch."""
        if held.error is None:
            self._last = held._replace(batch=copy.deepcopy(held.batch))
        elif self._last is None:
            self._last = held

    def _repeat(self, *, ends: bool) -> Any:
        """Hand over this rank's last batch again; in the run's last step, none is left for what is resumed there."""
        assert self._last is not None
        if ends:
            self._yielded.state = self._after_last
        if self._last.error is not None:
            raise self._last.error
        return copy.deepcopy(self._last.batch)

    def _finish(self) -> None:
        """End the run on this rank, whatever is left of it."""
        self._yielded.over = True
        if self._held:
            log.info("equal_steps: a rank that has more batches than others leaves them out")
        self._held.clear()
        progress = self._inner._checkpointer.progress
        # Datasets that were left in the middle of their data.
        for worker, start in (progress.now.workers or {}).items():
            if start.snapshot is not None:
                progress.ends.setdefault(worker, start.snapshot)
        progress.is_over = True
        self._inner._meter.log_summary(is_over=True)
        if not self._persistent:
            self._inner.close()

    # -------------------------------------------------------------------------------------------------- pulling ahead

    def _pull(self, count: int) -> None:
        while not self._has(count):
            try:
                self._hold(next(self._inner))
            except StopIteration:
                self._ended = True
            except (BatchTimeoutError, LoaderClosedError):  # no batch, and none in its place
                raise
            except Exception as error:
                self._hold(None, error)

    async def _pull_async(self, count: int) -> None:
        while not self._has(count):
            try:
                self._hold(await anext(self._inner))
            except StopAsyncIteration:
                self._ended = True
            except (BatchTimeoutError, LoaderClosedError):
                raise
            except Exception as error:
                self._hold(None, error)

    def _hold(self, batch: Any, error: Exception | None = None) -> None:
        self._held.append(_Held(batch, error, self._inner.state_dict()))
        self._inner._meter.held_back += error is None

    # ---------------------------------------------------------------------------------------------------- agreeing

    def _ask(self, size: int) -> tuple[Any, list[torch.Tensor]]:
        """Tell the other ranks how far this one can go in a chunk that begins with the next step but those at hand."""
        ahead = len(self._held) - (0 if self._agreed is None else self._size - self._step)
        place = [self._number, self._epoch, self._chunk + (self._agreed is not None)]
        said = torch.tensor([*place, max(0, min(ahead, size + 1))])
        answers = [torch.empty_like(said) for _ in range(dist.get_world_size())]
        return dist.all_gather(answers, said, group=_own_group().result(), async_op=True), answers

    def _agree(self) -> None:
        """Go over to the chunk that all ranks have told of, for which they were waited for."""
        assert self._asked is not None
        self._inner._meter.waited_for_ranks(perf_counter() - self._since)
        told = [answer.tolist() for answer in self._asked[1]]
        self._asked = None
        _check_places({rank: tuple(place) for rank, (*place, _) in enumerate(told)})
        if self._agreed is not None:
            self._size, self._chunk = self._next_size(), self._chunk + 1
        self._step, counts = 0, [count for *_, count in told]
        self._agreed = Agreement(counts, self._size, self._mode)
        empty = [rank for rank, count in enumerate(counts) if not count]
        if self._mode == "pad" and not self._chunk and empty and self._agreed.steps:
            self._yielded.over = True
            raise AsyncLoaderError(
                f'rank {", ".join(map(str, empty))} has no batch at all that it could repeat: equal_steps="pad" needs '
                "one on each rank"
            )

    # ------------------------------------------------------------------------------------------------ the rest of it

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the batches that were handed over."""
        return self._yielded.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, which all ranks have to do."""
        self._inner.load_state_dict(state)
        self._yielded = self._runs.yielded = Yielded(self._inner._checkpointer)
        self._begin(self._inner._checkpointer.epoch)

    def close(self) -> None:
        """End the run and let go of everything."""
        self._held.clear()
        self._inner.close()

    async def aclose(self) -> None:
        """End the run as `close` does, without blocking the loop."""
        self._held.clear()
        await self._inner.aclose()


def _check_places(places: dict[int, tuple[int, ...]]) -> None:
    """See that all ranks speak of the same loader, and of the same steps."""
    if len({loader for loader, *_ in places.values()}) > 1:
        raise AsyncLoaderError(
            f"ranks are at different loaders, here as (loader, run, chunk of steps) by rank: {places}; with "
            "equal_steps all ranks make and use the same loaders in the same order, and threads or tasks use one at a "
            "time"
        )
    if len(set(places.values())) > 1:
        raise AsyncLoaderError(
            f"ranks are at different places, here as (loader, run, chunk of steps) by rank: {places}; with equal_steps "
            "all ranks begin, leave and resume a run at the same step"
        )


def _own_group() -> Future[Any]:
    """Return a group for this alone, over gloo: what the trainer does in its own at the time is not disturbed.

    All ranks have to join in making it. So that happens once, in a thread of its own, whoever stops waiting for it.
    """
    world = dist.group.WORLD
    with _making:
        known = _groups.get(id(world))
        if known is None or known[0] is not world or (known[1].done() and known[1].exception() is not None):
            _groups.clear()
            known = _groups[id(world)] = (world, Future())
            known[1].set_running_or_notify_cancel()  # from now on nobody can cancel it
            threading.Thread(target=_make_group, args=(known[1],), name="asyncloader-equal-steps", daemon=True).start()
    return known[1]


def _make_group(made: Future[Any]) -> None:
    try:
        made.set_result(dist.new_group(backend="gloo"))
    except BaseException as error:
        made.set_exception(error)
